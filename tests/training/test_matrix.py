"""Every estimator with every loss, in every mode of sampling: finite gradients that are not 0."""

import dataclasses
import math
import random

import pytest
import torch

from agentrl.algorithms.traits import (
    Input,
    needed_inputs,
    other_input,
    weighs_behaviour,
)
from agentrl.algorithms.types import LossInput
from agentrl.config.config import AlgorithmConfig, TrainerConfig
from agentrl.errors import Outcome
from agentrl.registry import Kind, lookup, names
from agentrl.training.algorithm_functions import PROVIDED
from agentrl.training.batch import StepExtras, step_batch
from agentrl.training.forward.runner import SumsByName
from agentrl.training.gradients import Objective
from agentrl.training.mixture_trainer import MixtureTrainer
from agentrl.training.rewards import RewardShaping
from agentrl.training.trainer import Trainer
from agentrl.trajectory import Source, TokenSequence, Trajectory, Turn

STALENESS = (0, 1, 4)
SHAPES = ("one sequence", "several sequences")
WORDS, WIDTH = 5, 6
ESTIMATORS = [name for name in names(Kind.ADVANTAGE) if ":" not in name]
LOSSES = [name for name in names(Kind.LOSS) if ":" not in name and other_input(lookup(Kind.LOSS, name)) is None]


def trajectories_of(staleness, shape):
    """Two groups of 3 and 2; every second episode was sampled `staleness` versions ago."""
    rng = random.Random(staleness)
    found = []
    for number, group in enumerate("aaabb"):
        reward = [0.0, 1.0, 0.5, 0.25, 1.0][number]
        trajectory = Trajectory(
            id=str(number),
            task_id=group,
            environment="maze",
            seed=0,
            group_id=group,
            outcome=Outcome.FINISHED,
            reward=reward,
            reward_components={"right": reward, "short": rng.random()},
        )
        version = 10 - staleness if number % 2 else 10
        for index in range(3):
            if index == 0 or shape == "several sequences":
                trajectory.sequences.append(TokenSequence())
                trajectory.sequences[-1].extend([2, 3, 2], Source.PROMPT)
            add_turn(rng, trajectory.sequences[-1], index, version)
        trajectory.turns[-1].reward = reward
        found.append(trajectory)
    return found


def add_turn(rng, sequence, index, version):
    count, start = rng.randint(1, 4), len(sequence)
    logprobs = [rng.uniform(-3, -1) for _ in range(count)]
    sequence.extend_sampled([rng.randrange(WORDS) for _ in range(count)], logprobs=logprobs, versions=[version] * count)
    sequence.turns.append(Turn(index=index, start=start, end=len(sequence), state_key=rng.choice("xy")))
    sequence.extend([4, 2], Source.OBSERVATION)


def settings(estimator, loss):
    correction = {"mode": "off"} if weighs_behaviour.of(lookup(Kind.LOSS, loss)) else {}
    guides = {
        "distill": {"teacher": {"path": "any"}},
        "distill_top_k": {"teacher": {"path": "any", "top_k": 2}},
        "luffy": {"expert": {}},
        "rl_plus": {"expert": {}},
    }.get(loss, {})
    return AlgorithmConfig(advantage=estimator, loss=loss, correction=correction, **guides)


class Policy:
    """log pi of every token from a few weights, as if each token had its own context."""

    def __init__(self, batch, seed, staleness):
        generator = torch.Generator().manual_seed(seed)

        def draw(*size):
            return torch.randn(*size, generator=generator, dtype=torch.float64)

        self.batch = batch
        self.weights = draw(WIDTH).requires_grad_()
        self.context = draw(batch.tokens, WORDS, WIDTH)
        self.word = torch.cat([sequence.targets for sequence in batch.sequences])
        self.old = self.logp(self.weights + 0.05 * draw(WIDTH)).detach()
        self.behaviour = self.logp(self.weights + 0.1 * staleness * draw(WIDTH)).detach() if staleness else self.old
        self.reference, self.teacher_weights = self.logp(draw(WIDTH)).detach(), draw(WIDTH)
        self.teacher = self.logp(self.teacher_weights).detach()

    def logp(self, weights):
        return (self.context @ weights).log_softmax(-1).gather(-1, self.word[:, None]).squeeze(-1)

    def top(self, weights):
        """Of the first two words, as if the teacher had named these."""
        return (self.context @ weights).log_softmax(-1)[:, :2]

    def loss_input(self, advantage):
        batch = self.batch
        return LossInput(
            logp=self.logp(self.weights),
            old_logp=self.old,
            behaviour_logp=self.behaviour,
            advantage=advantage.double(),
            episode_return=batch.episodes.to_tokens(batch.episodes.returns),
            sequence=batch.owners.sequence,
            sequences=len(batch.sequences),
            turn=batch.episodes.token_turn,
            episode=batch.owners.trajectory,
            group=batch.owners.group,
            reference_logp=self.reference,
            teacher_logp=self.teacher,
            teacher_top_logp=self.top(self.teacher_weights).detach(),
            top_logp=self.top(self.weights),
            expert=batch.owners.trajectory == 1,
        )


