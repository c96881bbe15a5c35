"""Router replay: recorded experts and the router's own gates, in every layout and on several ranks."""

import copy
import dataclasses
import types

import numpy as np
import pytest
import torch
from ranks_here import group_of
from support.models import EXPERTS, tiny_model

from agentrl.config.config import AlgorithmConfig, Config, TrainerConfig
from agentrl.errors import ConfigError, TrainingError
from agentrl.models.moe import ChosenExperts, routers
from agentrl.training.compile import checkpoint_activations
from agentrl.training.forward.layout import PADDED, Layout, with_replay
from agentrl.training.forward.logprobs import score
from agentrl.training.forward.sequences import ScoredSequence, pack
from agentrl.training.forward.tree_attention import ATTENTION
from agentrl.training.trainer import Trainer

LAYOUTS = {"padded": PADDED, "packed": Layout(packed=True), "shared": Layout(packed=True, share=2)}
GATES = {
    "deepseek_v2": (torch.softmax, False),
    "deepseek_v3": (lambda logits, _: torch.sigmoid(logits), True),
    "qwen2_moe": (torch.softmax, False),
    "qwen3_moe": (torch.softmax, False),
    "mixtral": (torch.softmax, True),
}
"""Scores of experts, and whether those of the chosen ones are made to sum to 1."""


def told(model, count, seed):
    """Routes that no router would choose: any two of four experts, in all layers that have experts."""
    draws = np.random.default_rng(seed)
    pairs = [draws.permutation(4)[:2] for _ in range(count * len(routers(model)))]
    return torch.from_numpy(np.array(pairs, dtype=np.uint8).reshape(count, -1))


def sequences(model):
    """Two with a prefix in common, routed alike up to a token; the last one's routes are known in part."""
    ids = torch.arange(3, 40)
    found = [ids[:20], torch.cat([ids[:12], ids[30:35]]), ids[5:14]]
    routes = [told(model, len(own), seed) for seed, own in enumerate(found)]
    routes[1][:9] = routes[0][:9]
    known = [*routes[:2], routes[2][:4]]
    return [
        ScoredSequence(input_ids=own, positions=torch.arange(len(own)), targets=own, routes=routed)
        for own, routed in zip(found, known, strict=True)
    ]


def by_hand(model, family, part):
    """Log-probabilities sequence by sequence in float64, with routers whose choice is written in."""
    model = copy.deepcopy(model).double()
    model.set_experts_implementation("eager")  # the grouped one takes no float64
    scoring, normalized = GATES[family]
    found = []
    for sequence in part:
        for number, router in enumerate(routers(model)):
            own = type(router).forward.__get__(router)
            fixed = sequence.routes.view(len(sequence.routes), -1, 2)[:, number].long()

            def forward(self, hidden, own=own, fixed=fixed):
                logits, gates, chosen = own(hidden)
                scores = scoring(logits, -1)[: len(fixed)].gather(1, fixed)
                scores = scores / scores.sum(1, keepdim=True) if normalized else scores
                scores = scores * getattr(self, "routed_scaling_factor", 1.0)
                rest = len(fixed)
                return logits, torch.cat([scores, gates[rest:]]), torch.cat([fixed, chosen[rest:]])

            router.forward = types.MethodType(forward, router)
        logits = model(input_ids=sequence.input_ids[None]).logits[0]
        found.append(logits.log_softmax(-1).gather(1, sequence.targets[:, None])[:, 0])
    return model, torch.cat(found)


def gradients(model):
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("family", EXPERTS)
def test_routes_are_followed_with_the_routers_own_gates(family):
    model = tiny_model(family)
    part = sequences(model)
    exact, expected = by_hand(model, family, part)
    expected.sum().backward()
    wanted = gradients(exact)
    replay = with_replay(model, PADDED).replay
    model.config._attn_implementation = ATTENTION
    for layout in LAYOUTS.values():
        found = score(model, part, temperature=1.0, layout=dataclasses.replace(layout, replay=replay))
        torch.testing.assert_close(found.logp, expected.float(), atol=2e-4, rtol=1e-4)
        found.logp.sum().backward()
        for name, gradient in gradients(model).items():
            largest = float(wanted[name].abs().max())
            assert float((gradient - wanted[name]).abs().max()) <= 2e-4 * max(largest, 1e-3), (family, name)
    gates = [name for name in wanted if name.endswith("gate.weight")]
    assert gates
    assert all(float(wanted[name].abs().max()) > 0 for name in gates)
    plain = score(model, part, temperature=1.0)
    assert float((plain.logp - expected).detach().abs().max()) > 1e-2


def test_a_prefix_is_shared_as_far_as_its_tokens_were_routed_alike():
    part = sequences(tiny_model("qwen3_moe"))
    assert pack(part, share=2).input_ids.numel() == 20 + 17 + 9 - 9
    unrouted = [dataclasses.replace(sequence, routes=None) for sequence in part]
    assert pack(unrouted, share=2).input_ids.numel() == 20 + 17 + 9 - 12


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_layers_that_are_computed_again_take_the_same_routes(mode):
    model = tiny_model("qwen3_moe")
    part, layout = sequences(model), with_replay(model, PADDED)
    found = []
    for enabled in (False, mode):
        with checkpoint_activations(model, enabled=enabled):
            score(model, part, temperature=1.0, layout=layout).logp.sum().backward()
        found.append(gradients(model))
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, atol=1e-6, rtol=1e-4)


