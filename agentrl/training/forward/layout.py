"""Layout of sequences in forward passes: padded, packed without padding, or packed with shared prefixes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from transformers import PreTrainedModel

from agentrl.config.config import LOGITS_MEGABYTES, TrainerConfig
from agentrl.errors import ConfigError, UsageError
from agentrl.message.image import ImageReader
from agentrl.models.packing import batch_dependent_rope, fixed_length, layer_obstacle, short_windows
from agentrl.models.vision import MODEL_TYPES, hidden_states
from agentrl.training.distributed import Ranks
from agentrl.training.distributed.context_parallel import Attention, ContextGroup, SharedAttention, key_value_copies
from agentrl.training.distributed.fsdp import computing_dtype, reshard, within_forward
from agentrl.training.forward.moe_replay import ROUTES, RouterReplay
from agentrl.training.forward.sequences import (
    ScoredSequence,
    group_by_length,
    pack,
    pad,
    padded_indices,
    shared_rows,
    sorted_prefixes,
)
from agentrl.training.forward.tree_attention import ATTENTION, AttentionTree, PaddedAttention, has_flash

MIN_SHARED_TOKENS = 16
"""Minimum number of additional shared tokens that justify a node of the prefix trie."""
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Maximum relative difference of hidden states that rounding in another order explains."""
_TRIED_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Layout of sequences in forward passes; `choose_layout` finds the best one."""

    budget: int = 8192
    """Maximum number of tokens of a forward pass, including padding."""
    logits_megabytes: int = LOGITS_MEGABYTES
    """Memory of the logits that exist at once, in MiB."""
    packed: bool = False
    """True to concatenate sequences in one row instead of padding them to equal length."""
    share: int = 0
    """Minimum length of a common prefix that is computed once in a packed row; 0 disables sharing."""
    context: ContextGroup | None = None
    """Ranks that share the tokens of every row."""
    replay: RouterReplay | None = None
    """Replay of the engine's routed experts, for sequences that have them."""
    longest_together: int | None = None
    """Length above which a sequence gets its own micro-batch, because it would change the others' rotary positions."""

    def micro_batches(self, sequences: Sequence[ScoredSequence]) -> list[list[int]]:
        """Group sequences into micro-batches; return their indices."""
        if self.share:
            return shared_rows(sequences, self.budget, share=self.share)
        lengths = [len(sequence) for sequence in sequences]
        if self.longest_together is None:
            return group_by_length(lengths, self.budget, padded=not self.packed)
        together = [i for i, length in enumerate(lengths) if length <= self.longest_together]
        groups = group_by_length([lengths[i] for i in together], self.budget, padded=not self.packed)
        alone = [[i] for i, length in enumerate(lengths) if length > self.longest_together]
        return [*alone, *([together[k] for k in group] for group in groups)]

    def for_workers(self, sequences: Sequence[ScoredSequence], workers: int) -> Layout:
        """Reduce the budget so that, if possible, every worker has a micro-batch.

        The two parts of a divided trie both compute their common prefix, so the budget allows for the longest one.
        """
        if workers == 1:
            return self
        tokens = sum(len(sequence) for sequence in sequences)
        if self.share:
            _, common = sorted_prefixes(sequences)
            tokens = self.tokens(sequences) + (workers - 1) * max(common, default=0)
        return replace(self, budget=min(self.budget, math.ceil(tokens / workers)))

    def tokens(self, sequences: Sequence[ScoredSequence]) -> int:
        """Count the tokens that a micro-batch of these sequences computes, including padding."""
        if self.share:
            return pack(sequences, share=self.share).input_ids.numel()
        lengths = [len(sequence) for sequence in sequences]
        return sum(lengths) if self.packed else max(lengths) * len(lengths)

    def pairs(self, sequences: Sequence[ScoredSequence]) -> int:
        """Count the pairs of tokens that attend to each other in a micro-batch, including padding."""
        if self.share:
            return int(pack(sequences, share=self.share).depths.sum())
        lengths = [len(sequence) for sequence in sequences]
        if not self.packed:
            lengths = [max(lengths)] * len(lengths)
        return sum(length * length for length in lengths) // 2

    def hidden_states(
        self,
        model: PreTrainedModel,
        sequences: Sequence[ScoredSequence],
        image_processor: ImageReader | None,
    ) -> torch.Tensor:
        """Compute the hidden states that predict the targets of a micro-batch: [targets, width]."""
        device = model.device
        if not self.packed:
            input_ids = pad(sequences)
            indices = padded_indices(sequences, input_ids.shape[1])
            options = self._routes(sequences, indices, input_ids.shape, device)
            images = tuple(sequence.images for sequence in sequences)
            hidden = hidden_states(model, input_ids.to(device), images, image_processor, **options)
            return hidden.flatten(0, 1)[_predicting(sequences, indices).to(device)]
        row = pack(sequences, share=self.share)
        output = model.base_model(
            input_ids=row.input_ids[None].to(device),
            position_ids=row.depths[None].to(device),
            attention_mask=torch.ones(1, 1, 1, 1, device=device),  # a mask with four dimensions is passed on unchanged
            tree=AttentionTree(row, device),
            use_cache=False,
            **self._routes(sequences, row.indices, (1, row.input_ids.numel()), device),
        )
        return cast("torch.Tensor", output.last_hidden_state[0, _predicting(sequences, row.indices).to(device)])

    def shared_hidden_states(
        self, model: PreTrainedModel, sequences: Sequence[ScoredSequence], context: ContextGroup
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute rows that several ranks share.

        Returns:
            This rank's hidden states, in the order of targets, and the rank of each target, int64 [targets].
        """
        if self.packed:
            row = pack(sequences, share=self.share).pad(context.padded_length)
            ids, depths = row.input_ids[None], row.depths[None]
            attention: Attention = AttentionTree(row, model.device)
            indices = row.indices
        else:
            longest = context.padded_length(max(len(sequence) for sequence in sequences))
            ids, attention = pad(sequences, longest=longest), PaddedAttention()
            depths = torch.arange(longest).expand_as(ids)
            indices = padded_indices(sequences, longest)
        at = _predicting(sequences, indices)
        device, own = model.device, context.own(ids.shape[1])
        options = self._routes(sequences, indices, ids.shape, device)
        output = model.base_model(
            input_ids=ids[:, own].to(device),
            position_ids=depths[:, own].to(device),
            attention_mask=torch.ones(1, 1, 1, 1, device=device),
            tree=SharedAttention(attention, context),
            use_cache=False,
            **{name: routes[:, own] for name, routes in options.items()},
        )
        part = ids.shape[1] // context.count
        line, column = at // ids.shape[1], at % ids.shape[1]
        owner = (column // part).to(device)
        here = (line * part + column % part).to(device)[owner == context.rank]
        return cast("torch.Tensor", output.last_hidden_state.flatten(0, 1)[here]), owner

    def _routes(
        self,
        sequences: Sequence[ScoredSequence],
        indices: Sequence[torch.Tensor],
        shape: Sequence[int],
        device: torch.device,
    ) -> dict[str, torch.Tensor]:
        """Return the additional arguments of the model for router replay, if any."""
        if self.replay is None:
            return {}
        return {ROUTES: self.replay.lay_out([sequence.routes for sequence in sequences], indices, shape).to(device)}


def _predicting(sequences: Sequence[ScoredSequence], indices: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the indices of the hidden states that predict the targets: int64 [targets]."""
    return torch.cat([own[sequence.positions] for own, sequence in zip(indices, sequences, strict=True)])


PADDED = Layout()


def choose_layout(model: PreTrainedModel, config: TrainerConfig, ranks: Ranks | None = None) -> Layout:
    """Choose the fastest layout that is exact for a model, and set up the model's attention for it.

    Raises:
        UsageError: the model does not support ``trainer.share_prefixes`` or context parallelism.
    """
    ranks = ranks or Ranks()
    obstacle, packed = _obstacle(model), config.share_prefixes or all(ranks.collect([_packs_well(model)]))
    if (packed or ranks.context is not None) and obstacle is None:
        obstacle = next(filter(None, ranks.collect([_difference(model)])), None)
    if ranks.context is not None:
        _check_context(model, ranks, ranks.context, obstacle)
    if obstacle is not None and config.share_prefixes:
        raise UsageError(
            "this model cannot share prefixes",
            got=f"{type(model).__name__}: {obstacle}",
            expected="a causal language model whose tokens interact only in attention",
            hint="set trainer.share_prefixes=false",
        )
    packed = packed and obstacle is None
    return Layout(
        budget=config.tokens_per_micro_batch,
        packed=packed,
        share=MIN_SHARED_TOKENS if packed and config.share_prefixes else 0,
        context=ranks.context,
        longest_together=fixed_length(model.config),
    )


def _check_context(model: PreTrainedModel, ranks: Ranks, context: ContextGroup, obstacle: str | None) -> None:
    if obstacle is not None:
        raise UsageError(
            "this model cannot be trained with trainer.context_parallel",
            got=f"{type(model).__name__}: {obstacle}",
            expected="a causal language model whose tokens interact only in attention",
            hint="set trainer.context_parallel=1",
        )
    text = model.config.get_text_config()
    heads, key_value_heads = text.num_attention_heads, getattr(text, "num_key_value_heads", text.num_attention_heads)
    key_value_copies(heads // ranks.tensor_parallel, max(1, key_value_heads // ranks.tensor_parallel), context.count)


def _packs_well(model: PreTrainedModel) -> bool:
    """Return True if the device has a kernel for packed rows without a dense mask, for all layers."""
    if model.device.type == "cuda":
        return has_flash(computing_dtype(model))
    text = model.config.get_text_config()
    if getattr(text, "attn_logit_softcapping", None):
        return False  # no kernel supports capped scores
    kinds = getattr(text, "layer_types", None) or ["sliding_attention" if getattr(text, "sliding_window", None) else ""]
    return model.device.type == "cpu" and "sliding_attention" not in kinds


def _obstacle(model: PreTrainedModel) -> str | None:
    """Find a reason in the model's config why it cannot compute packed rows."""
    text = model.config.get_text_config()
    if model.config.model_type in MODEL_TYPES or text is not model.config:
        return "it reads images"
    if (obstacle := layer_obstacle(model)) is not None:
        return obstacle
    rope = batch_dependent_rope(model.config)
    return None if rope is None else f"rotary positions of type {rope}, which depend on the batch"


@torch.no_grad()
def _difference(model: PreTrainedModel) -> str | None:
    """Compare a small packed row with padded sequences.

    Returns:
        ``None`` if they agree. Otherwise the reason why packed rows cannot be used; the model's attention is restored.
    """
    # avoids the first ids: special tokens amplify rounding errors, one of SmolLM2's up to its whole norm
    ids = (torch.arange(24) + model.config.vocab_size // 2) % model.config.vocab_size
    sequences = [
        ScoredSequence(input_ids=own, positions=torch.arange(len(own)), targets=own)
        for own in (ids, torch.cat([ids[:9], ids[:5]]), ids.flip(0))
    ]
    with short_windows(model):
        expected = within_forward(model, Layout().hidden_states, sequences, None)
    before = model.config._attn_implementation
    model.config._attn_implementation = ATTENTION
    try:
        with short_windows(model):
            found = within_forward(model, Layout(packed=True, share=2).hidden_states, sequences, None)
    except (TypeError, UsageError) as error:
        model.config._attn_implementation = before
        return f"its layers do not pass arguments to attention ({error})"
    finally:
        reshard(model)
    apart = float((found.float() - expected.float()).norm() / expected.float().norm())
    if apart <= TOLERANCE.get(expected.dtype, 0.0):
        return None
    model.config._attn_implementation = before
    return f"hidden states of a packed row differ by {apart:.2g} from those of padded sequences"


@torch.no_grad()
def with_replay(model: PreTrainedModel, layout: Layout) -> Layout:
    """Add router replay to a layout, and test that all routers follow it; all ranks must call this.

    Raises:
        ConfigError: the model does not support router replay.
    """
    replay = RouterReplay(model)
    layers, chosen = replay.shape
    ids, targets = torch.arange(_TRIED_TOKENS) % model.config.vocab_size, torch.zeros(0, dtype=torch.long)
    routes = torch.arange(chosen, dtype=torch.uint8).repeat(_TRIED_TOKENS, layers)
    sequence = ScoredSequence(input_ids=ids, positions=targets, targets=targets, routes=routes)
    with replay.count_differences() as count:
        within_forward(model, Layout(replay=replay).hidden_states, [sequence], None)
    reshard(model)
    if [differing.numel() for differing in count.differing] != [_TRIED_TOKENS] * layers:
        raise ConfigError(
            "this model cannot replay routes",
            got=f"{type(model).__name__}, whose layers do not receive them",
            hint="set trainer.moe.router_replay=false",
        )
    return replace(layout, replay=replay)
