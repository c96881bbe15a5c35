"""Preview of a policy's prompts: the first turns of a task in the model's tokens, and the reply to a wrong answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from agentrl.agent_loop import PLAIN_TURN, Answer, Conversation, TurnOptions
from agentrl.builders.episodes import build_env_pool, build_runner
from agentrl.builders.models import start_renderer
from agentrl.config.config import Config, ScratchModelConfig
from agentrl.engine import StopReason
from agentrl.env.lookup import resolve_environment
from agentrl.errors import UsageError
from agentrl.message import Message
from agentrl.models.scratch import build_scratch_tokenizer
from agentrl.render.renderer import Renderer
from agentrl.reward import EnvironmentReward
from agentrl.rollout.events import RolloutObserver
from agentrl.rollout.policies import EpisodePolicy, EpisodeView, append_textual_turn
from agentrl.rollout.scripted_policies import ScriptedConversation, ScriptedEpisodePolicy, ScriptedPolicy
from agentrl.rollout.task_source import task_source
from agentrl.tool import Tool
from agentrl.trajectory import Source, TokenSequence, Trajectory

WRONG_ANSWER = "I am not sure what to do."


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPart:
    """Part of a conversation as the model's tokens write it."""

    title: str
    text: str
    """Text including special tokens."""
    tokens: int
    """Number of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPreview:
    """Preview of the first turns of a task."""

    parts: list[PromptPart]
    """Prompt, answers (the expert's, or random ones without an expert), and the text after each answer."""
    special_tokens: frozenset[str]
    """Texts of the tokenizer's special tokens."""


async def preview_prompts(config: Config) -> PromptPreview:
    """Play the first turns of the first task, and return them as the model's tokens.

    Args:
        config: Config with the environment, the agent and the model; ``agent.max_turns`` limits the turns. A model from
            scratch has no tokenizer yet, so the preview uses a tokenizer without words.

    Raises:
        UsageError: the environment, loop or model does not exist, or the environment cannot be played.
    """
    renderer = _renderer(config)
    try:
        played = (await _play(config, ScriptedEpisodePolicy(ScriptedPolicy.EXPERT, renderer))).sequences
        who = "the expert's answer"
    except UsageError:  # no expert, or one that the loop cannot demonstrate
        played = (await _play(config, ScriptedEpisodePolicy(ScriptedPolicy.RANDOM, renderer))).sequences
        who = "a random answer"
    parts = [
        part
        for number, sequence in enumerate(played)
        for part in _parts(sequence, renderer, who, f", conversation {number + 1}" if number else "")
    ]
    return PromptPreview(
        parts=[*parts, *await _reply_to_wrong_answer(config, renderer)],
        special_tokens=frozenset(renderer.encoder.special_tokens),
    )


def _renderer(config: Config) -> Renderer:
    found = start_renderer(config)
    if found is not None:
        return found
    sizes = config.model.scratch or ScratchModelConfig()
    tokenizer = build_scratch_tokenizer(
        [], vocab_size=sizes.vocab_size, max_context=sizes.max_context, numbered_names=sizes.numbered_names
    )
    return Renderer(tokenizer, enable_thinking=config.agent.enable_thinking, tool_parser=config.agent.tool_parser)


def _parts(sequence: TokenSequence, renderer: Renderer, who: str, where: str) -> Iterator[PromptPart]:
    """Split a sequence at the beginnings and ends of answers."""
    ids, sources = sequence.ids_list(), sequence.sources.tolist()
    answers = {index for turn in sequence.turns for index in range(turn.start, turn.end)}
    start = 0
    for is_answer, group in groupby(range(len(ids)), lambda index: index in answers):
        end = start + len(list(group))
        title = who if is_answer else "prompt" if sources[start] == Source.PROMPT else "reply"
        yield PromptPart(title=f"{title}{where}", text=renderer.encoder.decode(ids[start:end]), tokens=end - start)
        start = end


async def _reply_to_wrong_answer(config: Config, renderer: Renderer) -> list[PromptPart]:
    once = config.model_copy(update={"agent": config.agent.model_copy(update={"max_turns": 1, "few_shot_turns": 0})})
    last = (await _play(once, _WrongPolicy(ScriptedPolicy.RANDOM, renderer))).last_message
    if last is None or last.role not in ("user", "tool"):
        return []
    text = renderer.after_answer([last])
    title = f"reply to a wrong first answer: {WRONG_ANSWER}"
    return [PromptPart(title=title, text=text, tokens=len(renderer.encoder.encode(text)))]


async def _play(config: Config, policy: EpisodePolicy) -> _EndedEpisode:
    spec = resolve_environment(config.sole_environment.name)
    ended = _EndedEpisode()
    pool = build_env_pool(config, spec=spec)
    try:
        runner = build_runner(config, pool, policy, observer=ended, retries=0)
        runner.scorer = EnvironmentReward()  # the return is unused, and a judge would cost money
        task = task_source(spec, config.sole_environment)[0]
        await runner.run(task, group_id="preview", member=0, seed=0)
    finally:
        await pool.close()
    if ended.last_message is None:
        raise UsageError(f"the first task of {spec.name} cannot be shown", got=ended.error)
    return ended


class _EndedEpisode(RolloutObserver):
    def __init__(self) -> None:
        self.sequences: list[TokenSequence] = []
        self.last_message: Message | None = None
        self.error: str | None = None

    def on_end(self, trajectory: Trajectory) -> None:
        self.sequences = trajectory.sequences
        self.last_message = trajectory.messages[-1] if trajectory.messages else None
        self.error = trajectory.error


class _WrongPolicy(ScriptedEpisodePolicy):
    """Policy whose answers are invalid."""

    def open(self, episode: EpisodeView, messages: Sequence[Message], tools: Sequence[Tool]) -> Conversation:
        return _WrongConversation(self, None, episode)


class _WrongConversation(ScriptedConversation):
    async def generate(self, *, prefill: str = "", options: TurnOptions = PLAIN_TURN) -> Answer:
        turns = self._episode.turns
        turns.begin_turn()
        turns.record(append_textual_turn(turns, StopReason.STOP), prompt_tokens=0, answer_tokens=0)
        message = Message(role="assistant", content=WRONG_ANSWER)
        return Answer(message=message, raw_text=WRONG_ANSWER, is_scripted=True)

    def fork(self, messages: Sequence[Message]) -> Conversation:
        return self