def routed(trajectories, model):
    """As an engine with other routers would have routed them; the experts of every layer."""
    engine = copy.deepcopy(model)
    with torch.no_grad():
        for router in routers(engine):
            router.weight += 0.3 * torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(0))
    chosen = ChosenExperts(routers(engine))
    for sequence in (s for trajectory in trajectories for s in trajectory.sequences):
        engine(input_ids=torch.from_numpy(sequence.token_ids.astype(np.int64))[None])
        sequence.routes.append(chosen.take()[len(sequence.routes) : -1], computed=len(sequence) - 1)
    return trajectories


def step(trajectories, **trainer):
    config = TrainerConfig(learning_rate=1e-2, **trainer)
    made = Trainer(tiny_model("qwen3_moe"), AlgorithmConfig(kl_coef=0.1), config, seed=0, max_tokens=100)
    return made.step(trajectories, temperature=1.0).metrics


def test_a_step_replays_and_says_how_many_routes_differed(trajectories):
    routed(trajectories, tiny_model("qwen3_moe"))
    plain = step(trajectories)
    assert "mismatch/routed_experts" not in plain
    found = step(trajectories, moe={"router_replay": True})
    assert found["mismatch/routed_experts_known"] == 1
    assert 0.05 < found["mismatch/routed_experts"] < 0.9
    assert found["train/kl_reference"] == pytest.approx(0, abs=1e-6)  # the reference follows the same routes
    assert found["train/loss"] != pytest.approx(plain["train/loss"], rel=1e-3)
    small = {"tokens_per_micro_batch": 60, "share_prefixes": True, "lanes": 2, "gradient_checkpointing": True}
    for name, value in step(trajectories, moe={"router_replay": True}, **small).items():
        if name in ("train/loss", "train/grad_norm", "train/entropy"):
            assert value == pytest.approx(found[name], rel=2e-4, abs=1e-6), name


def test_tokens_without_routes_go_where_the_router_says(trajectories):
    found, plain = step(trajectories, moe={"router_replay": True}), step(trajectories)
    assert found["mismatch/routed_experts_known"] == 0
    assert found["train/loss"] == pytest.approx(plain["train/loss"], rel=1e-6)
    assert found["train/grad_norm"] == pytest.approx(plain["train/grad_norm"], rel=1e-5)


@pytest.mark.parametrize("context", [1, 2])
@pytest.mark.slow
def test_ranks_replay_what_one_does(trajectories, tmp_path, context):
    model = tiny_model("qwen3_moe")
    model.save_pretrained(tmp_path / "model")
    routed(trajectories, model)
    found = []
    for count in (1, 2):
        trainer = {
            "processes": count,
            "moe": {"router_replay": True},
            "tokens_per_micro_batch": 80,
            "learning_rate": 1e-2,
        }
        config = Config(
            environment={"name": "maze"},
            model={"path": str(tmp_path / "model"), "device": "cpu"},
            trainer={**trainer, "context_parallel": context if count == 2 else 1},
        )
        with group_of(count) as group:
            parts = group.build(config)
            found.append(parts.trainer.step(trajectories, temperature=1.0).metrics)
    for name in (
        "train/loss",
        "train/grad_norm",
        "train/entropy",
        *(["mismatch/routed_experts"] if context == 1 else []),
    ):
        assert found[1][name] == pytest.approx(found[0][name], rel=1e-4, abs=1e-6), name


def test_what_cannot_be_replayed_is_refused(trajectories):
    with pytest.raises(ConfigError, match=r"routed experts: got Qwen3ForCausalLM.*moe.router_replay=false"):
        Trainer(tiny_model(), AlgorithmConfig(), TrainerConfig(moe={"router_replay": True}), seed=0, max_tokens=9)
    with pytest.raises(ValueError, match=r"moe.router_replay needs access to layers"):
        TrainerConfig(moe={"router_replay": True}, kernels="compiled")
    for sequence in (s for trajectory in trajectories for s in trajectory.sequences):
        rest = len(sequence) - 1 - len(sequence.routes)
        sequence.routes.append(np.full((rest, 6), 1, dtype=np.uint8), computed=len(sequence) - 1)
    with pytest.raises(
        TrainingError, match=r"experts do not fit the trainer's model: got 6 numbers per token.*expected 4"
    ):
        step(trajectories, moe={"router_replay": True})


def test_an_unknown_way_of_weighing_is_refused():
    model = tiny_model("qwen3_moe")
    for router in routers(model):
        own = router.forward
        router.forward = lambda hidden, own=own: (lambda out: (out[0], out[1] ** 2 + 0.3, out[2]))(own(hidden))
    with pytest.raises(ConfigError, match="does not support the gates of this router"):
        with_replay(model, PADDED)
