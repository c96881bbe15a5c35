"""Groups: admission by staleness, batches in a fixed order, filters, failures, saving and going on."""

import asyncio
import json
import random
import re
from collections import Counter

import pytest
from groups_here import Player, make, positions

from agentrl.errors import EnvironmentFailure, Outcome, TrainingError, UsageError
from agentrl.observe.trajectory_store import GroupEnd
from agentrl.rollout.group_metrics import environment_metrics
from agentrl.rollout.groups import Group
from agentrl.rollout.scheduler import MAX_WASTED_BATCHES, MIN_FAILED_GROUPS
from agentrl.rollout.task_order import TaskSampler
from agentrl.task import SeedTasks, TaskCursor
from agentrl.trajectory import Trajectory

__all__ = ["make"]


def oldest_version(group):
    return min((t.oldest_version for t in group.trainable if t.oldest_version is not None), default=None)


@pytest.mark.parametrize(("staleness", "started"), [(0, 3), (1, 6), (2, 9)])
async def test_only_as_much_starts_as_staleness_allows(make, staleness, started):
    player = Player()
    player.blocked = asyncio.Event()
    scheduler = make(player, max_staleness=staleness, group_size=1)
    scheduler.start_episodes()
    await asyncio.sleep(0)
    assert player.running == started
    scheduler.set_version(1)
    scheduler.start_episodes()
    await asyncio.sleep(0)
    assert player.running == started + 3


async def test_an_error_of_the_task_source_is_raised_by_the_next_batch_only(make, monkeypatch):
    def fail():
        raise ValueError("no more tasks")

    scheduler = make(max_staleness=1)
    await scheduler.next_batch()
    scheduler.set_version(1)
    monkeypatch.setattr(scheduler.tasks, "next", fail)
    scheduler.start_episodes()  # the run finishes its step after this
    with pytest.raises(EnvironmentFailure, match="ValueError: no more tasks"):
        await scheduler.next_batch()


async def test_the_trainer_sets_the_pace(make):
    scheduler = make(max_staleness=1)
    first = await scheduler.next_batch()
    assert positions(first) == [0, 1, 2]
    await scheduler.next_batch()
    third = asyncio.create_task(scheduler.next_batch())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not third.done()
    scheduler.set_version(1)
    scheduler.start_episodes()
    assert positions(await third) == [6, 7, 8]


@pytest.mark.parametrize("shuffle_seed", range(5))
async def test_without_staleness_nothing_depends_on_who_is_faster(make, shuffle_seed):
    generator = random.Random(shuffle_seed)
    player = Player(pauses=lambda task_id, member: generator.randrange(30))
    scheduler = make(player, group_size=4)
    seen = []
    for version in range(1, 4):
        groups = await scheduler.next_batch()
        seen += [(g.position, [t.id for t in g.trajectories]) for g in groups]
        player.version = version
        scheduler.set_version(version)
    assert [position for position, _ in seen] == list(range(9))
    cursor = TaskCursor(SeedTasks("w", size=1000), seed=0)
    for position, ids in seen:
        task = cursor.next()
        assert ids == [f"{position}-{task.id}/{member}.0" for member in range(4)]


@pytest.mark.parametrize("shuffle_seed", range(5))
async def test_filtered_groups_are_replaced_by_the_same_ones_in_any_order(make, shuffle_seed):
    generator = random.Random(shuffle_seed)
    player = Player(
        decide=lambda task_id, member: (Outcome.FINISHED, float(member == 0 and int(task_id[6:]) % 2)),
        pauses=lambda task_id, member: generator.randrange(30),
    )
    scheduler = make(player, keep=lambda group: len({t.reward for t in group.trajectories}) > 1)
    kept = positions(await scheduler.next_batch())
    cursor = TaskCursor(SeedTasks("w", size=1000), seed=0)
    odd = [position for position in range(40) if int(cursor.next().id[6:]) % 2]
    assert kept == odd[:3]
    assert player.counters.groups_filtered == odd[2] + 1 - 3
    assert player.counters.discarded_engine_s == 2 * 2.0 * player.counters.groups_filtered


