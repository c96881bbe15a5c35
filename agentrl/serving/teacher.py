"""Servers of a frozen model that say how probable they find given tokens."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from agentrl.config.guides import TeacherConfig
from agentrl.errors import EngineError, UsageError
from agentrl.server import ServerLost
from agentrl.serving.http import HttpSession, Refused

ATTEMPTS = 3
"""Of a sequence, each on the next server."""
BAD_REQUEST = 400
CONTEXT_RESERVE = 8
"""Tokens by which a server's context must be longer than what it is asked about: it samples one, and SGLang reserves a
few."""


class TeacherServers:
    """Asks servers in turn. Used from one event loop; opened by the first request.

    Args:
        settings: Addresses, kind, deadline; there are servers.
    """

    def __init__(self, settings: TeacherConfig) -> None:
        self._settings = settings
        self._servers = [HttpSession(url, api_key_variable=settings.api_key_variable) for url in settings.servers]
        self._turns = itertools.cycle(range(len(self._servers)))
        self._places = asyncio.Semaphore(settings.max_concurrent)
        self._names: dict[int, str] = {}

    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[npt.NDArray[np.float32]]:
        """Log p of each token after those before it, at temperature 1: float32 [T] each; NaN for the first.

        Args:
            sequences: Token ids, one or more each.

        Raises:
            UsageError: a key is missing or refused, or a server does not take a sequence.
            EngineError: all attempts of a sequence failed, or an answer is of no use.
        """
        asked = [asyncio.create_task(self._one(list(ids))) for ids in sequences]
        try:
            return await asyncio.gather(*asked)
        finally:
            for one in asked:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def _one(self, ids: list[int]) -> npt.NDArray[np.float32]:
        async with self._places:
            for attempt in range(ATTEMPTS):
                try:
                    return _checked(await self._ask(next(self._turns), ids), ids)
                except (ServerLost, Refused) as error:
                    if isinstance(error, Refused) and error.status == BAD_REQUEST:
                        raise _too_long(error, len(ids)) from error
                    if attempt == ATTEMPTS - 1 or (isinstance(error, Refused) and not error.is_of_a_start):
                        raise
        raise AssertionError("the last attempt returns or raises")

    async def _ask(self, number: int, ids: list[int]) -> list[Any]:
        server, deadline_s = self._servers[number], self._settings.timeout_s
        if self._settings.engine == "sglang":
            body: dict[str, Any] = {
                "input_ids": ids,
                "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
                "return_logprob": True,
                "logprob_start_len": 0,
            }
            return _of_sglang(await server.post("/generate", body, deadline_s=deadline_s))
        if number not in self._names:
            models = await server.get("/v1/models", deadline_s=deadline_s)
            self._names[number] = str(models["data"][0]["id"])
        body = {"model": self._names[number], "prompt": ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        return _of_vllm(await server.post("/v1/completions", body, deadline_s=deadline_s), ids)

    async def close(self) -> None:
        """Close the connections."""
        await asyncio.gather(*(server.close() for server in self._servers))


def _of_vllm(answer: Any, ids: Sequence[int]) -> list[Any]:
    """``prompt_logprobs``: for each token what is known by id, the token itself among it; nothing for the first."""
    try:
        rows = answer["choices"][0]["prompt_logprobs"]
        return [row and row[str(token)]["logprob"] for row, token in zip(rows, ids, strict=True)]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise _unusable(answer, "choices[0].prompt_logprobs") from error


def _of_sglang(answer: Any) -> list[Any]:
    """``input_token_logprobs``: log-probability, id and text of each token."""
    try:
        return [row[0] for row in answer["meta_info"]["input_token_logprobs"]]
    except (KeyError, IndexError, TypeError) as error:
        raise _unusable(answer, "meta_info.input_token_logprobs") from error


def _checked(values: Sequence[Any], ids: Sequence[int]) -> npt.NDArray[np.float32]:
    known = values[1:]
    if len(values) != len(ids) or not all(isinstance(v, int | float) and math.isfinite(v) for v in known):
        raise EngineError(
            "the teacher's log-probabilities are of no use",
            got=f"{len(values)} for {len(ids)} tokens, {sum(v is None for v in known)} missing",
            expected="a finite number for each token after the first",
        )
    return np.array([math.nan, *known], dtype=np.float32)


def _too_long(refused: Refused, length: int) -> UsageError:
    return UsageError(
        f"{refused.url} does not take a sequence of {length} tokens",
        got=f"{refused.status}, {refused.said!r}",
        expected=f"a teacher with a context of {length + CONTEXT_RESERVE} tokens or more, and the policy's tokens",
        hint=f"serve it with a context that is {CONTEXT_RESERVE} tokens longer than agent.max_tokens",
    )


def _unusable(answer: Any, where: str) -> EngineError:
    return EngineError("a teacher's server does not tell log-probabilities", got=repr(answer)[:200], expected=where)
