"""Full-text search: BM25 over terms, with the same scores as Lucene.

Robertson and Zaragoza, The probabilistic relevance framework, 2009. As in Lucene 8 and later, the factor k1 + 1 is left
out, document lengths are rounded to four significant bits, and weights are 32-bit floats. Each term's weights are
computed when the index is built, so a search only adds them up.
"""

from __future__ import annotations

import functools
from array import array
from collections import Counter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .analysis import term_of, words_of
from .tables import Groups, Rows, Span, map_array, save_array

K1 = 0.9
B = 0.4
HITS = 50
"""Maximum number of products that a search finds."""
_STOP = -1
_TOKENS_PER_BLOCK = 4_000_000


class SearchIndex:
    """A search index on disk.

    Args:
        folder: Folder that `IndexBuilder.save` wrote.
    """

    def __init__(self, folder: Path) -> None:
        self._terms = Groups(folder, "terms")
        self._weights: NDArray[np.float32] = map_array(folder, "weights")
        self._documents = int(map_array(folder, "lengths").shape[0])
        self._span = functools.lru_cache(maxsize=8192)(self._find)

    def search(self, text: str) -> Rows:
        """Return the best `HITS` documents, best first; ties keep their order. A repeated word counts twice."""
        scores = np.zeros(self._documents)
        for span, count in Counter(map(self._span, words_of(text))).items():
            stretch = slice(*span)
            scores[self._terms.rows[stretch]] += self._weights[stretch] * np.float32(count)
        return _best(scores.astype(np.float32))

    def _find(self, word: str) -> Span:
        term = term_of(word)
        return Span(0, 0) if term is None else self._terms.span(term)


def _best(scores: NDArray[np.float32]) -> Rows:
    found = np.flatnonzero(scores)
    if len(found) > HITS:
        least = np.partition(scores[found], -HITS)[-HITS]
        found = found[scores[found] >= least]
    order = np.argsort(-scores[found], kind="stable")[:HITS]
    return found[order].astype(np.int32)


class _TermNumbers(dict[str, int]):
    """Numbers of terms by word; a new word gets its term's number on first use."""

    def __init__(self) -> None:
        super().__init__()
        self.terms: dict[str, int] = {}

    def __missing__(self, word: str) -> int:
        term = term_of(word)
        number = _STOP if term is None else self.terms.setdefault(term, len(self.terms))
        self[word] = number
        return number


class IndexBuilder:
    """Collector of documents that writes their index."""

    def __init__(self) -> None:
        self._numbers = _TermNumbers()
        self._tokens = array("i")
        self._ends = array("q", [0])
        self._lengths = array("i")
        self._blocks: list[tuple[NDArray[np.int32], Rows, NDArray[np.int32]]] = []

    def add(self, text: str) -> None:
        """Add the next document."""
        self._tokens.extend(map(self._numbers.__getitem__, words_of(text)))
        self._ends.append(len(self._tokens))
        if len(self._tokens) >= _TOKENS_PER_BLOCK:
            self._close_block()

    def _close_block(self) -> None:
        """Convert tokens to (term, document, count), so that at most one block of tokens is kept."""
        tokens, ends = np.array(self._tokens, np.int64), np.array(self._ends)
        documents = np.repeat(np.arange(len(ends) - 1), np.diff(ends))
        documents, tokens = documents[tokens != _STOP], tokens[tokens != _STOP]
        keys, counts = np.unique(tokens * len(ends) + documents, return_counts=True)
        first = len(self._lengths)
        self._lengths.extend(np.bincount(documents, minlength=len(ends) - 1).tolist())
        terms, rows = np.divmod(keys, len(ends))
        self._blocks.append((terms.astype(np.int32), (rows + first).astype(np.int32), counts.astype(np.int32)))
        self._tokens, self._ends = array("i"), array("q", [0])

    def save(self, folder: Path) -> None:
        """Write the index; `SearchIndex` reads it."""
        self._close_block()
        names = sorted(self._numbers.terms, key=str.encode)
        place = np.empty(len(names), np.int32)
        place[[self._numbers.terms[name] for name in names]] = np.arange(len(names), dtype=np.int32)
        terms, rows, counts = (np.concatenate(parts) for parts in zip(*self._blocks, strict=True))
        terms = place[terms]
        order = np.argsort(terms, kind="stable")
        terms, rows, counts = terms[order], rows[order], counts[order]
        sizes = np.bincount(terms, minlength=len(names))
        Groups.save_arrays(folder, "terms", names, rows, sizes.tolist())
        lengths = np.array(self._lengths, np.int32)
        save_array(folder, "lengths", lengths)
        save_array(folder, "weights", bm25_weights(counts, lengths, rows, np.repeat(sizes, sizes)))


def bm25_weights(
    counts: NDArray[np.int32], lengths: NDArray[np.int32], rows: Rows, frequencies: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Return the weight of each (term, document) in the document's score.

    Args:
        counts: Occurrences of the term in the document.
        lengths: Number of terms of every document.
        rows: Index of the document.
        frequencies: Number of documents with the term.
    """
    documents = int(np.count_nonzero(lengths))
    rarity = np.log(1 + (documents - frequencies + 0.5) / (frequencies + 0.5)).astype(np.float32)
    mean = np.float32(lengths.sum() / max(documents, 1))
    k1, b = np.float32(K1), np.float32(B)
    inverse = np.float32(1) / (k1 * ((np.float32(1) - b) + b * rounded_lengths(lengths).astype(np.float32) / mean))
    weights: NDArray[np.float32] = rarity - rarity / (np.float32(1) + counts.astype(np.float32) * inverse[rows])
    return weights


def rounded_lengths(lengths: NDArray[np.int32]) -> NDArray[np.int32]:
    """Round lengths as Lucene does to fit a byte: exact up to 40, then the four highest bits of the part above 24.

    >>> rounded_lengths(np.array([3, 39, 40, 41, 42, 100, 1000])).tolist()
    [3, 39, 40, 40, 42, 96, 984]
    """
    above = np.maximum(lengths - 24, 1)
    shift = np.maximum(np.floor(np.log2(above)).astype(np.int32) - 3, 0)
    rounded: NDArray[np.int32] = np.where(lengths < 24, lengths, 24 + ((lengths - 24) >> shift << shift)).astype(
        np.int32
    )
    return rounded
