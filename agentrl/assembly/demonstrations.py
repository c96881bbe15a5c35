"""Demonstrations: environments' experts play through the agent loop, into the ledger of the model to be taught."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from agentrl.assembly.worlds import World, build_mixture, build_worlds, close_worlds
from agentrl.config.schema import Config
from agentrl.errors import UsageError
from agentrl.render.renderer import Renderer
from agentrl.rollout.counters import RolloutObserver
from agentrl.rollout.demonstrator import Demonstrator, ScriptedPolicy
from agentrl.rollout.play import Assignment, play_all
from agentrl.rollout.seeds import derive_seed
from agentrl.task import Task
from agentrl.trajectory import Trajectory


async def collect_demonstrations(
    config: Config,
    renderer: Renderer,
    *,
    observer: RolloutObserver | None = None,
    on_episode: Callable[[Trajectory], None] = lambda _: None,
    on_stall: Callable[[str], None] = lambda _: None,
) -> list[Trajectory]:
    """Let experts play ``sft.episodes`` tasks of the training splits, as the agent would: several environments in the
    shares of their weights.

    Args:
        config: Environment, agent, and ``sft``.
        renderer: Of the model that will learn from them.
        observer: Is told of every turn.
        on_episode: Called after each episode.
        on_stall: Is told who waits for what when nothing has moved for ``rollout.stall_report_s``.

    Returns:
        Those that solved their task (all trainable ones where the environment does not tell), in the order of tasks.

    Raises:
        UsageError: an environment has no expert, or it solved nothing.
    """
    tasks = build_mixture(config)
    speaker = Demonstrator(
        ScriptedPolicy.EXPERT, renderer, max_context=config.agent.max_tokens, mistakes=config.sft.mistakes
    )
    worlds = build_worlds(config, speaker, observer=observer)
    draws = [tasks.next() for _ in range(config.sft.episodes)]
    played: dict[int, Trajectory] = {}
    try:
        async with worlds[0].host.waits.watched(config.rollout.stall_report_s, on_stall):
            for world in worlds:
                own = {
                    number: _assignment(draw.task, number, config.run.seed)
                    for number, draw in enumerate(draws)
                    if draw.environment == world.label
                }
                played |= await _played(world, own, on_episode)
    finally:
        await close_worlds(worlds)
    return [played[number] for number in sorted(played)]


async def _played(
    world: World, assignments: Mapping[int, Assignment], on_episode: Callable[[Trajectory], None]
) -> dict[int, Trajectory]:
    """What can be learnt from among the demonstrations of one environment, by number."""
    numbers = {assignment.group_id: number for number, assignment in assignments.items()}
    found: dict[int, Trajectory] = {}
    concurrency = world.config.rollout.max_concurrent
    async for trajectory in play_all(world.runner, assignments.values(), concurrency=concurrency):
        found[numbers[trajectory.group_id]] = trajectory
        on_episode(trajectory)
    return _worth_learning(found)


def _assignment(task: Task, number: int, seed: int) -> Assignment:
    group_id = f"demonstration-{number}"
    return Assignment(task=task, group_id=group_id, member=0, seed=derive_seed(seed, group_id))


def _worth_learning(played: Mapping[int, Trajectory]) -> dict[int, Trajectory]:
    good = {
        number: t
        for number, t in played.items()
        if t.outcome is not None and t.outcome.is_trainable and t.success is not False
    }
    if played and not good:
        last = played[max(played)]
        raise UsageError(
            f"no demonstration of {last.environment} can be learnt from",
            got=f"{len(played)} episodes, the last one {last.outcome}: {last.error or 'task not solved'}",
            expected="an expert that solves tasks within the agent's budgets",
        )
    return good
