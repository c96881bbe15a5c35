"""Translation of the ledger's sequences to the tokens of another model, such as a teacher with another tokenizer.

The other model reads the same conversation in its own chat template, written by the same code as the ledger's. Of an
answer, it reads everything that the policy sampled as text, including thinking, the notation of tool calls and control
tokens. Only the end of the turn is its own. The tokens of each answer are aligned by bytes (`align`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from agentrl.errors import UsageError
from agentrl.message import Message
from agentrl.render.content_guard import BREAK, unbroken
from agentrl.render.conversation import LedgerConversation
from agentrl.render.renderer import Renderer
from agentrl.trajectory import TokenSequence, Trajectory, Turn, TurnContext

End: TypeAlias = int | None
"""Number of bytes up to the end of a token; ``None`` if it is not known, for some tokens that end within a character.
"""
Ends: TypeAlias = tuple[int, int] | None
"""First and last possible `End` of a token: they differ if a tokenizer drops the white space after it."""
NO_GROUP = -1
"""Group of a token that has none."""
UNALIGNED = -2
"""Group of a trained token for which the other model has no tokens of the same text."""
_PROBE = "@@ANSWER@@"
SAMPLE = """The train leaves at 7:45 and arrives 2.5 hours later; how far is it at 80 km/h?
Let me think step by step. 2.5 * 80 = 200, so the answer is 200 km.

def total(prices: list[float]) -> float:
    return sum(price for price in prices if price > 0)

