"""The report on the reward's integrity: each way to earn without a solution is seen in an environment that has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import pytest

from agentrl.env import EnvironmentSpec
from agentrl.errors import UnknownNameError
from agentrl.task import SeedTasks
from agentrl.testing import reward_integrity
from agentrl.testing.env_check import INTEGRITY, LEAKS
from agentrl.testing.report import CheckReport, CheckStatus

Step = tuple[str, float, bool, bool, dict[str, Any]]
FAILED, WARNED = CheckStatus.FAILED, CheckStatus.WARNED


class Sums(gymnasium.Env[str, str]):
    """Adds two numbers. Nothing is wrong with it; the others are made of it."""

    observation_space = action_space = gymnasium.spaces.Text(5000)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.numbers = [int(number) for number in self.np_random.integers(10_000, 100_000, size=2)]
        return self.text(), {}

    def step(self, action: str) -> Step:
        solved = self.earns(action)
        return "The end.", float(solved), True, False, {"success": solved}

    def text(self) -> str:
        return "What is {} plus {}?".format(*self.numbers)

    def earns(self, action: str) -> bool:
        return action == str(sum(self.numbers))

    def admissible_actions(self) -> list[str]:
        return ["10", "20"]

    def expert(self) -> Adder:
        return Adder()


class Adder:
    def act(self, observation: object) -> str:
        first, _, second = str(observation).removeprefix("What is ").partition("?")[0].partition(" plus ")
        return str(int(first) + int(second))


class Patient(Sums):
    def earns(self, action: str) -> bool:
        return action == "" or super().earns(action)


class Solved(Sums):
    def earns(self, action: str) -> bool:
        return action == "submit" or super().earns(action)


class Trusting(Sums):
    def earns(self, action: str) -> bool:
        return (action.startswith("```python") and "passed" in action) or super().earns(action)


class Gullible(Sums):
    def earns(self, action: str) -> bool:
        return (action.startswith("```bash") and "passed" in action) or super().earns(action)


class Parroted(Sums):
    def earns(self, action: str) -> bool:
        return action == self.text() or super().earns(action)


class Same(Sums):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.numbers = [3, 4]
        return self.text(), {}


class Marked(Sums):
    """Some tasks bear a mark, and are given away."""

    def text(self) -> str:
        return f"{super().text()}{' (A simple one.)' if self.numbers[0] % 2 else ''}"

    def earns(self, action: str) -> bool:
        return (action in ("10", "20") and self.numbers[0] % 2 == 1) or super().earns(action)


class Open(Sums):
    """Its sandbox holds the solution."""

    def visible(self) -> dict[str, str]:
        return {"./readme.txt": "nothing", "variables": f"HOME=/ SUM={sum(self.numbers)}"}

    def secrets(self) -> list[str]:
        return ["", str(sum(self.numbers))]


class Shut(Open):
    def visible(self) -> dict[str, str]:
        return {"./readme.txt": "nothing"}


def spec_of(make: Callable[..., Any], **changes: Any) -> EnvironmentSpec:
    facts: dict[str, Any] = {"reward_range": (0.0, 1.0), "max_turns": 1, **changes}
    return EnvironmentSpec(name="sums", make=make, tasks=lambda split, **_: SeedTasks("sums", split), **facts)


def complaints(report: CheckReport) -> dict[str, CheckStatus]:
    wrong = (*report.with_status(FAILED), *report.with_status(WARNED))
    return {row.check: row.status for row in wrong}


SEEN = [
    (Patient, "silence earns nothing", FAILED),
    (Solved, "handing in earns nothing", FAILED),
    (Trusting, "printed success earns nothing", FAILED),
    (Gullible, "echoed success earns nothing", FAILED),
    (Parroted, "repeating earns nothing", FAILED),
    (Same, "another solution earns nothing", WARNED),
    (Marked, "openings do not predict rewards", WARNED),
    (Open, "keeps secrets out of the sandbox", FAILED),
]


@pytest.mark.parametrize(("make", "rule", "status"), SEEN)
def test_a_way_to_earn_without_a_solution_is_seen(make: Callable[..., Any], rule: str, status: CheckStatus) -> None:
    report = reward_integrity(spec_of(make))
    assert complaints(report) == {rule: status}, report


def test_every_rule_has_been_broken() -> None:
    assert {rule.name for rule in INTEGRITY} - {rule.name for rule in LEAKS} == {rule for _, rule, _ in SEEN}


@pytest.mark.parametrize("make", [Sums, Shut])
def test_no_findings_if_only_solutions_are_rewarded(make: Callable[..., Any]) -> None:
    report = reward_integrity(spec_of(make))
    assert complaints(report) == {}
    silence = next(row for row in report.rows if row.check == "silence earns nothing")
    assert (silence.detail, silence.figures) == ("mean return 0, of a solution 1", {"mean_return": 0.0})


def test_single_chance_success_marks_no_word() -> None:
    class Lucky(Sums):
        episodes = 0

        def earns(self, action: str) -> bool:
            Lucky.episodes += action in ("10", "20")
            return Lucky.episodes == 5 or super().earns(action)

    report = reward_integrity(spec_of(Lucky), only=["openings do not predict rewards"])
    assert [(row.status, row.detail) for row in report.rows] == [
        (CheckStatus.PASSED, "random play: mean return 0.0625")
    ]


def test_what_an_environment_states_stands_for_an_expert_that_is_not_there() -> None:
    class Alone(Patient):
        expert = None

    report = reward_integrity(spec_of(Alone), only=["silence earns nothing", "another solution earns nothing"])
    assert [row.status for row in report.rows] == [FAILED, CheckStatus.SKIPPED]
    unbounded = spec_of(Alone, reward_range=(0.0, float("inf")))
    report = reward_integrity(unbounded, only=["silence earns nothing"])
    assert [(row.status, row.detail) for row in report.rows] == [(CheckStatus.PASSED, "mean return 1")]


def test_what_cannot_be_played_or_is_not_known_is_said() -> None:
    class Raising(Sums):
        def step(self, action: str) -> Step:
            raise RuntimeError("no numbers today")

    report = reward_integrity(spec_of(Raising))
    assert not report.passed
    assert "no numbers today" in report.rows[0].detail
    with pytest.raises(UnknownNameError, match="Did you mean 'silence earns nothing'"):
        reward_integrity(spec_of(Sums), only=["silence earns"])
