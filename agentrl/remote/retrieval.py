"""Passage retrieval: BM25 in memory, and a client of HTTP retrievers with the API of Search-R1.

BM25 uses an inverted index, for corpora of up to some hundred thousand passages.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import numpy.typing as npt

from agentrl.errors import EnvironmentFailure, UsageError
from agentrl.message.data_file import read_rows

_PATH = "/retrieve"
_HINT = "the retriever must answer POST /retrieve {queries, topk, return_scores}"
K1 = 0.9
B = 0.4
"""Saturation (`K1`) and length normalization (`B`): Anserini's defaults, which Search-R1 uses."""
_WORD = re.compile(r"\w+")


class Passage(NamedTuple):
    """One document of a corpus."""

    title: str
    text: str


def parse_passage(document: Mapping[str, Any]) -> Passage | None:
    r"""Read a passage from ``contents`` (title, line break, text) or from ``title`` and ``text``; ``None`` if invalid.

    >>> parse_passage({"id": "7", "contents": '"Fern"\nA plant.'})
    Passage(title='Fern', text='A plant.')
    >>> parse_passage({"id": "7"}) is None
    True
    """
    contents, title, text = document.get("contents"), document.get("title", ""), document.get("text")
    if isinstance(contents, str):
        title, _, text = contents.partition("\n")
    if not isinstance(title, str) or not isinstance(text, str):
        return None
    return Passage(title.strip().strip('"'), text.strip())


def load_corpus(path: str) -> tuple[Passage, ...]:
    """Load the passages of a JSONL file, one document per line.

    Raises:
        UsageError: the file cannot be read, is empty, or a line is not a document.
    """
    passages = []
    for row in read_rows(path, "corpus"):
        passage = parse_passage(row.values)
        if passage is None:
            raise UsageError(
                f"{row.location} of the corpus is not a passage",
                got=f"keys {', '.join(row.values)}",
                expected='"contents", or "title" and "text"',
            )
        passages.append(passage)
    if not passages:
        raise UsageError(f"the corpus {path} is empty", expected="one JSON object per line")
    return tuple(passages)


def list_passages(passages: Sequence[Passage]) -> str:
    """Return the passages of a search as text, numbered, one per line."""
    lines = [f'Doc {number}(Title: "{title}") {text}' for number, (title, text) in enumerate(passages, start=1)]
    return "\n".join(lines) or "Nothing was found."


class RetrievalService:
    """Client of one HTTP retriever.

    Args:
        url: URL of the retriever, with or without ``/retrieve``.
        topk: Number of passages per query.
        timeout_s: Timeout of a request in seconds.
    """

    def __init__(self, url: str, *, topk: int, timeout_s: float) -> None:
        self.url = url.rstrip("/").removesuffix(_PATH) + _PATH
        self._topk = topk
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def search(self, query: str) -> tuple[Passage, ...]:
        """Return the passages that the retriever finds, best first.

        Raises:
            EnvironmentFailure: the retriever is unreachable, too slow, or returns an invalid answer.
        """
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self._timeout_s))
        request = {"queries": [query], "topk": self._topk, "return_scores": True}
        try:
            try:
                answer = await self._post(self._session, request)
            except aiohttp.ServerDisconnectedError:  # it has closed an idle connection, as uvicorn does after 5 s
                answer = await self._post(self._session, request)
        except TimeoutError as late:
            raise self._failure(f"no answer in {self._timeout_s:g} s") from late
        except (aiohttp.ClientError, ValueError) as error:
            raise self._failure(f"{type(error).__name__}: {error}") from error
        return self._read(answer)

    async def _post(self, session: aiohttp.ClientSession, request: Mapping[str, Any]) -> Any:
        async with session.post(self.url, json=request) as response:
            if response.status != 200:
                raise self._failure(f"status {response.status}: {(await response.text())[:200]}")
            return await response.json(content_type=None)

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _read(self, answer: Any) -> tuple[Passage, ...]:
        """Read the passages of the only query from documents with or without scores."""
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


def words(text: str) -> list[str]:
    """Return the terms of a text: its words in lower case.

    >>> words("The river's mouth, 1843")
    ['the', 'river', 's', 'mouth', '1843']
    """
    return _WORD.findall(text.lower())


class BM25Index:
    """Index that ranks passages by BM25 over title and text (Robertson and Zaragoza, 2009, with Lucene's positive idf).

    The corpus has at least one passage.
    """

    def __init__(self, passages: Sequence[Passage]) -> None:
        self.passages = tuple(passages)
        counts = [Counter(words(f"{passage.title} {passage.text}")) for passage in self.passages]
        lengths = np.array([count.total() for count in counts], dtype=np.float32)
        self._penalty = K1 * (1 - B + B * lengths / max(float(lengths.mean()), 1.0))
        postings: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        for number, count in enumerate(counts):
            for term, frequency in count.items():
                postings[term].append((number, frequency))
        self._postings = {term: self._weigh(rows) for term, rows in postings.items()}

    def _weigh(self, rows: list[tuple[int, int]]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Return the indices of the passages that contain a term, and the term's weight in each passage's score."""
        numbers = np.array([number for number, _ in rows], dtype=np.int32)
        frequencies = np.array([frequency for _, frequency in rows], dtype=np.float32)
        idf = math.log(1 + (len(self.passages) - len(rows) + 0.5) / (len(rows) + 0.5))
        weights = idf * frequencies * (K1 + 1) / (frequencies + self._penalty[numbers])
        return numbers, weights.astype(np.float32)

    def search(self, query: str, topk: int) -> tuple[Passage, ...]:
        """Return the best passages that share a term with the query, best first; ties keep the order of the corpus."""
        scores = np.zeros(len(self.passages), dtype=np.float32)
        for term in words(query):
            if (posting := self._postings.get(term)) is not None:
                numbers, weights = posting
                scores[numbers] += weights
        kept = min(topk, int(np.count_nonzero(scores)))
        if not kept:
            return ()
        least = np.partition(scores, -kept)[-kept]
        candidates = np.flatnonzero(scores >= least)
        order = candidates[np.argsort(-scores[candidates], kind="stable")]
        return tuple(self.passages[number] for number in order[:kept])
