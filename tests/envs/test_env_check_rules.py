"""Each rule of the environment check finds an environment that breaks it, and no other rule complains of that one."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import gymnasium
import pytest
from support.waiting import join

from agentrl.env import AsyncEnv, EnvironmentSpec, Isolation
from agentrl.errors import UsageError
from agentrl.task import SeedTasks, Task
from agentrl.testing import CheckDepth, check_env
from agentrl.testing.env_check import ELSEWHERE, RULES
from agentrl.testing.env_rules import resources as speed
from agentrl.testing.env_rules.rewards import NONSENSE
from agentrl.testing.report import CheckReport, CheckRule, CheckStatus
from agentrl.tool import tool

WAYS = ("north", "east", "south", "west")
COUNTER = itertools.count()
Step = tuple[str, float, bool, bool, dict[str, Any]]


class Arrows(gymnasium.Env[str, str]):
    """Six arrows to follow, one after the other. Nothing is wrong with it; the others are made of it."""

    observation_space = action_space = gymnasium.spaces.Text(5000)
    length = 6

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.way = [WAYS[int(turn)] for turn in self.np_random.integers(4, size=self.length)]
        self.room = int(self.np_random.integers(10_000, 100_000))
        self.right = self.steps = 0
        return self.text(), {}

    def step(self, action: str) -> Step:
        is_right = action == self.way[self.steps]
        self.steps, self.right = self.steps + 1, self.right + is_right
        done = self.steps == self.length
        info = {"success": done and self.right == self.length, "valid": action in WAYS}
        return self.text(), is_right / self.length, done, False, info

    def text(self) -> str:
        shown = f"The arrow shows {self.way[self.steps]}." if self.steps < self.length else "The end."
        return f"Room {self.room}, door {self.steps}. {shown}"

    def admissible_actions(self) -> list[str]:
        return list(WAYS)

    def snapshot(self) -> dict[str, Any]:
        return {"way": self.way, "room": self.room, "right": self.right, "steps": self.steps}

    def restore(self, data: dict[str, Any]) -> None:
        for name, value in data.items():
            setattr(self, name, value)

    def state_key(self) -> str:
        return f"{self.way}/{self.room}/{self.right}/{self.steps}"

    def expert(self) -> Reader:
        return Reader()


class Reader:
    def act(self, observation: object) -> str:
        return str(observation).rpartition("shows ")[2].rstrip(".")


class OneWay(Arrows):
    """The arrows show the same way in every room."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        _, info = super().reset(seed=seed)
        self.way = ["north", "east", "east", "south", "north", "west"]
        return self.text(), info


