"""Members of groups in episodes of several agents: numbers computed by hand, and one agent as ever."""

import copy
import dataclasses

import pytest
import torch
from support.trainers import state_of

from agentrl.algorithms.advantages import dr_grpo, grpo, reinforce
from agentrl.config.config import AlgorithmConfig, TrainerConfig
from agentrl.errors import LedgerError, Outcome
from agentrl.observe.trajectory_record import trajectory_from_record, trajectory_record
from agentrl.training.batch import StepExtras, select, skipped_metrics, step_batch
from agentrl.training.rewards import RewardShaping
from agentrl.training.roles import role_extras, role_members
from agentrl.training.trainer import Trainer
from agentrl.trajectory import SOLE_ROLE, Source, TokenSequence, Trajectory, Turn


def episode(member, *turns, verdict=None, group="g"):
    """Turns of (role, reward for all, own reward); every role has one sequence of one sampled token a turn."""
    trajectory = Trajectory(
        id=f"{group}/{member}", task_id="t", environment="e", seed=0, group_id=group, outcome=Outcome.FINISHED
    )
    sequences = {}
    for index, (role, shared, own) in enumerate(turns):
        sequence = sequences.setdefault(role, TokenSequence())
        if not sequence.turns:
            trajectory.sequences.append(sequence)
        sequence.extend([5, 6], Source.OBSERVATION if sequence.turns else Source.PROMPT)
        start = len(sequence)
        sequence.extend_sampled([7], logprobs=[-1.0], versions=[0])
        turn = Turn(index=index, start=start, end=start + 1, role=role, reward=shared + own, own_reward=own)
        sequence.turns.append(turn)
    total = sum(shared + own for _, shared, own in turns)
    trajectory.reward = total if verdict is None else verdict
    return trajectory


def batch_of(*trajectories):
    members = select(role_members(trajectories), compare_groups=True)
    return step_batch(members, RewardShaping({}, max_tokens=100))


def by_role(batch, values):
    found = {}
    for token, value in enumerate(values.tolist()):
        member = batch.trajectories[int(batch.episodes.token_episode[token])]
        found.setdefault(member.id, []).append(value)
    return found


def test_each_role_has_a_return_and_a_baseline_of_its_own():
    # Shared 1 and 0; the planner's own 0.5 and 0; the worker's own -1 and 3.
    first = episode(0, ("planner", 0.0, 0.5), ("worker", 1.0, -1.0))
    second = episode(1, ("planner", 0.0, 0.0), ("worker", 0.0, 3.0))
    assert first.role_returns == {"planner": 1.5, "worker": 0.0}
    assert second.role_returns == {"planner": 0.0, "worker": 3.0}
    batch = batch_of(first, second)
    assert by_role(batch, dr_grpo(batch.episodes)) == {
        "g/0:planner": [0.75],
        "g/1:planner": [-0.75],
        "g/0:worker": [-1.5],
        "g/1:worker": [1.5],
    }
    half = 0.5**0.5  # (R - mean) / std of two members is 1 / sqrt(2), whatever the returns are
    for advantage in grpo(batch.episodes).abs().tolist():
        assert advantage == pytest.approx(half, rel=1e-5)


def test_shared_rewards_count_for_each_role_at_the_time_they_were_given():
    played = episode(
        0,
        ("planner", 0.0, 0.0),
        ("worker", 1.0, 0.0),
        ("worker", 2.0, 0.5),
        ("planner", 0.0, 0.0),
        ("worker", 4.0, 0.0),
    )
    members = {member.id: member for member in role_members([played])}
    planner, worker = members["g/0:planner"], members["g/0:worker"]
    assert [turn.reward for turn in planner.turns] == [3.0, 4.0]
    assert [turn.reward for turn in worker.turns] == [1.0, 2.5, 4.0]
    assert (planner.reward, worker.reward) == (7.0, 7.5)
    batch = step_batch([planner, worker], RewardShaping({}, max_tokens=100))
    assert by_role(batch, reinforce(batch.episodes)) == {"g/0:planner": [7.0, 4.0], "g/0:worker": [7.5, 6.5, 4.0]}


def test_rewards_before_a_role_has_spoken_fall_on_its_first_turn():
    (_, late) = role_members([episode(0, ("first", 1.0, 0.0), ("late", 0.0, 0.0))])
    assert [turn.reward for turn in late.turns] == [1.0]


def test_what_a_scorer_gives_counts_for_all():
    played = episode(0, ("planner", 0.0, 0.0), ("worker", 1.0, 0.25), verdict=0.5 + 0.25)
    assert played.environment_reward == 1.0
    assert played.role_returns == {"planner": 0.5, "worker": 0.75}


def test_zero_sum_returns_are_compared_within_each_role():
    games = [episode(n, ("x", 0.0, won), ("o", 0.0, -won)) for n, won in enumerate((1.0, 1.0, -1.0, -1.0))]
    assert all(game.reward == 0.0 for game in games)
    batch = batch_of(*games)
    assert sorted(dr_grpo(batch.episodes).tolist()) == [-1.0] * 4 + [1.0] * 4
    assert int(batch.episodes.group.max()) == 1


