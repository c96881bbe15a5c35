"""Throughput of a training step, compared with TRL's GRPOTrainer on the same model and trajectories.

Both take GRPO steps (token-mean, no reference model, AdamW) in alternation in one process, on two loads: multi-turn
groups of unequal lengths, and groups with long common prompts, for which prefixes are shared. Every occurrence of a
token in a trajectory counts, regardless of sharing and padding. TRL uses the fastest micro-batch size of `batches`. The
gradients of both are compared first.

    agentrl bench train --versus trl --json train.json
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from support.models import tiny_model
from throughput.steps import Side
from throughput.training_load import GROUP_SIZE, long_prompts, multi_turn
from throughput.trl_step import TRLStep
from transformers import PreTrainedModel

from agentrl.config.algorithm import CorrectionConfig
from agentrl.config.config import AlgorithmConfig, TrainerConfig
from agentrl.errors import UsageError
from agentrl.training.trainer import Trainer
from agentrl.trajectory import Trajectory

LEARNING_RATE = 1e-4


class _Own:
    """agentrl's trainer with accessible gradients."""

    def __init__(self, model: PreTrainedModel, trajectories: Sequence[Trajectory], budget: int, share: bool) -> None:
        algorithm = AlgorithmConfig(
            group_size=GROUP_SIZE, aggregation="token-mean", correction=CorrectionConfig(mode="off")
        )
        config = TrainerConfig(learning_rate=LEARNING_RATE, tokens_per_micro_batch=budget, share_prefixes=share)
        self._trainer = Trainer(model, algorithm, config, seed=0, max_tokens=10**6)
        self._trajectories = trajectories
        self.metrics: dict[str, float] = {}

    def step(self) -> None:
        self.metrics = self._trainer.step(self._trajectories, temperature=1.0).metrics

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients of a first step."""
        optimizer, found = self._trainer._optimizer, {}
        update = optimizer.update

        def record() -> Any:
            found.update({name: p.grad.clone() for name, p in self._trainer.model.named_parameters()})
            return update()

        optimizer.update = record  # type: ignore[method-assign]
        self.step()
        optimizer.update = update  # type: ignore[method-assign]
        return found


def _advantages(trajectories: Sequence[Trajectory]) -> list[float]:
    rewards = torch.tensor([trajectory.reward or 0.0 for trajectory in trajectories]).view(-1, GROUP_SIZE)
    centred = rewards - rewards.mean(1, keepdim=True)
    return [float(value) for value in (centred / (rewards.std(1, keepdim=True) + 1e-6)).flatten()]


def _compare(
    model: PreTrainedModel, trajectories: Sequence[Trajectory], *, share: bool, rounds: int, budget: int, batches: Any
) -> dict[str, Any]:
    def peer(batch_size: int) -> TRLStep:
        return TRLStep(
            copy.deepcopy(model),
            trajectories,
            _advantages(trajectories),
            batch_size=batch_size,
            group_size=GROUP_SIZE,
            learning_rate=LEARNING_RATE,
        )

    ours = _Own(copy.deepcopy(model), trajectories, budget, share)
    gradients = ours.gradients()
    peers = {size: peer(size) for size in batches}
    tried = {size: Side(candidate.step) for size, candidate in peers.items()}
    first = next(iter(peers.values()))
    first.step(keep_gradients=True)
    difference = _difference(gradients, first.gradients)
    for side in tried.values():
        side.measure()
    best = min(tried, key=lambda size: tried[size].cpu_seconds[0])
    sides = {"agentrl": Side(ours.step), "trl": Side(peers[best].step)}
    for _ in range(rounds):
        for side in sides.values():
            side.measure()
    tokens = sum(t.sequences[0].turns[-1].end for t in trajectories)
    figures = {name: side.figures(tokens) for name, side in sides.items()}
    return {
        "tokens": tokens,
        "trl_batch_size": best,
        "tokens_saved": ours.metrics["train/tokens_saved"],
        "gradient_difference": difference,
        **figures,
        "ratios": [
            theirs / own for own, theirs in zip(sides["agentrl"].cpu_seconds, sides["trl"].cpu_seconds, strict=True)
        ],
        "ratio_memory": figures["agentrl"]["peak_megabytes"] / figures["trl"]["peak_megabytes"],
    }


def _difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the norm of the difference, relative to the norm."""
    apart = sum(float((found[name] - gradient).double().square().sum()) for name, gradient in expected.items())
    return (apart / sum(float(gradient.double().square().sum()) for gradient in expected.values())) ** 0.5


def run(
    *,
    versus: str = "trl",
    groups: int = 2,
    rounds: int = 3,
    threads: int = 1,
    layers: int = 2,
    width: int = 128,
    vocabulary: int = 2048,
    budget: int = 4096,
    batches: tuple[int, ...] = (2, 8),
    seed: int = 0,
) -> dict[str, Any]:
    """Measure both loads; a Qwen3-architecture model in float32.

    Returns:
        Plain JSON types: conditions, tokens per CPU second and per wall-clock second, the growth of the resident set
        during a step, and the ratios of TRL's CPU seconds to agentrl's: `ratio_multi_turn`, `ratio_shared_prompts`.
    """
    if versus != "trl":
        raise UsageError("unknown peer", got=f"versus={versus}", expected="trl")
    torch.set_num_threads(threads)
    model = tiny_model(
        vocab_size=vocabulary, layers=layers, hidden_size=width, max_context=4096, initializer_range=0.02
    )
    sizes = {"rounds": rounds, "budget": budget, "batches": batches}
    unequal = _compare(model, multi_turn(groups, vocabulary, seed), share=False, **sizes)
    shared = _compare(model, long_prompts(groups, vocabulary, seed), share=True, **sizes)
    return {
        "threads": threads,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "trajectories": groups * GROUP_SIZE,
        "multi_turn": unequal,
        "shared_prompts": shared,
        "ratio_multi_turn": median(unequal["ratios"]),
        "ratio_shared_prompts": median(shared["ratios"]),
        "ratio_memory_multi_turn": unequal["ratio_memory"],
        "ratio_memory_shared_prompts": shared["ratio_memory"],
    }
