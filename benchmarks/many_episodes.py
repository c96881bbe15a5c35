"""Many concurrent episodes with waiting steps: memory, CPU per turn, and CPU per pass of the event loop.

All episodes start together, on the scripted engine; every step waits for an exponentially distributed time.
``training`` plays groups of 8 through the scheduler as one batch, ``evaluation`` uses `play_all`. Each measurement runs
in its own process.
A pass is one iteration of the event loop, from one poll of sockets and timers to the next; during a long pass, no other
episode makes progress.

    agentrl bench many_episodes --json many.json
    agentrl bench many_episodes episodes=[2000] wait_s=3
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import resource
import time
from collections.abc import AsyncIterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import gymnasium
from support.tokenizers import build_tokenizer

from agentrl.config.derived import make_agent_loop
from agentrl.engine import GenerateRequest, SamplingParams
from agentrl.env import AsyncEnv, EnvironmentSpec, Isolation
from agentrl.render.renderer import Renderer
from agentrl.rollout.budget import EpisodeLimits
from agentrl.rollout.env_pool import EnvPool
from agentrl.rollout.heap import settled_heap
from agentrl.rollout.policies import EngineEpisodePolicy
from agentrl.rollout.runner import Assignment, EpisodeRunner, play_all
from agentrl.rollout.scheduler import GroupScheduler
from agentrl.rollout.task_order import TaskSampler
from agentrl.serving.scripted import ScriptedEngine
from agentrl.task import SeedTasks, Task
from agentrl.trajectory import Trajectory

GROUP_SIZE = 8
ANSWERS = 20


class WaitingRoom(AsyncEnv):
    """Environment that answers any action with a sentence after a delay.

    Args:
        turns: Number of steps.
        wait_s: Mean seconds of a step.
    """

    observation_space = action_space = gymnasium.spaces.Text(200)
    action_hint = "go to cabinet NUMBER"
    instructions = "You look for things in cabinets."

    def __init__(self, turns: int, wait_s: float) -> None:
        self._turns, self._wait_s, self._taken = turns, wait_s, 0

    async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        """Start an episode."""
        self._random, self._taken = random.Random(seed), 0
        return "You are in a room with cabinets 1 to 20. Your task is to: put a clean mug in cabinet 7.", {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Wait, and count the step."""
        await asyncio.sleep(self._random.expovariate(1 / self._wait_s))
        self._taken += 1
        done = self._taken >= self._turns
        return f"Cabinet {self._taken} is closed. You did: {action}.", float(done), done, False, {"success": done}


class TimedLoop(asyncio.SelectorEventLoop):
    """Event loop that records the CPU seconds of each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.passes: list[float] = []

    def _run_once(self) -> None:
        began = time.thread_time()
        super()._run_once()  # type: ignore[misc]
        self.passes.append(time.thread_time() - began)


def run(
    *,
    episodes: list[int] | None = None,
    turns: int = 20,
    wait_s: float = 30.0,
    paths: list[str] | None = None,
) -> dict[str, Any]:
    """Return the figures of each path and number of episodes.

    Args:
        episodes: Numbers of concurrent episodes; 1,000 and 10,000 by default.
        turns: Turns of an episode.
        wait_s: Mean seconds of a step.
        paths: ``training``, ``evaluation``, or both, the default.
    """
    figures: dict[str, Any] = {"turns": turns, "wait_s": wait_s}
    context = multiprocessing.get_context("fork")  # before the process has computed anything
    for path in paths or ["training", "evaluation"]:
        for count in episodes or [1000, 10_000]:
            with ProcessPoolExecutor(1, mp_context=context) as process:
                figures[f"{path}_{count}"] = process.submit(measure, path, count, turns, wait_s).result()
    return figures


def measure(path: str, episodes: int, turns: int, wait_s: float) -> dict[str, float]:
    """Play all episodes concurrently in this process, and measure."""
    runner = _make_runner(turns, wait_s, episodes)
    source = _trained(runner, episodes) if path == "training" else _evaluated(runner, episodes)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with asyncio.Runner(loop_factory=TimedLoop) as loop:
        cpu = time.process_time()
        with settled_heap(runner.pool.waits):  # as in a run
            kept = loop.run(_keep(source))
        cpu = time.process_time() - cpu
        played = sum(len(trajectory.turns) for trajectory in kept)
        assert all(trajectory.success for trajectory in kept)
        timed = loop.get_loop()
        assert isinstance(timed, TimedLoop)
        passes = sorted(timed.passes)
        loop.run(runner.pool.close())
    return {
        "turns": played,
        "cpu_ms_per_turn": 1000 * cpu / played,
        "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "memory_before_mb": before / 1024,
        "pass_p99_ms": 1000 * passes[int(0.99 * len(passes))],
        "pass_max_ms": 1000 * passes[-1],
        "passes": len(passes),
    }


async def _keep(played: AsyncIterator[Trajectory]) -> list[Trajectory]:
    """Collect all episodes, because a training step keeps them."""
    return [trajectory async for trajectory in played]


async def _trained(runner: EpisodeRunner, episodes: int) -> AsyncIterator[Trajectory]:
    scheduler = GroupScheduler(
        {"": runner},
        TaskSampler({"": SeedTasks("room", size=episodes)}, seed=0),
        group_size=GROUP_SIZE,
        batch=episodes // GROUP_SIZE,
        max_concurrent=episodes,
    )
    for group in await scheduler.next_batch():
        for trajectory in group.trajectories:
            yield trajectory
    await scheduler.close()


def _evaluated(runner: EpisodeRunner, episodes: int) -> AsyncIterator[Trajectory]:
    assignments = [
        Assignment(task=Task(id=str(n), environment="room", seed=n), group_id=str(n), member=0, seed=n)
        for n in range(episodes)
    ]
    return play_all(runner, assignments, concurrency=episodes)


def _make_runner(turns: int, wait_s: float, episodes: int) -> EpisodeRunner:
    tokenizer = build_tokenizer("qwen2.5")
    renderer = Renderer(tokenizer)
    text = "<think>I have to look further.</think><action>go to cabinet {}</action>"
    answers = [[*renderer.encoder.encode(text.format(n)), renderer.boundary.end_id] for n in range(ANSWERS)]

    def script(request: GenerateRequest) -> list[int]:
        return answers[(request.params.seed or 0) % ANSWERS]

    spec = EnvironmentSpec(name="room", make=WaitingRoom, tasks=SeedTasks, isolation=Isolation.INLINE)
    return EpisodeRunner(
        pool=EnvPool(
            spec, options={"turns": turns, "wait_s": wait_s}, max_concurrent=episodes, step_timeout_s=100 * wait_s
        ),
        loop=make_agent_loop("react_text", {}),
        policy=EngineEpisodePolicy(
            ScriptedEngine(script=script, vocab_size=len(tokenizer)), renderer, SamplingParams()
        ),
        limits=EpisodeLimits(max_turns=turns),
    )
