"""Reward models: a causal model's body with one output, which reads a text and says how good it is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from agentrl.errors import UsageError
from agentrl.training.models.loading import check_complete, reports_left_out

HEAD = "ForSequenceClassification"
OUTPUT = ("score.", "classifier.")
"""How the names of the output's tensors begin."""


class RewardModel:
    """Reads texts.

    Args:
        path: A folder, or a name on the Hugging Face hub.
        dtype: Number format of the weights.
        device: As ``model.device``.
        max_tokens: Of a text; of a longer one the end is read.
        new_head: Put a new output on a language model, to be trained; otherwise the model must have one.
        seed: Of the new output's weights.

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
    ) -> None:
        transformers_logging.disable_progress_bar()
        try:
            config = AutoConfig.from_pretrained(path, num_labels=1) if new_head else AutoConfig.from_pretrained(path)
            self.tokenizer: Any = AutoTokenizer.from_pretrained(path, use_fast=True)
            _check_head(path, config, new_head=new_head)
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                with reports_left_out():
                    model, told = AutoModelForSequenceClassification.from_pretrained(
                        path,
                        config=config,
                        dtype=getattr(torch, dtype),
                        output_loading_info=True,
                        ignore_mismatched_sizes=True,
                    )
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise UsageError(
                "cannot load the reward model",
                got=f"{path} ({str(error).strip().splitlines()[0]})",
                expected="a folder with a Hugging Face model and its tokenizer, or a name on the hub",
            ) from error
        check_complete(path, told, new=OUTPUT if new_head else ())
        self.model: PreTrainedModel = model
        _move(self.model.eval(), device)
        room = getattr(config.get_text_config(), "max_position_embeddings", max_tokens)
        self._max_tokens = min(max_tokens, room)
        self._pad_id = self._choose_pad()

    def rewards(self, texts: Sequence[str]) -> torch.Tensor:
        """What the model says of texts: float32 [texts]; gradients flow unless the caller turned them off."""
        rows = [self.tokenizer(text, add_special_tokens=False)["input_ids"][-self._max_tokens :] for text in texts]
        longest = max(1, max(map(len, rows)))
        ids = torch.full((len(rows), longest), self._pad_id)
        mask = torch.zeros_like(ids)
        for place, row in enumerate(rows):
            ids[place, : len(row)] = torch.tensor(row, dtype=torch.int64)
            mask[place, : len(row)] = 1
        device = self.model.device
        logits: torch.Tensor = self.model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
        return logits.squeeze(-1).float()

    def score(self, text: str) -> float:
        """What it says of one text."""
        with torch.no_grad():
            return float(self.rewards([text])[0])

    def save(self, folder: Path) -> None:
        """Write model and tokenizer into an existing folder."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def _choose_pad(self) -> int:
        """An id that no text ends with; the model looks for the last token that is another."""
        known = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        pad = next((number for number in known if number is not None), 0)
        self.model.config.pad_token_id = pad
        self.model.config.get_text_config().pad_token_id = pad
        return int(pad)


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
