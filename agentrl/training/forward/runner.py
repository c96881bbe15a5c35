"""A model's forward and backward passes over any number of sequences, on any number of lanes and ranks.

`ModelRunner` cuts sequences into micro-batches, gives each lane and rank its share, and brings the results together; no
other part of training knows micro-batches, lanes, shards or layouts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from agentrl.config.config import Checkpointing, TrainerConfig
from agentrl.errors import UsageError
from agentrl.image import ImageReader
from agentrl.models.lora import adapters_off
from agentrl.models.threads import ThreadWorkers, check_lanes
from agentrl.training.distributed import Ranks
from agentrl.training.distributed.fsdp import reshard, within_forward
from agentrl.training.forward.layout import PADDED, Layout, choose_layout, with_replay
from agentrl.training.forward.logprobs import LARGEST_ID, TeacherLogprobs, TokenScores, read_top_tokens, score
from agentrl.training.forward.micro_batches import (
    Loss,
    MicroBatch,
    SumsByName,
    add_gradients,
    make_micro_batches,
    pad_to_ranks,
    rank_share,
)
from agentrl.training.forward.sequences import ScoredSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSettings:
    """Settings that all passes of a model have in common."""

    layout: Layout = PADDED
    lanes: ThreadWorkers = field(default_factory=lambda: ThreadWorkers(1))
    ranks: Ranks = field(default_factory=Ranks)
    image_processor: ImageReader | None = None
    """Prepares images; needed where sequences hold any."""
    every_time: bool = False
    """Add the gradients of a model in shards up over the ranks after every micro-batch, not in the end."""
    recompute: bool | Checkpointing = False
    """Activations, in the backward pass; see `agentrl.training.compile`."""


class PassHook(Protocol):
    """A part of a model, such as routed experts, that takes part in the passes of an update."""

    def begin(
        self,
        runner: ModelRunner,
        own: Sequence[tuple[list[ScoredSequence], bool]],
        tokens: int,
        tally: SumsByName,
    ) -> None:
        """Prepare an update; called on every rank before the first micro-batch, without gradients.

        `own` has each micro-batch of this rank that needs gradients, and whether its loss counts; `tokens` are those of
        all micro-batches, on all ranks, whose gradients count.
        """

    def record(self) -> AbstractContextManager[Any]:
        """Watch the forward pass of a micro-batch inside the block."""

    def end(
        self, recorded: Any, runner: ModelRunner, sequences: Sequence[ScoredSequence], tally: SumsByName
    ) -> torch.Tensor | None:
        """Give an addition to the loss of a micro-batch, of which `record` gave `recorded`, and tally measurements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """Result of the forward and backward passes of an update, on all ranks."""

    loss: float
    tally: SumsByName
    work: Sequence[MicroBatch]


