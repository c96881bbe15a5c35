"""Shared parts of the GPU benchmarks: models of known sizes with random weights, episodes, and the machine's name."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from agentrl.errors import Outcome, UsageError
from agentrl.trajectory import Source, TokenSequence, Trajectory, Turn

ON_CPU = "the figures of a CPU mean nothing: this shows only that the script runs"
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
}
"""Sizes of the Qwen3 family; ``tiny`` is for machines without a GPU."""
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "B200": 2250e12}
"""Dense bfloat16 FLOP/s from the data sheet, by a part of the card's name."""


def choose_device() -> torch.device:
    """Return the first GPU, or the CPU if there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def conditions() -> dict[str, Any]:
    """Return the conditions of the measurement."""
    if not torch.cuda.is_available():
        return {"device": "cpu", "torch": torch.__version__, "note": ON_CPU}
    return {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}


def choose_size(size: str | None) -> str:
    """Return the requested size, or by default one that fits the machine.

    Raises:
        UsageError: The size is unknown.
    """
    if size is not None and size not in SIZES:
        raise UsageError("unknown model size", got=size, expected=", ".join(SIZES))
    return size or ("0.6B" if torch.cuda.is_available() else "tiny")


def model_config(size: str) -> Qwen3Config:
    """Return the sizes as a config of transformers."""
    tiny = size == "tiny"
    return Qwen3Config(
        **SIZES[size],
        vocab_size=512 if tiny else 151_936,
        num_key_value_heads=2 if tiny else 8,
        head_dim=16 if tiny else 128,
        tie_word_embeddings=size in ("tiny", "0.6B", "1.7B", "4B"),
        max_position_embeddings=32_768,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def random_model(size: str, *, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> PreTrainedModel:
    """Make a model with random weights on the device; the same seed gives the same weights."""
    torch.manual_seed(seed)
    with choose_device():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            model_config(size), dtype=dtype, attn_implementation="sdpa"
        )
    return model.eval()


def episodes(count: int, *, prompt: int, answer: int, vocabulary: int, seed: int = 0) -> list[Trajectory]:
    """Make groups of 4 episodes with a common prompt; answers have `answer` / 2 to `answer` random tokens."""
    generator = random.Random(seed)
    found: list[Trajectory] = []
    for number in range(count):
        group, member = divmod(number, 4)
        shared = random.Random(f"{seed}/{group}").choices(range(vocabulary), k=prompt)
        sequence = TokenSequence()
        sequence.extend(shared, Source.PROMPT)
        ids = generator.choices(range(vocabulary), k=generator.randint(answer // 2, answer))
        sequence.extend_sampled(ids, logprobs=[-1.0] * len(ids), versions=[0] * len(ids))
        sequence.turns.append(Turn(index=0, start=prompt, end=len(sequence), reward=float(member % 2)))
        trajectory = Trajectory(id=str(number), task_id=str(group), environment="random", seed=0, group_id=str(group))
        trajectory.outcome, trajectory.reward = Outcome.FINISHED, float(member % 2)
        trajectory.sequences.append(sequence)
        found.append(trajectory)
    return found


def seconds_of(work: Callable[[], object]) -> float:
    """Return wall-clock seconds, including the device's queue."""
    finish()
    start = time.perf_counter()
    work()
    finish()
    return time.perf_counter() - start


def finish() -> None:
    """Wait until the device has finished."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