def test_attempts_at_one_problem_are_compared_within_their_episode():
    """As in prime-rl's hierarchical GRPO: the proposers of a group, and the solvers of one proposal."""
    first = episode(0, ("proposer", 0.0, 0.5), ("solver#1", 0.0, 1.0), ("solver#2", 0.0, 0.0), ("solver#3", 0.0, 0.5))
    second = episode(1, ("proposer", 0.0, 0.0), ("solver#1", 0.0, 1.0), ("solver#2", 0.0, 1.0))
    third = episode(2, ("proposer", 0.0, 1.0), ("solver#1", 0.0, 1.0))
    batch = batch_of(first, second, third)
    assert by_role(batch, dr_grpo(batch.episodes)) == {
        "g/0:proposer": [0.0],
        "g/1:proposer": [-0.5],
        "g/2:proposer": [0.5],
        "g/0:solver#1": [0.5],
        "g/0:solver#2": [-0.5],
        "g/0:solver#3": [0.0],
        "g/1:solver#1": [0.0],
        "g/1:solver#2": [0.0],  # and the sole attempt of the third episode is not compared
    }


def test_a_role_that_one_member_used_has_no_baseline():
    alone = episode(0, ("planner", 0.0, 0.0), ("worker", 1.0, 0.0))
    other = episode(1, ("planner", 0.0, 0.0))
    members = role_members([alone, other])
    selected = select(members, compare_groups=True)
    assert [member.id for member in selected] == ["g/0:planner", "g/1:planner"]
    assert skipped_metrics(members, selected)["groups/skipped"] == 1


def test_a_role_whose_tokens_are_forced_is_no_member():
    played = episode(0, ("planner", 1.0, 0.0))
    forced = TokenSequence()
    forced.extend([5], Source.PROMPT)
    forced.extend([7], Source.FORCED)
    forced.turns.append(Turn(index=1, start=1, end=2, role="worker"))
    played.sequences.append(forced)
    assert [member.id for member in role_members([played])] == ["g/0:planner"]


def test_several_roles_in_one_sequence_are_refused():
    played = episode(0, ("planner", 1.0, 0.0), ("planner", 1.0, 0.0))
    played.sequences[0].turns[1].role = "worker"
    with pytest.raises(LedgerError, match="got planner, worker"):
        role_members([played])


def test_members_leave_the_episode_as_it_was(trajectories):
    played = episode(0, ("planner", 0.0, 0.5), ("worker", 1.0, -1.0))
    before = trajectory_record(played)
    role_members([played])
    assert trajectory_record(played) == before
    assert trajectory_record(trajectory_from_record(before)) == before
    assert all(a is b for a, b in zip(role_members(trajectories), trajectories, strict=True))


def test_failed_episodes_stay_whole_and_are_counted_once():
    failed = dataclasses.replace(
        episode(0, ("a", 0.0, 0.0), ("b", 0.0, 0.0)), outcome=Outcome.ENGINE_ERROR, reward=None
    )
    assert role_members([failed]) == [failed]


def test_extra_rollouts_follow_their_roles():
    greedy = episode("greedy", ("planner", 0.0, 0.0), ("worker", 1.0, 0.5))
    played = episode(0, ("planner", 0.0, 0.0), ("worker", 1.0, 0.0))
    extras = role_extras(StepExtras(greedy={"g": greedy}, teacher_logp={"g/0": ["p", "w"]}), [played])
    assert {group: member.reward for group, member in extras.greedy.items()} == {"g:planner": 1.0, "g:worker": 1.5}
    assert (extras.teacher_logp["g/0:planner"], extras.teacher_logp["g/0:worker"]) == (["p"], ["w"])


def stepped(model, trajectories, **algorithm):
    trainer = Trainer(
        copy.deepcopy(model),
        AlgorithmConfig(group_size=2, **algorithm),
        TrainerConfig(learning_rate=1e-2, mini_batches=1),
        seed=0,
        max_tokens=100,
    )
    report = trainer.step(trajectories, temperature=1.0)
    return state_of(trainer)["model"], report.metrics


def test_one_role_trains_as_one_agent_does_bit_for_bit(model, trajectories):
    plain, before = stepped(model, trajectories)
    named = copy.deepcopy(trajectories)
    for turn in (turn for trajectory in named for turn in trajectory.turns):
        assert turn.role == SOLE_ROLE
        turn.role = "worker"
    renamed, after = stepped(model, named)
    assert all(torch.equal(plain[name], renamed[name]) for name in plain)
    same = {name for name in before if not name.endswith(("seconds", "per_s"))}
    assert {name: before[name] for name in same} == {name: after[name] for name in same}
    assert not any(name.startswith("role/") for name in before)
    assert after["role/worker/members"] == len(trajectories)


def test_a_weight_of_zero_is_a_role_that_does_not_train(model):
    played = [episode(n, ("planner", float(n), 0.0), ("worker", 0.0, 2.0 * n)) for n in range(2)]
    alone = [dataclasses.replace(each, sequences=each.sequences[:1], reward=float(n)) for n, each in enumerate(played)]
    # A mean over sequences' sums divides by a constant: the planner's gradient does not depend on the worker's tokens.
    settings = {"aggregation": "seq-mean-token-sum-norm", "norm_length": 10}
    weights, metrics = stepped(model, played, role_weights={"worker": 0.0}, **settings)
    assert metrics["role/worker/advantage_abs_mean"] == 0.0
    assert metrics["role/planner/advantage_abs_mean"] > 0.0
    both, _ = stepped(model, played, **settings)
    only, _ = stepped(model, alone, **settings)
    assert any(not torch.equal(both[name], weights[name]) for name in weights)
    assert all(torch.allclose(only[name], weights[name], atol=1e-3) for name in weights)
