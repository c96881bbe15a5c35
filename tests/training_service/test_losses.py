"""Losses and gradients of the service against plain torch, on the same weights, by the client's documentation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from agentrl.errors import TrainingError, UsageError
from agentrl.training_service.runs import AdamStep, BaseWeights, RunSettings, TrainingRun
from agentrl.training_service.wire import Datum, PassRequest

SETTINGS = RunSettings(rank=4, seed=3)
OPTIONS = {
    "ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
    "cispo": {"clip_low_threshold": 0.7, "clip_high_threshold": 1.3},
    "dro": {"beta": 0.3},
    "gspo": {"clip_low_threshold": 0.95, "clip_high_threshold": 1.05},
}
STEP = AdamStep(learning_rate=1e-2, beta1=0.8, beta2=0.9, eps=1e-8, weight_decay=0.1, grad_clip_norm=0.5)


def token_loss(name: str, p: torch.Tensor, given: dict[str, torch.Tensor], options: dict[str, float]) -> torch.Tensor:
    """One datum's loss, written down again from the client's documentation."""
    if name == "cross_entropy":
        return (-p * given["weights"]).sum()
    q, advantage = given["logprobs"], given["advantages"]
    ratio = torch.exp(p - q)
    if name == "importance_sampling":
        return -(ratio * advantage).sum()
    if name == "dro":
        return -(p * advantage - 0.5 * options["beta"] * (p - q) ** 2).sum()
    low, high = options["clip_low_threshold"], options["clip_high_threshold"]
    if name == "cispo":
        return -(torch.clamp(ratio, low, high).detach() * p * advantage).sum()
    if name == "gspo":
        inside = given["sequence_ratio_mask"] != 0
        ratio = torch.exp((p.detach() - q)[inside].mean() + p - p.detach())
    return -torch.min(ratio * advantage, torch.clamp(ratio, low, high) * advantage).sum()


def datum_of(name: str, length: int, seed: int) -> Datum:
    """Random data; targets are not the shifted input, which the service must not take for granted."""
    random = np.random.default_rng(seed)
    inputs: dict[str, Any] = {"target_tokens": random.integers(0, 300, length)}
    if name == "cross_entropy":
        inputs["weights"] = random.normal(size=length).astype(np.float32)
    else:
        inputs["logprobs"] = random.normal(-5, 2, size=length).astype(np.float32)
        inputs["advantages"] = random.normal(size=length).astype(np.float32)
    if name == "gspo":
        inputs["sequence_ratio_mask"] = (random.random(length) < 0.7).astype(np.float32)
    return Datum(tokens=random.integers(0, 300, length), inputs=inputs)


def awake(run: TrainingRun) -> TrainingRun:
    """Give adapters values: at the start their product is 0, and half of the gradients, too."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in run.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return run


