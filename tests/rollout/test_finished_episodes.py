"""Which finished episodes of a killed run are used."""

import asyncio
from dataclasses import replace

import pytest
from groups_here import Player, make

from agentrl.errors import Outcome
from agentrl.observe.trajectory_store import TrajectoryStore
from agentrl.rollout.events import RolloutObserver
from agentrl.rollout.finished_episodes import RecoveredEpisodes, group_position, read_recoverable
from agentrl.rollout.groups import Group
from agentrl.rollout.journal import JournalFolder
from agentrl.rollout.journal_file import file_name
from agentrl.rollout.task_order import TaskSampler
from agentrl.task import SeedTasks
from agentrl.trajectory import Source, TokenSequence, Trajectory, Turn

__all__ = ["make"]


def episode(group_id, member=0, attempt=0, versions=(3,), adapter=None):
    sequence = TokenSequence()
    sequence.extend([1], Source.PROMPT)
    sequence.extend_sampled([2] * len(versions), logprobs=[-1.0] * len(versions), versions=list(versions))
    sequence.turns.append(Turn(index=0, start=1, end=len(sequence), adapter=adapter))
    return Trajectory(
        id=f"{group_id}/{member}.{attempt}",
        task_id=group_id.rpartition("-")[2],
        environment="e",
        seed=0,
        group_id=group_id,
        sequences=[sequence],
    )


def test_an_episode_is_taken_once_and_the_last_attempt_counts():
    first, second = episode("4-a"), episode("4-a", attempt=1)
    found = RecoveredEpisodes([first, second])
    assert len(found) == 1
    assert found.take("4-a", 0) is second
    assert found.take("4-a", 0) is None
    assert found.take("4-a", 1) is None


def test_trainable_episodes_of_the_last_steps_are_read(tmp_path):
    assert len(read_recoverable(tmp_path / "none", first_step=1)) == 0
    with TrajectoryStore(tmp_path, step=1) as store:
        for step, group, outcome in ((1, "4-a", "finished"), (2, "5-a", "finished"), (2, "6-a", "engine_error")):
            store.rotate(step)
            one = replace(episode(group), outcome=Outcome(outcome), reward=1.0 if outcome == "finished" else None)
            store.start(one)
            store.end(one)
    found = read_recoverable(tmp_path, first_step=2)
    assert [found.take(group, 0) is not None for group in ("4-a", "5-a", "6-a")] == [False, True, False]


def test_only_unfinished_and_later_groups_are_kept():
    found = RecoveredEpisodes(map(episode, ["3-train-a", "4-train-b", "5-train-c", "evaluation/train-d"]))
    found.keep_groups_from(5, ["3-train-a"])
    assert [found.take(name, 0) is None for name in ("3-train-a", "4-train-b", "5-train-c")] == [False, True, False]
    assert len(found) == 0


@pytest.mark.parametrize(("versions", "kept"), [((2, 3), True), ((3, 4), False), ((4, 3), False), ((), True)])
def test_tokens_of_newer_weights_are_not_used(versions, kept):
    found = RecoveredEpisodes([episode("5-a", versions=versions)])
    found.keep_versions_until(3, {})
    assert (found.take("5-a", 0) is not None) is kept


def test_a_tokens_version_counts_by_its_own_adapter():
    episodes = [episode("5-a", adapter="one"), episode("6-a", adapter="two"), episode("7-a", adapter="gone")]
    found = RecoveredEpisodes(episodes)
    found.keep_versions_until(9, {"one": 3, "two": 2})
    assert [found.take(name, 0) is not None for name in ("5-a", "6-a", "7-a")] == [True, False, False]


async def test_a_group_that_its_scorer_compared_is_recovered_as_a_whole_only(make, tmp_path):
    waiting = make(Player(pauses=lambda task_id, member: 1000), max_staleness=1, batch=1)
    waiting.start_episodes()
    state = waiting.state_dict()
    await waiting.close()
    player = Player()
    player.scores_groups, player.observer = True, RolloutObserver()
    restored = make(player, max_staleness=1, batch=2)
    restored.load_state_dict(state)
    whole, part = (group.id for group in restored._to_restart)
    found = [episode(whole, member=0), episode(whole, member=1), episode(part, member=0)]
    found = [
        replace(one, sequences=[], outcome=Outcome.FINISHED, reward=5.0 + number) for number, one in enumerate(found)
    ]
    assert restored.recover(RecoveredEpisodes(found), JournalFolder(tmp_path, lambda: 0.0, print)) == 3
    first, second = await restored.next_batch()
    assert [trajectory.reward for trajectory in first.trajectories] == [5.0, 6.0], "its scores are kept"
    assert [trajectory.reward for trajectory in second.trajectories] == [0.0, 1.0]
    assert {(part, 0), (part, 1)} <= player.seeds.keys()
    assert whole not in {group_id for group_id, _ in player.seeds}
    assert whole.rpartition("-")[2] not in [task_id for task_id, _ in player.scored]


async def test_members_that_the_checkpoint_holds_are_neither_recovered_nor_counted(make, tmp_path):
    scheduler = make(Player(pauses=lambda task_id, member: 1000 * member), max_staleness=1, batch=1)
    scheduler.start_episodes()
    for _ in range(10):
        await asyncio.sleep(0)
    state = scheduler.state_dict()
    first, second = (f"{group['position']}-{group['members'][0][1]['task_id']}" for group in state["unfinished"])
    restored = make(Player(), max_staleness=1, batch=1)
    restored.load_state_dict(state)
    held, missing = episode(first, member=0, versions=(0,)), episode(second, member=1, versions=(0,))
    journals = JournalFolder(tmp_path, lambda: 0.0, print)
    for player in (f"{first}/0", f"{first}/1", "0-earlier/0"):
        name = file_name(f"{player}.0")
        journals.writer.begin(name, {"kind": "start", "id": f"{player}.0"})
        journals.writer.append(name, {"kind": "answer", "token_ids": [1], "logprobs": [-1.0], "versions": [0]})
    journals.writer.flush()
    assert restored.recover(RecoveredEpisodes([held, missing]), journals) == 1
    journals.writer.flush()
    assert [file.name for file in tmp_path.iterdir()] == [file_name(f"{first}/1.0")]
    for player in (f"{first}/0", f"{first}/1"):
        journals.claim(player)
        journals.begin(f"{player}.0")
    assert [journal.recorded is None for journal in journals.active.values()] == [True, False]


@pytest.mark.parametrize("stage", [0, 1])
def test_an_episode_of_another_stage_is_not_recovered(stage):
    """After a kill, an asynchronous run may draw the task of a position in another stage than before."""
    sampler = TaskSampler({"": SeedTasks("w"), "~1": SeedTasks("w")}, seed=0, stages={"": [1]})
    state = sampler.state_dict()
    played = Group(position=0, draw=sampler.next(), size=1)
    sampler.load_state_dict(state)
    for _ in range(stage):
        sampler.learn([])
    drawn = Group(position=0, draw=sampler.next(), size=1)
    assert (drawn.task, drawn.draw.stage, group_position(drawn.id)) == (played.task, stage, 0)
    assert RecoveredEpisodes([episode(played.id)]).holds_group(drawn.id, 1) is (stage == 0)
