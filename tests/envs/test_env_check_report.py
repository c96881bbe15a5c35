"""Which rules an environment check runs, how it announces them, and when it doubts a score."""

from __future__ import annotations

import pytest

from agentrl.errors import UnknownNameError
from agentrl.testing import check_env
from agentrl.testing.env_rules import rewards


def test_rules_can_be_chosen_and_left_out() -> None:
    report = check_env("guess_number", only=("has-tasks", "speaks_properly", "is deterministic"), skip=("has tasks",))
    assert [row.check for row in report.rows] == ["is deterministic", "speaks properly"]
    with pytest.raises(UnknownNameError, match="Did you mean 'keeps its memory'"):
        check_env("guess_number", only=("keeps memory",))


def test_each_rule_is_announced_and_the_report_is_plain_data() -> None:
    announced: list[str] = []
    report = check_env("guess_number", only=("has tasks", "is as fast as it says"), watch=announced.append)
    assert announced == ["has tasks", "is as fast as it says"]
    plain = report.to_plain()
    assert (plain["environment"], plain["split"], plain["passed"]) == ("guess_number", "train", True)
    assert set(plain["rows"][1]["figures"]) == {"reset_p50_ms", "reset_p99_ms", "step_p50_ms", "step_p99_ms"}


def test_a_score_is_doubted_only_where_chance_cannot_explain_it() -> None:
    assert rewards._chance(0, 8, 0.1) > 0.1
    assert rewards._chance(8, 8, 0.1) < rewards.IMPLAUSIBLE
    assert rewards._chance(150, 200, 0.44) < rewards.IMPLAUSIBLE < rewards._chance(100, 200, 0.44)
    assert rewards._chance(200, 200, 0.97) == pytest.approx(1.0)
