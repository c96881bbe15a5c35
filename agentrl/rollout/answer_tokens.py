"""What the sampled tokens of an answer say: where a stop text ends it, and the text and log-probability of each."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from agentrl.agent_loop import TokenLogprob
from agentrl.engine import Generation
from agentrl.errors import EngineError
from agentrl.render.progress import REPLACEMENT


def ended_at(ids: Sequence[int], stop: Sequence[str], decode: Callable[[Sequence[int]], str]) -> int | None:
    """Return how many of the tokens it takes to complete one of the stop texts; ``None`` if none is among them."""

    def is_complete(tokens: int) -> bool:
        text = decode(ids[:tokens])
        return any(end in text for end in stop)

    if not is_complete(len(ids)):
        return None
    return bisect.bisect_left(range(len(ids)), True, key=is_complete)


ROUNDING = 5e-6
"""Log-probabilities above 0 by at most this are those of certain tokens: float32 rounds the difference of two logits of
up to 64 by this much."""


def checked_logprobs(generation: Generation, request_id: str) -> Generation:
    """Return an answer whose log-probabilities are 0 at most; rounding above 0 becomes 0.

    Raises:
        EngineError: one is not a number, infinite, or above 0 by more than rounding.
    """
    for token, logprob in zip(generation.token_ids, generation.logprobs, strict=False):
        if not -math.inf < logprob <= ROUNDING:
            raise EngineError(
                f"the engine's answer to request {request_id} cannot be trained on",
                got=f"log-probability {logprob} of token {token}",
                expected="a number of 0 at most",
                hint="the engine must return the natural logarithm of each sampled token's probability"
                if logprob > 0
                else None,
            )
    if max(generation.logprobs, default=0.0) <= 0:
        return generation
    return replace(generation, logprobs=[min(logprob, 0.0) for logprob in generation.logprobs])


RECENT = 8
"""Tokens that are decoded with a token to find its own text: some tokenizers begin a text in another way."""


def content_logprobs(
    ids: Sequence[int], logprobs: Sequence[float], content: str, decode: Callable[[Sequence[int]], str]
) -> tuple[TokenLogprob, ...]:
    """Return the sampled tokens that an answer's content consists of, without thinking, calls and stop tokens.

    Args:
        ids: The whole answer.
        logprobs: Of its tokens.
        content: A piece of its text; the last one counts, if there are several.
        decode: Gives the text of tokens.
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