async def test_seeds_follow_from_the_run_and_the_place(make):
    first, again, other = Player(), Player(), Player()
    for player, seed in ((first, 0), (again, 0), (other, 1)):
        await make(player, seed=seed).next_batch()
    assert first.seeds == again.seeds
    assert set(first.seeds.values()).isdisjoint(other.seeds.values())


async def test_capacity_bounds_the_episodes_in_flight(make):
    player = Player(pauses=lambda task_id, member: 3)
    scheduler = make(player, group_size=8, batch=5, max_concurrent=6)
    scheduler.start_episodes()
    assert len(scheduler._running) == 1, "its eight episodes are more than there are places"
    assert len(await scheduler.next_batch()) == 5
    assert player.most_running == 6


async def test_failed_members_leave_the_statistics_and_failed_groups_are_replaced(make):
    def decide(task_id, member):
        failed = int(task_id[6:]) % 2 or member == 0
        return (Outcome.ENGINE_ERROR, None) if failed else (Outcome.FINISHED, 1.0)

    player = Player(decide)
    scheduler = make(player, batch=10)
    groups = await scheduler.next_batch()
    assert all([t.id[-3:] for t in group.trainable] == ["1.0"] for group in groups)
    assert all(len(group.trajectories) == 2 for group in groups)
    assert player.counters.groups_failed > 0


async def test_groups_of_one_are_replaced_where_members_are_compared(make):
    def decide(task_id, member):
        return (Outcome.ENGINE_ERROR, None) if member and int(task_id[6:]) % 2 else (Outcome.FINISHED, 1.0)

    player = Player(decide)
    groups = await make(player, batch=10, min_members=2).next_batch()
    assert all(len(group.trainable) == 2 for group in groups)
    assert player.counters.groups_failed > 0


async def test_nothing_but_groups_of_one_stops_a_run_that_compares(make):
    player = Player(lambda task_id, member: (Outcome.ENGINE_ERROR, None) if member else (Outcome.FINISHED, 1.0))
    with pytest.raises(TrainingError, match=r"fewer than 2 episodes to train on: got engine_error in .*/1\.0"):
        await make(player, min_members=2).next_batch()


@pytest.mark.parametrize(("batch", "failures"), [(1, MIN_FAILED_GROUPS), (6, 6)])
async def test_nothing_but_failures_stops_the_run(make, batch, failures):
    scheduler = make(Player(lambda task_id, member: (Outcome.ENVIRONMENT_ERROR, None)), batch=batch)
    with pytest.raises(TrainingError, match=f"{failures} groups in a row have no episode to train on"):
        await scheduler.next_batch()


@pytest.mark.parametrize("batch", [1, 3])
async def test_nothing_but_equal_returns_stops_the_run(make, batch):
    scheduler = make(batch=batch, keep=lambda group: False)
    with pytest.raises(TrainingError, match=f"{batch * MAX_WASTED_BATCHES} groups in a row were not worth") as caught:
        await scheduler.next_batch()
    assert re.search(r"got rewards from \S+ to \S+ in the latest of them", str(caught.value))
    assert "algorithm.selection" in str(caught.value)


async def test_what_the_user_must_change_reaches_the_trainer(make):
    scheduler = make(Player(lambda task_id, member: (UsageError("wrong key"), None)))
    with pytest.raises(UsageError, match="wrong key"):
        await scheduler.next_batch()


async def test_groups_that_waited_too_long_are_dropped(make):
    player = Player()
    scheduler = make(player, max_staleness=1, batch=2, group_size=1)
    assert positions(await scheduler.next_batch()) == [0, 1]
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(scheduler.state_dict()["finished"]) == 2
    player.version = 2
    scheduler.set_version(2)
    groups = await scheduler.next_batch()
    assert positions(groups) == [4, 5]
    assert player.counters.groups_stale == 2
    assert player.counters.discarded_engine_s == 2 * 2.0
    assert [oldest_version(group) for group in groups] == [2, 2]


async def test_nothing_but_stale_groups_stops_the_run(make):
    class Stuck(Player):
        """Its engine never serves new weights."""

        version = property(lambda self: 0, lambda self, version: None)

    scheduler = make(Stuck(), max_staleness=1, batch=1, group_size=1)
    scheduler.set_version(2)
    with pytest.raises(TrainingError, match=f"{MAX_WASTED_BATCHES} groups in a row were too stale"):
        await scheduler.next_batch()


