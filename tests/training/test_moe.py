"""Load balancing of routed experts: its formula, and gradients independent of micro-batches and layout."""

import pytest
import torch
from support.models import EXPERTS, tiny_model

from agentrl.config.config import AlgorithmConfig, TrainerConfig
from agentrl.errors import ConfigError
from agentrl.training.distributed import Ranks
from agentrl.training.forward.layout import PADDED, Layout
from agentrl.training.forward.logprobs import score
from agentrl.training.forward.sequences import ScoredSequence
from agentrl.training.forward.tree_attention import ATTENTION
from agentrl.training.moe import LoadBalancingLoss, assignments, token_weights
from agentrl.training.trainer import Trainer

LAYOUTS = {"padded": PADDED, "packed": Layout(packed=True), "shared": Layout(packed=True, share=2)}


def sequences():
    ids = torch.arange(3, 40)
    found = [ids[:20], torch.cat([ids[:12], ids[30:35]]), ids[5:14]]
    return [ScoredSequence(input_ids=i, positions=torch.arange(len(i)), targets=i) for i in found]


def recorded(balance, model, part, layout):
    with balance.record() as routed:
        score(model, part, temperature=1.0, layout=layout)
    return routed


def by_formula(model, part):
    """Sequence by sequence, in float64."""
    balance, total = LoadBalancingLoss(model, 1.0), 0.0
    alone = [recorded(balance, model, [sequence], PADDED) for sequence in part]
    for layer in range(len(alone[0])):
        logits = torch.cat([routed[layer][0] for routed in alone]).double()
        chosen = torch.cat([routed[layer][1] for routed in alone]).flatten()
        experts = logits.shape[1]
        shares = torch.bincount(chosen, minlength=experts).double() / len(chosen)
        total = total + experts * (shares * logits.softmax(-1).mean(0)).sum()
    return total / len(alone[0])


def gradients(model, part, layout, batches):
    """Of the balance alone, added up over micro-batches; and its value."""
    model.config._attn_implementation = ATTENTION
    balance = LoadBalancingLoss(model, 1.0)
    parts = [part[start::batches] for start in range(batches)]
    with torch.no_grad():
        counts = [assignments(recorded(balance, model, own, layout), token_weights(layout, own, torch.device("cpu")))
                  for own in parts]  # fmt: skip
    balance.count(counts, sum(map(len, part)), Ranks())
    values = []
    for own in parts:
        value = balance.part(recorded(balance, model, own, layout), token_weights(layout, own, torch.device("cpu")))
        value.backward()
        values.append(value.item())
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found, sum(values)


@pytest.mark.parametrize("family", EXPERTS)
def test_the_balance_is_its_formula_however_it_is_computed(family):
    model, part = tiny_model(family), sequences()
    expected = by_formula(model, part)
    expected.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    assert any("gate" in name for name in wanted)
    for layout in LAYOUTS.values():
        for batches in (1, 3):
            found, value = gradients(model, part, layout, batches)
            assert value == pytest.approx(expected.item(), rel=1e-5)
            for name, gradient in wanted.items():
                torch.testing.assert_close(found[name], gradient.float(), atol=1e-6, rtol=1e-4)


def test_a_step_with_a_large_weight_balances_the_experts(trajectories):
    model = tiny_model("qwen3_moe")
    config = TrainerConfig(moe={"aux_loss_coef": 10.0}, learning_rate=1e-2, tokens_per_micro_batch=80, lanes=2)
    trainer = Trainer(model, AlgorithmConfig(), config, seed=0, max_tokens=100)
    steps = [trainer.step(trajectories, temperature=1.0).metrics["train/moe_max_load"] for _ in range(8)]
    assert steps[-1] < steps[0]


def test_a_model_without_experts():
    with pytest.raises(ConfigError, match=r"routed experts: got Qwen3ForCausalLM.*trainer.moe.aux_loss_coef=0"):
        Trainer(tiny_model(), AlgorithmConfig(), TrainerConfig(moe={"aux_loss_coef": 0.1}), seed=0, max_tokens=9)
