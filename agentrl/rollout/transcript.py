"""An episode as text that somebody else can read, from its ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from agentrl.trajectory import Source, TokenSequence, Trajectory

Decode = Callable[[Sequence[int]], str]
WRITTEN = frozenset({Source.SAMPLED, Source.FORCED, Source.MISTAKE})
AGENT, WORLD = "[agent]", "[world]"


def transcript(trajectory: Trajectory, decode: Decode) -> str:
    """What was said to the agent, and what it answered, under a mark each; branches follow one another.

    Args:
        trajectory: An episode that has tokens.
        decode: Text of token ids, without special tokens.
    """
    return "\n\n".join(piece for sequence in trajectory.sequences for piece in _pieces(sequence, decode))


def _pieces(sequence: TokenSequence, decode: Decode) -> Iterator[str]:
    ids, sources = sequence.token_ids.tolist(), sequence.sources.tolist()
    own = range(sequence.shared, len(ids))
    for by_agent, places in groupby(own, key=lambda i: sources[i] in WRITTEN):
        if text := decode([ids[i] for i in places]).strip():
            yield f"{AGENT if by_agent else WORLD}\n{text}"