async def test_a_saved_scheduler_goes_on(make):
    player = Player(pauses=lambda task_id, member: 0 if task_id.endswith("1") else member * 1000)
    scheduler = make(player, max_staleness=2, batch=2, group_size=2)
    scheduler.start_episodes()
    for _ in range(10):
        await asyncio.sleep(0)
    state = json.loads(json.dumps(scheduler.state_dict()))
    assert [len(record["members"]) for record in state["unfinished"]].count(1) > 0

    restored = make(Player(), max_staleness=2, batch=2, group_size=2)
    restored.load_state_dict(state)
    groups = [*await restored.next_batch(), *await restored.next_batch(), *await restored.next_batch()]
    assert sorted(positions(groups)) == list(range(6))
    undisturbed = make(Player(), max_staleness=2, batch=2, group_size=2)
    await undisturbed.next_batch()
    again = restored.runners[""].seeds
    assert again
    assert again.items() <= undisturbed.runners[""].seeds.items()


async def train(scheduler, versions):
    """Take a batch per version, as a trainer does."""
    batches = []
    for version in versions:
        batches.append(positions(await scheduler.next_batch()))
        scheduler.runners[""].version = version
        scheduler.set_version(version)
    return batches


async def test_synchronous_state_is_exact(make):
    whole, first, second = make(), make(), make()
    batches = await train(whole, [1, 2, 3, 4])
    assert await train(first, [1, 2]) == batches[:2]
    second.load_state_dict(first.state_dict())
    second.runners[""].version = 2
    assert await train(second, [3, 4]) == batches[2:]


@pytest.mark.parametrize("batch", [1, 5])
async def test_a_run_may_go_on_with_batches_of_another_size(make, batch):
    first, second = make(batch=3), make(batch=batch)
    await train(first, [1, 2])
    second.load_state_dict(first.state_dict())
    second.runners[""].version = 2
    assert await train(second, [3, 4]) == [list(range(6, 6 + batch)), list(range(6 + batch, 6 + 2 * batch))]
    assert len(second.runners[""].seeds) == 2 * batch * second.group_size


async def test_a_run_does_not_go_on_with_groups_of_another_size(make):
    experts = {"": {"expert-0": Player()}}
    state = make(group_size=2, extra_runners=experts).state_dict()
    with pytest.raises(UsageError, match="got 3 episodes of the policy in each group, expected 2") as raised:
        make(group_size=3, extra_runners=experts).load_state_dict(state)
    assert "algorithm.group_size 3" not in str(raised.value)  # which counts the experts' episodes, too
    assert raised.value.hint == "set algorithm.group_size and algorithm.expert.members to their previous values"


async def test_an_engine_that_keeps_its_old_weights_stops_the_run(make):
    scheduler = make(batch=1)
    await scheduler.next_batch()
    scheduler.set_version(1)
    with pytest.raises(TrainingError, match="tokens that are 1 versions old at version 1"):
        await scheduler.next_batch()


async def test_closing_cancels_what_runs(make):
    player = Player()
    player.blocked = asyncio.Event()
    scheduler = make(player)
    scheduler.start_episodes()
    await asyncio.sleep(0)
    assert player.running == 6
    await scheduler.close()
    assert player.running == 0
    scheduler.start_episodes()
    await asyncio.sleep(0)
    assert player.running == 0