class Forgetting(Arrows):
    """All instances are in the same room."""

    shared: ClassVar[dict[str, int]] = {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.shared["room"] = self.room
        return self.text(), {}

    def step(self, action: str) -> Step:
        self.room = self.shared.get("room", self.room)
        return super().step(action)

    def restore(self, data: dict[str, Any]) -> None:
        super().restore(data)
        self.shared["room"] = self.room


class OneThread(Arrows):
    """Works in the first thread only that takes a step."""

    threads: ClassVar[list[int]] = []

    def step(self, action: str) -> Step:
        if not self.threads:
            self.threads.append(threading.get_ident())
        if threading.get_ident() not in self.threads:
            raise RuntimeError("another thread")
        return super().step(action)


class Alike(Arrows):
    """The seed does not count."""

    state_key = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.way, self.room = [WAYS[0]] * self.length, 7
        return self.text(), {}


class Unpickled(Alike):
    def __init__(self) -> None:
        self.lock = threading.Lock()


class FewRooms(Arrows):
    """Seeds of all splits lead to the same million episodes."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        return super().reset(seed=None if seed is None else seed % 1_000_000)


class Strict(Arrows):
    def step(self, action: str) -> Step:
        if not action:
            raise ValueError("say something")
        return super().step(action)


class Telling(Arrows):
    def text(self) -> str:
        return f"(answer: {self.room % 10}) {super().text()}"

    @property
    def answer(self) -> int:
        return self.room


class Printing(Arrows):
    """An attribute that is called so stands in the text."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.answer = self.room % 100
        return self.text(), {}

    def restore(self, data: dict[str, Any]) -> None:
        super().restore(data)
        self.answer = self.room % 100

    def text(self) -> str:
        return f"[answer={self.room % 100}] {super().text()}"


class Informing(Arrows):
    """What the task calls its ground truth stands in the info."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        text, _ = super().reset(seed=seed)
        return text, {"solution": f"id {seed}"}


class Helpful(Arrows):
    """A tool without arguments gives the ground truth away."""

    def __init__(self) -> None:
        @tool(inline=True)
        def look_up() -> str:
            """Looks something up."""
            return f"The answer is id {self.seed}."

        self.tools = [look_up]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.seed = seed
        return super().reset(seed=seed)

    def snapshot(self) -> dict[str, Any]:
        return super().snapshot() | {"seed": self.seed}


class Showing(Arrows):
    def text(self) -> str:
        return super().text() + (f" The way is {', then '.join(self.way)}." if self.steps == 0 else "")

    def expert(self) -> Reader:
        return Follower()


class Follower(Reader):
    def act(self, observation: object) -> str:
        return super().act(str(observation).partition(" The way")[0])


class Scoring(Arrows):
    def step(self, action: str) -> Step:
        text, reward, *rest = super().step(action)
        return f"Reward: {reward:.2f}; {text}", reward, *rest


class Reading(Arrows):
    def step(self, action: str) -> Step:
        text, *rest = super().step(action)
        word, _, path = action.partition(" ")
        return (Path(path).read_text() if word == "cat" else text), *rest


class Running(Arrows):
    """Runs what it is given, where the tests lie, and shows nothing of it."""

    def step(self, action: str) -> Step:
        if action.startswith("```bash"):
            subprocess.run(action.strip("`").removeprefix("bash"), shell=True, stdout=subprocess.DEVNULL, check=False)
        return super().step(action)


class ReadingTool(Arrows):
    def __init__(self) -> None:
        @tool(inline=True)
        def read(path: str) -> str:
            """Reads a file.

            Args:
                path: Which.
            """
            return Path(path).read_text() if Path(path).is_file() else "no file"

        self.tools = [read]


class Overpaid(Arrows):
    """Each step after some words pays as much as following the arrow does."""

    def is_paid(self, action: str) -> bool:
        raise NotImplementedError

    def step(self, action: str) -> Step:
        text, reward, *rest = super().step(action)
        return text, 1 / self.length if self.is_paid(action) else reward, *rest


class Idle(Overpaid):
    def is_paid(self, action: str) -> bool:
        return action == ""


class Muddled(Overpaid):
    def is_paid(self, action: str) -> bool:
        return action == NONSENSE


class Lenient(Overpaid):
    def is_paid(self, action: str) -> bool:
        return "give up" in action


class Hedged(Overpaid):
    def is_paid(self, action: str) -> bool:
        return all(way in action for way in WAYS)


class LenientTool(Overpaid):
    """Handing over is a tool; what is said after it pays."""

    def __init__(self) -> None:
        @tool(inline=True)
        def transfer(to: str) -> str:
            """Hands over.

            Args:
                to: Whom to.
            """
            self.is_handed_over = to != ""
            return "Good."

        self.tools = [transfer]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.is_handed_over = False
        return super().reset(seed=seed)

    def state_key(self) -> str:
        return f"{super().state_key()}/{self.is_handed_over}"

    def snapshot(self) -> dict[str, Any]:
        return super().snapshot() | {"is_handed_over": self.is_handed_over}

    def is_paid(self, action: str) -> bool:
        return self.is_handed_over and action not in WAYS


class Threaded(Arrows):
    """Starts a thread in each episode, and ends it."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.close()
        self.end = threading.Event()
        self.thread = threading.Thread(target=self.end.wait, name="physics", daemon=True)
        self.thread.start()
        return super().reset(seed=seed)

    def close(self) -> None:
        if hasattr(self, "end"):
            self.end.set()
            join(self.thread)


class Opening(Arrows):
    files: ClassVar[list[int]] = []

    def __init__(self) -> None:
        self.files.append(os.open(os.devnull, os.O_RDONLY))


class Waiting(Arrows):
    end = threading.Event()

    def __init__(self) -> None:
        threading.Thread(target=self.end.wait, daemon=True).start()


class Listed(Arrows):
    instances: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        self.instances.append(self)


class Hoarding(Arrows):
    episodes: ClassVar[list[bytes]] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.episodes.append(bytes(5000))
        return super().reset(seed=seed)


class Awaited(AsyncEnv):
    """Arrows whose steps are awaited, behind a lock."""

    def __init__(self) -> None:
        self.inner = Arrows()
        self.busy = False

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        await asyncio.sleep(0)
        return self.inner.reset(seed=seed)

    async def step(self, action: str) -> Step:
        if self.busy:
            raise RuntimeError("another step has not ended")
        self.busy = True
        try:
            await asyncio.sleep(0)
            return self.inner.step(action)
        finally:
            self.busy = False

    def admissible_actions(self) -> list[str]:
        return list(WAYS)


class Wordless(AsyncEnv):
    """Neither lists its actions nor has a space of them; ends after three words."""

    def __init__(self) -> None:
        self.heard = ""

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        self.heard = f"{seed}"
        return f"Say three words about {seed}.", {}

    async def step(self, action: str) -> Step:
        self.heard += f" {action}"
        return f"Heard: {self.heard}", 0.0, len(self.heard.split()) > 3, False, {}


class Stuck(Awaited):
    """Nothing is put back when a step is cancelled."""

    async def step(self, action: str) -> Step:
        if self.busy:
            raise RuntimeError("another step has not ended")
        self.busy = True
        await asyncio.sleep(0)
        self.busy = False
        return self.inner.step(action)


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    Waiting.end.clear()
    yield
    Waiting.end.set()
    while Opening.files:
        os.close(Opening.files.pop())
    for kept in (Listed.instances, Hoarding.episodes, OneThread.threads):
        kept.clear()


def seeds(split: str, **_options: Any) -> SeedTasks:
    return SeedTasks("arrows", split)


class Answered:
    """Tasks that know their answer."""

    def __init__(self, split: str, **_options: Any) -> None:
        self.inner = SeedTasks("arrows", split)

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Task:
        task = self.inner[index]
        return Task(id=task.id, environment="arrows", seed=task.seed, ground_truth=f"id {task.seed}")


class Drawn(Answered):
    """Tasks that are drawn anew."""

    def __getitem__(self, index: int) -> Task:
        return Task(id=f"{next(COUNTER)}", environment="arrows", seed=self.inner[index].seed)


def spec_of(make: Callable[..., Any], **changes: Any) -> EnvironmentSpec:
    facts: dict[str, Any] = {"tasks": seeds, "reward_range": (0.0, 1.001), "max_turns": 6, **changes}
    return EnvironmentSpec(name="arrows", make=make, **facts)


def complaints(report: CheckReport) -> dict[str, CheckStatus]:
    wrong = (*report.with_status(CheckStatus.FAILED), *report.with_status(CheckStatus.WARNED))
    return {row.check: row.status for row in wrong}


def check(spec: EnvironmentSpec, **settings: Any) -> CheckReport:
    return check_env(spec, skip=[rule.name for rule in ELSEWHERE], **settings)


FAILED, WARNED = CheckStatus.FAILED, CheckStatus.WARNED
BROKEN = [
    (spec_of(Forgetting, isolation=Isolation.INLINE), "runs interleaved", FAILED),
    (spec_of(OneThread), "runs in threads", FAILED),
    (spec_of(Stuck), "survives cancellation", FAILED),
    (spec_of(Alike), "differs between tasks", FAILED),
    (spec_of(Unpickled), "differs between tasks", WARNED),
    (spec_of(Arrows, tasks=lambda _split, **_: SeedTasks("arrows", "train")), "keeps splits apart", FAILED),
    (spec_of(FewRooms), "keeps splits apart", WARNED),
    (spec_of(Arrows, tasks=Drawn), "has tasks", FAILED),
    (spec_of(Strict), "answers invalid actions", FAILED),
    (spec_of(Arrows, scores={"expert": 0.1}), "is solved by its expert", FAILED),
    (spec_of(Arrows, scores={"random": 0.9}), "has a random score", FAILED),
    (spec_of(OneWay), "blind play solves little", WARNED),
    (spec_of(Printing), "hides the answer", WARNED),
    (spec_of(Informing, tasks=Answered), "hides the answer", WARNED),
    (spec_of(Helpful, tasks=Answered), "hides the answer", WARNED),
    (spec_of(Showing), "hides the plan", WARNED),
    (spec_of(Scoring), "hides the reward", WARNED),
    (spec_of(Reading), "reads no files", WARNED),
    (spec_of(ReadingTool), "reads no files", WARNED),
    (spec_of(Running), "reads no files", WARNED),
    (spec_of(Idle), "doing nothing does not pay", FAILED),
    (spec_of(Muddled), "repeating nonsense does not pay", FAILED),
    (spec_of(Lenient), "giving up does not pay", FAILED),
    (spec_of(LenientTool), "giving up does not pay", FAILED),
    (spec_of(Hedged), "saying everything does not pay", FAILED),
    (spec_of(Threaded), "is isolated enough", WARNED),
    (spec_of(Opening), "releases everything", FAILED),
    (spec_of(Waiting), "releases everything", FAILED),
    (spec_of(Listed), "releases everything", FAILED),
    (spec_of(Hoarding), "keeps memory constant", FAILED),
]


def id_of(value: object) -> str:
    return getattr(value.make, "__name__", "") if isinstance(value, EnvironmentSpec) else str(value)


@pytest.mark.parametrize(
    ("spec", "rule", "status"),
    [*BROKEN[::2], *(pytest.param(*row, marks=pytest.mark.slow) for row in BROKEN[1::2])],
    ids=id_of,
)
def test_each_rule_finds_only_its_own_violations(spec: EnvironmentSpec, rule: str, status: CheckStatus) -> None:
    report = check(spec)
    threads = {"is isolated enough": WARNED} if spec.make is Waiting else {}
    alike = {"blind play solves little": WARNED} if spec.make in (Alike, Unpickled) else {}
    assert complaints(report) == {rule: status, **threads, **alike}, report
    assert report.passed is (status is WARNED)


@pytest.mark.parametrize("make", [Arrows, Telling, Awaited])
@pytest.mark.slow
def test_conforming_environment_has_no_findings(make: Callable[..., Any]) -> None:
    """`Telling` says the word "answer" with a number that is none of it."""
    assert complaints(check(spec_of(make, tasks=Answered, scores={"random": 0.0}))) == {}


def test_native_code_is_recommended_to_run_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    native = ModuleType("fast_physics")
    native.__file__ = f"/packages/fast_physics{EXTENSION_SUFFIXES[0]}"
    monkeypatch.setitem(sys.modules, "fast_physics", native)
    monkeypatch.setitem(globals(), "fast_physics", native)
    (row,) = check(spec_of(Arrows), only=("is isolated enough",)).rows
    assert (row.status, "native code (fast_physics)" in row.detail) == (WARNED, True)
    (row,) = check(spec_of(Arrows, isolation=Isolation.PROCESS), only=("is isolated enough",)).rows
    assert row.status is CheckStatus.SKIPPED


@pytest.mark.slow
def test_a_slow_step_may_not_run_in_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "INLINE_STEP_MS", 0.0)
    assert complaints(check(spec_of(Arrows, isolation=Isolation.INLINE))) == {"steps are fast enough": FAILED}


