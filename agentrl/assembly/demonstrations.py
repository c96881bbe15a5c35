"""Demonstrations: the environment's expert plays through the agent loop, into the ledger of the model to be taught."""

from __future__ import annotations

from collections.abc import Callable

from agentrl.assembly.environments import find_environment, task_source
from agentrl.assembly.episodes import build_host, build_runner
from agentrl.config.schema import Config
from agentrl.errors import UsageError
from agentrl.render.renderer import Renderer
from agentrl.rollout.counters import RolloutObserver
from agentrl.rollout.demonstrator import Demonstrator, ScriptedPolicy
from agentrl.rollout.play import Assignment, play_all
from agentrl.rollout.seeds import derive_seed
from agentrl.task import Task, TaskCursor
from agentrl.trajectory import Trajectory


async def collect_demonstrations(
    config: Config,
    renderer: Renderer,
    *,
    observer: RolloutObserver | None = None,
    on_episode: Callable[[Trajectory], None] = lambda _: None,
    on_stall: Callable[[str], None] = lambda _: None,
) -> list[Trajectory]:
    """Let the expert play ``sft.episodes`` tasks of the training split, as the agent would.

    Args:
        config: Environment, agent, and ``sft``.
        renderer: Of the model that will learn from them.
        observer: Is told of every turn.
        on_episode: Called after each episode.
        on_stall: Is told who waits for what when nothing has moved for ``rollout.stall_report_s``.

    Returns:
        Those that solved their task (all trainable ones where the environment does not tell), in the order of tasks.

    Raises:
        UsageError: the environment has no expert, or it solved nothing.
    """
    spec = find_environment(config.environment)
    tasks = TaskCursor(task_source(spec, config.environment), seed=config.run.seed)
    host = build_host(config, spec=spec)
    speaker = Demonstrator(
        ScriptedPolicy.EXPERT, renderer, max_context=config.agent.max_tokens, mistakes=config.sft.mistakes
    )
    runner = build_runner(config, host, speaker, observer=observer)
    assignments = [_assignment(tasks.next(), number, config.run.seed) for number in range(config.sft.episodes)]
    played: dict[str, Trajectory] = {}
    try:
        async with host.waits.watched(config.rollout.stall_report_s, on_stall):
            async for trajectory in play_all(runner, assignments, concurrency=config.rollout.max_concurrent):
                played[trajectory.group_id] = trajectory
                on_episode(trajectory)
    finally:
        await host.close()
    return _worth_learning([played[assignment.group_id] for assignment in assignments])


def _assignment(task: Task, number: int, seed: int) -> Assignment:
    group_id = f"demonstration-{number}"
    return Assignment(task=task, group_id=group_id, member=0, seed=derive_seed(seed, group_id))


def _worth_learning(played: list[Trajectory]) -> list[Trajectory]:
    good = [t for t in played if t.outcome is not None and t.outcome.is_trainable and t.success is not False]
    if not good:
        last = played[-1]
        raise UsageError(
            "no demonstration can be learnt from",
            got=f"{len(played)} episodes, the last one {last.outcome}: {last.error or 'task not solved'}",
            expected="an expert that solves tasks within the agent's budgets",
        )
    return good
