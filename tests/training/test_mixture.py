"""Several environments with an algorithm for each: gradients are the weighted sum of those of each alone."""

from dataclasses import replace

import pytest
import torch

from agentrl.algorithms.traits import needed_inputs, other_input
from agentrl.builders.tinker import NEEDS_MODELS
from agentrl.config import load_config
from agentrl.config.config import AlgorithmConfig, TrainerConfig
from agentrl.config.derived import environment_algorithms, per_environment_configs
from agentrl.errors import ConfigError, UsageError
from agentrl.registry import Kind, lookup, names
from agentrl.training.algorithm_functions import PROVIDED, run_learns_from_rewards
from agentrl.training.batch import NothingToTrain, StepExtras
from agentrl.training.mixture_trainer import COMMON_SHAPING, MixtureTrainer, check_mixture
from agentrl.training.trainer import Trainer

CONFIG = TrainerConfig(learning_rate=1e-2, steps=4)
ALGORITHMS = {
    "maze": AlgorithmConfig(advantage="rloo", loss="ppo", shaping={"invalid": {"penalty": -0.1}}, entropy_coef=0.01),
    "search": AlgorithmConfig(advantage="grpo", loss="gspo", correction={"mode": "off"}),
}
LABELS = {"a": "maze", "b": "search", "c": "search"}
"""Environments of the groups of 3, 2 and 2 episodes."""


def gradients(trainer):
    """Remember the gradients of each update."""
    found = []
    update = trainer._optimizer.update

    def record():
        found.append({n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None})
        return update()

    trainer._optimizer.update = record
    return found


def step(trainer, trajectories):
    extras = StepExtras(environments=LABELS)
    return trainer.step(trajectories, temperature=1.0, extras=extras)


def alone(make_model, label, trajectories, config=CONFIG):
    trainer = Trainer(make_model(), ALGORITHMS[label], config, seed=0, max_tokens=256)
    found = gradients(trainer)
    report = step(trainer, [t for t in trajectories if LABELS[t.group_id] == label])
    return found, report


@pytest.fixture
def make_model(model):
    def make():
        copy = type(model)(model.config).eval()
        copy.load_state_dict(model.state_dict())
        return copy

    return make


def mixed(make_model, config=CONFIG, algorithms=ALGORITHMS):
    return MixtureTrainer(make_model(), AlgorithmConfig(), config, algorithms=algorithms, seed=0, max_tokens=256)


def test_the_gradient_is_the_sum_of_both_by_their_shares_of_the_episodes(make_model, trajectories):
    trainer = mixed(make_model)
    found = gradients(trainer)
    report = step(trainer, trajectories)
    (maze,), maze_report = alone(make_model, "maze", trajectories)
    (search,), search_report = alone(make_model, "search", trajectories)
    (both,) = found
    assert both.keys() == maze.keys() == search.keys()
    for name, gradient in both.items():
        torch.testing.assert_close(gradient, 3 / 7 * maze[name] + 4 / 7 * search[name], rtol=1e-5, atol=1e-7)
    metrics = report.metrics
    losses = [one.metrics["train/loss"] for one in (maze_report, search_report)]
    assert metrics["env/maze/train/loss"] == pytest.approx(losses[0], rel=1e-5)
    assert metrics["env/search/train/loss"] == pytest.approx(losses[1], rel=1e-5)
    assert metrics["train/loss"] == pytest.approx(3 / 7 * losses[0] + 4 / 7 * losses[1], rel=1e-5)
    assert metrics["train/updates"] == 1
    assert metrics["trajectories/trained"] == 7
    shaped = [one.metrics["reward/shaped_mean"] for one in (maze_report, search_report)]
    assert metrics["reward/shaped_mean"] == pytest.approx(3 / 7 * shaped[0] + 4 / 7 * shaped[1])
    speeds = [metrics[f"env/{label}/train/tokens_per_s"] for label in ("maze", "search")]
    assert metrics["train/tokens_per_s"] == pytest.approx(sum(speeds))
    assert metrics["groups/trained"] == 3
    assert metrics["train/tokens"] == sum(one.metrics["train/tokens"] for one in (maze_report, search_report))
    assert "env/maze/train/learning_rate" not in metrics


def test_equal_algorithms_with_trajectory_means_are_one_algorithm(make_model, trajectories):
    """Where the loss is a mean over episodes, shares of episodes are the weights of one algorithm, too."""
    same = AlgorithmConfig(advantage="rloo", aggregation="traj-mean-token-mean")
    trainer = mixed(make_model, algorithms={"maze": same, "search": same})
    both = gradients(trainer)
    step(trainer, trajectories)
    plain = Trainer(make_model(), same, CONFIG, seed=0, max_tokens=256)
    single = gradients(plain)
    step(plain, trajectories)
    for name, gradient in single[0].items():
        torch.testing.assert_close(both[0][name], gradient, rtol=1e-5, atol=1e-7)


def test_several_updates_take_a_part_of_each_environment(make_model, trajectories):
    config = CONFIG.model_copy(update={"mini_batches": 2})
    trainer = mixed(make_model, config)
    found, losses, apply = gradients(trainer), [], trainer.watch.apply
    trainer.watch.apply = lambda gradient, optimizer: (losses.append(gradient.loss), apply(gradient, optimizer))[1]
    report = step(trainer, trajectories)
    assert (len(found), report.metrics["train/updates"]) == (2, 2)
    assert losses[0] != losses[1]
    assert report.metrics["train/loss"] == pytest.approx(sum(losses) / 2, rel=1e-5)
    assert trainer.steps == 1


