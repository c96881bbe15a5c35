"""Evaluation with a real runner: order, concurrency, failures, and resuming after an interruption."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import pytest

from agentrl.agent_loop import AgentLoop, Episode
from agentrl.config import load_config
from agentrl.env import EnvironmentSpec, Isolation
from agentrl.errors import Outcome, UsageError
from agentrl.evaluation import periodic
from agentrl.evaluation.evaluate import PolicyKind, evaluate_panel
from agentrl.evaluation.panel import EpisodeStore, EvaluatedEpisode, Panel, assignments, choose_tasks
from agentrl.evaluation.session import make_request
from agentrl.message import Message, user
from agentrl.reward import GroupScorer, Score
from agentrl.rollout.env_pool import EnvPool
from agentrl.rollout.runner import EpisodeRunner
from agentrl.rollout.scripted_policies import ScriptedEpisodePolicy, ScriptedPolicy
from agentrl.task import SeedTasks, Task
from agentrl.trajectory import Trajectory


class Coin(gym.Env[str, str]):
    """Heads or tails; seeds that are told to break do."""

    observation_space = action_space = gym.spaces.Text(10)
    broken: frozenset[int] = frozenset()
    resets: list[int]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        assert seed is not None
        self.resets.append(seed)
        if seed in self.broken:
            raise RuntimeError("the coin is lost")
        self.side = "heads" if self.np_random.random() < 0.5 else "tails"
        return "Heads or tails?", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        won = action == self.side
        return self.side, float(won), True, False, {"success": won, "task_type": self.side}

    def admissible_actions(self) -> list[str]:
        return ["heads", "tails"]


class OneAction(AgentLoop):
    async def run(self, episode: Episode) -> None:
        conversation = episode.open([user(await episode.reset())])
        await episode.step((await conversation.generate()).text)

    def demonstrate(self, action: str) -> Message:
        return Message(role="assistant", content=action)


SOURCE = SeedTasks("coin", size=20)
PANEL = Panel(environment="coin/train", policy="random", model=None, n_tasks=6, samples=2, seed=0)


@pytest.fixture(autouse=True)
def _fresh_coin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Coin, "broken", frozenset())
    monkeypatch.setattr(Coin, "resets", [], raising=False)


@pytest.fixture
async def runner() -> AsyncIterator[EpisodeRunner]:
    spec = EnvironmentSpec(name="coin", make=Coin, tasks=lambda split: SOURCE, isolation=Isolation.INLINE)
    pool = EnvPool(spec)
    yield EpisodeRunner(pool=pool, loop=OneAction(), policy=ScriptedEpisodePolicy(ScriptedPolicy.RANDOM), retries=1)
    await pool.close()


async def test_every_slot_is_played_once_and_comes_in_order(runner: EpisodeRunner) -> None:
    result = await evaluate_panel(runner, SOURCE, PANEL, concurrency=3)
    expected = [(found.task.id, found.member) for found in assignments(choose_tasks(SOURCE, 6, 0), 2, 0)]
    assert [episode.slot for episode in result.episodes] == expected
    assert len(Coin.resets) == 12
    assert result.success is not None
    assert 0 < result.success.mean < 1
    assert set(result.by_task_type) == {"heads", "tails"}


async def test_a_source_that_is_too_small_does_not_shrink_the_panel(runner: EpisodeRunner) -> None:
    with pytest.raises(UsageError, match="got 6 tasks, expected at most 2"):
        await evaluate_panel(runner, SeedTasks("coin", size=2), PANEL, concurrency=3)


@pytest.mark.parametrize(
    ("source", "split", "tasks"), [(None, "valid_unseen", 69), (None, "train", 100), ("quickstart", "train", 256)]
)
def test_an_evaluation_without_a_number_plays_the_tasks_of_the_config_or_100_or_a_small_split(
    source: str | None, split: str, tasks: int
) -> None:
    words = [f"environment=household/{split}", "environment.options={size: tiny, rooms: [kitchen]}"]
    request = make_request(load_config(source, words), policy=PolicyKind.EXPERT, model=None)
    assert request.n_tasks == tasks


async def test_the_same_seed_gives_the_same_result_at_any_concurrency(runner: EpisodeRunner) -> None:
    results = [await evaluate_panel(runner, SOURCE, PANEL, concurrency=count) for count in (1, 8)]
    rewards = [[episode.trajectory.reward for episode in result.episodes] for result in results]
    assert rewards[0] == rewards[1]


async def test_machine_failures_are_tried_again_reported_and_count_in_no_estimate(
    runner: EpisodeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = choose_tasks(SOURCE, 6, 0)[2]
    monkeypatch.setattr(Coin, "broken", frozenset({broken.seed}))
    result = await evaluate_panel(runner, SOURCE, PANEL, concurrency=4)
    assert (result.failures, result.retries) == (2, 2)
    assert result.outcomes[Outcome.ENVIRONMENT_ERROR] == 2
    assert sum(found.n_tasks for found in result.by_task_type.values()) == 5


async def test_finished_episodes_are_found_and_failed_ones_are_played_again(
    runner: EpisodeRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "episodes.jsonl"
    tasks = choose_tasks(SOURCE, 6, 0)
    monkeypatch.setattr(Coin, "broken", frozenset({tasks[2].seed}))
    store = EpisodeStore(file)
    small = Panel(environment="coin/train", policy="random", model=None, n_tasks=4, samples=1, seed=0)
    before = await evaluate_panel(runner, SOURCE, small, concurrency=2, store=store)
    store.close()
    file.write_bytes(file.read_bytes() + b'{"task_id": "cut sho')

    monkeypatch.setattr(Coin, "broken", frozenset())
    Coin.resets.clear()
    store = EpisodeStore(file)
    after = await evaluate_panel(runner, SOURCE, PANEL, concurrency=2, store=store)
    store.close()
    new = [tasks[2], tasks[4], tasks[5], *tasks]
    assert sorted(Coin.resets) == sorted(task.seed for task in new)
    assert after.failures == 0
    assert after.episodes[0].to_record() == before.episodes[0].to_record()
    assert EpisodeStore(file).find(tasks[2], 0) is not None


async def test_what_stops_the_store_stops_the_evaluation_with_one_error(runner: EpisodeRunner, tmp_path: Path) -> None:
    class FullStore(EpisodeStore):
        def add(self, episode: EvaluatedEpisode) -> None:
            raise UsageError("no space left")

    with pytest.raises(UsageError, match="no space left"):
        await evaluate_panel(runner, SOURCE, PANEL, concurrency=4, store=FullStore(tmp_path / "e.jsonl"))


def test_a_larger_choice_begins_with_the_smaller_one() -> None:
    source = SeedTasks("world", size=50)
    assert choose_tasks(source, 30, seed=1)[:10] == choose_tasks(source, 10, seed=1)
    assert choose_tasks(source, 10, seed=1) != choose_tasks(source, 10, seed=2)


def test_impossible_panels_are_refused() -> None:
    with pytest.raises(UsageError, match="nothing to evaluate"):
        choose_tasks(SeedTasks("world", size=5), 0, seed=0)
    with pytest.raises(UsageError, match="got 6 tasks, expected at most 5"):
        choose_tasks(SeedTasks("world", size=5), 6, seed=0)
    with pytest.raises(UsageError, match="needs samples"):
        assignments(choose_tasks(SeedTasks("world", size=5), 1, seed=0), 0, 0)
    twin = Task(id="same", environment="world")
    with pytest.raises(UsageError, match=r"2 tasks of environment world have the same id: got 'same' among 2 tasks"):
        assignments([twin, twin], 1, 0)


class Places(GroupScorer):
    """Rewards the place in the group, and keeps the groups that it was given."""

    def __init__(self) -> None:
        self.groups: list[list[str]] = []

    async def score_group(self, trajectories: Sequence[Trajectory], task: Task) -> list[Score]:
        self.groups.append([trajectory.id for trajectory in trajectories])
        return [Score(reward=float(place)) for place in range(len(trajectories))]


@pytest.mark.parametrize("concurrency", [1, 8])
async def test_samples_of_a_task_are_compared_where_the_scorer_does_that(
    runner: EpisodeRunner, concurrency: int
) -> None:
    runner.scorer = scorer = Places()
    result = await evaluate_panel(runner, SOURCE, PANEL, concurrency=concurrency)
    assert [episode.trajectory.reward for episode in result.episodes] == [0.0] * 6 + [1.0] * 6
    expected = [[f"evaluation/{task.id}/{n}.0" for n in range(2)] for task in choose_tasks(SOURCE, 6, 0)]
    assert sorted(scorer.groups) == sorted(expected)


async def test_one_sample_cannot_be_compared(runner: EpisodeRunner) -> None:
    runner.scorer = Places()
    panel = Panel(environment="coin/train", policy="random", model=None, n_tasks=6, samples=1, seed=0)
    with pytest.raises(UsageError, match=r"Places compares the episodes of a group.*samples in evaluations"):
        await evaluate_panel(runner, SOURCE, panel, concurrency=3)
    assert Coin.resets == []


async def test_an_interrupted_comparison_plays_whole_groups_again(runner: EpisodeRunner, tmp_path: Path) -> None:
    runner.scorer = scorer = Places()
    file = tmp_path / "episodes.jsonl"
    store = EpisodeStore(file)
    whole = await evaluate_panel(runner, SOURCE, PANEL, concurrency=3, store=store)
    store.close()
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:-3]))  # of one task nothing, of another one sample is left
    scorer.groups.clear()
    store = EpisodeStore(file)
    again = await evaluate_panel(runner, SOURCE, PANEL, concurrency=3, store=store)
    store.close()
    assert len(scorer.groups) == 2
    assert [e.trajectory.reward for e in again.episodes] == [e.trajectory.reward for e in whole.episodes]
    scorer.groups.clear()
    await evaluate_panel(runner, SOURCE, PANEL, concurrency=3, store=EpisodeStore(file))
    assert scorer.groups == []


async def test_the_success_of_several_environments_is_weighted_as_they_are_played(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A warm start stops at it: the greater part counts three times as much, and an equal mean would be 0.375."""
    shares = {3.0: 0.5, 1.0: 0.25}

    class Engine:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        async def close(self) -> None:
            """Nothing."""

    async def success_in(env: Any, n_tasks: int) -> float:
        assert n_tasks == 4
        return shares[env.weight]

    async def closed(environments: Any) -> None:
        assert [env.weight for env in environments] == [3.0, 1.0]

    monkeypatch.setattr(periodic, "LocalEngine", Engine)
    monkeypatch.setattr(periodic, "build_run_environments", lambda *_: [SimpleNamespace(weight=w) for w in shares])
    monkeypatch.setattr(periodic, "close_run_environments", closed)
    monkeypatch.setattr(periodic, "_success_in", success_in)
    renderer: Any = SimpleNamespace(
        images=None, encoder=SimpleNamespace(decode=None), stop_token_ids=frozenset(), family=None
    )
    model: Any = None
    config = load_config(None, ["environment=guess_number"])
    assert await periodic.success_now(model, renderer, config, n_tasks=4) == (3 * 0.5 + 1 * 0.25) / 4
