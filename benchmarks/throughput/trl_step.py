"""A training step of TRL's GRPOTrainer on given trajectories.

TRL's own code starts from the batch that its sampling would have produced: it shuffles the batch, splits it into
micro-batches, computes their losses and gradients, clips, and updates with AdamW. Only the sampling is left out.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from agentrl.config.trainer import LoraConfig
from agentrl.errors import UsageError
from agentrl.trajectory import Trajectory

try:
    import peft
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
except ImportError as error:
    raise UsageError(
        "TRL cannot be imported", got=str(error), expected="trl", hint="pip install 'agentrl[bench]'"
    ) from error


class TRLStep:
    """Trainer of a model in place.

    Args:
        model: Model in float32, on the CPU.
        trajectories: Trajectories of one sequence each.
        advantages: Advantage of each trajectory.
        batch_size: Trajectories of a micro-batch.
        group_size: Trajectories of a group.
        learning_rate: Learning rate of AdamW.
        bfloat16: True to compute in bfloat16, with weights in float32.
        adapters: Adapters to train instead of all weights.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        trajectories: Sequence[Trajectory],
        advantages: Sequence[float],
        *,
        batch_size: int,
        group_size: int,
        learning_rate: float,
        bfloat16: bool = False,
        adapters: LoraConfig | None = None,
    ) -> None:
        batch = _batch(trajectories, advantages)

        class Given(GRPOTrainer):  # type: ignore[misc]
            def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
                return dict(batch)

        self._micro_batches = len(trajectories) // batch_size
        with tempfile.TemporaryDirectory() as folder:
            settings = GRPOConfig(
                output_dir=str(Path(folder)),
                per_device_train_batch_size=batch_size,
                gradient_accumulation_steps=self._micro_batches,
                num_generations=group_size,
                learning_rate=learning_rate,
                loss_type="dapo",
                beta=0.0,
                temperature=1.0,
                max_completion_length=batch["completion_ids"].shape[1],
                gradient_checkpointing=False,
                bf16=bfloat16,
                use_cpu=True,
                report_to=[],
                disable_tqdm=True,
                adam_beta1=0.9,
                adam_beta2=0.95,
                weight_decay=0.0,
            )
            self._trainer = Given(
                model=model,
                reward_funcs=lambda completions, **_: [0.0] * len(completions),
                args=settings,
                train_dataset=Dataset.from_list([{"prompt": "0"}] * len(trajectories)),
                processing_class=_tokenizer(model.config.vocab_size),
                peft_config=None if adapters is None else _peft(adapters),
            )
        self._trainer.create_optimizer()
        self._trainer.current_gradient_accumulation_steps = self._micro_batches
        self.gradients: dict[str, torch.Tensor] = {}

    def step(self, *, keep_gradients: bool = False) -> None:
        """Take an optimizer step."""
        trainer = self._trainer
        trainer._step, trainer._buffered_inputs = 0, None
        for _ in range(self._micro_batches):
            trainer.training_step(trainer.model, [], None)
        if keep_gradients:
            self.gradients = {name: p.grad.clone() for name, p in trainer.model.named_parameters()}
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        trainer.optimizer.step()
        trainer.model.zero_grad()


def _peft(adapters: LoraConfig) -> peft.LoraConfig:
    return peft.LoraConfig(
        r=adapters.rank, lora_alpha=adapters.scale * adapters.rank, target_modules=adapters.target_modules
    )


def _batch(trajectories: Sequence[Trajectory], advantages: Sequence[float]) -> dict[str, torch.Tensor]:
    """Return the batch as TRL's sampling produces it: prompts padded on the left, the rest on the right."""
    sequences = [trajectory.sequences[0] for trajectory in trajectories]
    starts = [sequence.turns[0].start for sequence in sequences]
    prompts = [torch.from_numpy(s.token_ids[:start]).long() for s, start in zip(sequences, starts, strict=True)]
    ends = [sequence.turns[-1].end for sequence in sequences]
    spans = list(zip(sequences, starts, ends, strict=True))
    completions = [torch.from_numpy(s.token_ids[start:end]).long() for s, start, end in spans]
    own = [torch.from_numpy(s.loss_mask[start:end]).long() for s, start, end in spans]

    def padded(rows: Sequence[torch.Tensor], side: str) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_side=side)

    return {
        "prompt_ids": padded(prompts, "left"),
        "prompt_mask": padded([torch.ones_like(row) for row in prompts], "left"),
        "completion_ids": padded(completions, "right"),
        "completion_mask": padded([torch.ones_like(row) for row in completions], "right"),
        "tool_mask": padded(own, "right"),
        "advantages": torch.tensor(advantages),
        "num_items_in_batch": torch.stack([row.sum() for row in own]).sum(),
    }


def _tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    words = models.WordLevel({str(i): i for i in range(vocabulary)}, unk_token="0")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="0", eos_token="1", unk_token="0")
