"""Ranks that share rows and matrices, with a critic, adapters and experts: the gradients of one rank."""

import copy

import pytest
import torch
from ranks_here import in_ranks
from support.models import tiny_model
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.algorithms.traits import Input, needed_inputs, other_input, weighs_behaviour
from agentrl.builders.trainers import build_trainer
from agentrl.config.config import Config
from agentrl.models.lora import adapted_layers, factors
from agentrl.registry import Kind, lookup, names
from agentrl.training.algorithm_functions import PROVIDED
from agentrl.training.batch import StepExtras
from agentrl.training.distributed.fsdp import sharded_like, whole
from agentrl.training.optimizer import Update

pytestmark = pytest.mark.slow

OWN = {"trainer": {"critic": {"kind": "own"}}, "algorithm": {"advantage": "gae"}}
SHARED = {"trainer": {"critic": {"kind": "shared"}}, "algorithm": {"advantage": "gae_turn"}}
ADAPTERS = {"model": {"lora": {"rank": 4, "modules_to_save": ["norm"]}}}
BALANCE = {"trainer": {"moe": {"aux_loss_coef": 0.5}}}
CASES = {
    2: {
        "own critic, rows": ("qwen3", OWN, {"context_parallel": 2}),
        "own critic, matrices": ("qwen3", OWN, {"tensor_parallel": 2}),
        "shared critic, rows": ("qwen3", SHARED, {"context_parallel": 2}),
        "adapters, matrices": ("qwen3", ADAPTERS, {"tensor_parallel": 2}),
        "experts, rows": ("qwen3_moe", BALANCE, {"context_parallel": 2}),
        "experts, common prefixes in rows": ("qwen3_moe", BALANCE, {"context_parallel": 2, "share_prefixes": True}),
    },
    4: {
        "shared critic, both": ("qwen3", SHARED, {"context_parallel": 2, "tensor_parallel": 2}),
        "adapters, both": ("qwen3", ADAPTERS, {"context_parallel": 2, "tensor_parallel": 2}),
    },
}
"""By the number of ranks: a model, what it is trained with, and what ranks share."""


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    config = Qwen3Config(
        vocab_size=41,
        hidden_size=24,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        max_position_embeddings=256,
        initializer_range=0.3,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    folder = tmp_path_factory.mktemp("models")
    with torch.random.fork_rng():
        torch.manual_seed(5)
        Qwen3ForCausalLM(config).save_pretrained(folder / "qwen3")
        tiny_model("qwen3_moe", vocab_size=41).save_pretrained(folder / "qwen3_moe")
    return folder


def settings(paths, case, count):
    model, changes, shared = case
    alone = {name: value for name, value in shared.items() if "parallel" not in name}
    return Config(
        environment={"name": "maze"},
        model={"path": str(paths / model), "device": "cpu", **changes.get("model", {})},
        algorithm={"kl_coef": 0.0, "entropy_coef": 0.05, **changes.get("algorithm", {})},
        trainer={
            "processes": count,
            "tokens_per_micro_batch": 60,
            **changes.get("trainer", {}),
            **(alone if count == 1 else shared),
        },
    )


def computed(ranks, config, trajectories):
    """Numbers of a step, and all gradients, whole."""
    parts = build_trainer(config, config.model.path, None, ranks=ranks)
    trainer, gradients = parts.trainer, {}
    optimizers = {"policy": trainer._optimizer}
    if (critic := trainer.signals.get("critic")) is not None:
        optimizers |= {"head": critic.head_optimizer, "trunk": critic.trunk_optimizer}
    for name, optimizer in optimizers.items():
        if optimizer is not None:
            optimizer.update = recorder(name, optimizer, gradients)
    begin_beside_zero(trainer)
    given = trajectories, 0.9, StepExtras()
    numbers = trainer.calls()["step"](*given).metrics  # all ranks are here already
    return numbers, gradients


def recorder(name, optimizer, gradients):
    def record():
        for key, parameter in optimizer._parameters.items():
            gradients[f"{name}/{key}"] = whole(parameter.grad).clone()
            parameter.grad = None
        return Update(grad_norm=1.0, learning_rate=0.0, non_finite=())

    return record


@torch.no_grad()
def begin_beside_zero(trainer):
    """Let adapters and the critic's head say something, so that what is before them learns."""
    if (critic := trainer.signals.get("critic")) is not None:
        critic.head.weight.copy_(torch.linspace(-0.5, 0.5, len(critic.head.weight)))
    for layer in adapted_layers(trainer.model).values():
        up, _ = factors(layer)
        values = torch.linspace(-0.2, 0.2, up.numel()).view(up.shape)
        up.copy_(sharded_like(values, up))


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_find_the_gradients_of_one(paths, module_trajectories, count):
    def work(ranks):
        cases = CASES[count].items()
        return {name: computed(ranks, settings(paths, case, ranks.count), module_trajectories) for name, case in cases}

    one, many = in_ranks(1, work), in_ranks(count, work)
    for name, (numbers, gradients) in one.items():
        found, own = many[name]
        for key, value in numbers.items():
            if not any(word in key for word in ("seconds", "per_s", "tokens_saved")):
                assert found[key] == pytest.approx(value, rel=1e-5, abs=1e-6), (name, key)
        assert sorted(own) == sorted(gradients)
        for key, gradient in gradients.items():
            largest = float(gradient.abs().max())
            assert largest > 0, (name, key)
            assert float((own[key] - gradient).abs().max()) < 1e-5 * largest, (name, key)


PARTS = [
    *(("advantage", name) for name in names(Kind.ADVANTAGE)),
    *(("loss", name) for name in names(Kind.LOSS) if other_input(lookup(Kind.LOSS, name)) is None),
]
MODELS = {Input.VALUES: "critic", Input.PROCESS_REWARD: "process_reward"}
"""Sections of `trainer` for inputs that a further model gives."""


def needed(kind, name):
    return needed_inputs(lookup(Kind(kind), name)) - PROVIDED


@pytest.mark.capability("{kind} {name}", "distributed")
@pytest.mark.parametrize(("kind", "name"), [part for part in PARTS if needed(*part) <= set(MODELS)])
def test_two_ranks_compute_the_gradients_of_one_with_every_estimator_and_loss(paths, module_trajectories, kind, name):
    correction = {"mode": "off"} if kind == "loss" and weighs_behaviour.of(lookup(Kind.LOSS, name)) else {}
    algorithm = {kind: name, "correction": correction, "entropy_coef": 0.0}
    changes = {"algorithm": algorithm, "trainer": {MODELS[part]: {} for part in needed(kind, name)}}

    trajectories = copy.deepcopy(module_trajectories)
    for turn in (turn for trajectory in trajectories for turn in trajectory.turns):
        turn.state_key = "xy"[turn.index % 2]  # for estimators that compare turns in one state

    def work(ranks):
        return computed(ranks, settings(paths, ("qwen3", changes, {}), ranks.count), trajectories)

    (one, expected), (two, found) = in_ranks(1, work), in_ranks(2, work)
    assert two["train/loss"] == pytest.approx(one["train/loss"], rel=1e-5, abs=1e-6)
    assert sorted(found) == sorted(expected)
    for key, gradient in expected.items():
        difference = float((found[key] - gradient).abs().max())
        assert difference <= 1e-5 * max(1e-6, float(gradient.abs().max())), key
