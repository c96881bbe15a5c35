"""Search for passages, with BM25 over a JSONL file or with an HTTP retriever."""

from __future__ import annotations

import functools
from types import TracebackType

from agentrl import ToolError, tool
from agentrl.errors import UsageError
from agentrl.errors.foreign import run_in_own_thread
from agentrl.remote.retrieval import BM25Index, RetrievalService, list_passages, load_corpus


@functools.lru_cache(maxsize=4)
def index_of(corpus: str) -> BM25Index:
    """Return the index of a file; it is built once per process.

    Raises:
        UsageError: the file cannot be read.
    """
    return BM25Index(load_corpus(corpus))


class Search:
    """Search tool of one episode.

    Args:
        corpus: A JSONL file with passages: ``contents``, or ``title`` and ``text``.
        url: Address of a retriever that answers ``POST /retrieve``, instead of a file.
        topk: Number of passages that a search shows.
        patience_s: Seconds after which the retriever at `url` counts as failed: an environment failure, not an error
            of the policy.
    """

    def __init__(
        self, *, corpus: str | None = None, url: str | None = None, topk: int = 3, patience_s: float = 20.0
    ) -> None:
        if (corpus is None) == (url is None):
            raise UsageError("tool search needs one source of passages", expected="either corpus or url")
        if topk < 1 or patience_s <= 0:
            raise UsageError("an option of tool search is too small", got=f"topk {topk}, patience_s {patience_s:g}")
        self._index = None if corpus is None else index_of(corpus)
        self._service = None if url is None else RetrievalService(url, topk=topk, timeout_s=patience_s)
        self._topk = topk

    async def __aenter__(self) -> Search:
        """Return the tool; connections open with the first search."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connections."""
        if self._service is not None:
            await self._service.close()

    async def __call__(self, query: str) -> str:
        """Searches a collection of passages and shows the best matches.

        Args:
            query: What to look for: names and a few words.
        """
        if not query.strip():
            raise ToolError("the query is empty", expected="some words")
        if self._service is not None:
            return list_passages(await self._service.search(query))
        assert self._index is not None
        return list_passages(await run_in_own_thread(self._index.search, query, self._topk))


search = tool(name="search", parallel=True)(Search)
