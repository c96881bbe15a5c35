"""Log-probabilities of given tokens without a tensor of [tokens, vocabulary]: the head runs over chunks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from agentrl.image import ImageReader
from agentrl.lanes import Lanes
from agentrl.training.head_scores import TokenScores, chunk_tokens, head_scores
from agentrl.training.layout import PADDED, Layout
from agentrl.training.sequences import ScoredSequence


def score(
    model: PreTrainedModel,
    sequences: Sequence[ScoredSequence],
    *,
    temperature: float,
    pad_id: int,
    layout: Layout = PADDED,
    entropy_gradient: bool = False,
    reader: ImageReader | None = None,
) -> TokenScores:
    """The wanted tokens of a micro-batch, sequence after sequence; gradients flow unless the caller turned them off.

    Args:
        model: A causal language model; attention sees each sequence from its start.
        sequences: One or more.
        temperature: Divides the logits; 0 counts as 1, as engines do (see `agentrl.policy`).
        pad_id: Any id of the vocabulary.
        layout: How the sequences lie in the forward pass, and the size of the logits that exist at once.
        entropy_gradient: Let gradients flow through the entropy too; without, it is a measurement only.
        reader: Prepares images; needed where sequences hold any.
    """
    hidden = layout.read(model, sequences, pad_id, reader)
    targets = torch.cat([sequence.targets for sequence in sequences]).to(model.device)
    head = model.get_output_embeddings()
    return head_scores(
        hidden,
        head.weight,
        head.bias,
        targets,
        temperature=temperature or 1.0,
        chunk=chunk_tokens(head.weight.shape[0], layout.logits_megabytes),
        entropy_gradient=entropy_gradient,
    )


def score_all(
    model: PreTrainedModel,
    sequences: Sequence[ScoredSequence],
    *,
    temperature: float,
    pad_id: int,
    layout: Layout,
    lanes: Lanes,
    reader: ImageReader | None = None,
) -> TokenScores:
    """The wanted tokens of any number of sequences, without gradients.

    Args:
        model: See `score`, also for the other arguments.
        sequences: One or more; the result is in their order.
        temperature: Divides the logits.
        pad_id: Any id of the vocabulary.
        layout: How the sequences lie in the forward passes.
        lanes: Compute the forward passes.
        reader: Prepares images.
    """
    batches = layout.for_lanes(sequences, lanes.count).micro_batches(sequences)

    def compute(indices: list[int]) -> dict[int, TokenScores]:
        part = [sequences[i] for i in indices]
        with torch.no_grad():
            scores = score(model, part, temperature=temperature, pad_id=pad_id, layout=layout, reader=reader)
        counts = [s.targets.numel() for s in part]
        own = zip(indices, torch.split(scores.logp, counts), torch.split(scores.entropy, counts), strict=True)
        return {index: TokenScores(logp=logp, entropy=entropy) for index, logp, entropy in own}

    found: dict[int, TokenScores] = {}
    for scores in lanes.run(compute, batches):
        found.update(scores)
    ordered = [found[i] for i in range(len(sequences))]
    return TokenScores(logp=torch.cat([s.logp for s in ordered]), entropy=torch.cat([s.entropy for s in ordered]))
