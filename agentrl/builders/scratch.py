"""Text for the tokenizer of a new model: episodes of the environment with the agent's messages."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from agentrl.agent_loop import PLAIN_TURN, AgentLoop, Answer, Conversation, Episode, TurnOptions
from agentrl.builders.episodes import build_env_pool, build_runner
from agentrl.config.config import Config, ScratchModelConfig
from agentrl.config.derived import per_environment_configs
from agentrl.engine import StopReason
from agentrl.env.lookup import resolve_environment
from agentrl.errors import UsageError
from agentrl.message import Message, system, user
from agentrl.models.scratch import build_scratch_model
from agentrl.reward import EnvironmentReward
from agentrl.rollout.environment_probe import has_expert
from agentrl.rollout.policies import EpisodePolicy, EpisodeView, append_textual_turn, cut_characters, split_characters
from agentrl.rollout.scripted_policies import ScriptedPolicy, demonstrate
from agentrl.rollout.task_source import task_source
from agentrl.rollout.turns import derive_seed
from agentrl.task import TaskCursor
from agentrl.tool import Tool

EPISODES = 512
"""Episodes of the corpus, over all environments. The tokenizer encodes all other text by bytes or characters."""

MAX_FAILED = 8
"""Maximum failed episodes in a row before playing stops, as each may take a whole step timeout."""


class TextCollector(EpisodePolicy):
    """Policy that acts as a scripted policy and collects all text of its conversations.

    Args:
        policy: Scripted policy.
    """

    def __init__(self, policy: ScriptedPolicy) -> None:
        self.policy = policy
        self.texts: list[str] = []

    def open(self, episode: EpisodeView, messages: Sequence[Message], tools: Sequence[Tool]) -> Conversation:
        """Open a conversation whose messages and tools are collected."""
        self.texts.extend(_json(tool.schema) for tool in tools)
        conversation = _RecordedConversation(self, episode)
        conversation.add(*messages)
        return conversation

    def cut(self, text: str, max_tokens: int) -> str:
        """Truncate by an estimate, as there is no tokenizer yet."""
        return cut_characters(text, max_tokens)

    def split(self, text: str, max_tokens: int) -> list[str]:
        """Split by an estimate."""
        return split_characters(text, max_tokens)


class _RecordedConversation(Conversation):
    def __init__(self, collector: TextCollector, episode: EpisodeView) -> None:
        self._collector = collector
        self._episode = episode

    def add(self, *messages: Message) -> None:
        """Collect the text of messages."""
        self._collector.texts.extend(text for message in messages for text in _texts_of(message))

    def fork(self, messages: Sequence[Message]) -> Conversation:
        """Open another conversation for a rewritten history."""
        return self._collector.open(self._episode, messages, ())

    async def generate(self, *, prefill: str = "", options: TurnOptions = PLAIN_TURN) -> Answer:
        """Act, and collect the answer."""
        turns = self._episode.turns
        seed = turns.begin_turn(is_counted=not options.for_environment)
        message, _ = await demonstrate(self._collector.policy, self._episode, seed, options)
        turn = append_textual_turn(turns, StopReason.STOP, options.role)
        turns.record(turn, prompt_tokens=0, answer_tokens=0, trained=options.trained)
        self.add(message)
        return Answer(message=message, raw_text=message.text, is_scripted=True)


class RawActionLoop(AgentLoop):
    """Agent loop with raw actions, used in place of a loop without `demonstrate`."""

    async def run(self, episode: Episode) -> None:
        """Play one episode."""
        observation = await episode.reset()
        conversation = episode.open([system(episode.spec.instructions), user(observation)])
        while not (result := await episode.step((await conversation.generate()).text)).done:
            conversation.add(user(result.observation))

    def demonstrate(self, action: str) -> Message:
        """Return the action as an assistant message."""
        return Message(role="assistant", content=action)


def _texts_of(message: Message) -> Iterator[str]:
    """Yield a message's text, and its tool calls in the format of the new model's template."""
    yield message.text
    for call in message.tool_calls:
        yield _json({"name": call.name, "arguments": dict(call.arguments)})


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def ignore(_: str) -> None:
    """Ignore a message."""


async def write_scratch_model(config: Config, folder: Path, *, say: Callable[[str], None] = ignore) -> None:
    """Write a new model, with a tokenizer trained on episodes of the expert (of random actions without an expert).

    Args:
        config: Config with model, environments and agent.
        folder: Folder to write the model to.
        say: Called with a message for the user when an episode fails.

    Raises:
        UsageError: the environment cannot be played.
        ConfigError: the model's sizes are incompatible.
    """
    corpus = await scratch_corpus(config, say=say)
    sizes = config.model.scratch or ScratchModelConfig()
    build_scratch_model(folder, corpus, sizes, seed=config.run.seed)


async def scratch_corpus(config: Config, *, say: Callable[[str], None] = ignore) -> list[str]:
    """Return all text of some episodes, in the order of tasks; equal for equal configs."""
    parts = per_environment_configs(config)
    return [text for part in parts for text in await _texts(part.config, max(1, EPISODES // len(parts)), say)]


async def _texts(config: Config, episodes: int, say: Callable[[str], None]) -> list[str]:
    """Collect the texts of one environment."""
    spec = resolve_environment(config.sole_environment.name)
    tasks = TaskCursor(task_source(spec, config.sole_environment), seed=config.run.seed)
    collector = TextCollector(ScriptedPolicy.EXPERT if has_expert(spec, config) else ScriptedPolicy.RANDOM)
    pool = build_env_pool(config, spec=spec)
    failed, consecutive = None, 0
    try:
        runner = build_runner(config, pool, collector)
        if problem := runner.loop.demonstration_problem():
            say(f"{problem}: the new model's vocabulary is built from the environment's text and bare actions")
            runner.loop = RawActionLoop()
            if runner.roles is not None:
                runner.roles = replace(runner.roles, names=())
        runner.scorer = EnvironmentReward()  # rewards are not read, so no judge or reward model is used
        for number in range(episodes):
            seed = derive_seed(config.run.seed, "corpus", number)
            played = await runner.run(tasks.next(), group_id=f"corpus-{number}", member=0, seed=seed)
            if played.outcome is None or not played.outcome.is_infrastructure:
                consecutive = 0
                continue
            if failed is None:
                say(f"an episode for the new model's vocabulary failed; others follow: {played.error}")
            failed, consecutive = failed or played, consecutive + 1
            if consecutive >= MAX_FAILED:
                say(f"{consecutive} episodes in a row failed; the vocabulary is built from the text collected so far")
                break
    finally:
        await pool.close()
    if failed is not None and not collector.texts:
        raise UsageError(
            "no episode can be played for the vocabulary",
            got=f"{spec.name}: {failed.error}",
            hint=f"run: agentrl env check {shlex.quote(spec.name)}",
        )
    return collector.texts
