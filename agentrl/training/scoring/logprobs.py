"""Log-probabilities of given tokens without a tensor of [tokens, vocabulary]: the head runs over chunks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from agentrl.image import ImageReader
from agentrl.lanes import Lanes
from agentrl.training.critic.value_head import ValueHead
from agentrl.training.micro_batch_gradients import cut
from agentrl.training.ranks import Ranks
from agentrl.training.ranks.sharding import reshard, within_forward
from agentrl.training.ranks.shares import share_of
from agentrl.training.scoring.head_scores import TokenScores, chunk_tokens, head_scores
from agentrl.training.scoring.layout import PADDED, Layout
from agentrl.training.scoring.sequences import ScoredSequence


def score(
    model: PreTrainedModel,
    sequences: Sequence[ScoredSequence],
    *,
    temperature: float,
    pad_id: int,
    layout: Layout = PADDED,
    entropy_gradient: bool = False,
    reader: ImageReader | None = None,
    value_head: ValueHead | None = None,
    others: torch.Tensor | None = None,
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
        value_head: Reads values from the same hidden states.
        others: Tokens besides the wanted ones that are asked about: int64 [targets, k]; not where ranks share rows.
    """
    logp, entropy, *rest = within_forward(
        model,
        _read,
        sequences,
        temperature=temperature,
        pad_id=pad_id,
        layout=layout,
        entropy_gradient=entropy_gradient,
        reader=reader,
        value_head=value_head,
        others=others,
    )
    top = rest.pop(0) if others is not None else None
    return TokenScores(logp=logp, entropy=entropy, top_logp=top, values=rest[0] if rest else None)


def _read(
    model: PreTrainedModel,
    sequences: Sequence[ScoredSequence],
    *,
    temperature: float,
    pad_id: int,
    layout: Layout,
    entropy_gradient: bool,
    reader: ImageReader | None,
    value_head: ValueHead | None,
    others: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    targets = torch.cat([sequence.targets for sequence in sequences]).to(model.device)
    owner = None
    if layout.context is None:
        hidden = layout.read(model, sequences, pad_id, reader)
    else:
        hidden, owner = layout.read_shared(model, sequences, pad_id, layout.context)
        targets = targets[owner == layout.context.rank]
    head = model.get_output_embeddings()
    scores = head_scores(
        hidden,
        head.weight,
        head.bias,
        targets,
        temperature=temperature or 1.0,
        chunk=chunk_tokens(head.weight.shape[0], layout.logits_megabytes),
        entropy_gradient=entropy_gradient,
        cap=getattr(model.config.get_text_config(), "final_logit_softcapping", None),
        others=others,
    )
    found = [scores.logp, scores.entropy]
    if scores.top_logp is not None:
        found.append(scores.top_logp)
    if value_head is not None:
        found.append(value_head(hidden))
    if layout.context is None or owner is None:
        return tuple(found)
    together = layout.context.collected(torch.stack(found), owner)
    return tuple(own.clone() for own in together)  # what a model in shards gives back is no view


def score_all(
    model: PreTrainedModel,
    sequences: Sequence[ScoredSequence],
    *,
    temperature: float,
    pad_id: int,
    layout: Layout,
    lanes: Lanes,
    ranks: Ranks | None = None,
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
        ranks: Share them out; all get the result.
        reader: Prepares images.
    """

    def read(part: Sequence[ScoredSequence]) -> torch.Tensor:
        scores = score(model, part, temperature=temperature, pad_id=pad_id, layout=layout, reader=reader)
        return torch.stack([scores.logp, scores.entropy])

    logp, entropy = read_all(model, sequences, read, rows=2, layout=layout, lanes=lanes, ranks=ranks or Ranks())
    return TokenScores(logp=logp, entropy=entropy)


def read_all(
    model: PreTrainedModel,
    sequences: Sequence[ScoredSequence],
    read: Callable[[Sequence[ScoredSequence]], torch.Tensor],
    *,
    rows: int,
    layout: Layout,
    lanes: Lanes,
    ranks: Ranks,
) -> torch.Tensor:
    """Numbers about the wanted tokens of any number of sequences, without gradients: float32 [rows, targets].

    Args:
        model: What is read with.
        sequences: One or more; the result is in their order.
        read: Gives the numbers of a micro-batch: float32 [rows, targets].
        rows: How many for each token.
        layout: How the sequences lie in the forward passes.
        lanes: Compute the forward passes.
        ranks: Share them out; all get the result.
    """
    work = cut(range(len(sequences)), sequences, layout=layout, workers=lanes.count * ranks.teams, learns=False)
    own = share_of(work, rank=ranks.team, ranks=ranks.teams)

    def compute(indices: list[int]) -> dict[int, torch.Tensor]:
        part = [sequences[i] for i in indices]
        with torch.no_grad():
            numbers = read(part)
        return dict(zip(indices, torch.split(numbers, [s.targets.numel() for s in part], dim=1), strict=True))

    found: dict[int, torch.Tensor] = {}
    for scores in lanes.run(compute, [micro_batch.sequences for micro_batch in own]):
        found.update(scores)
    reshard(model)
    unknown = [torch.full((rows, sequence.targets.numel()), math.nan, device=model.device) for sequence in sequences]
    return ranks.filled(torch.cat([found.get(i, unknown[i]) for i in range(len(sequences))], dim=1))