async def test_the_trainers_wait_is_registered(make):
    player = Player()
    player.blocked = asyncio.Event()
    waiting = asyncio.create_task(make(player).next_batch())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert "groups       3 complete groups" in player.waits.stall_report(0.0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


def test_a_group_is_restored_exactly():
    draw = TaskSampler({"w": SeedTasks("w")}, seed=0).next()
    group = Group(position=4, draw=draw, size=2)
    group.members[1] = Trajectory(id="a", task_id="t", environment="w", seed=1, group_id="g")
    record = json.loads(json.dumps(group.to_record()))
    assert Group.from_record(record, draw=draw, size=2) == group
    assert group.id == f"4-w-{draw.task.id}"
    assert not group.is_complete
    assert oldest_version(group) is None


async def test_extra_rollouts_are_no_members(make):
    greedy = Player(lambda task_id, member: (Outcome.FINISHED, 0.25))
    scheduler = make(group_size=2, batch=2, extra_runners={"": {"greedy": greedy, "expert-0": Player()}})
    groups = await scheduler.next_batch()
    for group in groups:
        assert [t.id for t in group.trajectories] == [f"{group.id}/0.0", f"{group.id}/1.0"]
        assert [group.extra_rollouts[name].id for name in ("greedy", "expert-0")] == [
            f"{group.id}/2.0",
            f"{group.id}/3.0",
        ]
        assert [t.id for t in group.experts] == [f"{group.id}/3.0"]
        assert group.outcome().episodes == 2
    assert len(greedy.seeds) == 2


async def test_a_group_fails_with_an_extra_rollout(make):
    lost = [True]

    def decide(task_id, member):
        return (Outcome.ENGINE_ERROR, None) if lost and lost.pop() else (Outcome.FINISHED, 1.0)

    player = Player()
    scheduler = make(player, batch=2, extra_runners={"": {"greedy": Player(decide)}})
    groups = await scheduler.next_batch()
    assert player.counters.groups_failed == 1
    assert positions(groups) == [1, 2]


async def test_an_extra_rollout_that_always_fails_ends_the_run_with_its_error(make):
    lost = Player(lambda task_id, member: (Outcome.ENGINE_ERROR, None))
    scheduler = make(batch=2, extra_runners={"": {"greedy": lost}})
    with pytest.raises(TrainingError, match=r"4 groups in a row have no episode of greedy.*got engine_error in"):
        await scheduler.next_batch()


async def test_extra_rollouts_are_saved_and_missing_ones_are_played_later(make):
    slow = Player()
    slow.blocked = asyncio.Event()
    first = make(max_staleness=1, batch=1, extra_runners={"": {"greedy": Player(), "expert-0": slow}})
    waiting = asyncio.create_task(first.next_batch())
    for _ in range(20):
        await asyncio.sleep(0)
    state = json.loads(json.dumps(first.state_dict()))
    waiting.cancel()
    assert [sorted(group["beside"]) for group in state["unfinished"]] == [["greedy"], ["greedy"]]
    greedy, expert = Player(), Player()
    second = make(max_staleness=1, batch=1, extra_runners={"": {"greedy": greedy, "expert-0": expert}})
    second.load_state_dict(state)
    (group,) = await second.next_batch()
    assert (group.position, sorted(group.extra_rollouts)) == (0, ["expert-0", "greedy"])
    assert (len(greedy.seeds), len(expert.seeds)) == (0, 2)


class Mixed(Player):
    """Members of one group are sampled under versions of their own."""

    def __init__(self, versions, decide=None):
        super().__init__(decide)
        self.versions = versions

    async def run(self, task, *, group_id, member, seed, in_group=False):
        self.version = self.versions(int(group_id.partition("-")[0]), member)
        return await super().run(task, group_id=group_id, member=member, seed=seed, in_group=in_group)


@pytest.mark.parametrize("oldest", [0, 1])
async def test_a_group_is_as_stale_as_its_oldest_token(make, oldest):
    """Members 0 and 2 are of the newest version; only member 1 of group 2 may be too old."""
    player = Mixed(lambda position, member: oldest if (position, member) == (2, 1) else 3)
    scheduler = make(player, max_staleness=2, batch=2, group_size=3, version=3)
    scheduler.used = 6
    assert positions(await scheduler.next_batch()) == [0, 1]
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(scheduler.state_dict()["finished"]) == 4
    groups = await scheduler.next_batch()
    assert positions(groups) == ([2, 3] if oldest == 1 else [3, 4])
    assert player.counters.groups_stale == (oldest == 0)
    assert oldest_version(groups[0]) == (oldest if oldest == 1 else 3)


async def test_failed_and_unscored_members_make_no_group_stale(make):
    def decide(task_id, member):
        return [(Outcome.FINISHED, 1.0), (Outcome.ENGINE_ERROR, None), (Outcome.FINISHED, None)][member]

    player = Mixed(lambda position, member: 5 if member == 0 else 0, decide)
    scheduler = make(player, group_size=3, batch=2, version=5)
    scheduler.used = 10
    groups = await scheduler.next_batch()
    assert [oldest_version(group) for group in groups] == [5, 5]
    assert [[t.id[-3:] for t in group.trainable] for group in groups] == [["0.0"], ["0.0"]]
    assert player.counters.groups_stale == 0


async def test_unscored_episodes_do_not_train(make):
    unscored = Player(lambda task_id, member: (Outcome.FINISHED, None if member else 1.0))
    (group,) = await make(unscored, batch=1).next_batch()
    assert (len(group.trainable), group.outcome().episodes) == (1, 1)
    with pytest.raises(
        TrainingError, match=r"fewer than 2 episodes to train on: got None from every reward function for .*/1\.0"
    ):
        await make(unscored, min_members=2).next_batch()
    nobody = Player(lambda task_id, member: (Outcome.FINISHED, None))
    with pytest.raises(TrainingError, match="no episode to train on"):
        await make(nobody).next_batch()
    assert nobody.counters.groups_failed >= MIN_FAILED_GROUPS


async def test_a_group_without_a_score_of_an_extra_rollout_fails(make):
    scored = iter([None, None])
    greedy = Player(lambda task_id, member: (Outcome.FINISHED, next(scored, 0.5)))
    player = Player()
    groups = await make(player, batch=2, extra_runners={"": {"greedy": greedy}}).next_batch()
    assert positions(groups) == [2, 3]
    assert player.counters.groups_failed == 2


async def test_only_consecutive_failed_or_filtered_groups_end_a_run(make):
    """Three failures, a good group, three failures, … never end it; nor do filtered groups between good ones."""
    results = {0: (Outcome.FINISHED, 1.0)}
    failing = Player(lambda task_id, member: (Outcome.ENGINE_ERROR, None))
    failing.decide = lambda task_id, member: results.get(
        failing.count.setdefault(task_id, len(failing.count)) % MIN_FAILED_GROUPS, (Outcome.ENGINE_ERROR, None)
    )
    failing.count = {}
    scheduler = make(failing, batch=4, max_concurrent=1, group_size=1)
    assert len(await scheduler.next_batch()) == 4
    assert failing.counters.groups_failed == 3 * (MIN_FAILED_GROUPS - 1)

    seen = []
    wasteful = make(
        batch=1,
        max_concurrent=1,
        group_size=1,
        keep=lambda group: seen.append(group) or len(seen) % MAX_WASTED_BATCHES == 0,
    )
    for version in range(1, 4):
        assert len(await wasteful.next_batch()) == 1
        wasteful.runners[""].version = version
        wasteful.set_version(version)
    assert wasteful.runners[""].counters.groups_filtered == 3 * (MAX_WASTED_BATCHES - 1)


async def test_what_is_counted_of_groups_adds_up(make):
    def decide(task_id, member):
        kind = int(task_id[6:]) % 3
        return (Outcome.ENGINE_ERROR, None) if kind == 0 else (Outcome.FINISHED, float(member * (kind == 1)))

    player = Player(decide)
    scheduler = make(player, batch=4, keep=rewards_differ_in)
    for version in range(1, 4):
        await scheduler.next_batch()
        player.version = version
        scheduler.set_version(version)
    counters = player.counters
    assert counters.groups_delivered == 12
    gone = counters.groups_delivered + counters.groups_failed + counters.groups_filtered
    state = scheduler.state_dict()
    assert scheduler.tasks.position == gone + len(state["unfinished"]) + len(state["finished"])
    assert scheduler.used == 12
    assert min(counters.groups_failed, counters.groups_filtered) > 0


async def test_it_is_told_what_became_of_each_group(make):
    def decide(task_id, member):
        kind = int(task_id[6:]) % 3
        failed = kind == 0 and member == 1
        return (Outcome.ENGINE_ERROR, None) if failed else (Outcome.FINISHED, float(member * (kind == 1)))

    player = Player(decide)
    scheduler = make(player, batch=2, max_staleness=2, keep=rewards_differ_in, min_members=2)
    for version in range(1, 4):
        for group in await scheduler.next_batch():
            scheduler.record_end(group, GroupEnd.TRAINED)
        player.version = version
        scheduler.set_version(version)
    await scheduler.close()
    scheduler.record_left_over()
    ends = player.observer.ends
    assert ends.keys() == set(range(scheduler.tasks.position)), "every group that was started is named"
    counts = Counter(end for end, _ in ends.values())
    assert counts[GroupEnd.TRAINED] == 6
    assert counts[GroupEnd.FAILED] == player.counters.groups_failed > 0
    assert counts[GroupEnd.FILTERED] == player.counters.groups_filtered > 0
    assert {episodes for end, episodes in ends.values() if end is not GroupEnd.LEFT_OVER} == {2}


async def test_a_stale_group_is_named(make):
    player = Player()
    scheduler = make(player, batch=1, max_staleness=1, batch_order="greedy")
    await scheduler.next_batch()
    await asyncio.gather(*scheduler._episodes)
    for version in (1, 2, 3):
        scheduler.set_version(version)
    player.version = 3
    await scheduler.next_batch()
    assert GroupEnd.STALE in {end for end, _ in player.observer.ends.values()}


def test_the_metrics_of_an_environment_are_of_its_own_groups():
    tasks = TaskSampler({"w": SeedTasks("w"), "other": SeedTasks("other")}, seed=0)
    groups = []
    for position, rewards in enumerate([(1.0, 1.0), (0.0, 1.0), (0.5, 0.5), (0.0, None), (1.0, 0.0), (1.0, 0.0)]):
        group = Group(position=position, draw=tasks.next(), size=2)
        for member, reward in enumerate(rewards):
            trajectory = Trajectory(id=f"{member}", task_id="t", environment="w", seed=1, group_id="g")
            trajectory.outcome, trajectory.reward = Outcome.FINISHED, reward
            group.members[member] = trajectory
        groups.append(group)
    metrics = environment_metrics(groups, has_signal=rewards_differ_in)
    for label in ("w", "other"):
        own = [group for group in groups if group.draw.environment == label]
        rewards = [t.reward for group in own for t in group.trainable]
        assert metrics[f"env/{label}/groups"] == len(own) > 0
        equal = [len({t.reward for t in group.trainable}) == 1 for group in own]
        assert metrics[f"env/{label}/zero_variance"] == sum(equal)
        assert metrics[f"env/{label}/reward"] == pytest.approx(sum(rewards) / len(rewards))


def rewards_differ_in(group):
    return len({trajectory.reward for trajectory in group.trainable}) > 1


def ranked_player():
    def decide(task_id, member):
        return (Outcome.ENGINE_ERROR if member == 1 else Outcome.FINISHED), None

    player = Player(decide)
    player.scores_groups = True
    return player


async def test_a_compared_group_is_scored_when_all_its_episodes_have_ended(make):
    player = ranked_player()
    scheduler = make(player, group_size=3, batch=2)
    groups = await scheduler.next_batch()
    assert [[t.reward for t in group.trajectories] for group in groups] == [[0.0, None, 1.0]] * 2
    assert sorted(names for _, names in player.scored) == [[f"{group.id}/0.0", f"{group.id}/2.0"] for group in groups]


async def test_groups_that_are_being_scored_take_no_places(make):
    player = ranked_player()
    player.scoring = asyncio.Event()
    scheduler = make(player, group_size=3, batch=4, max_concurrent=1)
    waiting = asyncio.create_task(scheduler.next_batch())
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(player.seeds) == 4 * 3, "all groups have been played while the first ones wait for their scores"
    assert player.most_running == 1
    player.scoring.set()
    assert positions(await waiting) == [0, 1, 2, 3]


async def test_a_group_saved_during_its_scoring_is_scored_after_a_resume(make):
    player = ranked_player()
    player.scoring = asyncio.Event()
    scheduler = make(player, group_size=3, batch=2)
    scheduler.start_episodes()
    for _ in range(20):
        await asyncio.sleep(0)
    state = json.loads(json.dumps(scheduler.state_dict()))
    await scheduler.close()
    assert [len(record["members"]) for record in state["unfinished"]] == [3, 3]
    assert player.scored == []
    again = ranked_player()
    restored = make(again, group_size=3, batch=2)
    restored.load_state_dict(state)
    groups = await restored.next_batch()
    assert [[t.reward for t in group.trajectories] for group in groups] == [[0.0, None, 1.0]] * 2
    assert len(again.scored) == 2
    assert again.seeds == {}  # nothing was played again
