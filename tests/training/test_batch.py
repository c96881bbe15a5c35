"""Step batches: flat tensors from ledgers."""

import pytest
import torch

from agentrl.config.config import AlgorithmConfig, TrainerConfig
from agentrl.errors import LedgerError, Outcome, TrainingError
from agentrl.training.batch import mini_batches, row_batches, step_batch
from agentrl.training.rewards import RewardShaping
from agentrl.training.trainer import Trainer
from agentrl.trajectory import Source, TokenSequence, Trajectory, Turn


def worked_example():
    """Two sampled tokens, an observation, one sampled token; then a fork after the first turn with two more."""
    sequence = TokenSequence()
    sequence.extend([5, 6, 7], Source.PROMPT)
    sequence.extend_sampled([8, 2], logprobs=[-0.5, -0.25], versions=[3, 3])
    sequence.extend([9], Source.OBSERVATION)
    sequence.extend_sampled([4], logprobs=[-1.0], versions=[4])
    sequence.turns = [Turn(index=0, start=3, end=5), Turn(index=2, start=6, end=7, reward=1.0)]
    fork = sequence.fork(5)
    fork.extend([9, 9], Source.OBSERVATION)
    fork.extend([3], Source.FORCED)
    fork.extend_sampled([11, 12], logprobs=[-2.0, -3.0], versions=[4, 4])
    fork.turns = [Turn(index=1, start=7, end=10, reward=0.25)]
    return Trajectory(
        id="1",
        task_id="1",
        environment="maze",
        seed=0,
        group_id="g",
        sequences=[sequence, fork],
        outcome=Outcome.FINISHED,
        reward=1.25,
    )


def build(*trajectories, **shaping):
    return step_batch(trajectories, RewardShaping(shaping, max_tokens=100))


def test_worked_example():
    batch = build(worked_example(), worked_example())
    assert batch.starts == (0, 3, 5, 8, 10)
    assert [s.input_ids.tolist() for s in batch.sequences[:2]] == [[5, 6, 7, 8, 2, 9], [5, 6, 7, 8, 2, 9, 9, 3, 11]]
    assert [s.targets.tolist() for s in batch.sequences[:2]] == [[8, 2, 4], [11, 12]]
    assert batch.behaviour_logp.tolist() == [-0.5, -0.25, -1.0, -2.0, -3.0] * 2
    assert batch.version.tolist() == [3, 3, 4, 4, 4] * 2
    assert batch.owners.sequence.tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 3, 3]
    assert batch.owners.trajectory.tolist() == [0] * 5 + [1] * 5
    assert batch.owners.group.tolist() == [0] * 10
    episodes = batch.episodes
    assert episodes.returns.tolist() == [1.25, 1.25]
    assert episodes.turn_reward.tolist() == [0.0, 0.25, 1.0] * 2
    assert episodes.token_turn.tolist() == [0, 0, 2, 1, 1, 3, 3, 5, 4, 4]
    assert episodes.turn_state.tolist() == [0, 1, 2] * 2  # prompt; prompt, answer and rewritten history; observation
    assert episodes.token_episode.tolist() == batch.owners.trajectory.tolist()


def test_states_are_those_of_the_environment_and_never_shared_between_groups():
    first, second, other = worked_example(), worked_example(), worked_example()
    other.group_id = "h"
    for trajectory in (first, second, other):
        for turn, key in zip(trajectory.turns, ["hall", "cellar", "hall"], strict=True):
            turn.state_key = key
    second.turns[1].state_key = None  # one that the environment could not name is told by what was observed
    assert build(first, second, other).episodes.turn_state.tolist() == [0, 1, 0, 0, 2, 0, 3, 4, 3]


def test_fork_trains_shared_tokens_once(trajectories):
    batch = build(*trajectories)
    assert batch.tokens == sum(t.sampled_tokens for t in trajectories)
    assert sum(batch.lengths) == batch.tokens


