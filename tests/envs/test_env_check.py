"""The environment check finds what is broken, and passes what is not."""

from __future__ import annotations

import asyncio
import itertools
import random
import shutil
from collections.abc import Callable
from typing import Annotated, Any

import gymnasium
import pytest
from agentrl.envs.web_clicks.chromium import NAMES as CHROMIUM_NAMES
from pydantic import BaseModel, Field

from agentrl import registry
from agentrl.env import AsyncEnv, EnvironmentSpec, Isolation
from agentrl.env.lookup import resolve_environment
from agentrl.errors import UnknownNameError
from agentrl.registry import Kind
from agentrl.rollout.env_workers import RANDOM_CHARACTERS
from agentrl.task import SeedTasks, Task
from agentrl.testing.env_check import ELSEWHERE, LAZY, check_env
from agentrl.testing.env_rules import contract
from agentrl.testing.env_session import EnvSession, is_call, play, random_policy
from agentrl.testing.env_subject import CheckDepth
from agentrl.testing.report import CheckReport, CheckStatus
from agentrl.tool import Tool

COUNTER = itertools.count()
GYMNASIUM = "keeps gymnasium rules"
LEAKS = {"resets completely", "restores snapshots"}
EXPLAINED = {"alfworld": {"keeps splits apart"}}
"""Warnings that have a reason, by shipped environment. The games that the tests write are the same in each split."""
FEW = 3
IN_SANDBOXES = {"code", "python_math", "repo_fix", "terminal", "web_clicks"}
"""Each of their episodes takes a tenth of a second or more; `FEW` of them are enough for every rule."""
PAYS_WITHOUT_WORK: dict[str, set[str]] = {}
"""Rules about lazy play that a shipped environment breaks for a reason, by its name; the reason stands beside it."""
WITHOUT_DEFAULT = {"agentgym", "inspect", "openenv", "openreward", "prompts", "verifiers"}
"""Adapters that play nothing unless told what."""


