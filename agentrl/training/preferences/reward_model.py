"""Reward models: a causal model's body with one output, which maps a text to a reward.

A reward model is trained on pairs of texts: the better one should get the higher reward.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch.nn import functional
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from agentrl.config.algorithm import PreferencesConfig
from agentrl.config.config import TrainerConfig
from agentrl.config.trainer import FSDPOptions
from agentrl.errors import TrainingError, UsageError
from agentrl.models.load import check_complete, silence_load_reports
from agentrl.training.checkpoint import save_model_folder
from agentrl.training.compile import checkpoint_activations
from agentrl.training.distributed import Ranks
from agentrl.training.distributed.fsdp import load_sharded
from agentrl.training.forward.micro_batches import MicroBatch
from agentrl.training.forward.runner import ModelRunner, RunnerSettings, SumsByName
from agentrl.training.optimizer import LearningProgress, OptimizerSettings, PolicyOptimizer
from agentrl.training.preferences.dpo import pair_batches
from agentrl.training.weights import ModelWeights

HEAD = "ForSequenceClassification"
OUTPUT = ("score.", "classifier.")
CHARACTERS_PER_TOKEN = 3
"""Characters per token, to estimate the tokens of texts in a micro-batch; English has more."""


class RewardModel:
    """Model that maps texts to rewards.

    Args:
        path: Folder, or name on the Hugging Face hub.
        dtype: Number format of the weights.
        device: Device, with the same values as ``model.device``.
        max_tokens: Maximum number of tokens of a text; only the end of a longer text is used.
        new_head: True to add an untrained output to a language model; otherwise the model must have one.
        seed: Seed of the new output's weights.
        ranks: Ranks that share the model; with several, it is sharded.
        sharding: Options of the sharding.

    Raises:
        UsageError: the model cannot be loaded, or has no reward output.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        dtype: Literal["float32", "bfloat16"],
        device: str = "auto",
        max_tokens: int = 4096,
        new_head: bool = False,
        seed: int = 0,
        ranks: Ranks | None = None,
        sharding: FSDPOptions | None = None,
    ) -> None:
        transformers_logging.disable_progress_bar()
        self.ranks = ranks or Ranks()
        try:
            config = AutoConfig.from_pretrained(path, num_labels=1) if new_head else AutoConfig.from_pretrained(path)
            self.tokenizer: Any = AutoTokenizer.from_pretrained(path, use_fast=True)
            _check_head(path, config, new_head=new_head)
            new = OUTPUT if new_head else ()
            self.model: PreTrainedModel
            if self.ranks.is_distributed:
                self.model = load_sharded(
                    path,
                    dtype=dtype,
                    device=self.ranks.device(device),
                    ranks=self.ranks,
                    options=sharding or FSDPOptions(),
                    make=lambda _: AutoModelForSequenceClassification.from_config(config, dtype=torch.float32),
                    load=lambda _, dtype: _load_model(path, config, dtype, seed, new),
                )
            else:
                self.model = _load_model(path, config, dtype, seed, new)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise UsageError(
                "cannot load the reward model",
                got=f"{path} ({str(error).strip().splitlines()[0]})",
                expected="a folder with a Hugging Face model and its tokenizer, or a name on the hub",
            ) from error
        self.model.eval()
        if not self.ranks.is_distributed:
            _move(self.model, device)
        self.source = ModelWeights(self.model, ranks=self.ranks, dtype=dtype)
        room = getattr(config.get_text_config(), "max_position_embeddings", max_tokens)
        self._max_tokens = min(max_tokens, room)
        self._pad_id = self._choose_pad()

    def rewards(self, texts: Sequence[str]) -> torch.Tensor:
        """Compute the rewards of texts: float32 [texts]; gradients flow if they are enabled."""
        rows = [self._encode(text)[-self._max_tokens :] for text in texts]
        longest = max(1, max(map(len, rows)))
        ids = torch.full((len(rows), longest), self._pad_id)
        mask = torch.zeros_like(ids)
        for index, row in enumerate(rows):
            ids[index, : len(row)] = torch.tensor(row, dtype=torch.int64)
            mask[index, : len(row)] = 1
        device = self.model.device
        logits: torch.Tensor = self.model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
        return logits.squeeze(-1).float()

    def _encode(self, text: str) -> list[int]:
        """Encode a policy's text; a spelled-out special token is encoded as text."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return ids

    def score(self, text: str) -> float:
        """Compute the reward of one text."""
        with torch.no_grad():
            return float(self.rewards([text])[0])

    def save(self, folder: Path) -> None:
        """Write model and tokenizer; ranks that share the model take part."""
        weights = self.source.weights() if self.ranks.is_distributed else None
        save_model_folder(self.model, self.tokenizer, folder, weights=weights)

    def _choose_pad(self) -> int:
        """Choose an id that no text ends with: the model's output is read at the last token with another id."""
        known = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        pad = next((number for number in known if number is not None), 0)
        self.model.config.pad_token_id = pad
        self.model.config.get_text_config().pad_token_id = pad
        return int(pad)