def test_all_rules_have_been_broken() -> None:
    """Here, in `test_env_check` or in `test_env_check_broken`."""
    elsewhere = {
        "plays an episode",
        "keeps standard output clean",
        "has stable state keys",
        "rewards success",
        "keeps gymnasium rules",
        "is deterministic",
        "is the same everywhere",
        "resets completely",
        "returns valid values",
        "ends properly",
        "accepts admissible actions",
        "restores snapshots",
        "survives mistakes",
        "steps are fast enough",
    }
    assert {rule.name for rule in RULES} == elsewhere | {rule for _, rule, _ in BROKEN}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.slow
def test_rule_has_the_same_result_alone(rule: CheckRule) -> None:
    together = {row.check: row.status for row in _checked_awaited().rows}
    (alone,) = check_env(spec_of(Awaited), only=(rule.name,)).rows
    assert alone.status is together[rule.name], alone


@functools.cache
def _checked_awaited() -> CheckReport:
    return check_env(spec_of(Awaited))


@pytest.mark.slow
def test_optional_info_may_be_missing() -> None:
    report = check_env(spec_of(Wordless))
    assert not [row for row in report.rows if row.status is CheckStatus.FAILED], report


def test_what_cannot_be_made_is_the_users_to_change() -> None:
    def needs_package() -> Arrows:
        raise UsageError("no package here")

    with pytest.raises(UsageError, match="no package here"):
        check_env(spec_of(needs_package))


def test_a_full_check_plays_more() -> None:
    (quick,) = check_env(spec_of(Arrows), only=("has a random score",)).rows
    (full,) = check_env(spec_of(Arrows), only=("has a random score",), thoroughness=CheckDepth.FULL).rows
    assert quick.figures["episodes"] == 8 < full.figures["episodes"] <= 200
