"""A two-turn bandit that a tiny model learns in seconds."""

import pytest
import torch

from agentrl.config.config import AlgorithmConfig, TrainerConfig
from agentrl.errors import Outcome
from agentrl.training.trainer import Trainer
from agentrl.trajectory import Source, TokenSequence, Trajectory, Turn

LEVERS = 4
TASKS, MEMBERS = 8, 8


def play(model, generator, *, grouped=True):
    """Every episode takes two turns: the lever with the task's number pays, first and again after an observation."""
    episodes = [start(task, member, grouped) for task in range(TASKS) for member in range(MEMBERS)]
    for index in range(2):
        ids = torch.tensor([episode.sequences[0].ids_list() for episode in episodes])
        with torch.no_grad():
            logp = model(ids).logits[:, -1].log_softmax(-1)
        tokens = torch.multinomial(logp.exp(), 1, generator=generator)
        for episode, token, value in zip(episodes, tokens.tolist(), logp.gather(1, tokens).tolist(), strict=True):
            pull(episode, index, token, value)
    return episodes


def start(task, member, grouped):
    sequence = TokenSequence()
    sequence.extend([2 + task % LEVERS, 30], Source.PROMPT)
    return Trajectory(
        id=f"{task}-{member}",
        task_id=str(task),
        environment="bandit",
        seed=0,
        group_id=str(task) if grouped else f"{task}-{member}",
        sequences=[sequence],
        outcome=Outcome.FINISHED,
        reward=0.0,
    )


def pull(episode, index, token, logp):
    (sequence,) = episode.sequences
    begin = len(sequence)
    sequence.extend_sampled(token, logprobs=logp, versions=[0])
    paid = 0.5 * (token[0] % LEVERS == int(episode.task_id) % LEVERS)
    sequence.turns.append(Turn(index=index, start=begin, end=begin + 1, reward=paid))
    sequence.extend([31, 32 + int(paid > 0)], Source.OBSERVATION)
    episode.reward += paid


def metrics_until_learned(trainer, *, steps, grouped=True):
    """Train until three steps in a row pay over nine tenths of what they could, for at most so many steps."""
    generator = torch.Generator().manual_seed(1)
    found = []
    while len(found) < steps and (len(found) < 3 or mean_of_last(found) <= 0.9):
        episodes = play(trainer.model, generator, grouped=grouped)
        found.append(trainer.step(episodes, temperature=1.0).metrics)
    return found


def mean_of_last(metrics):
    return sum(line["reward/mean"] for line in metrics[-3:]) / 3


@pytest.mark.parametrize(
    "settings",
    [
        {"advantage": "grpo", "loss": "ppo"},
        {"advantage": "rloo", "loss": "dapo", "kl_coef": 0.001},
        {"advantage": "reinforce++", "loss": "cispo", "aggregation": "traj-mean-token-mean"},
        {
            "advantage": "dr_grpo",
            "loss": "gspo",
            "aggregation": "seq-mean-token-mean",
            "loss_options": {"clip_low": 0.2, "clip_high": 0.2},
        },
    ],
    ids=lambda settings: f"{settings['advantage']}-{settings['loss']}",
)
@pytest.mark.slow
def test_reward_rises(model, settings):
    config = TrainerConfig(learning_rate=1e-2, mini_batches=2)
    trainer = Trainer(model, AlgorithmConfig(**settings), config, seed=0, max_tokens=10)
    metrics = metrics_until_learned(trainer, steps=25)
    assert all(line["mismatch/prob_abs_mean"] < 1e-4 for line in metrics)
    assert metrics[0]["reward/mean"] < 0.3
    assert mean_of_last(metrics) > 0.9


@pytest.mark.parametrize(
    ("critic", "settings"),
    [
        ({"kind": "own", "learning_rate": 1e-2}, {"advantage": "gae"}),
        ({"kind": "shared", "learning_rate": 1e-2, "pretrain_steps": 3}, {"advantage": "gae_turn"}),
        ({"kind": "own", "learning_rate": 1e-2, "pretrain_steps": 3}, {"advantage": "vapo", "loss": "vapo"}),
    ],
    ids=["own-gae", "shared-gae_turn", "own-vapo"],
)
@pytest.mark.slow
def test_reward_rises_without_groups(model, critic, settings):
    """No episode is compared with another of its task; the critic tells what was to be expected."""
    config = TrainerConfig(learning_rate=1e-2, mini_batches=2, critic=critic, max_kl=0.2)
    algorithm = AlgorithmConfig(group_size=1, **settings)
    trainer = Trainer(model, algorithm, config, seed=0, max_tokens=10)
    metrics = metrics_until_learned(trainer, steps=28, grouped=False)
    assert metrics[0]["reward/mean"] < 0.3
    assert mean_of_last(metrics) > 0.9
    assert max(line.get("critic/explained_variance", 0.0) for line in metrics) > 0.3