def test_token_index():
    batch = build(worked_example(), worked_example())
    assert batch.token_index([3, 0]).tolist() == [8, 9, 0, 1, 2]


def test_sampled_token_outside_every_turn():
    trajectory = worked_example()
    trajectory.sequences[0].turns[0].end = 4
    with pytest.raises(LedgerError, match=r"trajectory 1 does not belong to a turn: got token 4"):
        build(trajectory)


@pytest.mark.parametrize("logprob", [float("nan"), float("-inf"), 0.25])
def test_sampled_token_without_log_probability(logprob):
    trajectory = worked_example()
    trajectory.sequences[0].extend_sampled([7], logprobs=[logprob], versions=[4])
    trajectory.sequences[0].turns.append(Turn(index=3, start=7, end=8))
    with pytest.raises(TrainingError, match="has no valid log-probability"):
        build(trajectory)


def test_an_episode_without_tokens_still_counts_in_its_group():
    silent = worked_example()
    silent.sequences, silent.reward = [], 0.0
    batch = build(worked_example(), silent)
    assert batch.episodes.returns.tolist() == [1.25, 0.0]
    assert batch.episodes.group.tolist() == [0, 0]
    assert batch.owners.trajectory.tolist() == [0] * 5


@pytest.mark.parametrize("count", [1, 2, 3])
def test_mini_batches_keep_groups_whole(trajectories, count):
    batch = build(*trajectories)
    parts = mini_batches(batch, count, torch.Generator().manual_seed(0))
    assert len(parts) == count
    assert sorted(i for part in parts for i in part) == list(range(len(batch.sequences)))
    owners = [{int(batch.episodes.group[batch.sequence_trajectory[i]]) for i in part} for part in parts]
    assert sum(map(len, owners)) == 3


@pytest.mark.parametrize("count", [4, 7])
def test_more_mini_batches_than_groups_keep_trajectories_whole(trajectories, count):
    batch = build(*trajectories)
    parts = mini_batches(batch, count, torch.Generator().manual_seed(0))
    assert len(parts) == count
    owners = [{batch.sequence_trajectory[i] for i in part} for part in parts]
    assert sum(map(len, owners)) == 7


def test_more_mini_batches_than_groups_of_coupled_episodes_keep_groups_whole(trajectories, model):
    batch = build(*trajectories)
    parts = mini_batches(batch, 7, torch.Generator().manual_seed(0), whole_groups=True)
    owners = [{int(batch.episodes.group[batch.sequence_trajectory[i]]) for i in part} for part in parts]
    assert sorted(map(sorted, owners)) == [[0], [1], [2]]
    trainer = Trainer(model, AlgorithmConfig(loss="online_dpo"), TrainerConfig(mini_batches=7), seed=0, max_tokens=100)
    report = trainer.step(trajectories, temperature=0.8)
    assert report.metrics["train/updates"] == 3
    assert report.metrics["train/loss"] > 0.1


def test_mini_batches_follow_the_generator(trajectories):
    batch = build(*trajectories)
    first, second, other = (mini_batches(batch, 3, torch.Generator().manual_seed(s)) for s in (1, 1, 4))
    assert first == second != other


@pytest.mark.parametrize(("rows", "sizes"), [(4, [4, 4, 4, 1]), (13, [13]), (50, [13]), (1, [1] * 13)])
def test_row_batches_count_the_rows_that_are_trained(trajectories, rows, sizes):
    batch = build(*trajectories, *trajectories, *trajectories)
    count = len(batch.sequences)
    expected = sizes if count == 13 else [rows] * (count // rows) + ([count % rows] if count % rows else [])
    parts = row_batches(batch, rows, torch.Generator().manual_seed(0))
    assert [len(part) for part in parts] == expected
    assert sorted(i for part in parts for i in part) == list(range(count))


def test_row_batches_follow_the_generator(trajectories):
    batch = build(*trajectories)
    first, second, other = (row_batches(batch, 3, torch.Generator().manual_seed(s)) for s in (1, 1, 4))
    assert first == second != other
