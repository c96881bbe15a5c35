"""The most probable tokens of a model at each wanted position, whose logits exist for a chunk of positions only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from agentrl.errors import UsageError
from agentrl.image import ImageReader
from agentrl.lanes import Lanes
from agentrl.training.ranks import Ranks
from agentrl.training.ranks.sharding import within_forward
from agentrl.training.scoring.head_scores import chunk_tokens, head_logits
from agentrl.training.scoring.layout import Layout
from agentrl.training.scoring.logprobs import read_all
from agentrl.training.scoring.sequences import ScoredSequence

LARGEST_ID = 1 << 24
"""Above it float32, in which ranks tell each other ids, skips whole numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOpinions:
    """What a model says at the positions of given tokens."""

    logp: torch.Tensor
    """Log-probability of the given tokens: float32 [targets]."""
    top_ids: torch.Tensor | None = None
    """The model's own k most probable tokens there: int64 [targets, k]; ``None`` where nobody asks for them."""
    top_logp: torch.Tensor | None = None
    """Their log-probabilities: float32 [targets, k]."""


def opinions_of_all(
    model: PreTrainedModel,
    sequences: Sequence[ScoredSequence],
    *,
    top_k: int,
    temperature: float,
    pad_id: int,
    layout: Layout,
    lanes: Lanes,
    ranks: Ranks,
    reader: ImageReader | None = None,
) -> TokenOpinions:
    """What a model says of any number of sequences, without gradients; all ranks get it.

    Args:
        model: See `agentrl.training.scoring.logprobs.score`, also for the other arguments.
        sequences: One or more; the result is in their order.
        top_k: How many tokens at each position.
        temperature: Divides the logits.
        pad_id: Any id of the vocabulary.
        layout: How the sequences lie in the forward passes; ranks do not share rows.
        lanes: Compute the forward passes.
        ranks: Share them out.
        reader: Prepares images.

    Raises:
        UsageError: the vocabulary has fewer tokens, or ranks share rows.
    """
    vocabulary = model.get_output_embeddings().weight.shape[0]
    if not top_k <= vocabulary <= LARGEST_ID or layout.context is not None:
        raise UsageError(
            f"the {top_k} most probable tokens cannot be read",
            got=f"a vocabulary of {vocabulary:,}" + ("" if layout.context is None else " in rows that ranks share"),
            expected=f"at most {LARGEST_ID:,} tokens, {top_k} or more, and trainer.context_parallel=1",
        )

    def read(part: Sequence[ScoredSequence]) -> torch.Tensor:
        found: torch.Tensor = within_forward(
            model,
            _read,
            part,
            top_k=top_k,
            temperature=temperature or 1.0,
            pad_id=pad_id,
            layout=layout,
            reader=reader,
        )
        return found

    found = read_all(model, sequences, read, rows=1 + 2 * top_k, layout=layout, lanes=lanes, ranks=ranks)
    ids, logp = found[1 : 1 + top_k].mT.long(), found[1 + top_k :].mT.contiguous()
    return TokenOpinions(logp=found[0], top_ids=ids, top_logp=logp)


def _read(
    model: PreTrainedModel,
    sequences: Sequence[ScoredSequence],
    *,
    top_k: int,
    temperature: float,
    pad_id: int,
    layout: Layout,
    reader: ImageReader | None,
) -> torch.Tensor:
    """Log-probabilities of the targets, ids, log-probabilities of these: float32 [1 + 2 k, targets]."""
    targets = torch.cat([sequence.targets for sequence in sequences]).to(model.device)
    hidden, head = layout.read(model, sequences, pad_id, reader), model.get_output_embeddings()
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    chunk = chunk_tokens(head.weight.shape[0], layout.logits_megabytes)
    found = []
    for first in range(0, len(targets), chunk):
        part = slice(first, first + chunk)
        logits = head_logits(hidden[part], head.weight, head.bias, temperature, cap)
        total = logits.logsumexp(-1, keepdim=True)
        best, ids = logits.topk(top_k, dim=-1)
        of_targets = logits.gather(-1, targets[part, None]) - total
        found.append(torch.cat([of_targets, ids.float(), best - total], dim=1))
        del logits
    return torch.cat(found).mT.contiguous()
