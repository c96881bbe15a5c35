"""Preview of what a policy reads: the first turns of a task as the model's tokens, and the reply to a wrong answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from agentrl.agent_loop import PLAIN_TURN, Answer, Conversation, TurnOptions
from agentrl.builders.environments import task_source
from agentrl.builders.episodes import build_env_pool, build_runner
from agentrl.builders.start_checks import start_renderer
from agentrl.config.config import Config, ScratchModelConfig
from agentrl.engine import StopReason
from agentrl.env_lookup import resolve_environment
from agentrl.errors import UsageError
from agentrl.message import Message
from agentrl.models.scratch import build_scratch_tokenizer
from agentrl.render.renderer import Renderer
from agentrl.reward import EnvironmentReward
from agentrl.rollout.policies import EpisodePolicy, EpisodeView, append_textual_turn
from agentrl.rollout.scripted_policies import ScriptedConversation, ScriptedEpisodePolicy, ScriptedPolicy
from agentrl.rollout.waits import RolloutObserver
from agentrl.tool import Tool
from agentrl.trajectory import Source, TokenSequence, Trajectory

WRONG_ANSWER = "I am not sure what to do."


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPart:
    """A part of a conversation, as the model's tokens spell it."""

    title: str
    text: str
    """With special tokens."""
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPreview:
    """What a policy reads in the first turns of a task."""

    parts: list[PromptPart]
    """Prompt, the expert's answers (random ones where there is no expert) and what follows each."""
    special_tokens: frozenset[str]
    """Texts of the tokenizer's special tokens."""


async def preview_prompts(config: Config) -> PromptPreview:
    """Play the first turns of the first task.

    Args:
        config: Environment, agent, model; ``agent.max_turns`` bounds the turns. A model from scratch has no tokenizer
            yet: the preview spells its text with one that knows no words.

    Raises:
        UsageError: no such environment, loop or model, or the environment cannot be played.
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
    """Split a conversation where the answers begin and end."""
    ids, sources = sequence.ids_list(), sequence.sources.tolist()
    answers = {place for turn in sequence.turns for place in range(turn.start, turn.end)}
    start = 0
    for is_answer, group in groupby(range(len(ids)), lambda place: place in answers):
        end = start + len(list(group))
        title = who if is_answer else "prompt" if sources[start] == Source.PROMPT else "what follows"
        yield PromptPart(title=f"{title}{where}", text=renderer.encoder.decode(ids[start:end]), tokens=end - start)
        start = end


async def _reply_to_wrong_answer(config: Config, renderer: Renderer) -> list[PromptPart]:
    once = config.model_copy(update={"agent": config.agent.model_copy(update={"max_turns": 1, "shots": 0})})
    last = (await _play(once, _WrongPolicy(ScriptedPolicy.RANDOM, renderer))).last_message
    if last is None or last.role not in ("user", "tool"):
        return []
    text = renderer.after_answer([last])
    title = f"what follows if the first answer is: {WRONG_ANSWER}"
    return [PromptPart(title=title, text=text, tokens=len(renderer.encoder.encode(text)))]


async def _play(config: Config, policy: EpisodePolicy) -> _EndedEpisode:
    spec = resolve_environment(config.sole_environment.name)
    ended = _EndedEpisode()
    pool = build_env_pool(config, spec=spec)
    try:
        runner = build_runner(config, pool, policy, observer=ended, retries=0)
        runner.scorer = EnvironmentReward()  # nobody reads the return, and a judge would be paid for it
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
    """Policy that answers in the wrong form."""

    def open(self, episode: EpisodeView, messages: Sequence[Message], tools: Sequence[Tool]) -> Conversation:
        return _WrongConversation(self, None, episode)


class _WrongConversation(ScriptedConversation):
    async def generate(self, *, prefill: str = "", options: TurnOptions = PLAIN_TURN) -> Answer:
        turns = self._episode.turns
        turns.begin()
        turns.take(append_textual_turn(turns, StopReason.STOP), prompt_tokens=0, answer_tokens=0)
        return Answer(message=Message(role="assistant", content=WRONG_ANSWER), raw_text=WRONG_ANSWER)

    def fork(self, messages: Sequence[Message]) -> Conversation:
        return self