def plain(
    run: TrainingRun, data: list[Datum], name: str, options: dict[str, float]
) -> tuple[torch.Tensor, list[torch.Tensor], PreTrainedModel]:
    """The loss and log-probabilities by transformers' own forward pass, one sequence at a time, and its model."""
    model = run.base.copy(run.settings)
    model.load_state_dict(run.model.state_dict())
    model.config._attn_implementation = "sdpa"
    total, found = torch.zeros(()), []
    for datum in data:
        logits = model(input_ids=torch.from_numpy(datum.tokens)[None]).logits[0]
        targets = torch.from_numpy(datum.inputs["target_tokens"])
        p = logits.log_softmax(-1).gather(1, targets.reshape(len(targets), -1)).reshape(targets.shape)
        given = {key: torch.from_numpy(value) for key, value in datum.inputs.items()}
        total = total + token_loss(name, p, given, options)
        found.append(p)
    return total, found, model


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("rank", [4, None], ids=["adapters", "all weights"])
@pytest.mark.parametrize("name", ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_losses_and_gradients_equal_torch(name: str, rank: int | None, base_model: Callable[..., BaseWeights]) -> None:
    run = awake(TrainingRun(base_model(), RunSettings(rank=rank, seed=3)))
    data, options = [datum_of(name, length, length) for length in (9, 3, 14)], OPTIONS.get(name, {})
    expected, logprobs, model = plain(run, data, name, options)
    expected.backward()

    found, loss = run.forward_backward(PassRequest(data=data, loss=name, options=options))

    assert loss == pytest.approx(expected.item(), rel=1e-4)
    for own, other in zip(found, logprobs, strict=True):
        np.testing.assert_allclose(own, other.detach().numpy(), rtol=1e-4, atol=1e-4)
    wanted = gradients(model)
    assert {key for key, value in wanted.items() if value is not None} == set(wanted), "a parameter without gradient"
    for key, gradient in gradients(run.model).items():
        torch.testing.assert_close(gradient, wanted[key], rtol=2e-3, atol=2e-4 * float(wanted[key].abs().max()))


def test_mixed_numbers_of_targets_per_position(base_model: Callable[..., BaseWeights]) -> None:
    run = awake(TrainingRun(base_model(), SETTINGS))
    random = np.random.default_rng(1)
    wide = Datum(
        tokens=random.integers(0, 300, 6),
        inputs={
            "target_tokens": random.integers(0, 300, (6, 3)),
            "weights": random.random((6, 3)).astype(np.float32),
        },
    )
    narrow = Datum(
        tokens=random.integers(0, 300, 5),
        inputs={name: value[:5, :2] for name, value in wide.inputs.items()},
    )
    data = [wide, datum_of("cross_entropy", 4, 2), narrow]
    expected, logprobs, model = plain(run, data, "cross_entropy", {})
    expected.backward()
    found, loss = run.forward_backward(PassRequest(data=data, loss="cross_entropy"))
    assert loss == pytest.approx(expected.item(), rel=1e-4)
    assert [own.shape for own in found] == [(6, 3), (4,), (5, 2)]
    np.testing.assert_allclose(found[0], logprobs[0].detach().numpy(), rtol=1e-4, atol=1e-4)
    for key, gradient in gradients(run.model).items():
        wanted = gradients(model)[key]
        torch.testing.assert_close(gradient, wanted, rtol=2e-3, atol=2e-4 * float(wanted.abs().max()))


def test_gradients_add_up_until_an_update_that_is_torchs_adamw(base_model: Callable[..., BaseWeights]) -> None:
    run = awake(TrainingRun(base_model(), SETTINGS))
    data = [datum_of("cross_entropy", length, length) for length in (9, 5)]
    _, _, reference = plain(run, data, "cross_entropy", {})
    trained = [p for p in reference.parameters() if p.requires_grad]
    adam = torch.optim.AdamW(trained, lr=1e-2, betas=(0.8, 0.9), eps=1e-8, weight_decay=0.1)
    for scale in (1.0, 0.5):  # the second one takes other numbers, and other moments into account
        for group in adam.param_groups:
            group["lr"] = 1e-2 * scale
        adam.zero_grad()
        for datum in data:
            logits = reference(input_ids=torch.from_numpy(datum.tokens)[None]).logits[0]
            p = logits.log_softmax(-1).gather(1, torch.from_numpy(datum.inputs["target_tokens"])[:, None])[:, 0]
            token_loss("cross_entropy", p, {"weights": torch.from_numpy(datum.inputs["weights"])}, {}).backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 0.5)
        adam.step()
        for datum in data:
            run.forward_backward(PassRequest(data=[datum], loss="cross_entropy"))
        metrics = run.optim_step(replace(STEP, learning_rate=1e-2 * scale))
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-3)
    for (name, own), other in zip(run.model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-3, atol=1e-4, msg=name)


def test_a_forward_pass_alone_leaves_no_gradient(base_model: Callable[..., BaseWeights]) -> None:
    run = awake(TrainingRun(base_model(), SETTINGS))
    data = [datum_of("ppo", 5, 5)]
    _, measured = run.forward_backward(PassRequest(data=data, loss="ppo", options=OPTIONS["ppo"], forward_only=True))
    assert all(gradient is None for gradient in gradients(run.model).values())
    _, learned = run.forward_backward(PassRequest(data=data, loss="ppo", options=OPTIONS["ppo"]))
    assert learned == pytest.approx(measured, rel=1e-5)


@pytest.mark.parametrize("break_it", ["a loss that is not finite", "an input that does not fit"])
def test_a_pass_that_fails_leaves_the_gradients_before_it(
    break_it: str, base_model: Callable[..., BaseWeights]
) -> None:
    run = awake(TrainingRun(base_model(), SETTINGS))
    run.forward_backward(PassRequest(data=[datum_of("cross_entropy", 5, 5)], loss="cross_entropy"))
    before = {name: gradient.clone() for name, gradient in gradients(run.model).items()}
    bad = datum_of("importance_sampling", 5, 5)
    if break_it == "a loss that is not finite":
        bad.inputs["logprobs"][2] = -1e4
    else:
        bad.inputs["advantages"].resize((4,), refcheck=False)
    with pytest.raises(UsageError, match=r"not finite|does not fit"):
        run.forward_backward(PassRequest(data=[bad], loss="importance_sampling"))
    for name, gradient in gradients(run.model).items():
        assert torch.equal(gradient, before[name])


