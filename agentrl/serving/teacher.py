"""Servers of a frozen teacher model that return log-probabilities of given tokens."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from agentrl.config.algorithm import TeacherConfig
from agentrl.engine import ServerLost, TopTokens
from agentrl.engine.answer_check import MIN_LOGPROB, ROUNDING
from agentrl.errors import EngineError, UsageError
from agentrl.serving.http import HttpSession, ServerStatusError, decoding

ATTEMPTS = 3
"""Attempts per sequence, each on the next server."""
BAD_REQUEST = 400
NO_LOGPROBS = "a teacher's server does not report log-probabilities"
CONTEXT_RESERVE = 8
"""Tokens by which a server's context must exceed the scored sequence: the server samples one token, and SGLang reserves
a few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherScore:
    """Teacher's log-probabilities of a sequence, at temperature 1."""

    logp: npt.NDArray[np.float32]
    """Log-probability of each token given the tokens before it: [T]; NaN for the first."""
    top: TopTokens | None = None
    """Most probable tokens, if ``algorithm.teacher.top_k`` is set."""


class TeacherServers:
    """Teacher's servers, used in turn. Use from one event loop."""

    def __init__(self, settings: TeacherConfig) -> None:
        self._settings = settings
        variable, section = settings.api_key_variable, "algorithm.teacher"
        self._servers = [HttpSession(url, api_key_variable=variable, section=section) for url in settings.servers]
        self._turns = itertools.cycle(range(len(self._servers)))
        self._slots = asyncio.Semaphore(settings.max_concurrent)
        self._names: dict[int, str] = {}

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[TeacherScore]:
        """Request the teacher's log-probabilities of each sequence of token ids.

        Raises:
            UsageError: a key is missing or refused, or a server rejects a sequence.
            EngineError: all attempts of a sequence failed, or an answer is invalid.
        """
        tasks = [asyncio.create_task(self._score_one(list(ids))) for ids in sequences]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _score_one(self, ids: list[int]) -> TeacherScore:
        async with self._slots:
            for attempt in range(ATTEMPTS):
                try:
                    return await self._ask(next(self._turns), ids)
                except (ServerLost, ServerStatusError) as error:
                    if isinstance(error, ServerStatusError) and error.status == BAD_REQUEST:
                        raise _context_error(error, len(ids)) from error
                    if attempt == ATTEMPTS - 1 or (isinstance(error, ServerStatusError) and not error.is_transient):
                        raise
        raise AssertionError("the last attempt returns or raises")

    async def _ask(self, number: int, ids: list[int]) -> TeacherScore:
        server, deadline_s, top_k = self._servers[number], self._settings.timeout_s, self._settings.top_k or 0
        if self._settings.engine == "sglang":
            body: dict[str, Any] = {
                "input_ids": ids,
                "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
                "return_logprob": True,
                "logprob_start_len": 0,
                **({"top_logprobs_num": top_k} if top_k else {}),
            }
            return _decode_sglang(await server.post("/generate", body, deadline_s=deadline_s), ids, top_k)
        if number not in self._names:
            models = await server.get("/v1/models", deadline_s=deadline_s)
            self._names[number] = str(models["data"][0]["id"])
        body = {
            "model": self._names[number],
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": top_k,
        }
        return _decode_vllm(await server.post("/v1/completions", body, deadline_s=deadline_s), ids, top_k)

    async def close(self) -> None:
        """Close the connections."""
        await asyncio.gather(*(server.close() for server in self._servers))


def _decode_vllm(answer: Any, ids: Sequence[int], top_k: int) -> TeacherScore:
    """Decode ``prompt_logprobs``: for each token but the first, log-probabilities by id, including its own."""
    with decoding(NO_LOGPROBS, answer, expected="choices[0].prompt_logprobs"):
        rows = answer["choices"][0]["prompt_logprobs"]
        values = [row and row[str(token)]["logprob"] for row, token in zip(rows, ids, strict=True)]
        known = [{int(token): one["logprob"] for token, one in (row or {}).items()} for row in rows]
    return TeacherScore(logp=_check_values(values, ids), top=_best(known, top_k))


def _decode_sglang(answer: Any, ids: Sequence[int], top_k: int) -> TeacherScore:
    """Decode ``input_token_logprobs`` (log-probability, id and text per token) and ``input_top_logprobs``."""
    expected = "meta_info.input_token_logprobs" + (" and input_top_logprobs" if top_k else "")
    with decoding(NO_LOGPROBS, answer, expected=expected):
        meta = answer["meta_info"]
        values = [row[0] for row in meta["input_token_logprobs"]]
        rows = meta["input_top_logprobs"] if top_k else []
        known = [{int(one[1]): one[0] for one in row or ()} for row in rows]
    return TeacherScore(logp=_check_values(values, ids), top=_best(known, top_k))


def _best(rows: Sequence[Mapping[int, Any]], top_k: int) -> TopTokens | None:
    """Return the k most probable tokens of each row except the first."""
    if not top_k:
        return None
    ids, logp = np.zeros((len(rows), top_k), np.int64), np.full((len(rows), top_k), math.nan, np.float32)
    for position, row in enumerate(rows[1:], start=1):
        if wrong := [value for value in row.values() if not _is_logprob(value)]:
            raise EngineError(
                "the teacher's log-probabilities are invalid",
                got=f"{wrong[0]!r:.40} at position {position}",
                expected=f"{_EXPECTED} for each of the most probable tokens",
            )
        best = sorted(row.items(), key=lambda one: -one[1])[:top_k]
        if len(best) < top_k:
            raise EngineError(
                "the teacher reported too few tokens",
                got=f"{len(best)} at position {position}",
                expected=f"algorithm.teacher.top_k {top_k}",
                hint="vLLM returns at most its --max-logprobs, which is 20 by default",
            )
        ids[position], logp[position] = [token for token, _ in best], [min(value, 0.0) for _, value in best]
    return TopTokens(ids=ids, logp=logp)


def _check_values(values: Sequence[Any], ids: Sequence[int]) -> npt.NDArray[np.float32]:
    known = values[1:]
    if len(values) != len(ids) or not all(map(_is_logprob, known)):
        missing, wrong = sum(v is None for v in known), [v for v in known if v is not None and not _is_logprob(v)]
        raise EngineError(
            "the teacher's log-probabilities are invalid",
            got=f"{len(values)} for {len(ids)} tokens, {missing} missing" + "".join(f", {v!r:.40}" for v in wrong[:1]),
            expected=f"{_EXPECTED} for each token after the first",
        )
    return np.array([math.nan, *(min(value, 0.0) for value in known)], dtype=np.float32)


_EXPECTED = "a finite number of at most 0"


def _is_logprob(value: Any) -> bool:
    """Return True for a number that may be a log-probability, up to the rounding error of a certain token's."""
    return isinstance(value, int | float) and MIN_LOGPROB < value <= ROUNDING


def _context_error(failure: ServerStatusError, length: int) -> UsageError:
    return UsageError(
        f"{failure.url} rejects a sequence of {length} tokens",
        got=f"{failure.status}, {failure.message!r}",
        expected=f"a teacher with the policy's tokenizer and a context of at least {length + CONTEXT_RESERVE} tokens",
        hint=f"serve it with a context that is {CONTEXT_RESERVE} tokens longer than agent.max_tokens",
    )
