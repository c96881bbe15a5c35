"""Continuations of a stored training episode from one of its turns (`agentrl replay`)."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from agentrl.agent_loop import AgentLoop
from agentrl.builders.episodes import build_env_pool, build_runner
from agentrl.builders.models import check_model, resolve_model
from agentrl.config import load_config
from agentrl.config.config import Config
from agentrl.config.derived import SOLE, per_environment_configs
from agentrl.env.lookup import resolve_environment
from agentrl.errors import UsageError, did_you_mean
from agentrl.evaluation.evaluate import PolicyKind, open_policy
from agentrl.evaluation.panel import EPISODES_FILE, EpisodeStore, EvaluatedEpisode, task_digest
from agentrl.evaluation.rescoring import environments_played, find_environment, find_tasks
from agentrl.evaluation.result import MeanInterval, bootstrap_mean, wilson_interval
from agentrl.evaluation.session import episodes_at_once
from agentrl.observe.files import first_free, writing
from agentrl.observe.run_folder import RunDirectory
from agentrl.observe.trajectory_store import read_trajectories
from agentrl.rollout.judges import build_judge
from agentrl.rollout.policies import EngineEpisodePolicy
from agentrl.rollout.recorded_turns import EpisodeRecords, continue_from, recorded_answers
from agentrl.rollout.runner import Assignment, EpisodeRunner, play_all
from agentrl.rollout.turns import derive_seed
from agentrl.task import Task
from agentrl.trajectory import Trajectory

REPLAYS = "replays"
"""Folder of a run that holds the continuations of its episodes."""


def find_episode(run: RunDirectory, name: str) -> Trajectory:
    """Return a stored episode of a run by its id; without the number of the attempt, its last attempt.

    Raises:
        UsageError: there is no such episode.
    """
    known: list[str] = []
    found: Trajectory | None = None
    for stored in read_trajectories(run.trajectories):
        known.append(stored.trajectory.id)
        if name in (stored.trajectory.id, stored.trajectory.id.rpartition(".")[0]):
            found = stored.trajectory
    if found is None:
        raise UsageError(
            f"no such episode in {run.path}",
            got=name,
            expected="the id of a stored episode",
            hint=did_you_mean(name, known) or f"list the newest: agentrl replay {run.path}",
        )
    return found


def newest_episodes(run: RunDirectory, most: int) -> list[Trajectory]:
    """Return the episodes of a run that ended last, the newest one first."""
    found = [stored.trajectory for stored in read_trajectories(run.trajectories) if stored.trajectory.turns]
    return found[: -most - 1 : -1]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRequest:
    """Request of continuations of one episode."""

    run: RunDirectory
    episode: Trajectory
    turn: int
    """Number of turns that are repeated."""
    samples: int
    seed: int
    config: Config
    """Config with only the episode's environment, and the engine, model and sampling of the continuations."""