def test_an_update_needs_gradients_all_of_them_and_finite_ones(base_model: Callable[..., BaseWeights]) -> None:
    run = awake(TrainingRun(base_model(), SETTINGS))
    before = {name: p.clone() for name, p in run.model.named_parameters()}
    with pytest.raises(UsageError, match="no gradients are accumulated"):
        run.optim_step(STEP)
    request = PassRequest(data=[datum_of("cross_entropy", 5, 5)], loss="cross_entropy")
    run.forward_backward(request)
    run.mark_incomplete("its data did not fit")
    with pytest.raises(UsageError, match="its data did not fit"):
        run.optim_step(STEP)
    run.forward_backward(request)
    next(gradient for gradient in gradients(run.model).values())[0] = torch.inf
    with pytest.raises(TrainingError, match="not finite"):
        run.optim_step(STEP)
    assert all(torch.equal(p, before[name]) for name, p in run.model.named_parameters())
    run.forward_backward(request)
    run.optim_step(STEP)
    assert any(not torch.equal(p, before[name]) for name, p in run.model.named_parameters())


@pytest.mark.parametrize("refused", ["a part of the data is missing", "gradients are not finite"])
def test_rejected_update_clears_its_gradients(refused: str, base_model: Callable[..., BaseWeights]) -> None:
    base = base_model()
    run, fresh = awake(TrainingRun(base, SETTINGS)), awake(TrainingRun(base, SETTINGS))
    bad, good = (datum_of("cross_entropy", length, length) for length in (9, 5))
    run.forward_backward(PassRequest(data=[bad], loss="cross_entropy"))
    if refused == "a part of the data is missing":
        run.mark_incomplete("its data did not fit")
    else:
        next(gradient for gradient in gradients(run.model).values())[0] = torch.nan
    with pytest.raises((UsageError, TrainingError), match="no update"):
        run.optim_step(STEP)
    assert all(gradient is None for gradient in gradients(run.model).values())
    metrics = []
    for one in (run, fresh):
        one.forward_backward(PassRequest(data=[good], loss="cross_entropy"))
        metrics.append(one.optim_step(STEP))
    assert metrics[0] == metrics[1]
    for (name, own), other in zip(run.model.named_parameters(), fresh.model.parameters(), strict=True):
        assert torch.equal(own, other), name


def test_runs_share_the_base_and_nothing_else(base_model: Callable[..., BaseWeights]) -> None:
    base = base_model()
    first, second = TrainingRun(base, SETTINGS), TrainingRun(base, SETTINGS)
    frozen = {name: p.clone() for name, p in base.model.named_parameters()}
    request = PassRequest(data=[datum_of("cross_entropy", 5, 5)], loss="cross_entropy")
    first.forward_backward(request)
    assert all(gradient is None for gradient in gradients(second.model).values())
    first.optim_step(STEP)
    assert all(torch.equal(p, frozen[name]) for name, p in base.model.named_parameters())
    shared = {p.data_ptr() for p in first.model.parameters()} & {p.data_ptr() for p in second.model.parameters()}
    assert shared == {p.data_ptr() for p in base.model.parameters()}
    untouched = TrainingRun(base, SETTINGS)
    for (name, own), other in zip(second.model.named_parameters(), untouched.model.parameters(), strict=True):
        assert torch.equal(own, other), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rank", [4, None], ids=["adapters", "all weights"])
def test_saved_run_continues_bitwise(
    rank: int | None, dtype: str, base_model: Callable[..., BaseWeights], tmp_path: Path
) -> None:
    base, settings = base_model(f"model.dtype={dtype}"), RunSettings(rank=rank, seed=3)
    request = PassRequest(data=[datum_of("cross_entropy", length, length) for length in (9, 5)], loss="cross_entropy")
    small = replace(STEP, learning_rate=1e-4)  # below what bfloat16 can tell apart: copies in float32 remember it

    def go_on(run: TrainingRun) -> list[float]:
        losses = []
        for _ in range(3):
            losses.append(run.forward_backward(request)[1])
            run.optim_step(small)
        return losses

    run = TrainingRun(base, settings)
    go_on(run)
    run.save(tmp_path, optimizer=True)
    expected = go_on(run)
    again = TrainingRun(base, settings)
    again.load(tmp_path, optimizer=True)
    assert go_on(again) == expected
    for (name, own), other in zip(run.model.named_parameters(), again.model.named_parameters(), strict=True):
        assert torch.equal(own, other[1]), name
    assert again.updates == run.updates == 6


@pytest.mark.parametrize(
    ("attention", "mlp", "head", "expected"),
    [
        (True, False, False, {"q_proj", "k_proj", "v_proj", "o_proj"}),
        (False, True, False, {"gate_proj", "up_proj", "down_proj"}),
        (False, False, True, {"lm_head"}),
    ],
)
def test_the_layers_that_get_adapters(
    attention: bool, mlp: bool, head: bool, expected: set[str], base_model: Callable[..., BaseWeights]
) -> None:
    settings = RunSettings(rank=2, train_attn=attention, train_mlp=mlp, train_unembed=head)
    names = [name for name, p in TrainingRun(base_model(), settings).model.named_parameters() if p.requires_grad]
    assert {part for name in names for part in name.split(".") if part.endswith(("_proj", "lm_head"))} == expected
