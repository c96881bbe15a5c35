"""Episodes while sandboxes fail to start, are killed, and hang.

Runs episodes of `code` with real sandboxes on this machine. A scripted policy submits correct solutions and, in every
third episode, one that exits, sleeps forever, or leaves a daemon behind. Meanwhile, a share of all sandboxes fails to
start, is killed, or is stopped. Correct solutions must get reward 1 and others 0, or the episode must end as an
infrastructure failure without a reward. At the end, no process, folder or handle may be left.

    agentrl bench sandbox_episodes
    agentrl bench sandbox_episodes episodes=100 trouble=0.5 --json soak.json
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from agentrl.config.derived import make_agent_loop
from agentrl.env import EnvironmentSpec
from agentrl.env.lookup import resolve_environment
from agentrl.errors import Outcome, SandboxError
from agentrl.message import Content
from agentrl.registry import Kind, register, unregister
from agentrl.rollout.env_pool import EnvPool
from agentrl.rollout.runner import Assignment, EpisodeRunner, play_all
from agentrl.rollout.scripted_policies import ScriptedEpisodePolicy, ScriptedPolicy
from agentrl.sandbox import Command, Limits, SandboxProcess, SandboxSpec
from agentrl.sandbox.contract import NO_VARIABLES
from agentrl.sandbox.local import LocalSandbox

NAME = "troubled"
KINDS = ("refused", "killed", "stopped")
LATEST_CALL = 8
"""Maximum number of calls that precede the fault of a sandbox."""
HOPELESS = (
    "import sys\nsys.exit(0)",
    "import os\nos._exit(0)",
    "import time\ndef solve(items):\n    time.sleep(1e6)",
    "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(1e6)\n"
    "    os._exit(0)\ndef solve(items):\n    return None",
    "def solve(items):\n    return [bytearray(2**28) for _ in range(64)]",
)


class Troubled(LocalSandbox):
    """Local sandbox with injected faults.

    Args:
        spec: The options ``share`` and ``seed`` determine its fault, if any.
    """

    happened: ClassVar[Counter[str]] = collections.Counter()
    """Number of faults in this process, by kind."""
    draws: ClassVar[dict[int, random.Random]] = {}
    """Random generator of each seed, shared by all sandboxes."""

    def __init__(self, spec: SandboxSpec) -> None:
        options = dict(spec.options)
        share, seed = options.pop("share"), options.pop("seed")
        super().__init__(dataclasses.replace(spec, options=options))
        draw = self.draws.setdefault(seed, random.Random(seed))
        self._trouble = draw.choice(KINDS) if draw.random() < share else ""
        self._calls = draw.randint(0, LATEST_CALL)

    async def _start(self) -> None:
        if self._trouble == "refused":
            self._happen()
            raise SandboxError("there is no room for a sandbox")
        await super()._start()

    async def write(self, path: str, data: bytes, *, executable: bool = False) -> None:
        """See `LocalSandbox`."""
        self._call()
        await super().write(path, data, executable=executable)

    async def spawn(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] = NO_VARIABLES,
        limits: Limits | None = None,
    ) -> SandboxProcess:
        """See `LocalSandbox`."""
        process = await super().spawn(command, cwd=cwd, env=env, limits=limits)
        self._calls = 0
        self._call()
        return process

    def _call(self) -> None:
        self._calls -= 1
        if self._calls >= 0 or self._program is None:
            return
        if self._trouble == "killed":
            self._happen()
            self._program.kill()
        elif self._trouble == "stopped":
            self._happen()
            signal.pidfd_send_signal(self._program._first, signal.SIGSTOP)

    def _happen(self) -> None:
        self.happened[self._trouble] += 1
        self._trouble = ""


class Sometimes:
    """Policy that always returns the same action: a correct solution or a harmful one."""

    def __init__(self, answer: str) -> None:
        self._answer = answer

    def act(self, observation: Content) -> str:
        """Return the action."""
        return self._answer


def make(**options: Any) -> Any:
    """Make the environment, whose expert submits harmful code in every third task."""
    world: Any = resolve_environment("code").make(**options)
    expert = world.expert

    def choose() -> Any:
        number = int(world.problem.id.rpartition("-")[2])
        if is_hopeless(number):
            return Sometimes(f"```python\n{HOPELESS[number // 3 % len(HOPELESS)]}\n```")
        return expert()

    world.expert = choose
    return world


def is_hopeless(number: int) -> bool:
    """Return True if the policy is harmful in a task."""
    return number % 3 == 2


def run(
    *,
    episodes: int = 1000,
    concurrency: int = 16,
    trouble: float = 0.15,
    retries: int = 2,
    seconds: float = 3.0,
    seed: int = 0,
) -> dict[str, Any]:
    """Return outcomes and leaked resources.

    Args:
        episodes: Number of episodes.
        concurrency: Number of concurrent episodes.
        trouble: Share of sandboxes with a fault.
        retries: New attempts after infrastructure failures.
        seconds: Time limit for the tests of one solution.
        seed: Seed of the disturbances.
    """
    register(Kind.SANDBOX, NAME, Troubled)
    Troubled.happened.clear()
    try:
        return asyncio.run(_soak(episodes, concurrency, retries, _options(trouble, seconds, seed)))
    finally:
        unregister(Kind.SANDBOX, NAME)


def _options(trouble: float, seconds: float, seed: int) -> dict[str, Any]:
    sandbox = {"type": NAME, "options": {"share": trouble, "seed": seed}, "limits": {"memory_bytes": 2**28}}
    return {"max_steps": 2, "seconds": seconds, "sandbox": sandbox}


async def _soak(episodes: int, concurrency: int, retries: int, options: dict[str, Any]) -> dict[str, Any]:
    spec: EnvironmentSpec = dataclasses.replace(resolve_environment("code"), make=make)
    pool = EnvPool(spec, options=options, max_concurrent=concurrency)
    loop = make_agent_loop("react_text", {"format": "free"})
    runner = EpisodeRunner(pool=pool, loop=loop, policy=ScriptedEpisodePolicy(ScriptedPolicy.EXPERT), retries=retries)
    source = spec.tasks("train", **options)
    tasks = [source[number % len(source)] for number in range(episodes)]
    work = [Assignment(task=task, group_id=str(n), member=0, seed=n) for n, task in enumerate(tasks)]
    before, began = _count_resources(), time.perf_counter()
    outcomes: Counter[str] = collections.Counter()
    wrong: list[str] = []
    async for trajectory in play_all(runner, work, concurrency=concurrency):
        outcomes[trajectory.outcome or "none"] += 1
        fair = 0.0 if is_hopeless(int(trajectory.task_id.rpartition("-")[2])) else 1.0
        failed = trajectory.outcome is not None and trajectory.outcome.is_infrastructure
        if trajectory.reward != (None if failed else fair):
            wrong.append(f"{trajectory.task_id}: {trajectory.outcome}, reward {trajectory.reward}")
    await pool.close()
    return {
        "episodes": episodes,
        "finished": outcomes[Outcome.FINISHED],
        "sandbox_errors": outcomes[Outcome.SANDBOX_ERROR],
        "other_outcomes": episodes - outcomes[Outcome.FINISHED] - outcomes[Outcome.SANDBOX_ERROR],
        "retries": runner.counters.retries,
        "happened": dict(Troubled.happened),
        "wrong_rewards": len(wrong),
        "first_wrong_rewards": "; ".join(wrong[:3]),
        "left": {name: count - before[name] for name, count in _count_resources().items()},
        "seconds": time.perf_counter() - began,
    }


def _count_resources() -> dict[str, int]:
    """Count the resources that this process holds."""
    children = [path.read_text().split() for path in Path("/proc/self/task").glob("*/children")]
    return {
        "processes": sum(map(len, children)),
        "handles": len(os.listdir("/proc/self/fd")),
        "folders": sum("agentrl" in name for name in os.listdir(tempfile.gettempdir())),
        "tasks": len(asyncio.all_tasks()),
    }
