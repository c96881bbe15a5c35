"""Scripted policies: the environment's own expert, a random policy, and an expert's stored episodes.

In each turn a scripted policy gets an action from the environment, and from the agent loop the answer that a perfect
policy would write for it. With a renderer the answer enters the ledger as forced tokens in place of sampled ones, for
warm starts. Without a renderer only messages are kept, so that scores of scripted policies need no model.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from agentrl.agent_loop import PLAIN_TURN, Answer, Conversation, TurnOptions
from agentrl.engine import StopReason
from agentrl.errors import UsageError, shorten
from agentrl.message import Message, ToolCall, plainly_written
from agentrl.observe.trajectory_record import trajectory_from_record, trajectory_record
from agentrl.remote.env_methods import EXPERT_ACTION, RANDOM_ACTION, TOOL_MESSAGE
from agentrl.render.chat_template import ToolSchema
from agentrl.render.conversation import LedgerConversation
from agentrl.render.renderer import Renderer
from agentrl.rollout.policies import (
    EpisodePolicy,
    EpisodeView,
    append_textual_turn,
    cut_characters,
    split_characters,
    write_answer,
)
from agentrl.task import Task
from agentrl.tool import Tool
from agentrl.tool.random_call import random_arguments
from agentrl.tool.results import content_text
from agentrl.trajectory import NOT_SAMPLED, Source, Trajectory


class ScriptedPolicy(enum.StrEnum):
    """Kinds of scripted policies: the environment's expert, or random actions."""

    EXPERT = "expert"
    RANDOM = "random"


class ScriptedEpisodePolicy(EpisodePolicy):
    """Policy whose answers are scripted.

    Args:
        kind: Expert or random.
        renderer: Writes the answers into the ledger; ``None`` keeps only text.
        max_context: Maximum number of tokens of prompt and answer together.
        mistakes: Fraction of actions before which an expert makes a mistake.
    """

    def __init__(
        self, kind: ScriptedPolicy, renderer: Renderer | None = None, *, max_context: int = 2**31, mistakes: float = 0.0
    ) -> None:
        self.kind = kind
        self.renderer = renderer
        self.max_context = max_context
        self.mistakes = mistakes

    def open(self, episode: EpisodeView, messages: Sequence[Message], tools: Sequence[Tool]) -> Conversation:
        """Return a conversation on the ledger, or in text."""
        ledger = None
        if self.renderer is not None:
            schemas: list[ToolSchema] = [tool.schema for tool in tools]
            ledger = LedgerConversation(self.renderer, episode.turns.trajectory, messages, tools=schemas)
        return ScriptedConversation(self, ledger, episode, {tool.name: tool for tool in tools})

    def for_role(self, name: str, *, of_environment: bool = False) -> EpisodePolicy:
        """Return this policy, or for an environment's role one without a renderer: its answers are not demonstrated."""
        return ScriptedEpisodePolicy(self.kind) if of_environment else self

    def write_answer(self, message: Message) -> str:
        """Return an answer as the chat template writes it, or as JSON without a renderer."""
        return super().write_answer(message) if self.renderer is None else write_answer(self.renderer, message)

    @property
    def reads_images(self) -> bool:
        """True if the episodes are rendered for a model that accepts images."""
        return self.renderer is not None and self.renderer.images is not None

    def cut(self, text: str, max_tokens: int) -> str:
        """Cut by the model's tokens, or by an estimate without a renderer."""
        return cut_characters(text, max_tokens) if self.renderer is None else self.renderer.cut(text, max_tokens)

    def split(self, text: str, max_tokens: int) -> list[str]:
        """Split by the model's tokens, or by an estimate without a renderer."""
        return split_characters(text, max_tokens) if self.renderer is None else self.renderer.split(text, max_tokens)


