"""Sampled tokens of an answer: the position of a stop text, and the text of each token."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence

from agentrl.agent_loop import TokenLogprob
from agentrl.render.progress import REPLACEMENT


def find_stop(ids: Sequence[int], stop: Sequence[str], decode: Callable[[Sequence[int]], str]) -> int | None:
    """Return the number of tokens up to the end of the first stop text; ``None`` if the answer contains none."""

    def is_complete(tokens: int) -> bool:
        text = decode(ids[:tokens])
        return any(end in text for end in stop)

    if not is_complete(len(ids)):
        return None
    return bisect.bisect_left(range(len(ids)), True, key=is_complete)


RECENT = 8
"""Number of tokens that are decoded together to find the text of the last one, because some tokenizers decode the first
token of a text differently."""


def content_logprobs(
    ids: Sequence[int], logprobs: Sequence[float], content: str, decode: Callable[[Sequence[int]], str]
) -> tuple[TokenLogprob, ...]:
    """Return the sampled tokens of an answer's content, without thinking, calls and stop tokens.

    Args:
        ids: Token ids of the whole answer, ``[num_tokens]``.
        logprobs: Log-probabilities of these tokens, ``[num_tokens]``.
        content: Text of the content; its last occurrence in the answer counts.
        decode: Decodes token ids to text.
    """
    pieces = []
    for end in range(1, len(ids) + 1):
        recent = ids[max(0, end - RECENT) : end]
        before, after = (decode(part).rstrip(REPLACEMENT) for part in (recent[:-1], recent))
        pieces.append(after[len(before) :])
    start = "".join(pieces).rfind(content) if content else -1
    if start < 0:
        return ()
    ends = list(itertools.accumulate(map(len, pieces)))
    last = bisect.bisect_left(ends, start + len(content))
    rows = zip(ends[: last + 1], pieces, logprobs, strict=False)
    return tuple(TokenLogprob(text=piece, logprob=logprob) for end, piece, logprob in rows if end + (not piece) > start)