@pytest.fixture(autouse=True)
def _everything_is_provided(request, monkeypatch):
    """As if there were a critic, a teacher, an expert and a process reward model."""
    if "everything" in request.keywords or "whole" in request.node.name:
        monkeypatch.setattr("agentrl.training.algorithm_functions.PROVIDED", frozenset(Input))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("staleness", STALENESS)
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.capability(
    ["advantage {estimator}", *(f"loss {name}" for name in LOSSES)], "staleness {staleness}", "{shape}"
)
def test_whole_matrix(estimator, staleness, shape):
    batch = step_batch(trajectories_of(staleness, shape), RewardShaping({}, max_tokens=100))
    policy = Policy(batch, seed=staleness, staleness=staleness)
    episodes = dataclasses.replace(
        batch.episodes,
        values=policy.reference.exp(),
        process_reward=policy.teacher / 20,
        greedy_return=torch.tensor([0.5, 0.25], dtype=torch.float64),
        score_norm=1 - policy.teacher.exp(),
        baseline=torch.tensor([0.5, 0.5, 0.25, 0.5, 0.75], dtype=torch.float64),
    )
    for loss in LOSSES:
        objective = Objective(settings(estimator, loss))
        tokens = policy.loss_input(objective.estimate(episodes).advantage)
        look = dataclasses.replace(tokens, logp=tokens.logp.detach())
        kept = objective.mark_rejected(look) == 0
        chosen = kept if objective.choose(look) is None else objective.choose(look)
        loss_input = dataclasses.replace(tokens, chosen=chosen)
        values = objective.loss(loss_input, torch.zeros(batch.tokens), SumsByName()).values
        index = kept.nonzero().squeeze(-1)
        total = (objective.weights(batch.owners.select(index)) * values[index]).sum()
        (gradient,) = torch.autograd.grad(total, policy.weights)
        assert bool(gradient.isfinite().all()), loss
        assert float(gradient.norm()) > 1e-6, loss


MODELS = (Input.VALUES, Input.PROCESS_REWARD)
TRAINABLE = [n for n in ESTIMATORS if needed_inputs(lookup(Kind.ADVANTAGE, n)) <= {*PROVIDED, *MODELS}]
TRAINABLE_LOSSES = [name for name in LOSSES if needed_inputs(lookup(Kind.LOSS, name)) <= PROVIDED]


def step(model, trajectories, config):
    """The norm of the gradient of one training step."""
    critic = {} if Input.VALUES in needed_inputs(lookup(Kind.ADVANTAGE, config.advantage)) else None
    judge = {} if Input.PROCESS_REWARD in needed_inputs(lookup(Kind.ADVANTAGE, config.advantage)) else None
    beside = {"critic": critic, "process_reward": judge}
    trainer = Trainer(model, config, TrainerConfig(learning_rate=1e-4, **beside), seed=0, max_tokens=100)
    trainer.steps = 10
    metrics = trainer.step(trajectories, temperature=1.0).metrics
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["train/updates"] == 1
    return metrics["train/grad_norm"]


QUICK = ("grpo", "gigpo")
"""Estimators whose steps with every loss are taken in `make test`; the others are, in `make test-slow`."""


@pytest.mark.parametrize(
    "estimator", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in TRAINABLE]
)
@pytest.mark.capability("advantage {estimator}", "staleness 1", "several sequences")
def test_trainer_steps_with_every_estimator_and_loss(model, estimator):
    for loss in TRAINABLE_LOSSES:
        assert step(model, trajectories_of(1, "several sequences"), settings(estimator, loss)) > 1e-6, loss


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("staleness", STALENESS)
@pytest.mark.parametrize("proximal", ["trainer", "behaviour", "loglinear"])
def test_trainer_steps_in_every_mode(model, proximal, staleness, shape):
    config = AlgorithmConfig(correction={"proximal": proximal})
    assert step(model, trajectories_of(staleness, shape), config) > 1e-6


PARTS = [*(("advantage", name) for name in TRAINABLE), *(("loss", name) for name in TRAINABLE_LOSSES)]
"""Each estimator, trained with the loss ppo, and each loss, with the estimator grpo."""


def settings_with(kind, name):
    return settings(name, "ppo") if kind == "advantage" else settings("grpo", name)


@pytest.mark.slow
@pytest.mark.capability("{kind} {name}", "several roles")
@pytest.mark.parametrize(("kind", "name"), PARTS)
def test_trainer_steps_with_several_roles(model, kind, name):
    trajectories = trajectories_of(1, "several sequences")
    for turn in (turn for trajectory in trajectories for turn in trajectory.turns):
        turn.role = ("planner", "worker")[turn.index % 2]
    assert step(model, trajectories, settings_with(kind, name)) > 1e-6


ALONE = [
    (kind, name) for kind, name in PARTS if needed_inputs(lookup(Kind(kind), name)) <= PROVIDED - {Input.REFERENCE}
]
"""Estimators and losses that need no further model."""


@pytest.mark.slow
@pytest.mark.capability("{kind} {name}", "mixture")
@pytest.mark.parametrize(("kind", "name"), ALONE)
def test_trainer_steps_with_an_algorithm_for_one_environment(model, kind, name):
    algorithms = {"maze": settings_with(kind, name), "search": AlgorithmConfig()}
    config = TrainerConfig(learning_rate=1e-4)
    trainer = MixtureTrainer(model, AlgorithmConfig(), config, algorithms=algorithms, seed=0, max_tokens=100)
    extras = StepExtras(environments={"a": "maze", "b": "search"})
    metrics = trainer.step(trajectories_of(0, "one sequence"), temperature=1.0, extras=extras).metrics
    assert metrics["train/grad_norm"] > 1e-6
    assert math.isfinite(metrics["env/maze/train/loss"])