class ModelRunner:
    """Runs one model over sequences.

        runner = make_runner(model, config.trainer)
        scores = runner.logprobs(sequences, temperature=1.0, pad_id=0)     # no gradient
        runner.forward_backward(sequences, loss)                           # adds to the parameters' gradients

    Args:
        model: As it is at the time of each call.
        passes: How to compute.
        base_only: Leave the model's adapters out.
        workers: Lanes of all ranks, for which there are micro-batches enough; counted when left out.
    """

    def __init__(
        self, model: PreTrainedModel, passes: RunnerSettings, *, base_only: bool = False, workers: int | None = None
    ) -> None:
        self.model, self.passes, self._base_only = model, passes, base_only
        self._workers = workers or passes.lanes.count * passes.ranks.dp_size

    def for_model(self, model: PreTrainedModel, config: TrainerConfig, *, base_only: bool = False) -> ModelRunner:
        """Make the runner of another model, whose layout is its own."""
        passes = replace(self.passes, layout=choose_layout(model, config, self.passes.ranks))
        return ModelRunner(model, passes, base_only=base_only)

    def replay_routes(self) -> None:
        """Let the model's routers do as the engine's did from now on."""
        self.passes = replace(self.passes, layout=with_replay(self.model, self.passes.layout))

    @property
    def replays_routes(self) -> bool:
        """True if sequences are routed as the engine routed them."""
        return self.passes.layout.replay is not None

    def score(self, part: Sequence[ScoredSequence], **options: Any) -> TokenScores:
        """Score the wanted tokens of one micro-batch; see `agentrl.training.forward.logprobs.score`."""
        passes = self.passes
        return score(self.model, part, layout=passes.layout, image_processor=passes.image_processor, **options)

    def hidden_states(
        self, part: Sequence[ScoredSequence], pad_id: int
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
        """Read the hidden states that predict the wanted tokens of one micro-batch: [targets, width].

        Returns:
            Those that this rank has, and what brings numbers about them together, [targets], in the targets' order.
        """
        layout, images = self.passes.layout, self.passes.image_processor
        if (context := layout.context) is None:
            return within_forward(self.model, layout.read, part, pad_id, images), lambda numbers: numbers
        hidden, owner = within_forward(self.model, layout.read_shared, part, pad_id, context)
        return hidden, lambda numbers: context.collected(numbers[None], owner)[0]

    def logprobs(self, sequences: Sequence[ScoredSequence], *, temperature: float, pad_id: int) -> TokenScores:
        """Score the wanted tokens of all sequences, in their order, on every rank, without gradients."""

        def compute(part: Sequence[ScoredSequence]) -> torch.Tensor:
            scores = self.score(part, temperature=temperature, pad_id=pad_id)
            return torch.stack([scores.logp, scores.entropy])

        logp, entropy = self.forward(sequences, compute, rows=2)
        return TokenScores(logp=logp, entropy=entropy)

    def top_logprobs(
        self, sequences: Sequence[ScoredSequence], *, top_k: int | None, temperature: float, pad_id: int
    ) -> TeacherLogprobs:
        """Score as `logprobs` does, with the model's own `top_k` tokens in each place; ranks do not share rows then.

        Raises:
            UsageError: the vocabulary has fewer tokens, or ranks share rows.
        """
        if top_k is None:
            return TeacherLogprobs(logp=self.logprobs(sequences, temperature=temperature, pad_id=pad_id).logp)
        layout, vocabulary = self.passes.layout, self.model.get_output_embeddings().weight.shape[0]
        if not top_k <= vocabulary <= LARGEST_ID or layout.context is not None:
            raise UsageError(
                f"the {top_k} most probable tokens cannot be read",
                got=f"a vocabulary of {vocabulary:,}" + ("" if layout.context is None else " in rows that ranks share"),
                expected=f"at most {LARGEST_ID:,} tokens, {top_k} or more, and trainer.context_parallel=1",
            )

        def compute(part: Sequence[ScoredSequence]) -> torch.Tensor:
            found: torch.Tensor = within_forward(
                self.model,
                read_top_tokens,
                part,
                top_k=top_k,
                temperature=temperature or 1.0,
                pad_id=pad_id,
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
        """Compute numbers about the wanted tokens of all sequences, without gradients: float32 [rows, targets].

        `compute` gives those of a micro-batch; the result is in the order of the sequences, and on every rank.
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
        with adapters_off(model) if self._base_only else nullcontext():
            for numbers in self.passes.lanes.run(compute_part, [micro_batch.sequences for micro_batch in own]):
                found.update(numbers)
            reshard(model)
        unknown = [torch.full((rows, s.targets.numel()), math.nan, device=model.device) for s in sequences]
        return ranks.filled(torch.cat([found.get(i, unknown[i]) for i in range(len(sequences))], dim=1))

    def backward_logprobs(
        self, sequences: Sequence[ScoredSequence], by_logp: torch.Tensor, *, temperature: float, pad_id: int
    ) -> None:
        """Add the gradient of a loss whose derivative by each log-probability is known: [targets]."""
        slopes = torch.split(by_logp.float().to(self.model.device), [s.targets.numel() for s in sequences])

        def loss(indices: list[int], _: SumsByName) -> torch.Tensor:
            scores = self.score([sequences[i] for i in indices], temperature=temperature, pad_id=pad_id)
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
        """Add the gradient of a loss over sequences, which is a sum over their micro-batches.

        Args:
            sequences: Each goes through the model once.
            loss: Of a micro-batch; called in the lanes' threads.
            numbers: By which `loss` knows the sequences; their places when left out.
            needs_grad: Whether each sequence has a gradient; the others are only measured. All have when left out.
            head_parameters: Parameters outside the model, which get a gradient, too.
            hooks: Take part in the passes.
        """
        numbers = range(len(sequences)) if numbers is None else numbers
        by_number, work = dict(zip(numbers, sequences, strict=True)), list[MicroBatch]()
        for kind in (True, False):
            members = [number for k, number in enumerate(numbers) if (needs_grad is None or needs_grad[k]) == kind]
            work += self._micro_batches(members, [by_number[number] for number in members], needs_grad=kind)
        if not hooks:
            return self.run(work, loss, head_parameters=head_parameters)
        tally = self._begin(hooks, work, by_number)

        def hooked(indices: list[int], own: SumsByName) -> torch.Tensor:
            with ExitStack() as stack:
                recorded = [stack.enter_context(hook.record()) for hook in hooks]
                value = loss(indices, own)
            part = [by_number[i] for i in indices]
            for hook, found in zip(hooks, recorded, strict=True):
                if (more := hook.end(found, self, part, own)) is not None:
                    value = value + more
            return value

        result = self.run(work, hooked, head_parameters=head_parameters)
        result.tally.merge(tally)
        return result

    def run(
        self, work: Sequence[MicroBatch], loss: Loss, *, head_parameters: Sequence[nn.Parameter] = ()
    ) -> PassResult:
        """Compute micro-batches that the caller has made: see `forward_backward`."""
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
    """Make the runner that a config asks for.

    Raises:
        UsageError: prefixes are to be shared, and the model cannot do it; or lanes would harm.
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
