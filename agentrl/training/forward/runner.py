"""A model's forward and backward passes over any number of sequences, with any number of threads and ranks.

`ModelRunner` divides sequences into micro-batches, assigns them to worker threads ("lanes") and ranks, and combines the
results. The rest of training does not depend on micro-batches, lanes, shards or layouts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from agentrl.config.config import Checkpointing, TrainerConfig
from agentrl.errors import UsageError
from agentrl.message.image import ImageReader
from agentrl.models.lora import disable_adapters
from agentrl.models.threads import ThreadWorkers, check_lanes
from agentrl.training.distributed import Ranks
from agentrl.training.distributed.fsdp import add_up_gradients, reshard, within_forward
from agentrl.training.forward.layout import PADDED, Layout, choose_layout, with_replay
from agentrl.training.forward.logprobs import MAX_EXACT_ID, TeacherLogprobs, TokenScores, score, top_token_scores
from agentrl.training.forward.micro_batches import MicroBatch, make_micro_batches, pad_to_ranks, rank_share, share_out
from agentrl.training.forward.sequences import ScoredSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSettings:
    """Settings of all passes of a model."""

    layout: Layout = PADDED
    lanes: ThreadWorkers = field(default_factory=lambda: ThreadWorkers(1))
    ranks: Ranks = field(default_factory=Ranks)
    image_processor: ImageReader | None = None
    """Image processor; required if sequences contain images."""
    every_time: bool = False
    """True to add up a sharded model's gradients over ranks after every micro-batch instead of once at the end."""
    recompute: bool | Checkpointing = False
    """Gradient checkpointing; see `agentrl.training.compile`."""


class SumsByName:
    """Sums and counts by name."""

    def __init__(self) -> None:
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._counts: defaultdict[str, int] = defaultdict(int)

    def add(self, name: str, values: torch.Tensor) -> None:
        """Add values of any shape."""
        self._sums[name] += float(values.detach().double().sum())
        self._counts[name] += values.numel()

    def merge(self, other: SumsByName) -> None:
        """Add the sums and counts of `other`."""
        for name, total in other._sums.items():
            self._sums[name] += total
            self._counts[name] += other._counts[name]

    def means(self) -> dict[str, float]:
        """Compute the mean of the values added under each name."""
        return {name: self._sums[name] / count for name, count in self._counts.items() if count}


Loss = Callable[[list[int], SumsByName], torch.Tensor]
"""Function from the numbers of a micro-batch's sequences to its loss; it adds measurements to the given sums."""


class PassHook(Protocol):
    """Hook into the passes of an update, for parts of a model such as routed experts."""

    def begin(
        self, runner: ModelRunner, own: Sequence[tuple[list[ScoredSequence], bool]], tokens: int, tally: SumsByName
    ) -> None:
        """Prepare an update; called on every rank before the first micro-batch, without gradients.

        Args:
            runner: Runner of the update.
            own: This rank's micro-batches that need gradients, each with True if its loss counts.
            tokens: Number of tokens, over all ranks, of the micro-batches whose gradients count.
            tally: Sums to which the hook may add measurements.
        """

    def record(self) -> AbstractContextManager[Any]:
        """Record the forward pass of a micro-batch in this block."""

    def end(
        self, recorded: Any, runner: ModelRunner, sequences: Sequence[ScoredSequence], tally: SumsByName
    ) -> torch.Tensor | None:
        """Return a term to add to a micro-batch's loss, if any, from what `record` has recorded; tally measurements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """Results of an update's forward and backward passes on all ranks."""

    loss: float
    tally: SumsByName
    work: Sequence[MicroBatch]


