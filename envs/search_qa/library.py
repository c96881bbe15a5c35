"""The built-in retrievers: one per fact world or corpus file, created once per process."""

from __future__ import annotations

import functools

from agentrl.remote.retrieval import BM25Index, load_corpus

from .options import SearchOptions
from .world import world_of


def index_of(split: str, options: SearchOptions) -> BM25Index:
    """Return the index for the questions of a split.

    Raises:
        UsageError: the corpus file cannot be read.
    """
    return _index_of_world(split) if options.corpus is None else _index_of_file(options.corpus)


@functools.cache
def _index_of_world(split: str) -> BM25Index:
    return BM25Index(world_of(split).passages)


@functools.lru_cache(maxsize=2)
def _index_of_file(path: str) -> BM25Index:
    return BM25Index(load_corpus(path))