class Corridor(gymnasium.Env[str, str]):
    """Five steps; "go" scores. The base of the broken ones."""

    observation_space = action_space = gymnasium.spaces.Text(50)
    length = 5

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.room = int(self.np_random.integers(10**9))
        self.steps = self.rests = 0
        return self.text(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        self.rests += action == "rest"
        done = self.steps == self.length
        return self.text(), self.reward(action), done, False, {"success": done, "valid": action in ("go", "rest")}

    def text(self) -> str:
        return f"door {self.room}, step {self.steps}"

    def reward(self, action: str) -> float:
        return 0.2 if action == "go" else 0.0

    def admissible_actions(self) -> list[str]:
        return ["go", "rest"]

    def snapshot(self) -> dict[str, int]:
        return {"room": self.room, "steps": self.steps, "rests": self.rests}

    def restore(self, data: dict[str, int]) -> None:
        self.room, self.steps, self.rests = data["room"], data["steps"], data["rests"]

    def state_key(self) -> str:
        return f"{self.room}/{self.steps}"

    def expert(self) -> Goer:
        return Goer()


class Goer:
    def act(self, observation: object) -> str:
        return "go"

    def mistake(self, rng: random.Random) -> str | None:
        return None


class Owner(BaseModel):
    name: str


class Straying(Corridor):
    """Its expert's mistakes are steps like any other, and five steps are all there are."""

    def expert(self) -> Goer:
        return Strayer()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        *rest, info = super().step(action)
        return *rest, info | {"success": info["success"] and not self.rests}


class Strayer(Goer):
    def mistake(self, rng: random.Random) -> str | None:
        return "rest"


class Unseeded(Corridor):
    def text(self) -> str:
        return f"door {next(COUNTER)}"


class Leaking(Corridor):
    seen = 0

    def text(self) -> str:
        self.seen += 1
        return f"door {self.room}, text {self.seen}"


class Greedy(Corridor):
    def reward(self, action: str) -> float:
        return 2.0


class NotANumber(Corridor):
    def reward(self, action: str) -> float:
        return float("nan")


class Resetting(Corridor):
    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        _, reward, terminated, truncated, info = super().step(action)
        if terminated:
            self.steps = 0
        return self.text(), reward, terminated, truncated, info


class Lying(Corridor):
    def admissible_actions(self) -> list[str]:
        return ["go", "fly"]


class Forgetful(Corridor):
    def restore(self, data: dict[str, int]) -> None:
        self.room, self.steps = data["room"], 0


class Speechless(Corridor):
    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        _, reward, terminated, truncated, info = super().step(action)
        return 7, reward, terminated, truncated, info


class BadExpert(Corridor):
    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated, truncated, {**info, "success": False}


class Cancelling(Corridor):
    """An environment whose own task was cancelled."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        raise asyncio.CancelledError


class Immense(Corridor):
    """The sum of a few of its returns is no float."""

    length = 1

    def reward(self, action: str) -> float:
        return 1e308


class Raising(Corridor):
    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        raise RuntimeError("the door is stuck")


class Awaited(AsyncEnv):
    def __init__(self) -> None:
        self.inner = Corridor()

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        await asyncio.sleep(0)
        return self.inner.reset(seed=seed)

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        await asyncio.sleep(0)
        return self.inner.step(action)

    def admissible_actions(self) -> list[str]:
        return self.inner.admissible_actions()


def spec_of(make: Callable[..., Any], **changes: Any) -> EnvironmentSpec:
    facts: dict[str, Any] = {"reward_range": (0.0, 1.001), "scores": {"expert": 1.0}, **changes}
    return EnvironmentSpec(name="corridor", make=make, tasks=lambda split, **_: SeedTasks("corridor", split), **facts)


def broken_rules(report: CheckReport) -> set[str]:
    return {row.check for row in report.rows if not row.passed}


def test_a_sound_environment_passes() -> None:
    report = check_env(spec_of(Corridor, scores={"expert": 1.0, "random": 1.0, "blind": 1.0}))
    assert {row.status for row in report.rows} == {CheckStatus.PASSED, CheckStatus.SKIPPED}, report
    skipped = [row.check for row in report.with_status(CheckStatus.SKIPPED)]
    assert skipped == ["survives cancellation", "hides the answer"]
    assert "8 of 8 solved, stated 1; 5.0 steps on average" in str(report)


@pytest.mark.parametrize(
    ("make", "rules"),
    [
        (
            Unseeded,
            {GYMNASIUM, "is deterministic", "is the same everywhere", "runs interleaved", "runs in threads", *LEAKS},
        ),
        (Leaking, {GYMNASIUM, *LEAKS}),
        (Greedy, {"returns valid values"}),
        (Immense, {"returns valid values"}),
        (NotANumber, {GYMNASIUM, "returns valid values"}),
        (Resetting, {"ends properly"}),
        (Lying, {"accepts admissible actions"}),
        (Forgetful, {"restores snapshots"}),
        (BadExpert, {"is solved by its expert", "survives mistakes"}),
        (Straying, {"survives mistakes"}),
    ],
)
@pytest.mark.slow
def test_a_broken_environment_fails_where_it_is_broken(make: Callable[..., Any], rules: set[str]) -> None:
    processes = [] if "is the same everywhere" in rules else [rule.name for rule in ELSEWHERE]
    assert broken_rules(check_env(spec_of(make), skip=processes)) == rules


@pytest.mark.parametrize(
    ("make", "rule", "words"),
    [
        (Speechless, "returns valid values", "observation of step is invalid: got int 7"),
        (Raising, "plays an episode", "step raised RuntimeError: the door is stuck"),
        (Cancelling, "plays an episode", "step raised CancelledError without being cancelled"),
    ],
)
def test_what_an_environment_raises_is_reported(make: Callable[..., Any], rule: str, words: str) -> None:
    report = check_env(spec_of(make), only=(rule,))
    row = next(row for row in report.rows if row.check == rule)
    assert row.status is CheckStatus.FAILED
    assert words in row.detail


@pytest.mark.slow
def test_another_process_must_see_the_same(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hash_game.py").write_text(
        "import gymnasium as gym\n"
        "class Game(gym.Env):\n"
        "    observation_space = action_space = gym.spaces.Text(50)\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        super().reset(seed=seed)\n"
        "        return 'door %d %d' % (hash('door'), self.np_random.integers(10**9)), {}\n"
        "    def step(self, action):\n"
        "        return 'end', 1.0, True, False, {}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONHASHSEED", "5")
    assert broken_rules(check_env("hash_game:Game")) == {"is the same everywhere"}


@pytest.mark.slow
def test_one_that_only_this_process_knows_may_not_ask_for_worker_processes() -> None:
    class Local(Corridor):
        pass

    report = check_env(spec_of(Local))
    skipped = {row.check for row in report.with_status(CheckStatus.SKIPPED)}
    unknown_elsewhere = {"is the same everywhere", "keeps standard output clean"}
    assert skipped == {*unknown_elsewhere, "survives cancellation", "hides the answer"}
    report = check_env(spec_of(Local, isolation=Isolation.PROCESS))
    assert broken_rules(report) == {"is the same everywhere"}


@pytest.mark.slow
def test_an_asynchronous_environment_is_checked_too() -> None:
    report = check_env(spec_of(Awaited))
    skipped = {row.check for row in report.rows if row.status is CheckStatus.SKIPPED}
    assert report.passed, str(report)
    assert {"keeps gymnasium rules", "is solved by its expert", "restores snapshots"} <= skipped


@pytest.mark.slow
@pytest.mark.parametrize("name", registry.names(Kind.ENVIRONMENT))
def test_every_shipped_environment_passes(name: str) -> None:
    extra = resolve_environment(name).extra
    if name in WITHOUT_DEFAULT or (extra is not None and not extra.is_installed):
        pytest.skip("needs a package, or options; see tests/originals")
    if name == "web_clicks" and not any(map(shutil.which, CHROMIUM_NAMES)):
        pytest.skip("Chromium is not installed")
    episodes = FEW if name in IN_SANDBOXES else 8
    report = check_env(name, episodes=episodes, call_timeout_s=60)  # tests may run beside others
    assert report.passed, str(report)
    assert {row.check for row in report.with_status(CheckStatus.WARNED)} == EXPLAINED.get(name, set()), report
    statuses = {row.check: row.status for row in report.rows}
    assert statuses["is the same everywhere"] is CheckStatus.PASSED


@pytest.mark.parametrize("name", [name for name in registry.names(Kind.ENVIRONMENT) if name not in IN_SANDBOXES])
@pytest.mark.slow
def test_doing_no_work_pays_in_no_shipped_environment(name: str) -> None:
    """On more tasks than above: what differs by luck on eight is seen on these."""
    extra = resolve_environment(name).extra
    if name in WITHOUT_DEFAULT or (extra is not None and not extra.is_installed):
        pytest.skip("needs a package, or options; see tests/originals")
    rules = [rule.name for rule in LAZY]
    report = check_env(name, episodes=30, only=rules, thoroughness=CheckDepth.FULL, call_timeout_s=60)
    wrong = {row.check: row.detail for row in report.rows if row.status is not CheckStatus.PASSED}
    assert set(wrong) == PAYS_WITHOUT_WORK.get(name, set()), wrong


@pytest.mark.slow
def test_split_and_options_can_be_chosen() -> None:
    report = check_env("household/valid_unseen", options={"size": "tiny"}, episodes=3)
    assert report.passed, str(report)
    assert report.name == resolve_environment("household").name
    with pytest.raises(UnknownNameError, match="Did you mean household/valid_seen"):
        check_env("household/valid_sen")


def test_random_play_of_a_space_of_very_long_texts_is_short() -> None:
    """Gymnasium allows any length: a sample of the whole space would take minutes and gigabytes."""
    said: list[str] = []

    class Endless(Corridor):
        action_space = gymnasium.spaces.Text(100_000_000)

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            said.append(action)
            return super().step(action)

    spec = EnvironmentSpec(name="endless", make=Endless, tasks=lambda split, **_: SeedTasks("endless", split))
    assert check_env(spec, only=("plays an episode",)).passed
    assert 0 < max(map(len, said)) <= RANDOM_CHARACTERS


def test_random_play_begins_with_valid_calls_where_tools_are_the_only_actions() -> None:
    calls: list[int] = []

    class Oven(gymnasium.Env[str, str]):
        action_space = observation_space = gymnasium.spaces.Text(10)

        def __init__(self) -> None:
            self.tools = [Tool(self.heat)]

        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            return "An oven.", {}

        def heat(self, degrees: Annotated[int, Field(ge=200, le=220)], owner: Owner) -> str:
            """Heat it.

            Args:
                degrees: Temperature.
                owner: Whose it is.
            """
            calls.append(degrees)
            return "It is warm."

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            return "", 0.0, True, False, {}

    session = EnvSession(Oven, {})
    for seed in range(10):
        [*called, answer] = play(session, Task(id="1", environment="oven"), random_policy(seed), limit=50).actions
        assert len(called) == 3
        assert all(map(is_call, called))
        assert not is_call(answer)
    session.close()
    assert len(calls) == 30, "all arguments fit the schema"


def test_splits_are_compared_whole_where_there_is_time_and_at_distances_where_there_is_not() -> None:
    source = SeedTasks("arrows", size=1000)
    assert [task.seed for task in contract._some_tasks(source, 1000)] == list(range(1000))
    some = [task.seed for task in contract._some_tasks(source, 100)]
    assert some[:51] == [*range(50), 50]
    assert len(some) <= 100
    assert some[-1] > 950