class ModelRunner:
    """Runner of a model over sequences.

        runner = make_runner(model, config.trainer)
        scores = runner.logprobs(sequences, temperature=1.0)               # no gradient
        runner.forward_backward(sequences, loss)                           # adds to the parameters' gradients

    Args:
        model: Model whose current weights each call uses.
        passes: Settings of the passes.
        base_only: True to disable the model's adapters.
        workers: Minimum number of micro-batches into which sequences are divided, if possible; by default, the number
            of lanes of all data-parallel ranks.
    """

    def __init__(
        self, model: PreTrainedModel, passes: RunnerSettings, *, base_only: bool = False, workers: int | None = None
    ) -> None:
        self.model, self.passes, self._base_only = model, passes, base_only
        self._workers = workers or passes.lanes.count * passes.ranks.dp_size

    def for_model(self, model: PreTrainedModel, config: TrainerConfig, *, base_only: bool = False) -> ModelRunner:
        """Make the runner of another model, with a layout chosen for that model."""
        passes = replace(self.passes, layout=choose_layout(model, config, self.passes.ranks))
        return ModelRunner(model, passes, base_only=base_only)

    def replay_routes(self) -> None:
        """Replay the engine's routed experts in the model from now on."""
        self.passes = replace(self.passes, layout=with_replay(self.model, self.passes.layout))

    @property
    def replays_routes(self) -> bool:
        """True if sequences are routed as the engine routed them."""
        return self.passes.layout.replay is not None

    def score(self, part: Sequence[ScoredSequence], **options: Any) -> TokenScores:
        """Score the target tokens of one micro-batch; see `agentrl.training.forward.logprobs.score`."""
        passes = self.passes
        return score(self.model, part, layout=passes.layout, image_processor=passes.image_processor, **options)

    def hidden_states(
        self, part: Sequence[ScoredSequence]
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
        """Compute the hidden states that predict the target tokens of one micro-batch: [targets, width].

        Returns:
            This rank's hidden states, and a function that gathers one number per hidden state from all ranks: [targets]
            in the targets' order.
        """
        layout, images = self.passes.layout, self.passes.image_processor
        if (context := layout.context) is None:
            return within_forward(self.model, layout.hidden_states, part, images), lambda numbers: numbers
        hidden, owner = within_forward(self.model, layout.shared_hidden_states, part, context)
        return hidden, lambda numbers: context.gather_columns(numbers[None], owner)[0]

    def logprobs(self, sequences: Sequence[ScoredSequence], *, temperature: float) -> TokenScores:
        """Score the target tokens of all sequences, in order, without gradients; every rank gets all results."""

        def compute(part: Sequence[ScoredSequence]) -> torch.Tensor:
            scores = self.score(part, temperature=temperature)
            return torch.stack([scores.logp, scores.entropy])

        logp, entropy = self.forward(sequences, compute, rows=2)
        return TokenScores(logp=logp, entropy=entropy)

    def top_logprobs(
        self, sequences: Sequence[ScoredSequence], *, top_k: int | None, temperature: float
    ) -> TeacherLogprobs:
        """Score the target tokens like `logprobs`, and the model's `top_k` most probable tokens at each position.

        Raises:
            UsageError: the vocabulary is too small or too large, or ranks share rows.
        """
        if top_k is None:
            return TeacherLogprobs(logp=self.logprobs(sequences, temperature=temperature).logp)
        layout, vocabulary = self.passes.layout, self.model.get_output_embeddings().weight.shape[0]
        if not top_k <= vocabulary <= MAX_EXACT_ID or layout.context is not None:
            raise UsageError(
                f"the {top_k} most probable tokens cannot be computed",
                got=f"a vocabulary of {vocabulary:,} tokens" + ("" if layout.context is None else ", and shared rows"),
                expected=f"a vocabulary of {top_k} to {MAX_EXACT_ID:,} tokens, and trainer.context_parallel=1",
            )

        def compute(part: Sequence[ScoredSequence]) -> torch.Tensor:
            found: torch.Tensor = within_forward(
                self.model,
                top_token_scores,
                part,
                top_k=top_k,
                temperature=temperature or 1.0,
                layout=layout,
                image_processor=self.passes.image_processor,
            )
            return found

        found = self.forward(sequences, compute, rows=1 + 2 * top_k)
        ids, logp = found[1 : 1 + top_k].mT.long(), found[1 + top_k :].mT.contiguous()
        return TeacherLogprobs(logp=found[0], top_ids=ids, top_logp=logp)

    def forward(
        self,
        sequences: Sequence[ScoredSequence],
        compute: Callable[[Sequence[ScoredSequence]], torch.Tensor],
        *,
        rows: int,
    ) -> torch.Tensor:
        """Compute values of the target tokens of all sequences, without gradients: float32 [rows, targets].

        `compute` returns the values of a micro-batch. Every rank gets all results, in the order of the sequences.
        """
        model, ranks = self.model, self.passes.ranks
        work = self._micro_batches(range(len(sequences)), sequences, needs_grad=False)
        own = rank_share(work, rank=ranks.dp_rank, ranks=ranks.dp_size)

        def compute_part(indices: list[int]) -> dict[int, torch.Tensor]:
            part = [sequences[i] for i in indices]
            with torch.no_grad():
                numbers = compute(part)
            return dict(zip(indices, torch.split(numbers, [s.targets.numel() for s in part], dim=1), strict=True))

        found: dict[int, torch.Tensor] = {}
        with disable_adapters(model) if self._base_only else nullcontext():
            for numbers in self.passes.lanes.run(compute_part, [micro_batch.sequences for micro_batch in own]):
                found.update(numbers)
            reshard(model)
        unknown = [torch.full((rows, s.targets.numel()), math.nan, device=model.device) for s in sequences]
        return ranks.fill_missing(torch.cat([found.get(i, unknown[i]) for i in range(len(sequences))], dim=1))

    def backward_logprobs(
        self, sequences: Sequence[ScoredSequence], by_logp: torch.Tensor, *, temperature: float
    ) -> None:
        """Add the gradient of a loss, given its derivative with respect to each log-probability: [targets]."""
        slopes = torch.split(by_logp.float().to(self.model.device), [s.targets.numel() for s in sequences])

        def loss(indices: list[int], _: SumsByName) -> torch.Tensor:
            scores = self.score([sequences[i] for i in indices], temperature=temperature)
            return (torch.cat([slopes[i] for i in indices]) * scores.logp).sum()

        self.forward_backward(sequences, loss)

    def forward_backward(
        self,
        sequences: Sequence[ScoredSequence],
        loss: Loss,
        *,
        numbers: Sequence[int] | None = None,
        needs_grad: Sequence[bool] | None = None,
        head_parameters: Sequence[nn.Parameter] = (),
        hooks: Sequence[PassHook] = (),
    ) -> PassResult:
        """Add the gradient of a loss that is a sum over micro-batches.

        Args:
            sequences: Sequences, which go through the model once.
            loss: Loss of a micro-batch; called in the lanes' threads.
            numbers: Numbers by which `loss` identifies the sequences; by default, their indices.
            needs_grad: True for each sequence with a gradient; the others are only measured. By default, all have one.
            head_parameters: Parameters outside the model that also get gradients.
            hooks: Hooks into the passes.
        """
        numbers = range(len(sequences)) if numbers is None else numbers
        by_number, work = dict(zip(numbers, sequences, strict=True)), list[MicroBatch]()
        for kind in (True, False):
            members = [number for k, number in enumerate(numbers) if (needs_grad is None or needs_grad[k]) == kind]
            work += self._micro_batches(members, [by_number[number] for number in members], needs_grad=kind)
        if not hooks:
            return self.run(work, loss, head_parameters=head_parameters)
        tally = self._begin(hooks, work, by_number)

        def loss_with_hooks(indices: list[int], own: SumsByName) -> torch.Tensor:
            with ExitStack() as stack:
                recorded = [stack.enter_context(hook.record()) for hook in hooks]
                value = loss(indices, own)
            part = [by_number[i] for i in indices]
            for hook, found in zip(hooks, recorded, strict=True):
                if (more := hook.end(found, self, part, own)) is not None:
                    value = value + more
            return value

        result = self.run(work, loss_with_hooks, head_parameters=head_parameters)
        result.tally.merge(tally)
        return result

    def run(
        self, work: Sequence[MicroBatch], loss: Loss, *, head_parameters: Sequence[nn.Parameter] = ()
    ) -> PassResult:
        """Run the given micro-batches; see `forward_backward`."""
        passes, tally, total = self.passes, SumsByName(), 0.0
        work = pad_to_ranks(work, passes.ranks.dp_size)
        own = rank_share(work, rank=passes.ranks.dp_rank, ranks=passes.ranks.dp_size)
        found = add_gradients(
            self.model, passes.lanes, own, loss, every_time=passes.every_time, head_parameters=head_parameters
        )
        reshard(self.model)
        for value, measured in passes.ranks.collect(found if passes.ranks.is_dp_leader else []):
            total += value
            tally.merge(measured)
        return PassResult(loss=total, tally=tally, work=work)

    def _begin(
        self, hooks: Sequence[PassHook], work: Sequence[MicroBatch], by_number: Mapping[int, ScoredSequence]
    ) -> SumsByName:
        ranks, tally = self.passes.ranks, SumsByName()
        work = pad_to_ranks(work, ranks.dp_size)
        own = [
            ([by_number[i] for i in micro_batch.sequences], micro_batch.counts)
            for micro_batch in rank_share(work, rank=ranks.dp_rank, ranks=ranks.dp_size)
            if micro_batch.needs_grad
        ]
        counted = [micro_batch for micro_batch in work if micro_batch.needs_grad and micro_batch.counts]
        tokens = sum(len(by_number[i]) for micro_batch in counted for i in micro_batch.sequences)
        with torch.no_grad():
            for hook in hooks:
                hook.begin(self, own, tokens, tally)
        reshard(self.model)
        return tally

    def _micro_batches(
        self, numbers: Sequence[int], sequences: Sequence[ScoredSequence], *, needs_grad: bool
    ) -> list[MicroBatch]:
        layout, workers = self.passes.layout, self._workers
        return make_micro_batches(numbers, sequences, layout=layout, workers=workers, needs_grad=needs_grad)


def make_runner(
    model: PreTrainedModel,
    config: TrainerConfig,
    *,
    ranks: Ranks | None = None,
    image_processor: ImageReader | None = None,
) -> ModelRunner:
    """Make the runner of a config.

    Raises:
        UsageError: the model does not support ``trainer.share_prefixes``, context parallelism, or several lanes.
    """
    check_lanes("trainer.lanes", config.lanes, model)
    ranks = ranks or Ranks()
    passes = RunnerSettings(
        layout=choose_layout(model, config, ranks),
        lanes=ThreadWorkers(config.lanes),
        ranks=ranks,
        image_processor=image_processor,
        every_time=config.fsdp.reduce,
        recompute=config.gradient_checkpointing,
    )
    return ModelRunner(model, passes)


def add_gradients(
    model: PreTrainedModel,
    lanes: ThreadWorkers,
    work: Sequence[MicroBatch],
    loss: Loss,
    *,
    every_time: bool = False,
    head_parameters: Sequence[nn.Parameter] = (),
) -> list[tuple[float, SumsByName]]:
    """Add the gradients of all micro-batches to those of the model's parameters and of `head_parameters`.

    The loss is called in the lanes' threads. With `every_time`, a sharded model's gradients are added up over ranks
    after every micro-batch instead of once at the end.

    Returns:
        Loss and measurements of each micro-batch that counts, in the order of `work`.
    """
    parameters = [*(p for p in model.parameters() if p.requires_grad), *head_parameters]
    costs = [micro_batch.cost for micro_batch in work]
    shares = [list(range(len(work)))] if lanes.count == 1 else share_out(costs, lanes.count)
    last = max((index for index, micro_batch in enumerate(work) if micro_batch.needs_grad), default=None)
    single = len(shares) == 1

    def compute(share: list[int]) -> tuple[dict[int, tuple[float, SumsByName]], list[torch.Tensor | None]]:
        found: dict[int, tuple[float, SumsByName]] = {}
        gradients: list[torch.Tensor | None] = [None] * len(parameters)
        for index in share:
            tally = SumsByName()
            with torch.set_grad_enabled(work[index].needs_grad):
                value = loss(work[index].sequences, tally)
            if not work[index].counts:
                value = value * 0.0
            if work[index].needs_grad and single:
                add_up_gradients(model, over_ranks=every_time or index == last)
                torch.autograd.backward(value)
            elif work[index].needs_grad:
                new = torch.autograd.grad(value, parameters, allow_unused=True)
                gradients = [_sum(old, own) for old, own in zip(gradients, new, strict=True)]
            found[index] = float(value.detach()), tally
        return found, gradients

    results: dict[int, tuple[float, SumsByName]] = {}
    for found, gradients in lanes.run(compute, shares):
        results.update(found)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = _sum(parameter.grad, gradient)
    return [results[index] for index, micro_batch in enumerate(work) if micro_batch.counts]


def _sum(old: torch.Tensor | None, new: torch.Tensor | None) -> torch.Tensor | None:
    if old is None or new is None:
        return new if old is None else old
    return old.add_(new)
