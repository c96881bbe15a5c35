"""Where two lists of tokens part, and how to say so."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.errors import LedgerError
from agentrl.render.encoding import TextEncoder
from agentrl.trajectory import Source, TokenSequence, first_difference

_NEIGHBOURS = 6


def common_prefix(first: Sequence[object], second: Sequence[object]) -> int:
    """Number of leading items (tokens, characters) that two sequences share."""
    differing = first_difference(first, second)
    return min(len(first), len(second)) if differing is None else differing


def require_prefix(sequence: TokenSequence, length: int, sent_ids: Sequence[int], encoder: TextEncoder) -> None:
    """Check that `sent_ids` are exactly the first `length` tokens of the ledger.

    Raises:
        LedgerError: They are not; shows the first differing token, its neighbours and the cause.
    """
    expected = sequence.ids_list()[:length]
    sent = list(sent_ids)
    if sent == expected:
        return
    at = common_prefix(expected, sent)
    raise LedgerError(
        f"the tokens sent to the engine are not the ledger's prefix: token {at} differs ({_place(sequence, at)})",
        got=f"{_neighbours(sent, at, encoder)} in {len(sent)} tokens",
        expected=f"{_neighbours(expected, at, encoder)} in {length} tokens",
        hint=f"cause: {_cause(expected, sent, encoder)}",
    )


def _place(sequence: TokenSequence, at: int) -> str:
    if at >= len(sequence):
        return "past the ledger's end"
    turn = next((t for t in reversed(sequence.turns) if t.start <= at), None)
    source = Source(int(sequence.sources[at])).name.lower()
    if turn is None:
        return f"{source}, before the first answer"
    return f"{source}, {'in' if at < turn.end else 'after'} turn {turn.index}"


def _neighbours(ids: Sequence[int], at: int, encoder: TextEncoder) -> str:
    if at >= len(ids):
        return f"{encoder.decode(ids[max(0, at - _NEIGHBOURS) : at])!r} and then nothing"
    before, after = encoder.decode(ids[max(0, at - _NEIGHBOURS) : at]), encoder.decode(ids[at + 1 : at + _NEIGHBOURS])
    return f"{before!r} → {ids[at]} {encoder.decode([ids[at]])!r} → {after!r}"


def _cause(expected: Sequence[int], sent: Sequence[int], encoder: TextEncoder) -> str:
    if sent[: len(expected)] == expected:
        return "tokens were sent that the ledger does not hold; they must be written to it first"
    if expected[: len(sent)] == sent:
        return "the end of the prompt was left out; was it cut to the engine's context?"
    if encoder.decode(sent) == encoder.decode(expected):
        return "the same text in other tokens: it was decoded and encoded again on the way"
    return "another text: the history was rewritten, or another sequence was sent; use fork for a rewritten history"