class ScriptedConversation(Conversation):
    """Conversation with scripted answers, which become forced tokens; without a ledger they are text only."""

    def __init__(
        self,
        policy: ScriptedEpisodePolicy,
        ledger: LedgerConversation | None,
        episode: EpisodeView,
        tools: Mapping[str, Tool] = MappingProxyType({}),
    ) -> None:
        self.ledger = ledger
        self._policy = policy
        self._episode = episode
        self._tools = tools

    def add(self, *messages: Message) -> None:
        """Append messages to the ledger; the scripted policy itself reads the environment."""
        if self.ledger is not None:
            self.ledger.add(messages)

    def fork(self, messages: Sequence[Message]) -> Conversation:
        """Return a conversation with a rewritten history."""
        ledger = None if self.ledger is None else self.ledger.fork(messages)
        return ScriptedConversation(self._policy, ledger, self._episode, self._tools)

    async def generate(self, *, prefill: str = "", options: TurnOptions = PLAIN_TURN) -> Answer:
        """Write the answer with the scripted policy's next action."""
        policy, turns = self._policy, self._episode.turns
        seed, prompt_tokens = turns.begin_turn(is_counted=not options.for_environment), 0
        if self.ledger is not None:
            prompt_tokens = len(self.ledger.prepare(prefill))
            turns.budget.answer_tokens(prompt_tokens, policy.max_context)
        message, source = await demonstrate(policy.kind, self._episode, seed, options, mistakes=policy.mistakes)
        if policy.kind is ScriptedPolicy.EXPERT:
            self._check_tools(message, options.role)
        elif self._tools and any(call.name not in self._tools for call in message.tool_calls):
            message = self._random_call(seed)
        if self.ledger is None or policy.renderer is None:
            turn = append_textual_turn(turns, StopReason.STOP, options.role)
            turns.record(turn, prompt_tokens=0, answer_tokens=0, trained=options.trained)
            return Answer(message=message, raw_text=plainly_written(message), is_scripted=True)
        text = _answer_text(message, policy.renderer, self.ledger)
        if not text.startswith(prefill):
            raise UsageError(
                "the expert's answer does not begin with the prefill",
                got=repr(text),
                expected=f"a text that begins with {prefill!r}",
                hint="remove agent.options.prefill, or use the format that it belongs to",
            )
        answer = self.ledger.demonstrate(text.removeprefix(prefill), role=options.role, source=source)
        turn = self.ledger.sequence.turns[-1]
        self._check_length(text, turn.end - turn.start)
        turns.record(turn, prompt_tokens=prompt_tokens, answer_tokens=turn.end - turn.start)
        return replace(answer, is_scripted=True)

    def _random_call(self, seed: int) -> Message:
        """Return a call of one of the tools, for an environment that takes no actions but calls of its own tools."""
        generator = random.Random(seed)
        tool = generator.choice(list(self._tools.values()))
        seen = content_text(self._episode.observation)
        call = ToolCall(name=tool.name, arguments=random_arguments(tool.schema, generator, seen))
        return Message(role="assistant", tool_calls=(call,))

    def _check_tools(self, message: Message, role: str) -> None:
        missing = [call.name for call in message.tool_calls if call.name not in self._tools]
        if missing:
            raise UsageError(
                f"the environment's expert acts through a tool that {role} may not call",
                got=", ".join(missing),
                expected=f"one of {', '.join(self._tools)}" if self._tools else "no tool calls: it has no tools",
                hint=f"remove agent.roles.{role}.tools, which replaces the environment's tools, or agent.options.offer",
            )

    def _check_length(self, text: str, tokens: int) -> None:
        most = self._episode.turns.budget.limits.max_answer_tokens
        if tokens > most:
            raise UsageError(
                "the expert's answer exceeds the limit of the agent's answers, so the agent cannot learn it",
                got=f"{tokens} tokens: {text}",
                expected=f"at most agent.max_answer_tokens={most}",
                hint=f"set agent.max_answer_tokens={tokens} or more",
            )


def _answer_text(message: Message, renderer: Renderer, ledger: LedgerConversation) -> str:
    """Return `message` as the model would write it at this point of the conversation."""
    if not message.tool_calls:
        return renderer.plain_answer(message.text)
    earlier = sum(len(previous.tool_calls) for previous in ledger.messages)
    return renderer.answer_text(message, earlier_calls=earlier)


async def demonstrate(
    policy: ScriptedPolicy, episode: EpisodeView, seed: int, options: TurnOptions = PLAIN_TURN, *, mistakes: float = 0.0
) -> tuple[Message, Source]:
    """Return the message with the next action of `policy`, and the source of its tokens: forced or mistake.

    In a turn without an action, `options.demonstration` gives the message.
    """
    if options.demonstration is not None:
        return Message(role="assistant", content=options.demonstration()), Source.FORCED
    environment = episode.environment
    if policy is ScriptedPolicy.RANDOM:
        return await _write_action(episode, await environment.call(RANDOM_ACTION, seed), options), Source.FORCED
    action = await environment.call(EXPERT_ACTION, episode.observation, seed, mistakes)
    return await _write_action(episode, action.text, options), Source.MISTAKE if action.is_mistake else Source.FORCED


async def _write_action(episode: EpisodeView, action: str, options: TurnOptions) -> Message:
    """Return the answer with `action`: a call of the environment's tools if the loop offers them."""
    if options.for_environment:
        return Message(role="assistant", content=action)
    through_tools = await episode.environment.call(TOOL_MESSAGE, action) if episode.loop.offers_tools else None
    written: object = through_tools or episode.loop.demonstrate(action)
    if not isinstance(written, Message):
        wrote = f"demonstrate of agent loop {type(episode.loop).__name__}" if through_tools is None else TOOL_MESSAGE
        raise UsageError(
            f"{wrote} does not return a message",
            got=f"{type(written).__name__} {shorten(written)}",
            expected='Message(role="assistant", content=action)',
        )
    return written


class StoredExpert:
    """Expert that replays a task's stored episode with the best reward (`place` 0), the second best (1), and so on.

    Episodes with an infrastructure failure or without a reward are skipped.
    """

    def __init__(self, trajectories: Iterable[Trajectory], *, place: int) -> None:
        self._place = place
        self._episodes: dict[tuple[str, int], list[Trajectory]] = {}
        for trajectory in trajectories:
            if trajectory.is_trainable:
                self._episodes.setdefault((trajectory.task_id, trajectory.seed), []).append(trajectory)
        for episodes in self._episodes.values():
            episodes.sort(key=lambda trajectory: -(trajectory.reward or 0.0))

    def can_play(self, task: Task) -> bool:
        """Return True if there is a stored episode of this task and seed."""
        return len(self._episodes.get((task.id, task.seed), ())) > self._place

    async def run(self, task: Task, *, group_id: str, member: int, seed: int) -> Trajectory:
        """Return the stored episode as a member of a group, with its sampled tokens marked as forced."""
        return expert_copy(self._episodes[task.id, task.seed][self._place], id=f"{group_id}/{member}.0", group=group_id)


def expert_copy(trajectory: Trajectory, *, id: str, group: str) -> Trajectory:
    """Copy a stored episode under another id and group, with its sampled tokens marked as forced."""
    record = trajectory_record(trajectory)
    for row in record["sequences"]:
        row["sources"] = [Source.FORCED if source == Source.SAMPLED else source for source in row["sources"]]
        row["logprobs"] = [None] * len(row["logprobs"])
        row["versions"] = [NOT_SAMPLED] * len(row["versions"])
    other = trajectory_from_record(record)
    other.id, other.group_id = id, group
    return other
