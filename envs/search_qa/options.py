"""Options of the search environment and of its tasks."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from agentrl.errors import UsageError

from ..option_types import typed_options
from ..split_files import files_by_split
from ..task_ids import SPLITS

ENVIRONMENT = "search_qa"
HOPS = (1, 2, 3)
MAX_STEPS = 8
TOPK = 3
SEARCH_TIMEOUT_S = 20.0


class RewardKind(enum.StrEnum):
    """Reward of an answer."""

    EXACT_MATCH = "exact_match"
    F1 = "f1"
    RANK = "rank"
    """Reward of a query: 1 / rank of the first passage that contains an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """Checked options of the environment and its task source."""

    hops: tuple[int, ...]
    questions: Mapping[str, str] | None
    """Hashable mapping from split to file."""
    corpus: str | None
    url: str | None
    topk: int
    timeout_s: float
    reward: RewardKind
    max_steps: int
    remind: bool | None


@typed_options("search_qa")
def parse_options(
    *,
    hops: Iterable[int] = HOPS,
    questions: str | Mapping[str, str] | None = None,
    corpus: str | None = None,
    url: str | None = None,
    topk: int = TOPK,
    timeout_s: float | None = None,
    reward: str = RewardKind.EXACT_MATCH,
    max_steps: int = MAX_STEPS,
    remind: bool | None = None,
) -> SearchOptions:
    """Check the options of a config.

    Args:
        hops: Numbers of hops of the generated questions.
        questions: JSONL files with ``question`` and ``golden_answers``: one name with ``{split}`` in it, or a file for
            each split.
        corpus: A JSONL file with passages, for the built-in retriever.
        url: Address of a retriever that answers ``POST /retrieve``.
        topk: Number of passages that a search returns.
        timeout_s: Seconds after which the retriever at `url` counts as failed; 20 by default.
        reward: ``exact_match`` or ``f1`` of the answer; or ``rank``: the first query ends the episode with 1 / rank of
            the first of the `topk` passages that contains a golden answer, or 0.
        max_steps: Number of searches and answers after which an episode is truncated.
        remind: End each observation with a line that names the two moves, for small models that play in text; true by
            default in search_react.

    Raises:
        UsageError: a value is not allowed, or two contradict each other.
    """
    chosen = tuple(sorted(set(hops)))
    if not chosen or not set(chosen) <= set(HOPS):
        raise UsageError("unknown hops of search_qa", got=repr(hops), expected="a list of the numbers 1, 2 or 3")
    if reward not in list(RewardKind):
        raise UsageError("unknown reward of search_qa", got=repr(reward), expected=" or ".join(RewardKind))
    for name, value in (("topk", topk), ("max_steps", max_steps)):
        if value < 1:
            raise UsageError(f"the option {name} of search_qa is too small", got=value, expected="at least 1")
    if timeout_s is not None and url is None:
        raise UsageError(
            "the option timeout_s of search_qa is ignored without url", got=timeout_s, hint="leave timeout_s out"
        )
    if timeout_s is not None and timeout_s <= 0:
        raise UsageError(
            "the option timeout_s of search_qa is too small", got=timeout_s, expected="more than 0 seconds"
        )
    _check_sources(questions is not None, corpus, url, chosen)
    return SearchOptions(
        hops=chosen,
        questions=None if questions is None else files_by_split(questions, SPLITS, "questions of search_qa"),
        corpus=corpus,
        url=url,
        topk=topk,
        timeout_s=SEARCH_TIMEOUT_S if timeout_s is None else timeout_s,
        reward=RewardKind(reward),
        max_steps=max_steps,
        remind=remind,
    )


def _check_sources(has_questions: bool, corpus: str | None, url: str | None, hops: tuple[int, ...]) -> None:
    if corpus is not None and url is not None:
        raise UsageError("search_qa has two retrievers", got="corpus and url", expected="one of them")
    if has_questions and corpus is None and url is None:
        raise UsageError("search_qa has questions but no passages to search", expected="corpus, or url")
    if corpus is not None and not has_questions:
        raise UsageError("search_qa has a corpus but no questions about it", expected="questions, a JSONL file")
    if has_questions and hops != HOPS:
        raise UsageError(
            "the option hops of search_qa is ignored with a question file", got=hops, hint="leave hops out"
        )