{"name": "search", "arguments": {"query": "population of Zürich in 2020", "limit": 10}}"""
"""Text on which tokenizers are compared before a run: prose, numbers, code and a tool call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """A sequence of the ledger in the tokens of another model, and the groups of tokens with the same text."""

    ids: tuple[npt.NDArray[np.int32], ...]
    """Token ids of the other model's sequences: [T'] each. There are several if its template rewrites history."""
    other_groups: tuple[npt.NDArray[np.int32], ...]
    """Group of each of these tokens, or `NO_GROUP`: [T'] each."""
    groups: npt.NDArray[np.int32]
    """Group of each token of the ledger's sequence: [T]; `NO_GROUP` if it is not trained, or `UNALIGNED`."""

    @property
    def scored_groups(self) -> npt.NDArray[np.int32]:
        """Groups of the other model's tokens that have one, over all of its sequences."""
        return np.concatenate([np.empty(0, np.int32), *(own[own >= 0] for own in self.other_groups)])

    @property
    def counts(self) -> tuple[int, int, int]:
        """Numbers of trained tokens, of those in a group of one token on each side, and of unaligned ones."""
        own, trained = self.groups[self.groups >= 0], int((self.groups != NO_GROUP).sum())
        return trained, _one_to_one(own, self.scored_groups), trained - own.size

    def distribute(self, other_logp: npt.NDArray[np.float32], logp: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Distribute the other model's log-probabilities over the ledger's tokens: float32 [T]; NaN without a group.

        The values of a group add up to the other model's. All of its tokens differ from `logp` by the same amount, so
        that no token is preferred to another of its group. A token that is alone in its group has the other's value.

        Args:
            other_logp: Log-probabilities of the tokens of `scored_groups`: [scored].
            logp: Log-probabilities with which the ledger's tokens were sampled: [T]; NaN counts as 0.
        """
        found = np.full(self.groups.size, np.nan, np.float32)
        where = np.flatnonzero(self.groups >= 0)
        own, sampled = self.groups[where], np.nan_to_num(logp[where].astype(np.float64))
        count = int(own.max(initial=-1)) + 1
        size = np.bincount(own, minlength=count)
        other = np.bincount(self.scored_groups, other_logp, minlength=count)
        gap = (np.bincount(own, sampled, minlength=count) - other) / np.maximum(size, 1)
        found[where] = np.where(size[own] == 1, other[own], sampled - gap[own])
        return found


def _one_to_one(own: npt.NDArray[np.int32], other: npt.NDArray[np.int32]) -> int:
    """Count the groups with one token on each side."""
    count = int(max(own.max(initial=-1), other.max(initial=-1))) + 1
    return int(((np.bincount(own, minlength=count) == 1) & (np.bincount(other, minlength=count) == 1)).sum())


@dataclass(frozen=True, slots=True)
class _AlignedTurn:
    text: str
    """Text that the other model reads, with breaks in its control tokens."""
    own: npt.NDArray[np.int32]
    """Group of each token of the turn, from 0 on."""
    other: npt.NDArray[np.int32]
    """Group of each token of the text, and of the end of the turn."""


class Translator:
    """Translator of episodes.

    Args:
        policy: Renderer of the ledger's model, which keeps contexts (`Renderer.keeps_contexts`).
        reader: Renderer of the other model.
    """

    def __init__(self, policy: Renderer, reader: Renderer) -> None:
        self._policy, self.reader = policy, reader
        self._ends = policy.stop_token_ids | policy.boundary.end_ids
        self._lead = self._find_lead()

    def _find_lead(self) -> str:
        """Return the text that the reader needs before an answer, because the two headers of answers differ."""
        policy, reader = self._policy, self.reader
        if policy.opens_thinking:
            return "" if reader.opens_thinking else f"{policy.thinking.open}\n"
        if reader.opens_thinking or reader.family.marks_answers:
            return reader.plain_answer(_PROBE).partition(_PROBE)[0]
        return ""

    def equal_share(self) -> float:
        """Return the share of the policy's tokens that align one to one in a text of prose, numbers and code."""
        ids = self._policy.encoder.encode(SAMPLE)
        turn = self._align(ids, np.ones(len(ids), np.bool_))
        return _one_to_one(turn.own[turn.own >= 0], turn.other[turn.other >= 0]) / len(ids)

    def translate(self, trajectory: Trajectory, trained: Sequence[npt.NDArray[np.bool_]]) -> list[Translation]:
        """Translate all sequences of an episode; `trained` marks the trained tokens of each: [T].

        Raises:
            UsageError: the episode has images, or its messages were not kept.
            TemplateError: the reader's chat template refuses the conversation.
        """
        pairs = zip(trajectory.sequences, trained, strict=True)
        return [self._translate(trajectory, sequence, mask) for sequence, mask in pairs]

    def _translate(
        self, trajectory: Trajectory, sequence: TokenSequence, trained: npt.NDArray[np.bool_]
    ) -> Translation:
        groups = np.where(trained, UNALIGNED, NO_GROUP).astype(np.int32)
        turns = _turns_of(sequence, trajectory.contexts) if trained.any() else []
        if turns and sequence.images:
            raise UsageError(
                "a teacher with another tokenizer accepts text only",
                got=f"images in episode {trajectory.id}",
                hint="use a teacher with the policy's tokenizer",
            )
        written = Trajectory(id=trajectory.id, task_id="", environment="", seed=0, group_id="")
        places: list[tuple[TokenSequence, int, npt.NDArray[np.int32]]] = []
        conversation, messages, read, count = None, list[Message](), 0, 0
        for turn in turns:
            last, position = trajectory.contexts[turns[-1].index], trajectory.contexts[turn.index].position
            if conversation is None:
                messages = _with_call_ids(last.messages[: last.position], self.reader)
                conversation = LedgerConversation(self.reader, written, messages[:position], tools=last.tools)
            else:
                conversation.add(messages[read:position])
            read, tokens = position + 1, slice(turn.start, turn.end)
            aligned = self._align(sequence.token_ids[tokens].tolist(), trained[tokens])
            conversation.demonstrate(aligned.text)
            place = conversation.sequence.turns[-1]
            groups[tokens] = np.where(aligned.own >= 0, aligned.own + count, groups[tokens])
            other = np.where(aligned.other >= 0, aligned.other + count, NO_GROUP)
            places.append((conversation.sequence, place.start, other))
            count += int(aligned.own.max(initial=-1)) + 1
        ids, other_groups = [], []
        for one in written.sequences:
            own = np.full(len(one), NO_GROUP, np.int32)
            for at, start, other in places:
                if at is one:
                    own[start : start + other.size] = other
            if (own >= 0).any():
                end = int(np.flatnonzero(own >= 0)[-1]) + 1
                ids.append(one.token_ids[:end])
                other_groups.append(own[:end])
        return Translation(ids=tuple(ids), other_groups=tuple(other_groups), groups=groups)

    def _align(self, ids: Sequence[int], trained: npt.NDArray[np.bool_]) -> _AlignedTurn:
        """Align a turn with its text for the reader; groups with an untrained token do not count."""
        encoder, is_ended = self.reader.encoder, bool(ids) and ids[-1] in self._ends
        body = ids[: len(ids) - is_ended]
        parts = self._policy.encoder.decode_parts(body, is_cut=not is_ended)
        sizes = self._policy.encoder.byte_sizes(body)
        plain = self._lead + "".join(part or "" for part in parts)
        text = self._lead + self.reader.guard.text(plain[len(self._lead) :])
        other_ids, offsets = encoder.encode_with_offsets(text)
        own, other = np.full(len(ids), NO_GROUP, np.int32), np.full(len(other_ids) + 1, NO_GROUP, np.int32)
        if unbroken(text) == plain:
            ends, unknown = self._ends_of(other_ids, offsets, text)
            lead: list[str | None] = [self._lead] if self._lead else []
            own_ends = ends_of_parts([*lead, *parts], [*([None] if lead else []), *sizes])
            found, other[:-1] = align(own_ends, ends)
            own[: len(body)] = found[len(lead) :]
            bad = {group for group, is_unknown in zip(other[:-1].tolist(), unknown, strict=True) if is_unknown}
            bad |= {*own[~trained].tolist(), *found[: len(lead)]}
            own[np.isin(own, list(bad))] = NO_GROUP
            other[np.isin(other, list(bad))] = NO_GROUP
        if is_ended and trained[-1]:
            own[-1] = other[-1] = max(own.max(), other.max()) + 1
        return _AlignedTurn(text, own, other)

    def _ends_of(
        self, ids: Sequence[int], offsets: Sequence[tuple[int, int]], text: str
    ) -> tuple[list[Ends], list[bool]]:
        """Return the ends of the reader's tokens, and True for each one that differs from the text that it covers."""
        encoder, plain = self.reader.encoder, unbroken(text)
        parts = encoder.decode_parts(ids)
        if "".join(part or "" for part in parts) == plain:
            exact: list[End] = ends_of_parts(parts, encoder.byte_sizes(ids))
            return [None if end is None else (end, end) for end in exact], [False] * len(ids)
        if BREAK in text:
            offsets = [(start - text.count(BREAK, 0, start), end - text.count(BREAK, 0, end)) for start, end in offsets]
        ends, omits = ends_of_offsets(offsets, plain)
        unknown = [omitted or token == encoder.unknown_id for omitted, token in zip(omits, ids, strict=True)]
        return ends, unknown


def _with_call_ids(messages: Sequence[Message], reader: Renderer) -> list[Message]:
    """Return messages whose tool calls and results have ids in the format of the reader's family."""
    known: dict[str | int, str] = {}

    def own_id(given: str | None, name: str | None) -> str:
        number = len(known)
        return known.setdefault(number if given is None else given, reader.call_id(name or "tool", number))

    return [
        replace(
            message,
            tool_calls=tuple(replace(call, id=own_id(call.id, call.name)) for call in message.tool_calls),
            tool_call_id=own_id(message.tool_call_id, message.name) if message.role == "tool" else message.tool_call_id,
        )
        for message in messages
    ]


def _turns_of(sequence: TokenSequence, contexts: Mapping[int, TurnContext]) -> list[Turn]:
    """Return the turns of a sequence, including those that it shares, except those that its conversation rewrote."""
    if missing := [turn.index for turn in sequence.turns if turn.index not in contexts]:
        raise UsageError(
            "a teacher with another tokenizer needs the messages of an episode",
            got=f"only the tokens of turn {missing[0]}",
            expected="an episode that this run has played",
            hint="use a teacher with the policy's tokenizer",
        )
    turns, parent, shared = list(sequence.turns), sequence.parent, sequence.shared
    messages = contexts[turns[-1].index].messages if turns else ()
    while parent is not None and turns:
        kept = [turn for turn in parent.turns if turn.end <= shared and _is_in(messages, contexts.get(turn.index))]
        turns, shared, parent = [*kept, *turns], min(shared, parent.shared), parent.parent
    return turns


def _is_in(messages: Sequence[Message], context: TurnContext | None) -> bool:
    """Return True if a conversation contains that of a turn, including its answer."""
    if context is None:
        return False
    end = context.position + 1
    return list(messages[:end]) == list(context.messages[:end])


def align(own: Sequence[End], other: Sequence[Ends]) -> tuple[list[int], list[int]]:
    """Number the groups of two tokenizations of a text from 0 on, and return the group of each token.

    A token without characters belongs to the group after it, or to the last group at the end of the text. Tokens after
    the last common end have no group: those of a cut character, or white space that the other tokenizer drops.

    A group consists of tokens of both sides that cover the same part of the text, and cannot be split. The tokens
    ``don | 't!`` and ``do | n't | !`` end together only at the end of the text, so they are one group:

    >>> align([3, 6], [(2, 2), (5, 5), (6, 6)])
    ([0, 0], [0, 0, 0])

    The tokens ``do | n't | !`` and ``don't | !`` are two groups:

    >>> align([2, 5, 6], [(5, 5), (6, 6)])
    ([0, 0, 1], [0, 1])
    """
    own_groups, other_groups = [NO_GROUP] * len(own), [NO_GROUP] * len(other)
    own_start = other_start = i = j = count = 0
    while i < len(own) and j < len(other):
        end, ends = own[i], other[j]
        if end is None or (ends is not None and end < ends[0]):
            i += 1
        elif ends is None or end > ends[1]:
            j += 1
        else:
            i, j = i + 1, j + 1
            own_groups[own_start:i] = [count] * (i - own_start)
            other_groups[other_start:j] = [count] * (j - other_start)
            own_start, other_start, count = i, j, count + 1
    if count:
        last_own, last_other = own[own_start - 1], other[other_start - 1]
        for at in range(own_start, len(own)):
            own_groups[at] = count - 1 if own[at] == last_own else NO_GROUP
        for at in range(other_start, len(other)):
            other_groups[at] = count - 1 if other[at] == last_other else NO_GROUP
    return own_groups, other_groups


def ends_of_parts(parts: Sequence[str | None], sizes: Sequence[int | None]) -> list[End]:
    """Return the end of each token.

    Args:
        parts: Text that each token completes; ``None`` within a character (`TextEncoder.decode_parts`).
        sizes: Number of bytes of each token, which is used within characters; ``None`` if it is not known.

    >>> ends_of_parts(["a", None, "\u00e9", ""], [1, 1, 1, 0])
    [1, 2, 3, 3]
    >>> ends_of_parts(["a", None, "\u00e9", ""], [1, None, 1, 0])
    [1, None, 3, 3]
    """
    found: list[End] = []
    end = opened = 0
    for number, part in enumerate(parts):
        found.append(None)
        if part is None:
            continue
        length, within = len(part.encode()), sizes[opened : number + 1]
        known = [size for size in within if size is not None]
        if len(known) == len(within) and sum(known) == length:
            found[opened:] = [end + size for size in accumulate(known)]
        end, opened = end + length, number + 1
        found[number] = end
    return found


def ends_of_offsets(offsets: Sequence[tuple[int, int]], text: str) -> tuple[list[Ends], list[bool]]:
    """Return the ends of each token, given the characters of `text` that a tokenizer says it covers.

    Returns:
        The ends, and True for each token before which the tokenizer left out more than white space, such as characters
        that it does not know.

    >>> ends_of_offsets([(0, 1), (2, 3), (2, 3)], "a \u00e9 ")
    ([(1, 2), None, (4, 5)], [False, False, False])
    """
    found: list[Ends] = []
    omits: list[bool] = []
    size = [0, *accumulate(len(character.encode()) for character in text)]
    reached = 0
    for (start, end), (following, _) in pairwise([*offsets, (len(text), len(text))]):
        omits.append(bool(text[reached:start].strip()))
        reached = max(reached, end)
        found.append((size[reached], size[following]) if following >= reached else None)
    return found, omits
