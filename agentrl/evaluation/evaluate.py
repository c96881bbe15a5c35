"""Evaluating with an episode runner: choose the tasks, play them, draw the estimates."""

from __future__ import annotations

import time
from collections.abc import Callable

from agentrl.evaluation.episode import EpisodeStore, EvaluatedEpisode
from agentrl.evaluation.panel import Panel, Slot, choose_tasks, slots
from agentrl.evaluation.play import play_all, unwatched
from agentrl.evaluation.result import EvaluationResult, summarise
from agentrl.rollout.runner import EpisodeRunner
from agentrl.rollout.seeds import derive_seed
from agentrl.task import TaskSource
from agentrl.trajectory import Trajectory


async def evaluate_panel(
    runner: EpisodeRunner,
    source: TaskSource,
    panel: Panel,
    *,
    concurrency: int,
    store: EpisodeStore | None = None,
    on_episode: Callable[[EvaluatedEpisode], None] = unwatched,
) -> EvaluationResult:
    """Play a panel with a runner; the same panel on a seeded engine gives the same episodes.

    Args:
        runner: Plays and retries episodes.
        source: The split's tasks.
        panel: How many of them, how often, under which seed.
        concurrency: Most episodes at once.
        store: Where finished episodes are kept, and found.
        on_episode: Called after each episode.

    Raises:
        UsageError: nothing to play, a full disk, or something that no retry can mend.
    """
    began = time.perf_counter()
    chosen = slots(choose_tasks(source, panel.n_tasks, panel.seed), panel.samples)

    async def play(slot: Slot) -> Trajectory:
        seed = derive_seed("evaluation", panel.seed, slot.task.id)
        return await runner.run(slot.task, group_id=f"evaluation/{slot.task.id}", member=slot.sample, seed=seed)

    episodes = await play_all(chosen, play, concurrency=concurrency, store=store, on_episode=on_episode)
    return summarise(panel, episodes, time.perf_counter() - began)
