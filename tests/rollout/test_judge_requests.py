"""What a dry run announces about a judge: the number of its requests, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.config.config import Config
from agentrl.config.judge import JudgeConfig
from agentrl.rollout.judges.scorers import judge_rows, requests_per_group

ENGINE = {"url": "http://127.0.0.1:1/v1", "model": "m"}
RUBRIC = {
    "items": [
        {"name": "polite", "criterion": "Is it polite?"},
        {"name": "short", "criterion": "Is it short?"},
        {"name": "right", "criterion": "Is it right?"},
    ]
}


@pytest.mark.parametrize(
    ("settings", "size", "requests"),
    [
        ({}, 5, 5),
        ({"rubric": RUBRIC}, 5, 5),
        ({"rubric": RUBRIC, "rubric_requests": "each"}, 5, 15),
        ({"task_rubric": "points", "rubric_requests": "each"}, 5, 5),  # at least one item in each task
        ({"compare": "pairwise"}, 5, 20),  # 10 pairs, each in both orders
        ({"compare": {"how": "pairwise", "opponents": 2}}, 7, 14),  # 7 pairs on a circle
        ({"compare": {"how": "pairwise", "opponents": 4}}, 7, 28),
        ({"compare": "listwise"}, 5, 3),
        ({"compare": {"how": "listwise", "rounds": 2}}, 5, 2),
    ],
)
def test_every_request_about_a_group_is_announced(settings: dict[str, Any], size: int, requests: int) -> None:
    judge = JudgeConfig.model_validate({"engine": ENGINE, **settings})
    assert requests_per_group(judge, size) == requests


def test_the_dry_run_counts_groups_and_steps() -> None:
    config = Config.model_validate(
        {
            "environment": {"name": "guess_number"},
            "agent": {"judge": {"engine": ENGINE, "compare": "pairwise", "budget": {"max_requests": 9_000}}},
            "algorithm": {"group_size": 4},
            "trainer": {"tasks_per_step": 3, "steps": 70},
        }
    )
    rows = {name: (value, source) for name, value, source in judge_rows(config)}
    assert rows["judge"] == ("pairwise", "m at http://127.0.0.1:1/v1")
    assert rows["judge's requests per group"][0] == "12"
    assert rows["judge's requests"] == ("2,520", "70 steps of 3 groups, no evaluations")
    assert rows["judge's budget"] == ("9,000 requests", "then stop")
