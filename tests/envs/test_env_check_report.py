"""Which rules an environment check runs, how it announces them, and when it doubts a score."""

from __future__ import annotations

from typing import Any

import gymnasium
import pytest

from agentrl.errors import UnknownNameError
from agentrl.message import Message, ToolCall
from agentrl.testing import check_env
from agentrl.testing.env_rules import rewards
from agentrl.tool import Tool


def test_rules_can_be_chosen_and_left_out() -> None:
    report = check_env(
        "guess_number", only=("has-tasks", "returns_valid_values", "is deterministic"), skip=("has tasks",)
    )
    assert [row.check for row in report.rows] == ["is deterministic", "returns valid values"]
    with pytest.raises(UnknownNameError, match="Did you mean 'keeps memory constant'"):
        check_env("guess_number", only=("keeps memory",))


def test_each_rule_is_announced_and_the_report_is_plain_data() -> None:
    announced: list[str] = []
    report = check_env("guess_number", only=("has tasks", "steps are fast enough"), watch=announced.append)
    assert announced == ["has tasks", "steps are fast enough"]
    plain = report.to_plain()
    assert (plain["environment"], plain["split"], plain["passed"]) == ("guess_number", "train", True)
    assert set(plain["rows"][1]["figures"]) == {"reset_p50_ms", "reset_p99_ms", "step_p50_ms", "step_p99_ms"}


def test_a_score_is_doubted_only_where_chance_cannot_explain_it() -> None:
    assert rewards._chance(0, 8, 0.1) > 0.1
    assert rewards._chance(8, 8, 0.1) < rewards.IMPLAUSIBLE
    assert rewards._chance(150, 200, 0.44) < rewards.IMPLAUSIBLE < rewards._chance(100, 200, 0.44)
    assert rewards._chance(200, 200, 0.97) == pytest.approx(1.0)


class Door(gymnasium.Env[str, str]):
    """A door that a knock opens: as text, and through a tool that does not knock if it is broken."""

    observation_space = action_space = gymnasium.spaces.Text(20)

    def __init__(self, is_broken: bool = False) -> None:
        self.tools = (Tool(self.knock),)
        self.is_broken = is_broken

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.is_open = False
        return "A closed door.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.is_open |= action == "knock"
        ended = action == "enter"
        solved = ended and self.is_open
        return "The door.", float(solved), ended, False, {"success": solved}

    def knock(self) -> str:
        """Knocks at the door."""
        self.is_open |= not self.is_broken
        return "The door."

    def tool_message(self, action: str) -> Message:
        calls = (ToolCall(name="knock", arguments={}),) if action == "knock" else ()
        return Message(role="assistant", content="" if calls else action, tool_calls=calls)

    def expert(self) -> Guest:
        return Guest()


class Guest:
    def __init__(self) -> None:
        self.left = ["enter", "knock"]

    def act(self, observation: object) -> str:
        return self.left.pop()


@pytest.mark.parametrize("is_broken", [False, True])
def test_the_expert_is_played_through_the_tools_too(is_broken: bool) -> None:
    (row,) = check_env(Door, options={"is_broken": is_broken}, only=["is solved by its expert"], episodes=2).rows
    assert row.passed != is_broken, row.detail
    if is_broken:
        assert row.detail == "the expert does not solve train-0 through tools, and solves it with text actions"