def test_an_epoch_ends_for_all_environments_at_once(make_model, trajectories):
    """Maze has 3 episodes for 4 mini-batches; its second epoch does not begin in the first one of search."""
    trainer = mixed(make_model, CONFIG.model_copy(update={"mini_batches": 4, "epochs": 2}))
    update, search_weights = trainer._optimizer.update, []

    def record():
        search_weights.append(trainer._objectives["search"].weight)
        return update()

    trainer._optimizer.update = record
    step(trainer, trajectories)
    assert [weight == 1 for weight in search_weights] == 2 * [False, False, False, True]


def test_an_environment_without_a_trainable_episode_is_left_out(make_model, trajectories):
    left_out = [replace(t, reward=None) if LABELS[t.group_id] == "search" else t for t in trajectories]
    trainer = mixed(make_model)
    found = gradients(trainer)
    report = step(trainer, left_out)
    (maze,), _ = alone(make_model, "maze", trajectories)
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, maze[name])
    assert not any(name.startswith("env/search/train") for name in report.metrics)
    with pytest.raises(NothingToTrain):
        step(trainer, [replace(t, reward=None) for t in trajectories])


def test_groups_are_compared_if_one_algorithm_does(make_model):
    plain = {"maze": AlgorithmConfig(advantage="reinforce"), "search": AlgorithmConfig(advantage="reinforce")}
    assert mixed(make_model).min_members == 2
    assert mixed(make_model, algorithms=plain).min_members == 1


def test_a_resumed_trainer_goes_on_with_the_same_numbers(make_model, trajectories, tmp_path):
    first = mixed(make_model)
    step(first, trajectories)
    first.checkpoint.save(tmp_path)
    second = mixed(make_model)
    second.model.load_state_dict(first.model.state_dict())
    second.checkpoint.load(tmp_path)
    reports = [step(trainer, trajectories).metrics for trainer in (first, second)]
    numbers = [{k: v for k, v in one.items() if not k.endswith(("seconds", "per_s"))} for one in reports]
    assert numbers[0] == numbers[1]


TWO = (
    "environments={maze: {name: guess_number, algorithm: {advantage: rloo, loss: gspo}}, digits: {name: guess_number}}"
)


def test_an_environments_algorithm_changes_the_runs():
    config = load_config(None, [TWO, "algorithm={advantage: grpo, loss: ppo, loss_options: {clip_low: 0.1}}"])
    found = environment_algorithms(config)
    assert (found["maze"].advantage, found["maze"].loss, found["maze"].loss_options) == ("rloo", "gspo", {})
    assert found["maze"].aggregation == "seq-mean-token-mean"
    assert found["digits"] == config.algorithm
    assert [part.config.algorithm.advantage for part in per_environment_configs(config)] == ["rloo", "grpo"]
    check_mixture(config)
    assert environment_algorithms(load_config(None, ["environment=guess_number"])) == {}


@pytest.mark.parametrize(("loss", "expected"), [("gspo", True), ("sft", False)])
def test_steps_without_differing_returns_are_idle_if_no_environment_learns_from_anything_else(loss, expected):
    config = load_config(None, [TWO, f"environments.maze.algorithm.loss={loss}"])
    assert run_learns_from_rewards(config) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["environments.maze.algorithm={group_size: 4}"], "Set algorithm.group_size for all environments"),
        (["environments.maze.algorithm={advantag: rloo}"], "advantage"),
        (["environments.maze.algorithm={advantage: gae}"], "a critic's values"),
        (["environments.maze.algorithm={kl_coef: 0.1}"], "a reference policy, which algorithm does not have"),
        (
            [
                "algorithm={kl_coef: 0.1, reference: {refresh_every: 2}}",
                "environments.maze.algorithm={kl_coef: 0.1, reference: {refresh_every: 3}}",
            ],
            "its own reference.refresh_every",
        ),
        (["environments.maze.algorithm={shaping: {kl: {coef: 0.1}}}"], "the shaping kl"),
        (["environments.maze.algorithm={shaping: {ares: {}}}"], "the shaping ares"),
        (["environments.maze.algorithm={observation_coef: 0.1}"], r"environment maze .*algorithm\.observation_coef"),
        (["algorithm.observation_coef=0.1"], r"environment maze .*algorithm\.observation_coef"),
        (["trainer.mini_batches=2", "trainer.max_kl=0.1"], "trainer.max_kl does not work with several algorithms"),
        (["environments.maze.algorithm={loss: nosuch}"], "nosuch"),
    ],
)
def test_what_must_be_common_is_refused(words, message):
    with pytest.raises(UsageError, match=message):
        check_mixture(load_config(None, [TWO, *words]))


def test_shapings_that_a_run_computes_once_are_known():
    """A function shapes each environment's rewards; what is made once, from ``algorithm.shaping``, is a class."""
    made_once = {name for name in names(Kind.SHAPING) if isinstance(lookup(Kind.SHAPING, name), type)}
    assert set(COMMON_SHAPING) == made_once == NEEDS_MODELS - {"pf_ppo"}


NEEDY = [
    (kind.value, name)
    for kind in (Kind.ADVANTAGE, Kind.LOSS)
    for name in names(kind)
    if other_input(lookup(kind, name)) is None and needed_inputs(lookup(kind, name)) - PROVIDED
]
"""Estimators and losses that need a further model or rollout."""


@pytest.mark.capability("{kind} {name}", "mixture", refused=True)
@pytest.mark.parametrize(("kind", "name"), NEEDY)
def test_what_needs_a_further_part_is_refused(kind, name):
    config = load_config(None, [TWO, f"environments.maze.algorithm={{{kind}: {name}}}"])
    with pytest.raises(ConfigError, match="environment maze needs a part that runs with several algorithms"):
        check_mixture(config)
