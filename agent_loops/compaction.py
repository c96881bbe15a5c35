"""Conversations that the policy summarizes when they grow long; they continue from its summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from agentrl.agent_loop import PLAIN_TURN, Answer, Conversation, Episode, TurnOptions
from agentrl.errors import ConfigError
from agentrl.message import Message, user

from .prompting import after, text_with_image_marks, with_lines

REQUEST = (
    "This conversation has become too long and ends here. You will continue with nothing but a summary, which you write"
    " now. Write what you did, what happened, what you know, and what remains to be done. Write plain sentences and no"
    " action. For example:\n"
    "I looked into the desk and found a key. The drawer is locked. Next, I will try the key on the drawer.\n"
    "You will then see your summary and continue."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    """Settings of summaries."""

    above: int
    """Tokens of a conversation, including its latest answer, above which the next turn is a summary."""
    tokens: int = 256
    """Maximum tokens of a summary; a longer one is cut off."""
    trained: bool = True
    """True if summaries are trained like all other tokens of the policy."""

    @classmethod
    def from_option(cls, option: Mapping[str, Any] | None) -> Compaction | None:
        """Read the option ``compact`` of a loop.

        Raises:
            ConfigError: an entry is unknown, missing, or out of its range.
        """
        if option is None:
            return None
        known = [field.name for field in fields(cls)]
        if not isinstance(option, Mapping) or "above" not in option or any(name not in known for name in option):
            raise ConfigError("compact is not valid", got=repr(option), expected="{above: 2000, tokens: 256}")
        for name in ("above", "tokens"):
            value = option.get(name, 1)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"compact.{name} is not a number of tokens", got=repr(value), expected="at least 1")
        if not isinstance(option.get("trained", True), bool):
            raise ConfigError("compact.trained is not a boolean", got=repr(option["trained"]), expected="true or false")
        return cls(**option)


class CompactedConversation(Conversation):
    """A conversation that is replaced by the policy's own summary of it whenever it has grown too long.

    Args:
        episode: The episode of the conversation.
        conversation: The conversation to summarize.
        opening: Its first messages; they are kept, and the summary follows the last of them.
        compaction: Settings of the summaries.
    """

    def __init__(
        self, episode: Episode, conversation: Conversation, opening: Sequence[Message], compaction: Compaction
    ) -> None:
        self._episode = episode
        self._conversation = conversation
        self._opening = list(opening)
        self._compaction = compaction
        self._pending: list[Message] = []
        self._tokens = 0

    def add(self, *messages: Message) -> None:
        """Append messages."""
        self._pending.extend(messages)

    def fork(self, messages: Sequence[Message]) -> Conversation:
        """Return a conversation with a rewritten history, which becomes its opening."""
        forked = self._conversation.fork(messages)
        return CompactedConversation(self._episode, forked, messages, self._compaction)

    async def generate(self, *, prefill: str = "", options: TurnOptions = PLAIN_TURN) -> Answer:
        """Let the policy take a turn, after a summary if the conversation is too long."""
        if self._tokens > self._compaction.above:
            await self._sum_up()
        self._conversation.add(*self._pending)
        self._pending = []
        answer = await self._conversation.generate(prefill=prefill, options=options)
        self._tokens = answer.prompt_tokens + answer.answer_tokens
        return answer

    async def _sum_up(self) -> None:
        """Ask for a summary and start a new conversation with it; after an empty one, only the opening is left."""
        *earlier, latest = self._pending or [user("")]
        if latest.role == "user":
            self._conversation.add(*earlier, user(with_lines(latest.content, [f"\n{REQUEST}"])))
        else:
            self._conversation.add(*earlier, latest, user(REQUEST))
        options = TurnOptions(max_tokens=self._compaction.tokens, trained=self._compaction.trained)
        summary = (await self._conversation.generate(options=options)).text.strip()
        if not summary:
            self._episode.count_invalid("The summary was empty.")
        first = self._opening[-1]
        past = f"Your summary of what happened since then:\n{summary or '(nothing)'}\n\n"
        now = [text_with_image_marks(message.content) for message in earlier]
        content = after("".join([past, *(f"{text}\n" for text in now)]), latest.content)
        begun = after(f"{text_with_image_marks(first.content)}\n\n", content)
        self._conversation = self._conversation.fork([*self._opening[:-1], user(begun)])
        self._pending = []


def with_compaction(
    episode: Episode, conversation: Conversation, opening: Sequence[Message], compaction: Compaction | None
) -> Conversation:
    """Return the conversation with summaries as set by `compaction`; unchanged without it."""
    return conversation if compaction is None else CompactedConversation(episode, conversation, opening, compaction)
