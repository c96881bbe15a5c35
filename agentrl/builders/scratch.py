"""The text on which a new model's tokenizer is trained: episodes of the environment itself, in the agent's words."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from agentrl.agent_loop import PLAIN_TURN, AgentLoop, Answer, Conversation, Episode, TurnOptions
from agentrl.builders.environment_probe import probe_environment
from agentrl.builders.environments import task_source
from agentrl.builders.episodes import build_env_pool, build_runner
from agentrl.config.config import Config, ScratchModelConfig
from agentrl.config.derived import per_environment_configs
from agentrl.engine import StopReason
from agentrl.env import EnvironmentSpec, optional_part
from agentrl.env_lookup import resolve_environment
from agentrl.errors import EnvironmentFailure, UsageError
from agentrl.message import Message, system, user
from agentrl.models.scratch import build_scratch_model
from agentrl.reward import EnvironmentReward
from agentrl.rollout.policies import EpisodePolicy, EpisodeView, append_textual_turn, cut_characters, split_characters
from agentrl.rollout.scripted_policies import ScriptedPolicy, demonstration
from agentrl.rollout.turns import derive_seed
from agentrl.task import TaskCursor
from agentrl.tool import Tool

EPISODES = 512
"""Episodes of the corpus, of all environments together; the tokenizer spells what they do not contain."""

MAX_FAILED = 8
"""After so many failed episodes in a row no more are played: each may have cost the deadline of a step."""


class TextCollector(EpisodePolicy):
    """Lets a scripted policy act, and writes down every text that is said.

    Args:
        policy: Who acts.
    """

    def __init__(self, policy: ScriptedPolicy) -> None:
        self.policy = policy
        self.texts: list[str] = []

    def open(self, episode: EpisodeView, messages: Sequence[Message], tools: Sequence[Tool]) -> Conversation:
        """A conversation that is written down, with the tools that it begins with."""
        self.texts.extend(_json(tool.schema) for tool in tools)
        conversation = _WrittenDown(self, episode)
        conversation.add(*messages)
        return conversation

    def cut(self, text: str, max_tokens: int) -> str:
        """Cut by an estimate: there is no tokenizer yet."""
        return cut_characters(text, max_tokens)

    def split(self, text: str, max_tokens: int) -> list[str]:
        """Split by an estimate."""
        return split_characters(text, max_tokens)


class _WrittenDown(Conversation):
    def __init__(self, scribe: TextCollector, episode: EpisodeView) -> None:
        self._scribe = scribe
        self._episode = episode

    def add(self, *messages: Message) -> None:
        """Write them down."""
        self._scribe.texts.extend(text for message in messages for text in _texts_of(message))

    def fork(self, messages: Sequence[Message]) -> Conversation:
        """A rewritten history is text of its own."""
        return self._scribe.open(self._episode, messages, ())

    async def generate(self, *, prefill: str = "", options: TurnOptions = PLAIN_TURN) -> Answer:
        """Act, and write the answer down."""
        turns = self._episode.turns
        seed = turns.begin(is_counted=not options.for_environment)
        message, _ = await demonstration(self._scribe.policy, self._episode, seed, options)
        turn = append_textual_turn(turns, StopReason.STOP, options.role)
        turns.take(turn, prompt_tokens=0, answer_tokens=0, trained=options.trained)
        self.add(message)
        return Answer(message=message, raw_text=message.text)


class RawActionLoop(AgentLoop):
    """Plays with bare actions, in place of an agent loop that has no `demonstrate`."""

    async def run(self, episode: Episode) -> None:
        """Play one episode."""
        observation = await episode.reset()
        conversation = episode.open([system(episode.spec.instructions), user(observation)])
        while not (result := await episode.step((await conversation.generate()).text)).done:
            conversation.add(user(result.observation))

    def demonstrate(self, action: str) -> Message:
        """The action itself."""
        return Message(role="assistant", content=action)


def _texts_of(message: Message) -> Iterator[str]:
    """Write a message's text, and its calls as the new model's template writes them."""
    yield message.text
    for call in message.tool_calls:
        yield _json({"name": call.name, "arguments": dict(call.arguments)})


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def ignore(_: str) -> None:
    """Say nothing."""


async def write_scratch_model(config: Config, folder: Path, *, say: Callable[[str], None] = ignore) -> None:
    """Make a new model in `folder`, its tokenizer trained on expert episodes (random ones where there is no expert).

    Args:
        config: Describes the model, the environments and the agent.
        folder: The new model's.
        say: Called with a line for the user when an episode fails.

    Raises:
        UsageError: the environment cannot be played.
        ConfigError: sizes that do not fit together.
    """
    corpus = await scratch_corpus(config, say=say)
    sizes = config.model.scratch or ScratchModelConfig()
    build_scratch_model(folder, corpus, sizes, seed=config.run.seed)


async def scratch_corpus(config: Config, *, say: Callable[[str], None] = ignore) -> list[str]:
    """Every text of a few episodes, in the order of tasks; the same for the same config."""
    parts = per_environment_configs(config)
    return [text for part in parts for text in await _texts(part.config, max(1, EPISODES // len(parts)), say)]


async def _texts(config: Config, episodes: int, say: Callable[[str], None]) -> list[str]:
    """Collect the texts of one environment."""
    spec = resolve_environment(config.sole_environment.name)
    tasks = TaskCursor(task_source(spec, config.sole_environment), seed=config.run.seed)
    scribe = TextCollector(ScriptedPolicy.EXPERT if has_expert(spec, config) else ScriptedPolicy.RANDOM)
    pool = build_env_pool(config, spec=spec)
    failed, in_a_row = None, 0
    try:
        runner = build_runner(config, pool, scribe)
        if problem := runner.loop.demonstration_problem():
            say(f"{problem}: the new model's vocabulary is built from the environment's text and bare actions")
            runner.loop, runner.role_names = RawActionLoop(), []
        runner.scorer = EnvironmentReward()  # these returns are not read, and a judge would be asked about each
        for number in range(episodes):
            seed = derive_seed(config.run.seed, "corpus", number)
            played = await runner.run(tasks.next(), group_id=f"corpus-{number}", member=0, seed=seed)
            if played.outcome is None or not played.outcome.is_infrastructure:
                in_a_row = 0
                continue
            if failed is None:
                say(f"an episode for the new model's vocabulary failed; others follow: {played.error}")
            failed, in_a_row = failed or played, in_a_row + 1
            if in_a_row >= MAX_FAILED:
                say(f"{in_a_row} episodes in a row failed; the vocabulary is built from the text collected until then")
                break
    finally:
        await pool.close()
    if failed is not None and not scribe.texts:
        raise UsageError(
            "no episode can be played to learn the vocabulary from",
            got=f"{spec.name}: {failed.error}",
            hint=f"run: agentrl env check {shlex.quote(spec.name)}",
        )
    return scribe.texts


def has_expert(spec: EnvironmentSpec, config: Config) -> bool:
    """Check whether the environment has an expert.

    Raises:
        UsageError: it cannot be made.
    """
    environment = config.sole_environment
    try:
        return probe_environment(
            spec,
            environment.options,
            lambda env: optional_part(env, "expert") is not None,
            isolation=environment.isolation,
            deadline_s=environment.reset_timeout_s,
        )
    except EnvironmentFailure as error:
        raise UsageError(str(error), hint=f"run: agentrl env check {shlex.quote(spec.name)}") from error
