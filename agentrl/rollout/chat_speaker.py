"""A text service speaks: for evaluation only, since nobody knows its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agentrl.agent_loop import Answer, Conversation
from agentrl.errors import EngineError, UsageError, async_boundary
from agentrl.message import Message
from agentrl.policy import ChatPolicy, SamplingParams
from agentrl.render.encoding import CUT_MARK
from agentrl.rollout.speaker import Situation, Speaker
from agentrl.rollout.stall import WaitKind
from agentrl.rollout.turns import TurnLog
from agentrl.tool import Tool
from agentrl.trajectory import TokenSequence, Turn

CHARACTERS_PER_TOKEN = 4
"""The usual estimate for English: a text service's tokens cannot be counted here."""


def cut_characters(text: str, max_tokens: int) -> str:
    """`text` cut to about `max_tokens` tokens, with a visible mark."""
    most = max_tokens * CHARACTERS_PER_TOKEN
    return text if len(text) <= most else text[:most] + CUT_MARK.format(len(text) - most)


def append_textual_turn(turns: TurnLog, sequence: TokenSequence, stop_reason: str) -> Turn:
    """Record a turn without tokens, so that rewards have a place."""
    trajectory = turns.trajectory
    if not trajectory.sequences:
        trajectory.sequences.append(sequence)
    turn = Turn(index=len(trajectory.turns), start=0, end=0, stop_reason=stop_reason)
    trajectory.sequences[0].turns.append(turn)
    return turn


class ChatSpeaker(Speaker):
    """Opens conversations that a text service answers.

    Args:
        policy: The service.
        sampling: How to sample; `max_tokens` and `seed` are set per turn.
    """

    def __init__(self, policy: ChatPolicy, sampling: SamplingParams) -> None:
        self.policy = policy
        self.sampling = sampling

    def open(self, situation: Situation, messages: Sequence[Message], tools: Sequence[Tool]) -> Conversation:
        """A conversation in text."""
        return ChatConversation(self, messages, tools, situation.turns)

    def cut(self, text: str, max_tokens: int) -> str:
        """Cut by an estimate of the number of tokens."""
        return cut_characters(text, max_tokens)


class ChatConversation(Conversation):
    """A conversation that is sent whole with each turn."""

    def __init__(
        self, speaker: ChatSpeaker, messages: Sequence[Message], tools: Sequence[Tool], turns: TurnLog
    ) -> None:
        self.messages = list(messages)
        self._speaker = speaker
        self._tools = tools
        self._turns = turns
        self._prompt_tokens = 0

    def add(self, *messages: Message) -> None:
        """Append messages."""
        self.messages.extend(messages)

    def fork(self, messages: Sequence[Message]) -> Conversation:
        """A conversation with other messages."""
        return ChatConversation(self._speaker, messages, self._tools, self._turns)

    async def generate(self, *, prefill: str = "") -> Answer:
        """Ask for one turn."""
        if prefill:
            raise UsageError("a text service cannot continue an answer", got=f"prefill {prefill!r}", expected="none")
        seed = self._turns.begin()
        room = self._turns.budget.answer_tokens(self._prompt_tokens, self._speaker.policy.max_context)
        params = replace(self._speaker.sampling, max_tokens=room, seed=seed)
        trajectory_id = self._turns.trajectory.id
        request_id = f"{trajectory_id}/turn-{self._turns.budget.turns - 1}"
        deadline_s = self._turns.limits.answer_timeout_s
        with self._turns.recorders.waits.on(WaitKind.ENGINE, trajectory_id, "an answer"):
            async with async_boundary(EngineError, f"answer to request {request_id}", deadline_s=deadline_s):
                schemas = [tool.schema for tool in self._tools]
                chat = await self._speaker.policy.chat(self.messages, schemas, params, request_id)
        self.messages.append(chat.message)
        self._prompt_tokens = chat.prompt_tokens + chat.answer_tokens
        turn = append_textual_turn(self._turns, TokenSequence(), chat.stop_reason.value)
        self._turns.take(turn, prompt_tokens=chat.prompt_tokens, answer_tokens=chat.answer_tokens)
        return Answer(
            message=chat.message,
            raw_text=chat.message.text,
            problems=chat.problems,
            stop_reason=chat.stop_reason,
        )
