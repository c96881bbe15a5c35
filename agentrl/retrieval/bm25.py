"""BM25: an inverted index in memory, for corpora of up to some hundred thousand passages."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from agentrl.retrieval.passages import Passage

K1 = 0.9
B = 0.4
"""Saturation and length normalisation: the defaults of Anserini, which Search-R1's BM25 uses."""

_WORD = re.compile(r"\w+")


def words(text: str) -> list[str]:
    """The terms of a text: its words, lower case.

    >>> words("The river's mouth, 1843")
    ['the', 'river', 's', 'mouth', '1843']
    """
    return _WORD.findall(text.lower())


class BM25Index:
    """Ranks passages by BM25 over title and text (Robertson and Zaragoza, 2009, with Lucene's positive idf).

    Args:
        passages: The corpus, not empty.
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
        """The passages that hold a term, and what it adds to the score of each."""
        numbers = np.array([number for number, _ in rows], dtype=np.int32)
        frequencies = np.array([frequency for _, frequency in rows], dtype=np.float32)
        idf = math.log(1 + (len(self.passages) - len(rows) + 0.5) / (len(rows) + 0.5))
        weights = idf * frequencies * (K1 + 1) / (frequencies + self._penalty[numbers])
        return numbers, weights.astype(np.float32)

    def search(self, query: str, topk: int) -> tuple[Passage, ...]:
        """The best passages, best first; equal ones in the corpus's order; none that share no word with the query."""
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
