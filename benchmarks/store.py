"""Stored episodes: cost of finding some of 100,000, with the index and by a full scan.

agentrl bench store
agentrl bench store episodes=10000 turns=8 tokens=100
"""

from __future__ import annotations

import multiprocessing
import random
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentrl.errors import Outcome
from agentrl.evaluation.panel import EpisodeStore, EvaluatedEpisode, read_episodes
from agentrl.message import Message, user
from agentrl.observe.trajectory_index import EpisodeFilter, TrajectoryIndex
from agentrl.observe.trajectory_store import TrajectoryStore, read_trajectories
from agentrl.rollout.finished_episodes import read_recoverable
from agentrl.trajectory import Source, TokenSequence, Trajectory, Turn

EPISODES_PER_STEP = 500
GROUP_SIZE = 8
SHOWN = 20
"""Episodes that `agentrl view` shows."""
SELECTIONS = {
    "newest": EpisodeFilter(),
    "of_one_step": EpisodeFilter(first_step=3, last_step=3),
    "failed": EpisodeFilter(success=False),
    "by_reward_and_length": EpisodeFilter(least_reward=0.2, most_reward=0.4, least_turns=3),
    "by_text": EpisodeFilter(text="bottle number 1234 "),
}
"""Filters that are measured."""


def run(episodes: int = 100_000, turns: int = 4, tokens: int = 40, folder: str | None = None) -> dict[str, Any]:
    """Return CPU seconds and memory of reading, indexing and finding episodes.

    Args:
        episodes: Number of stored episodes.
        turns: Turns of each.
        tokens: Sampled tokens per turn; observations have as many.
        folder: Folder of the stores, which are kept and reused; a temporary folder by default.
    """
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as temporary:
        place = Path(folder or temporary)
        store, evaluation = place / "trajectories", place / "episodes.jsonl"
        if not store.exists():
            write_store(store, episodes, turns, tokens)
            write_evaluation(evaluation, store, episodes // 10)
        for index in (store / ".index.sqlite", place / ".episodes.index.sqlite"):
            index.unlink(missing_ok=True)
        size = sum(file.stat().st_size for file in store.glob("*.jsonl"))
        figures: dict[str, Any] = {
            "store": {"episodes": episodes, "megabytes": size / 2**20},
            "read_all": _measure(lambda: len(list(read_trajectories(store))[-SHOWN:])),
            "build_index": _measure(lambda: TrajectoryIndex(store).close()),
            "open_index": _measure(lambda: TrajectoryIndex(store).close()),
            "view_newest": _measure(lambda: _view(store)),
            "recover": _measure(lambda: len(read_recoverable(store, first_step=episodes // EPISODES_PER_STEP))),
            "read_evaluation": _measure(lambda: len(list(read_episodes(evaluation)))),
            "index_evaluation": _measure(lambda: TrajectoryIndex(evaluation).close()),
            "reuse_evaluation": _measure(lambda: EpisodeStore(evaluation).close()),
        }
        figures["index_megabytes"] = (store / ".index.sqlite").stat().st_size / 2**20
        figures["select_cpu_ms"] = _select(store)
        return figures


def write_store(folder: Path, episodes: int, turns: int, tokens: int) -> None:
    """Write a store of episodes in groups, as a run does."""
    chance = random.Random(0)
    with TrajectoryStore(folder, step=1) as store:
        for number in range(episodes):
            if number and number % EPISODES_PER_STEP == 0:
                store.rotate(1 + number // EPISODES_PER_STEP)
            play(store, number, turns, tokens, chance)


def play(store: TrajectoryStore, number: int, turns: int, tokens: int, chance: random.Random) -> None:
    """Write one episode."""
    position, member = divmod(number, GROUP_SIZE)
    group, version = f"{position}-train-{position % 997}", number // EPISODES_PER_STEP
    sequence = TokenSequence()
    episode = Trajectory(
        id=f"{group}/{member}.0",
        task_id=f"train-{position % 997}",
        environment="household",
        seed=position,
        group_id=group,
        sequences=[sequence],
    )
    sequence.extend([chance.randrange(150_000) for _ in range(2 * tokens)], Source.PROMPT)
    messages = [user(f"Bring bottle number {number} to the kitchen.")]
    store.start(episode)
    for index in range(turns):
        start, ids = len(sequence), [chance.randrange(150_000) for _ in range(tokens)]
        sequence.extend_sampled(ids, logprobs=[-chance.random() for _ in ids], versions=[version] * tokens)
        turn = Turn(index=index, start=start, end=len(sequence), valid=chance.random() < 0.95)
        sequence.turns.append(turn)
        sequence.extend(ids, Source.OBSERVATION)
        answer = Message(role="assistant", content=f"go to shelf {chance.randrange(100)} of room {index}")
        messages += [answer, user(f"You see {chance.randrange(100)} things, and shelf {index} is closed.")]
        episode.answers.append(answer)
        episode.completions.append(answer.text)
        store.turn(episode, turn)
    episode.conversations.append(messages)
    episode.reward, episode.outcome = chance.random(), Outcome.FINISHED
    episode.success = episode.reward > 0.5
    store.end(episode)


def write_evaluation(file: Path, store: Path, episodes: int) -> None:
    """Write an evaluation's file with some of the episodes of a store."""
    written = EpisodeStore(file)
    for number, stored in zip(range(episodes), read_trajectories(store), strict=False):
        episode = EvaluatedEpisode(task_id=f"task-{number}", sample=0, trajectory=stored.trajectory, task="digest")
        written.add(episode)
    written.close()


def _view(store: Path) -> int:
    with TrajectoryIndex(store) as index:
        return len([index.read(row) for row in index.select(descending=True, limit=SHOWN)])


def _select(store: Path) -> dict[str, float]:
    """Return the CPU milliseconds of the first pages."""
    found = {}
    with TrajectoryIndex(store) as index:
        for name, where in SELECTIONS.items():
            began = time.process_time()
            rows = index.select(where, order="reward", descending=True, limit=SHOWN)
            assert rows, name
            found[name] = 1e3 * (time.process_time() - began)
        began = time.process_time()
        index.count(SELECTIONS["failed"])
        found["count_failed"] = 1e3 * (time.process_time() - began)
    return found


def _measure(work: Callable[[], object]) -> dict[str, float]:
    """Return the CPU seconds and the additional memory of some work, in its own process."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    child = context.Process(target=_report, args=(work, sending))
    child.start()
    figures: dict[str, float] = receiving.recv()
    child.join()
    return figures


def _report(work: Callable[[], object], sending: Any) -> None:
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    work()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    sending.send({"cpu_s": time.process_time() - began, "megabytes": memory / 1024})
