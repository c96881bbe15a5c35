"""Routed experts in the ledger: appended, shared by forks, stored and read back."""

import numpy as np
import pytest

from agentrl.engine import Generation, StopReason
from agentrl.errors import LedgerError, Outcome
from agentrl.models.routed_experts import concatenate, routed_experts_from_record, routed_experts_record, small
from agentrl.observe.trajectory_record import trajectory_from_record, trajectory_record
from agentrl.observe.trajectory_store import TrajectoryStore, read_trajectories
from agentrl.trajectory import Source, TokenSequence, Trajectory, Turn


def numbered(first, last, dtype=np.uint8):
    """Two numbers per token, from its index."""
    return np.stack([np.arange(first, last), np.arange(first, last) % 7], axis=1).astype(dtype)


def answered(sequence, prompt, answer):
    """A turn, with what an engine tells of it."""
    sequence.extend(prompt, Source.OBSERVATION)
    start = len(sequence)
    sequence.extend_sampled(answer, logprobs=[-1.0] * len(answer), versions=[0] * len(answer))
    sequence.turns.append(Turn(index=len(sequence.turns), start=start, end=len(sequence)))
    sequence.routes.append(numbered(len(sequence.routes), len(sequence) - 1), computed=len(sequence) - 1)


def two_turns():
    sequence = TokenSequence()
    for _ in range(2):
        answered(sequence, [1, 2, 3], [4, 5])
    return sequence


def test_routes_reach_to_the_last_token_but_one():
    sequence = two_turns()
    assert (len(sequence.routes), len(sequence)) == (9, 10)
    assert sequence.routes.experts.tolist() == numbered(0, 9).tolist()
    assert TokenSequence().routes.experts is None
    with pytest.raises(LedgerError, match=r"not yet computed: got shape \(1, 2\), from token 9 on, expected at most 0"):
        sequence.routes.append(numbered(9, 10), computed=len(sequence) - 1)


def test_fork_shares_its_parents_routes_and_appends_its_own():
    parent = two_turns()
    child = parent.fork(10)
    assert len(child.routes) == 9
    answered(child, [7], [8, 8])
    assert child.routes.experts.tolist() == numbered(0, 12).tolist()
    early = parent.fork(4)
    assert len(early.routes) == 4
    answered(early, [7], [8])
    assert early.routes.experts.tolist() == numbered(0, 5).tolist()
    answered(parent, [1], [2])
    assert child.routes.experts.tolist() == numbered(0, 12).tolist()


def test_routes_survive_storage_turn_by_turn(tmp_path):
    trajectory = Trajectory(id="a", task_id="t", environment="e", seed=0, group_id="g", sequences=[TokenSequence()])
    store = TrajectoryStore(tmp_path, step=1)
    store.start(trajectory)
    for turn in range(3):
        answered(trajectory.sequences[0], [1, 2], [4] * (turn + 1))
        store.turn(trajectory, trajectory.sequences[0].turns[-1])
    trajectory.sequences.append(trajectory.sequences[0].fork(9))
    answered(trajectory.sequences[1], [5], [6, 6])
    trajectory.outcome = Outcome.FINISHED
    store.end(trajectory)
    store.close()
    (read,) = read_trajectories(tmp_path)
    for found in (read.trajectory, trajectory_from_record(trajectory_record(trajectory))):
        for own, expected in zip(found.sequences, trajectory.sequences, strict=True):
            assert len(own.routes) == len(expected.routes)
            assert own.routes.experts.dtype == np.uint8
            assert np.array_equal(own.routes.experts, expected.routes.experts)


def test_the_routes_of_later_turns_alone_say_where_they_begin():
    sequence = two_turns()
    answered(sequence, [1, 2, 3], [4, 5])
    assert sequence.own_arrays(10)["routes"] == [routed_experts_record(9, numbered(9, 14))]


def test_numbers_are_as_small_as_they_can_be():
    assert small(np.array([[0, 255]], dtype=np.int32)).dtype == np.uint8
    large = small(np.array([[0, 256]], dtype=np.int32))
    assert large.dtype == np.uint16
    assert np.array_equal(routed_experts_from_record(routed_experts_record(3, large)), large)


def test_an_answer_in_two_parts():
    first = Generation(
        token_ids=[1], logprobs=[0.0], versions=[0], stop_reason=StopReason.ABORT, routed_experts=numbered(0, 3)
    )
    second = Generation(token_ids=[2], logprobs=[0.0], versions=[1], stop_reason=StopReason.STOP)
    assert first.followed_by(second).routed_experts.tolist() == numbered(0, 3).tolist()
    with pytest.raises(LedgerError, match="different numbers of layers"):
        concatenate(numbered(0, 2), np.zeros((1, 4), dtype=np.uint8))
