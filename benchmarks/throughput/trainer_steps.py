"""Steps of trainers on the same episodes, each measured in a separate process because of its memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from agentrl.config.algorithm import CorrectionConfig
from agentrl.config.config import AlgorithmConfig, TrainerConfig
from agentrl.config.trainer import LoraConfig
from agentrl.models.load import load_model
from agentrl.models.lora import add_adapters
from agentrl.training.trainer import Trainer
from agentrl.trajectory import Trajectory
from throughput.steps import Side
from throughput.training_load import GROUP_SIZE, multi_turn

Dtype = Literal["float32", "bfloat16"]
LORA = LoraConfig(rank=16)


def make_step(model: PreTrainedModel, trajectories: Sequence[Trajectory], *, budget: int = 4096) -> Callable[[], None]:
    """Return a GRPO step of agentrl's trainer."""
    algorithm = AlgorithmConfig(
        group_size=GROUP_SIZE, aggregation="token-mean", correction=CorrectionConfig(mode="off")
    )
    settings = TrainerConfig(learning_rate=1e-5, tokens_per_micro_batch=budget)
    trainer = Trainer(model, algorithm, settings, seed=0, max_tokens=10**6)

    def step() -> None:
        trainer.step(trajectories, temperature=1.0)

    return step


def load_unmodified(path: str, dtype: Dtype) -> PreTrainedModel:
    """Load the model with transformers' layers, as peers use it."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    return model.eval()


def _bare_step(model: PreTrainedModel, trajectories: Sequence[Trajectory]) -> Callable[[], None]:
    sequences = [trajectory.sequences[0].ids_list() for trajectory in trajectories]

    def step() -> None:
        for ids in sequences:
            tokens = torch.tensor([ids])
            logits = model(tokens).logits[0, :-1].float()
            torch.nn.functional.cross_entropy(logits, tokens[0, 1:]).backward()
        model.zero_grad()

    return step


@dataclass(frozen=True, slots=True)
class StepKind:
    """Kind of a step: trainer and settings."""

    trainer: Literal["agentrl", "bare", "trl"]
    adapters: bool = False
    at_once: int = 0
    """Size of a micro-batch: tokens for agentrl, episodes for TRL."""

    @property
    def name(self) -> str:
        """Name in the output."""
        size = f" x{self.at_once}" if self.at_once else ""
        return f"{self.trainer}{', LoRA' if self.adapters else ''}{size}"

    def build(self, path: str, dtype: Dtype, trajectories: Sequence[Trajectory], seed: int) -> Callable[[], None]:
        """Return the step."""
        if self.trainer == "bare":
            return _bare_step(load_unmodified(path, dtype), trajectories)
        if self.trainer == "agentrl":
            model = load_model(path, dtype=dtype, device="cpu")
            if self.adapters:
                add_adapters(model, LORA, base=path, seed=seed)
            return make_step(model, trajectories, budget=self.at_once)
        from throughput.trl_step import TRLStep

        return TRLStep(
            load_unmodified(path, "float32"),
            trajectories,
            [1.0, -1.0] * (len(trajectories) // 2),
            batch_size=self.at_once,
            group_size=GROUP_SIZE,
            learning_rate=1e-5,
            bfloat16=dtype == "bfloat16",
            adapters=LORA if self.adapters else None,
        ).step


def measure_alone(kind: StepKind, path: str, dtype: Dtype, rounds: int, seed: int) -> dict[str, float]:
    """Return the figures of a kind of step, after a warm-up step, in a separate process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
        return alone.submit(_measure, kind, path, dtype, rounds, seed).result()


def _measure(kind: StepKind, path: str, dtype: Dtype, rounds: int, seed: int) -> dict[str, float]:
    trajectories = multi_turn(1, AutoConfig.from_pretrained(path).vocab_size, seed)
    side = Side(kind.build(path, dtype, trajectories, seed))
    side.step()
    for _ in range(rounds):
        side.measure()
    return side.figures(sum(len(trajectory.sequences[0].ids_list()) for trajectory in trajectories))
