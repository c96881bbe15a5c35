"""Trial of a model on the local engine: two short sequences in steps, compared with the model's own forward pass.

In a step, the tokens of all sequences form one row. A model whose tokens depend on others not only through attention as
the engine computes it, such as one with recurrent or convolutional layers, or with attention or a mask of its own,
would mix sequences or forget their beginnings without an error.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.errors import UsageError
from agentrl.models.packing import short_windows
from agentrl.serving.local.cache import STEP, CacheRow, RowStore
from agentrl.serving.local.forward import ForwardStep, SequenceChunk

CHUNKS = ((7, 1, 1), (4, 5, 1))
"""Tokens that each sequence computes in each step."""
TOLERANCE = {torch.float32: 5e-3, torch.float64: 5e-3}
"""Maximum difference of logits, relative to their norm, that is explained by rounding. Models of 90 architectures
differ by at most 2e-6 in float32 if the engine computes them as they do, and otherwise by 0.014 or more."""
TOLERANCE_OF_SHORT_FORMATS = 0.1


class Trial:
    """Trial of a module that still has its own attention; `check` compares it with the engine's."""

    def __init__(self, module: PreTrainedModel) -> None:
        self._module = module
        size = int(module.config.get_text_config().vocab_size)
        # avoids the first ids, which may be special tokens
        self._sequences = [[(size // 2 + 7 * k * sum(c)) % size for k in range(sum(c))] for c in CHUNKS]
        with torch.inference_mode(), short_windows(module):
            self._expected = torch.stack([self._own_logits(module, k) for k in range(len(CHUNKS))])

    def _own_logits(self, module: Any, number: int) -> Tensor:
        ids = torch.tensor([self._sequences[number]], device=module.device)
        logits: Tensor = module(input_ids=ids, use_cache=False).logits[0]
        return logits[[end - 1 for end in accumulate(CHUNKS[number])]]

    def check(self, compute: Callable[[ForwardStep], Tensor]) -> None:
        """Compare with the logits that `compute` returns for the steps.

        Raises:
            UsageError: they differ, or the model does not use the engine's attention.
        """
        try:
            with torch.inference_mode(), short_windows(self._module):
                found = self._step_logits(compute)
        except (TypeError, RuntimeError, UsageError) as error:
            raise self._refusal(f"an error in a trial: {error}") from error
        finite = self._expected.isfinite()  # some models exclude tokens
        expected, found = (_center(torch.where(finite, logits.float(), 0.0)) for logits in (self._expected, found))
        apart = float((found - expected).norm() / expected.norm())
        if apart > TOLERANCE.get(self._module.dtype, TOLERANCE_OF_SHORT_FORMATS):
            raise self._refusal(f"logits in a trial that differ by {apart:.2g} from those of the model's forward pass")

    def _step_logits(self, compute: Callable[[ForwardStep], Tensor]) -> Tensor:
        store = RowStore(max_tokens=len(CHUNKS) * STEP, max_context=STEP)
        rows = [store.take(len(ids)) for ids in self._sequences]
        found: dict[CacheRow, list[Tensor]] = {row: [] for row in rows}
        for row, ids in zip(rows, self._sequences, strict=True):
            row.ids = ids
        for counts in zip(*CHUNKS, strict=True):
            chunks = [SequenceChunk(row, count) for row, count in zip(rows, counts, strict=True)]
            step = ForwardStep(chunks, self._module.device)
            for chunk, logits in zip(step.chunks, compute(step), strict=True):
                found[chunk.row].append(logits)
                chunk.row.computed += chunk.count
        return torch.stack([torch.stack(found[row]) for row in rows])

    def _refusal(self, got: str) -> UsageError:
        return UsageError(
            f"the local engine does not support {type(self._module).__name__}",
            got=got,
            expected="a causal language model whose tokens interact only in attention",
            hint="use engine=vllm or engine=sglang",
        )


def _center(logits: Tensor) -> Tensor:
    return logits - logits.mean(-1, keepdim=True)
