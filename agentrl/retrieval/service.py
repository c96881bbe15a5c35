r"""A retriever behind HTTP, as Search-R1's servers speak it.

The request is ``POST /retrieve`` with ``{"queries": [text], "topk": 3, "return_scores": true}``; the answer is
``{"result": [[{"document": {"id": "0", "contents": "Title\nText"}, "score": 12.3}]]}``, or documents without scores.
"""

from __future__ import annotations

from typing import Any

import aiohttp

from agentrl.errors import EnvironmentFailure
from agentrl.retrieval.passages import Passage, parse_passage

_PATH = "/retrieve"
_HINT = "the retriever must answer POST /retrieve {queries, topk, return_scores}"


class RetrievalService:
    """Asks one retriever.

    Args:
        url: Its address, with or without ``/retrieve``.
        topk: Passages per query.
        timeout_s: Seconds after which it counts as failed.
    """

    def __init__(self, url: str, *, topk: int, timeout_s: float) -> None:
        self.url = url.rstrip("/").removesuffix(_PATH) + _PATH
        self._topk = topk
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def search(self, query: str) -> tuple[Passage, ...]:
        """The passages that the retriever finds, best first.

        Raises:
            EnvironmentFailure: it cannot be reached, is too slow, or answers something else.
        """
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self._timeout_s))
        request = {"queries": [query], "topk": self._topk, "return_scores": True}
        try:
            async with self._session.post(self.url, json=request) as response:
                if response.status != 200:
                    raise self._failure(f"status {response.status}: {(await response.text())[:200]}")
                answer = await response.json(content_type=None)
        except TimeoutError as late:
            raise self._failure(f"no answer in {self._timeout_s:g} s") from late
        except (aiohttp.ClientError, ValueError) as error:
            raise self._failure(f"{type(error).__name__}: {error}") from error
        return self._read(answer)

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _read(self, answer: Any) -> tuple[Passage, ...]:
        """The passages of the only query: documents, or documents with scores."""
        try:
            (hits,) = answer["result"]
            documents = [hit.get("document", hit) for hit in hits]
            passages = [parse_passage(document) for document in documents]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self._failure(repr(answer)[:200]) from error
        if None in passages:
            raise self._failure(repr(answer)[:200])
        return tuple(passage for passage in passages if passage is not None)[: self._topk]

    def _failure(self, got: str) -> EnvironmentFailure:
        return EnvironmentFailure(f"the retriever at {self.url} failed", got=got, hint=_HINT)
