"""Check of an engine's answers, before any part of them is stored."""

from __future__ import annotations

import math
from dataclasses import replace

from agentrl.engine import Capabilities, GenerateRequest, Generation, StopReason
from agentrl.errors import EngineError

ROUNDING = 5e-6
"""Maximum rounding error above 0 of the log-probability of a certain token: float32 rounds the difference of two logits
of up to 64 by this much."""
MIN_LOGPROB = -3e38
"""Minimum log-probability: the ledger stores float32."""


class InvalidAnswer(EngineError):
    """An engine's answer that cannot be stored."""


def check_answer(
    answer: Generation, request: GenerateRequest, capabilities: Capabilities, *, version: int, engine: str
) -> Generation:
    """Check an answer before any part of it is used, and return it with log-probabilities of at most 0.

    Log-probabilities above 0 by a rounding error become 0; cached tokens are at most those of the prompt.

    `version` is the newest weight version that the engine can have; `engine` names it in messages.

    Raises:
        InvalidAnswer: a token lacks its log-probability or version; there are no tokens or too many; an id is outside
            the vocabulary; the stop reason or a version is unknown; a log-probability is not finite or above 0 by more
            than `ROUNDING`; or a duration is not finite.
    """

    def invalid(got: object, expected: str, hint: str | None = None) -> InvalidAnswer:
        what = f"{engine} gave an invalid answer to request {request.request_id}"
        return InvalidAnswer(what, got=got, expected=expected, hint=hint)

    ids, logprobs, versions = answer.token_ids, answer.logprobs, answer.versions
    size, most = capabilities.vocab_size, request.params.max_tokens
    if not len(ids) == len(logprobs) == len(versions):
        got = f"{len(ids)} tokens, {len(logprobs)} log-probabilities and {len(versions)} weight versions"
        raise invalid(got, "a log-probability and a version for each token")
    if len(ids) > most or (not ids and answer.stop_reason is not StopReason.ABORT):
        raise invalid(f"{len(ids)} tokens", f"1 to {most}")
    if not isinstance(answer.stop_reason, StopReason):
        raise invalid(f"stop reason {answer.stop_reason!r:.80}", " or ".join(StopReason))
    if not 0 <= answer.queue_s + answer.prefill_s + answer.decode_s < math.inf:
        raise invalid(f"{answer.queue_s}, {answer.prefill_s} and {answer.decode_s} seconds", "finite durations")
    if not ids:
        return answer
    if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= size:
        wrong = next(token for token in ids if type(token) is not int or not 0 <= token < size)
        raise invalid(f"token id {wrong!r:.80}", f"a whole number from 0 to {size - 1}")
    known = set(versions)
    if min(known) < 0 or max(known) > version:
        raise invalid(f"tokens of the weight versions {sorted(known)}", f"0 to {version}")
    highest = max(logprobs)
    if not (math.isfinite(sum(logprobs)) and min(logprobs) > MIN_LOGPROB and highest <= ROUNDING):
        token, value = next((t, v) for t, v in zip(ids, logprobs, strict=True) if not MIN_LOGPROB < v <= ROUNDING)
        hint = "it must return the natural logarithm of each sampled token's probability"
        raise invalid(f"log-probability {value} of token {token}", "a number of at most 0", hint)
    if highest > 0:
        answer = replace(answer, logprobs=[min(logprob, 0.0) for logprob in logprobs])
    if not 0 <= answer.cached_tokens <= len(request.prompt_ids):
        answer = replace(answer, cached_tokens=min(max(answer.cached_tokens, 0), len(request.prompt_ids)))
    return answer