def _load_model(
    path: str | Path, config: Any, dtype: Literal["float32", "bfloat16"], seed: int, new: tuple[str, ...]
) -> PreTrainedModel:
    """Load the model; only parameters with a prefix in `new` may be missing in its files."""
    with torch.random.fork_rng(), silence_load_reports():
        torch.manual_seed(seed)
        model, report = AutoModelForSequenceClassification.from_pretrained(
            path, config=config, dtype=getattr(torch, dtype), output_loading_info=True, ignore_mismatched_sizes=True
        )
    check_complete(path, report, new=new)
    loaded: PreTrainedModel = model
    return loaded


def _move(model: PreTrainedModel, device: str) -> None:
    target = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        model.to(torch.device(target))
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(
            f"the reward model cannot be moved to {target}", got=reason, hint="check model.device"
        ) from error


def _check_head(path: str | Path, config: Any, *, new_head: bool) -> None:
    named = (getattr(config, "architectures", None) or ["nothing"])[0]
    if new_head or (named.endswith(HEAD) and config.num_labels == 1):
        return
    raise UsageError(
        f"{path} is not a reward model",
        got=f"{named} with {config.num_labels} labels" if named.endswith(HEAD) else named,
        expected=f"a model …{HEAD} with one label",
        hint="train one on pairs of episodes: agentrl reward-model --from RUN --model MODEL",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPair:
    """Two texts about one task."""

    better: str
    worse: str


def bradley_terry(better: torch.Tensor, worse: torch.Tensor) -> torch.Tensor:
    """Compute -log sigmoid(r_better - r_worse): [pairs] from rewards [pairs] (InstructGPT, arXiv 2203.02155, eq. 1)."""
    return -functional.logsigmoid(better - worse)


def train_reward_model(
    model: RewardModel,
    pairs: Sequence[TextPair],
    settings: PreferencesConfig,
    trainer: TrainerConfig,
    *,
    seed: int,
    progress: Callable[[LearningProgress], None] = lambda _: None,
) -> LearningProgress:
    """Train a reward model in place. All ranks that share it must call this with the same arguments.

    `progress` is called after every optimizer step; `seed` determines the order of the pairs.

    Returns:
        The state after the last step.

    Raises:
        TrainingError: there are no pairs, or the loss is not finite.
    """
    if not pairs:
        raise TrainingError("no pairs to learn from", expected="at least one pair of texts")
    batches = list(pair_batches(len(pairs), settings, seed))
    optimizer = PolicyOptimizer(model.model, OptimizerSettings.of(trainer, settings, total_updates=len(batches)))
    started = time.perf_counter()
    for number, batch in enumerate(batches, start=1):
        with checkpoint_activations(model.model, enabled=trainer.gradient_checkpointing):
            means = _backward(model, [pairs[i] for i in batch], trainer)
        latest = LearningProgress.after(
            optimizer.update(), number=number, updates=len(batches), started=started, **means
        )
        progress(latest)
    return latest


def _backward(model: RewardModel, batch: Sequence[TextPair], trainer: TrainerConfig) -> dict[str, float]:
    """Add the gradient of the mean loss of some pairs; return the mean loss, accuracy and margin."""

    def loss(pairs: list[int], tally: SumsByName) -> torch.Tensor:
        texts = [text for pair in pairs for text in (batch[pair].better, batch[pair].worse)]
        rewards = model.rewards(texts).view(-1, 2)
        losses, margins = bradley_terry(rewards[:, 0], rewards[:, 1]), rewards[:, 0] - rewards[:, 1]
        tally.add("loss", losses)
        tally.add("accuracy", margins > 0)
        tally.add("margin", margins)
        return losses.sum() / len(batch)

    runner = ModelRunner(model.model, RunnerSettings(ranks=model.ranks, every_time=trainer.fsdp.reduce))
    means = runner.run(_micro_batches(batch, trainer.tokens_per_micro_batch), loss).tally.means()
    if not math.isfinite(means["loss"]):
        raise TrainingError("the reward model's loss is not finite", hint="try a smaller preferences.learning_rate")
    return means


def _micro_batches(batch: Sequence[TextPair], budget: int) -> list[MicroBatch]:
    """Make micro-batches of pairs of similar length, within a budget of tokens including padding."""
    sizes = [max(len(pair.better), len(pair.worse)) for pair in batch]
    parts: list[MicroBatch] = []
    room = 0
    for index in sorted(range(len(batch)), key=lambda index: -sizes[index]):
        tokens = 2 * max(1, sizes[index] // CHARACTERS_PER_TOKEN)
        if room == 0:
            parts.append(MicroBatch([], needs_grad=True, tokens=0, cost=0))
            room = max(1, budget // tokens)
        last = parts[-1]
        parts[-1] = replace(
            last, sequences=[*last.sequences, index], tokens=last.tokens + tokens, cost=last.cost + tokens
        )
        room -= 1
    return parts
