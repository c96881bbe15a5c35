"""Answers of a server whose first token has its own temperature: one request for that token, one for the rest.

The log-probability of the first token is that of the distribution it was drawn from, over the `top_k` most probable
tokens. Servers report log-probabilities before this cut, so those of all `top_k` tokens are requested, which add up to
the probability that the cut keeps.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from agentrl.engine import GenerateRequest, Generation, StopReason
from agentrl.errors import EngineError


async def generate_with_first_token(
    request: GenerateRequest, ask: Callable[[GenerateRequest], Awaitable[Generation]], *, max_context: int
) -> Generation:
    """Sample an answer whose first token has its own temperature.

    Args:
        request: Request with `SamplingParams.first_token`.
        ask: Sends a request. For a request with `first_token`, it samples one token with the plain settings, and
            returns the log-probability that `after_cut` computes.
        max_context: Maximum number of tokens of prompt and answer together.
    """
    hot, params = request.params.first_token, request.params
    assert hot is not None
    settings = replace(params, temperature=hot.temperature, top_k=hot.top_k, top_p=1.0, min_p=0.0, max_tokens=1)
    first = await ask(replace(request, params=settings))
    left = min(params.max_tokens, max_context - len(request.prompt_ids)) - 1
    if first.stop_reason is not StopReason.LENGTH or left == 0:
        return first
    prompt = [*request.prompt_ids, *first.token_ids]
    rest = await ask(replace(request, prompt_ids=prompt, params=replace(params, first_token=None, max_tokens=left)))
    # The second request reports the routed experts of the prompt and the first token, too.
    return replace(first.followed_by(rest), routed_experts=rest.routed_experts)


def after_cut(answer: Generation, top_logprobs: Sequence[float]) -> Generation:
    """Return a one-token answer with the log-probability after the cut to the tokens with `top_logprobs`.

    Raises:
        EngineError: the sampled token is more probable than all of them together.
    """
    if not answer.token_ids:
        return answer
    (logprob,) = answer.logprobs
    kept = math.log(math.fsum(map(math.exp, top_logprobs))) if top_logprobs else -math.inf
    if logprob > kept + 1e-3:
        raise EngineError(
            "the server did not report the most probable first tokens",
            got=f"{len(top_logprobs)} log-probabilities, which do not contain that of the sampled token",
            expected="those of all tokens that it sampled from",
        )
    return replace(answer, logprobs=[min(logprob - kept, 0.0)])
