"""Repetition and language of what the policy wrote, and rankings of documents."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import FiniteFloat, PositiveInt

from agentrl.reward.answers import given_answer, policy_text
from agentrl.task import Task
from agentrl.trajectory import Trajectory

SCRIPTS: Mapping[str, str] = {
    "latin": r"A-Za-z\u00c0-\u024f",
    "han": r"\u4e00-\u9fff",
    "kana": r"\u3040-\u30ff\u4e00-\u9fff",
    "hangul": r"\uac00-\ud7af",
    "cyrillic": r"\u0400-\u04ff",
    "arabic": r"\u0600-\u06ff",
    "devanagari": r"\u0900-\u097f",
}
"""Letters of scripts, as in a regular expression's class."""


def repetition(trajectory: Trajectory, task: Task, *, size: PositiveInt = 3, penalty: FiniteFloat = -1.0) -> float:
    """Return `penalty` times the share of n-grams of words that repeat an earlier one; 0 for fewer than `size` words.

    Demystifying Long Chain-of-Thought, arXiv 2502.03373, as in Open-R1.
    """
    words = policy_text(trajectory).lower().split()
    grams = [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]
    return penalty * (1 - len(set(grams)) / len(grams)) if grams else 0.0


def language_consistency(
    trajectory: Trajectory,
    task: Task,
    *,
    script: Literal["latin", "han", "kana", "hangul", "cyrillic", "arabic", "devanagari"] = "latin",
) -> float:
    """Return the share of the policy's words that are written in a script; 1 without words.

    DeepSeek-R1, arXiv 2501.12948, section 2.3.2: the share of words in the target language. A Chinese or Japanese
    character counts as a word; words without letters do not count.
    """
    words = re.findall(rf"[{SCRIPTS['kana']}]|[^\W\d_{SCRIPTS['kana']}]+", policy_text(trajectory))
    own = re.compile(rf"[{SCRIPTS[script]}]+")
    return sum(own.fullmatch(word) is not None for word in words) / len(words) if words else 1.0


def ranked_ids(text: str) -> list[str]:
    """Return the ids of a ranking, each once: a JSON list, or ids separated by commas or lines, numbered or not.

    >>> ranked_ids('["d3", "d1"]'), ranked_ids("1. d3, d1"), ranked_ids("- d3")
    (['d3', 'd1'], ['d3', 'd1'], ['d3'])
    """
    try:
        found = json.loads(text)
    except ValueError:
        found = [re.sub(r"^\s*(?:\d+[.)]|[-*])\s+", "", part).strip() for part in re.split(r"[,\n]", text)]
    return list(dict.fromkeys(str(one) for one in (found if isinstance(found, list) else [found]) if str(one)))


def grades_of(truth: Any) -> dict[str, float]:
    """Return the relevance of documents by id: grades of a mapping, or 1 for each of a list or a single one."""
    if isinstance(truth, Mapping):
        return {str(name): float(grade) for name, grade in truth.items()}
    listed = truth if isinstance(truth, Sequence) and not isinstance(truth, str) else [truth]
    return {str(name): 1.0 for name in listed if name is not None}


def recall(trajectory: Trajectory, task: Task, *, k: PositiveInt | None = None) -> float:
    """Return the share of relevant documents (``task.ground_truth``) among the first `k` of the answer's ranking."""
    relevant = {name for name, grade in grades_of(task.ground_truth).items() if grade > 0}
    found = set(ranked_ids(given_answer(trajectory))[:k])
    return len(found & relevant) / len(relevant) if relevant else 0.0


def ndcg(trajectory: Trajectory, task: Task, *, k: PositiveInt | None = None) -> float:
    """Return DCG / ideal DCG of the first `k` documents, with DCG = sum_i (2^grade_i - 1) / log2(i + 1).

    Jaervelin and Kekaelaeinen 2002, with the exponential gain of Burges et al. 2005.
    """
    grades = grades_of(task.ground_truth)
    ideal = _dcg(sorted(grades.values(), reverse=True)[:k])
    found = [grades.get(name, 0.0) for name in ranked_ids(given_answer(trajectory))[:k]]
    return _dcg(found) / ideal if ideal else 0.0


def _dcg(grades: Sequence[float]) -> float:
    return sum((2**grade - 1) / math.log2(place + 1) for place, grade in enumerate(grades, 1))


def mrr(trajectory: Trajectory, task: Task, *, k: PositiveInt | None = None) -> float:
    """Return 1 / rank of the first relevant document among the first `k`; 0 without one."""
    relevant = {name for name, grade in grades_of(task.ground_truth).items() if grade > 0}
    ranking = ranked_ids(given_answer(trajectory))[:k]
    return next((1 / rank for rank, name in enumerate(ranking, 1) if name in relevant), 0.0)
