"""Reward models: a causal model's body with one output, which reads a text and says how good it is.

It is trained on pairs of texts: the better one is to get the greater reward.
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
from agentrl.models.load import check_complete, reports_left_out
from agentrl.training.checkpoint import save_model_folder
from agentrl.training.compile import gradients_recomputed
from agentrl.training.distributed import Ranks
from agentrl.training.distributed.fsdp import load_sharded
from agentrl.training.forward.micro_batches import MicroBatch, SumsByName
from agentrl.training.forward.runner import ModelRunner, RunnerSettings
from agentrl.training.optimizer import LearningProgress, OptimizerSettings, PolicyOptimizer
from agentrl.training.preferences import pair_batches
from agentrl.training.weights import ModelWeights

HEAD = "ForSequenceClassification"
OUTPUT = ("score.", "classifier.")


class RewardModel:
    """Reads texts.

    Args:
        path: A folder, or a name on the Hugging Face hub.
        dtype: Number format of the weights.
        device: As ``model.device``.
        max_tokens: Of a text; of a longer one the end is read.
        new_head: Put a new output on a language model, to be trained; otherwise the model must have one.
        seed: Of the new output's weights.
        ranks: Share the model, which is in shards then.
        sharding: How they do.

    Raises:
        UsageError: no such model, or one without an output for a reward.
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
            if self.ranks.are_many:
                self.model = load_sharded(
                    path,
                    dtype=dtype,
                    device=self.ranks.device(device),
                    ranks=self.ranks,
                    options=sharding or FSDPOptions(),
                    make=lambda _: AutoModelForSequenceClassification.from_config(config, dtype=torch.float32),
                    load=lambda _, dtype: _loaded(path, config, dtype, seed, new),
                )
            else:
                self.model = _loaded(path, config, dtype, seed, new)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise UsageError(
                "cannot load the reward model",
                got=f"{path} ({str(error).strip().splitlines()[0]})",
                expected="a folder with a Hugging Face model and its tokenizer, or a name on the hub",
            ) from error
        self.model.eval()
        if not self.ranks.are_many:
            _move(self.model, device)
        self.source = ModelWeights(self.model, ranks=self.ranks, dtype=dtype)
        room = getattr(config.get_text_config(), "max_position_embeddings", max_tokens)
        self._max_tokens = min(max_tokens, room)
        self._pad_id = self._choose_pad()

    def rewards(self, texts: Sequence[str]) -> torch.Tensor:
        """Compute the rewards of texts: float32 [texts]; gradients flow unless the caller turned them off."""
        rows = [self._encoded(text)[-self._max_tokens :] for text in texts]
        longest = max(1, max(map(len, rows)))
        ids = torch.full((len(rows), longest), self._pad_id)
        mask = torch.zeros_like(ids)
        for place, row in enumerate(rows):
            ids[place, : len(row)] = torch.tensor(row, dtype=torch.int64)
            mask[place, : len(row)] = 1
        device = self.model.device
        logits: torch.Tensor = self.model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
        return logits.squeeze(-1).float()

    def _encoded(self, text: str) -> list[int]:
        """Encode what a policy wrote: special tokens that it spells are text."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return ids

    def score(self, text: str) -> float:
        """Compute the reward of one text."""
        with torch.no_grad():
            return float(self.rewards([text])[0])

    def save(self, folder: Path) -> None:
        """Write model and tokenizer; ranks that share it help."""
        weights = self.source.weights() if self.ranks.are_many else None
        save_model_folder(self.model, self.tokenizer, folder, weights=weights)

    def _choose_pad(self) -> int:
        """An id that no text ends with; the model looks for the last token that is another."""
        known = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        pad = next((number for number in known if number is not None), 0)
        self.model.config.pad_token_id = pad
        self.model.config.get_text_config().pad_token_id = pad
        return int(pad)


def _loaded(
    path: str | Path, config: Any, dtype: Literal["float32", "bfloat16"], seed: int, new: tuple[str, ...]
) -> PreTrainedModel:
    """The model, in which only what begins with one of `new` may have no weights in the files."""
    with torch.random.fork_rng(), reports_left_out():
        torch.manual_seed(seed)
        model, told = AutoModelForSequenceClassification.from_pretrained(
            path, config=config, dtype=getattr(torch, dtype), output_loading_info=True, ignore_mismatched_sizes=True
        )
    check_complete(path, told, new=new)
    loaded: PreTrainedModel = model
    return loaded


def _move(model: PreTrainedModel, device: str) -> None:
    target = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        model.to(torch.device(target))
    except (RuntimeError, AssertionError) as error:
        said = str(error).strip().splitlines()[0]
        raise UsageError(
            f"the reward model cannot be moved to {target}", got=said, hint="check model.device"
        ) from error


def _check_head(path: str | Path, config: Any, *, new_head: bool) -> None:
    named = (getattr(config, "architectures", None) or ["nothing"])[0]
    if new_head or (named.endswith(HEAD) and config.num_labels == 1):
        return
    raise UsageError(
        f"{path} is no reward model",
        got=f"{named} with {config.num_labels} labels" if named.endswith(HEAD) else named,
        expected=f"a model …{HEAD} with one label",
        hint="train one on pairs of episodes: agentrl reward-model --from RUN --model MODEL",
    )


CHARACTERS_PER_TOKEN = 3
"""Fewer than English has: texts are put together by an estimate of their tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPair:
    """Two texts about one task."""

    better: str
    worse: str


def bradley_terry(better: torch.Tensor, worse: torch.Tensor) -> torch.Tensor:
    """-log sigmoid(r_better - r_worse): [pairs] from rewards [pairs] (InstructGPT, arXiv 2203.02155, equation 1)."""
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
    """Train a reward model in place. All ranks that share it must, with the same arguments.

    `progress` is called after every optimizer step; the order of the pairs depends on `seed`.

    Returns:
        The state after the last step.

    Raises:
        TrainingError: there are no pairs, or the loss is not finite.
    """
    if not pairs:
        raise TrainingError("there is nothing to learn", got="no pairs")
    batches = list(pair_batches(len(pairs), settings, seed))
    optimizer = PolicyOptimizer(model.model, OptimizerSettings.of(trainer, settings, total_updates=len(batches)))
    started = time.perf_counter()
    for number, batch in enumerate(batches, start=1):
        with gradients_recomputed(model.model, enabled=trainer.gradient_checkpointing):
            means = _backward(model, [pairs[i] for i in batch], trainer)
        latest = LearningProgress.after(
            optimizer.update(), number=number, updates=len(batches), started=started, **means
        )
        progress(latest)
    return latest


def _backward(model: RewardModel, batch: Sequence[TextPair], trainer: TrainerConfig) -> dict[str, float]:
    """Add the gradient of the mean loss of some pairs; gives the means that are measured."""

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
    """Pairs of similar length together, within a budget of tokens, padding included."""
    sizes = [max(len(pair.better), len(pair.worse)) for pair in batch]
    parts: list[MicroBatch] = []
    room = 0
    for place in sorted(range(len(batch)), key=lambda place: -sizes[place]):
        tokens = 2 * max(1, sizes[place] // CHARACTERS_PER_TOKEN)
        if room == 0:
            parts.append(MicroBatch([], needs_grad=True, tokens=0, cost=0))
            room = max(1, budget // tokens)
        last = parts[-1]
        parts[-1] = replace(
            last, sequences=[*last.sequences, place], tokens=last.tokens + tokens, cost=last.cost + tokens
        )
        room -= 1
    return parts
