"""Answers of a server whose first token has its own temperature: one request for that token, one for the rest.

Servers do not accept such settings, and vLLM accepts no temperature above 2. Therefore the first request asks for the
log-probabilities of the most probable tokens at temperature 1, and this module draws the token from them, so that its
distribution is known. Stop texts are found from the second token on.
"""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TypeAlias

from agentrl.engine import FirstToken, GenerateRequest, Generation, StopReason
from agentrl.errors import EngineError

Ask: TypeAlias = Callable[[GenerateRequest, dict[int, float] | None], Awaitable[Generation]]
"""Function that sends a request and, given a dict, fills it with the most probable first tokens: their ids and
log-probabilities at temperature 1."""


async def generate_with_first_token(request: GenerateRequest, ask: Ask, *, max_context: int) -> Generation:
    """Sample an answer to a request with `SamplingParams.first_token`.

    Args:
        request: Request with settings of the first token.
        ask: Sends a request, and reports the most probable tokens if it has settings of the first token.
        max_context: Maximum number of tokens of prompt and answer together.

    Raises:
        EngineError: the server reported other tokens than the most probable ones.
    """
    hot, params, tops = request.params.first_token, request.params, dict[int, float]()
    assert hot is not None
    settings = replace(
        params, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, max_tokens=1, stop=(), stop_token_ids=frozenset()
    )
    first = await ask(replace(request, params=settings, on_tokens=None), tops)
    if not first.token_ids:
        return first
    token, logprob = draw_first(tops, hot, random.Random(params.seed), greedy=first.token_ids[0])
    first = replace(first, token_ids=[token], logprobs=[logprob])
    if request.on_tokens is not None:
        request.on_tokens([token])
    if token in params.stop_token_ids:
        return replace(first, stop_reason=StopReason.STOP)
    left = min(params.max_tokens, max_context - len(request.prompt_ids)) - 1
    if first.stop_reason is StopReason.ABORT or left == 0:
        return first
    prompt, rest = [*request.prompt_ids, token], replace(params, first_token=None, max_tokens=left)
    second = await ask(replace(request, prompt_ids=prompt, params=rest), None)
    # The second answer also reports the routed experts of the prompt, from which the first token was drawn.
    return replace(first.followed_by(second), routed_experts=second.routed_experts)


def draw_first(
    tops: Mapping[int, float], hot: FirstToken, generator: random.Random, *, greedy: int
) -> tuple[int, float]:
    """Draw a token from the most probable ones; return it with its log-probability among them.

    Args:
        tops: Log-probabilities of tokens at temperature 1, the most probable ones among them.
        hot: Temperature, and number of tokens to draw from.
        generator: Random numbers.
        greedy: The most probable token.

    Raises:
        EngineError: `greedy` is not the most probable of `tops`.
    """
    best = sorted(tops, key=lambda token: -tops[token])[: hot.top_k]
    if not best or tops.get(greedy, -math.inf) < tops[best[0]] - 1e-3:
        raise EngineError(
            "the server did not report the most probable first tokens",
            got=f"{len(tops)} tokens, with {greedy} sampled at temperature 0",
            expected="the sampled token as the most probable one",
        )
    weights = [math.exp((tops[token] - tops[best[0]]) / hot.temperature) for token in best]
    (place,) = generator.choices(range(len(best)), weights)
    return best[place], math.log(weights[place] / math.fsum(weights))