def make_replay_request(
    run: RunDirectory,
    episode: Trajectory,
    *,
    turn: int,
    samples: int,
    seed: int = 0,
    model: str | None = None,
    engine: str | None = None,
    temperature: float | None = None,
    overrides: Sequence[str] = (),
) -> ReplayRequest:
    """Make a replay request; settings that are not given default to those of the run's training.

    Raises:
        UsageError: the episode's turns cannot be repeated, or its environment is not one of the run's.
        ConfigError: an override is invalid.
    """
    recorded_answers(episode, turn)
    words = [
        f"model.path={model or run.path}",
        *([] if engine is None else [f"engine={engine}"]),
        *([] if temperature is None else [f"sampling.temperature={temperature}"]),
        "cluster=null",
    ]
    part = find_environment(environments_played(load_config(run.config_file, [*words, *overrides])), episode)
    agent = part.config.agent.model_copy(update={"branch": None})
    config = part.config.model_copy(update={"agent": agent})
    return ReplayRequest(run=run, episode=episode, turn=turn, samples=samples, seed=seed, config=config)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Continuations of an episode, with estimates from the node before their first new turn."""

    episode: Trajectory
    turn: int
    continuations: Sequence[Trajectory]
    folder: Path
    """Folder of the stored continuations, for `agentrl view`."""
    decode: Callable[[Sequence[int]], str]

    @property
    def valid_continuations(self) -> list[Trajectory]:
        """Continuations without infrastructure failure."""
        return [one for one in self.continuations if one.outcome is not None and one.outcome.is_trainable]

    @property
    def success(self) -> MeanInterval | None:
        """Success with Wilson's interval; ``None`` if no continuation reports it."""
        known = [one.success for one in self.valid_continuations if one.success is not None]
        return wilson_interval(sum(known), len(known)) if known else None

    @property
    def reward(self) -> MeanInterval | None:
        """Mean return with a bootstrap interval; ``None`` if no continuation has one."""
        known = [one.reward for one in self.valid_continuations if one.reward is not None]
        return bootstrap_mean(known) if known else None

    def first_difference(self, continuation: Trajectory) -> tuple[int, str] | None:
        """Return the first turn, from 0, whose answer is not the stored episode's, and its text; ``None`` for none."""
        old, new = (dict(_answers(one)) for one in (self.episode, continuation))
        for turn in range(self.turn, len(new)):
            if new[turn] != old.get(turn):
                return turn, self.decode(new[turn])
        return (len(new), "") if len(new) < len(old) else None

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain JSON types."""
        return {
            "episode": self.episode.id,
            "task": self.episode.task_id,
            "environment": self.episode.environment,
            "turn": self.turn,
            "stored": {"reward": self.episode.reward, "success": self.episode.success},
            "success": None if self.success is None else self.success.to_json(),
            "reward": None if self.reward is None else self.reward.to_json(),
            "failed": len(self.continuations) - len(self.valid_continuations),
            "folder": str(self.folder),
            "continuations": [self._continuation_json(one) for one in self.continuations],
        }

    def _continuation_json(self, continuation: Trajectory) -> dict[str, Any]:
        difference = self.first_difference(continuation)
        return {
            "id": continuation.id,
            "reward": continuation.reward,
            "success": continuation.success,
            "turns": len(continuation.turns),
            "outcome": None if continuation.outcome is None else continuation.outcome.value,
            "error": continuation.error,
            "first_other_turn": None if difference is None else difference[0] + 1,
            "answer": None if difference is None else difference[1],
        }


def _answers(trajectory: Trajectory) -> Iterator[tuple[int, list[int]]]:
    """Yield the number and the tokens of each turn."""
    for sequence in trajectory.sequences:
        ids = sequence.ids_list()
        for turn in sequence.turns:
            yield turn.index, ids[turn.start : turn.end]


async def replay_episode(request: ReplayRequest, *, say: Callable[[str], None]) -> Replay:
    """Play the continuations, and store them in the run.

    Raises:
        UsageError: the task is not found, or a model or service does not exist.
        EnvironmentFailure: the environment does not repeat the episode.
        EngineError: the engine cannot be reached.
    """
    config = resolve_model(request.config)
    check_model(config)
    if config.curriculum.horizon is not None:
        say(
            "curriculum.horizon limited the turns of the run's episodes, but does not limit their continuations: set "
            f"agent.max_turns, now {config.agent.max_turns}, to curriculum/turns of the episode's step in metrics.jsonl"
        )
    episode = request.episode
    tasks = find_tasks(per_environment_configs(config), {SOLE: [episode.task_id]})
    task = replace(tasks[SOLE, episode.task_id], seed=episode.seed)
    folder = _new_folder(request)
    pool = build_env_pool(config, spec=resolve_environment(episode.environment))
    store = EpisodeStore(folder / EPISODES_FILE)
    found: list[Trajectory] = []
    try:
        async with open_policy(config, PolicyKind.ENGINE, folder) as policy:
            if not isinstance(policy, EngineEpisodePolicy):
                raise UsageError(
                    "a chat service cannot continue an episode from its tokens",
                    got=f"engine {config.engine.type}",
                    expected="an engine that samples tokens: local, vllm or sglang",
                )
            runner = build_runner(config, pool, policy, judge=build_judge(config.agent, folder=folder), retries=0)
            _check_repeatable(runner.loop, config)
            with pool.waits.report_stalls(config.rollout.stall_report_s, say):
                async for one in _continue(runner, request, task, episodes_at_once(config, PolicyKind.ENGINE)):
                    found.append(one)
                    number = int(one.id.rpartition("/")[2].partition(".")[0])
                    store.add(
                        EvaluatedEpisode(
                            task_id=task.id,
                            sample=number,
                            trajectory=one,
                            task=task_digest(task),
                            played_at=time.time(),
                        )
                    )
            decode = policy.renderer.encoder.decode
    finally:
        store.close()
        await pool.close()
    found.sort(key=lambda one: int(one.id.rpartition("/")[2].partition(".")[0]))
    return Replay(episode=episode, turn=request.turn, continuations=found, folder=folder, decode=decode)


async def _continue(
    runner: EpisodeRunner, request: ReplayRequest, task: Task, concurrency: int
) -> AsyncIterator[Trajectory]:
    """Play the continuations: one first, which takes a snapshot if the environment can, then the others together.

    If the scorer compares episodes, they are played together.
    """
    episode, turn = request.episode, request.turn
    seed = derive_seed("replay", request.seed, episode.id)
    plan = [
        Assignment(task=task, group_id=f"replay/{episode.id}", member=member, seed=seed)
        for member in range(request.samples)
    ]
    record, first = EpisodeRecords(), 0 if runner.scores_groups else 1
    async for one in play_all(continue_from(runner, episode, turn, records=record), plan[:first], concurrency=1):
        yield one
    others = continue_from(runner, episode, turn, restores=record)
    async for one in play_all(others, plan[first:], concurrency=concurrency):
        yield one


def _check_repeatable(loop: AgentLoop, config: Config) -> None:
    if not loop.is_deterministic:
        raise UsageError(
            f"episodes of the agent loop {config.agent.loop} cannot be continued from one of their turns",
            expected="a loop whose requests depend only on the episode",
        )


def _new_folder(request: ReplayRequest) -> Path:
    """Make the folder of the continuations."""
    name = re.sub(r"[^\w.-]+", "-", f"{request.episode.id}-turn-{request.turn}")
    base = request.run.path / REPLAYS
    folder = first_free(base / (name if number == 1 else f"{name}-{number}") for number in count(1))
    with writing(folder):
        folder.mkdir(parents=True)
    return folder
