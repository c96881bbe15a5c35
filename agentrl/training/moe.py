"""Load-balancing loss of routed experts (Switch Transformers, https://arxiv.org/abs/2101.03961, equations 4 to 6).

With E experts, f_e the share of an update's token assignments that went to expert e, and P_e the mean probability that
the router gave expert e:

    L = coefficient * mean over layers of E * sum_e f_e P_e            L = coefficient if experts are used equally

f has no gradient, and P is a mean over tokens, so L is a sum over tokens once f is known. A pass without gradients
counts f over the whole update, on all ranks, before the micro-batches add up their parts of P. The gradient therefore
does not depend on the number of micro-batches or ranks. A token that is computed once for a shared prefix counts once
for each sequence.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from agentrl.config.config import TrainerConfig
from agentrl.errors import ConfigError
from agentrl.models.moe import routers
from agentrl.training.distributed import Ranks
from agentrl.training.forward.layout import Layout
from agentrl.training.forward.moe_replay import ReplayCount, RouterReplay
from agentrl.training.forward.runner import ModelRunner, PassHook, SumsByName
from agentrl.training.forward.sequences import ScoredSequence, pack
from agentrl.training.signals.base import TokenSignal

Routed = tuple[Tensor, Tensor]
"""Router logits of a layer, [tokens, experts], and the chosen experts, [tokens, chosen]."""


class LoadBalancingLoss:
    """Pass hook that adds the load-balancing loss of a model's routers to the losses of micro-batches."""

    def __init__(self, model: PreTrainedModel, coefficient: float) -> None:
        self._routers = routers(model)
        self._coefficient = coefficient
        self._shares: Tensor | None = None
        self._tokens = 0
        if not self._routers:
            raise ConfigError(
                "trainer.moe.aux_loss_coef needs a model with routed experts",
                got=type(model).__name__,
                expected="a mixture-of-experts model such as Qwen3-MoE, Mixtral or DeepSeek",
                hint="set trainer.moe.aux_loss_coef=0",
            )

    def begin(
        self, runner: ModelRunner, own: Sequence[tuple[list[ScoredSequence], bool]], tokens: int, tally: SumsByName
    ) -> None:
        """Run an update's trained sequences without gradients, to count the assignments of all their tokens."""
        counts = []
        for part, counted in own:
            with self.record() as routed:
                runner.hidden_states(part)
            if counted:
                counts.append(assignments(routed, token_weights(runner.passes.layout, part, runner.model.device)))
        busiest = self.count(counts, tokens, runner.passes.ranks)
        if busiest is not None:
            tally.add("train/moe_max_load", busiest)

    def end(
        self, recorded: list[Routed], runner: ModelRunner, sequences: Sequence[ScoredSequence], tally: SumsByName
    ) -> Tensor | None:
        """Return a micro-batch's part of the load-balancing loss, if gradients are enabled."""
        if not torch.is_grad_enabled():
            return None
        layout = runner.passes.layout
        uneven = self.part(recorded, token_weights(layout, sequences, runner.model.device))
        return uneven if layout.context is None else layout.context.total(uneven)

    @contextmanager
    def record(self) -> Iterator[list[Routed]]:
        """Record the routers' outputs in this block and thread, layer after layer."""
        found: list[Routed] = []
        thread = threading.get_ident()  # other worker threads run the same modules

        def record(module: nn.Module, inputs: Any, output: tuple[Tensor, ...]) -> None:
            if threading.get_ident() == thread:
                found.append((output[0], output[-1]))

        hooks = [router.register_forward_hook(record) for router in self._routers]
        try:
            yield found
        finally:
            for hook in hooks:
                hook.remove()

    def count(self, counts: Sequence[Tensor], tokens: int, ranks: Ranks) -> Tensor | None:
        """Add up the `assignments` of an update's micro-batches over all ranks.

        `tokens` is the number of tokens of the update's sequences.

        Returns:
            Load of the busiest expert of each layer, relative to an equal load: [layers].
        """
        everyone = ranks.collect([own.cpu() for own in counts])
        self._tokens = tokens
        self._shares = torch.stack(everyone).sum(0) if everyone else None
        if self._shares is None:
            return None
        self._shares /= self._shares.sum(1, keepdim=True)
        return self._shares.amax(1) * self._shares.shape[1]

    def part(self, routed: Sequence[Routed], weights: Tensor) -> Tensor:
        """Compute a micro-batch's part of the loss from the recorded routing and the weight of each token, [tokens]."""
        assert self._shares is not None
        total = routed[0][0].new_zeros((), dtype=torch.float32)
        for (logits, _), shares in zip(routed, self._shares.float().to(weights.device), strict=True):
            probabilities = logits.float().softmax(-1)
            total = total + (weights[:, None] * probabilities * shares).sum() * shares.numel()
        return total * (self._coefficient / (self._tokens * len(routed)))


def assignments(routed: Sequence[Routed], weights: Tensor) -> Tensor:
    """Count the tokens assigned to each expert of each layer: float64 [layers, experts]."""
    counts = [logits.new_zeros(logits.shape[-1], dtype=torch.float64) for logits, _ in routed]
    for found, (_, chosen) in zip(counts, routed, strict=True):
        found.scatter_add_(0, chosen.flatten(), weights.double().repeat_interleave(chosen.shape[-1]))
    return torch.stack(counts)


def token_weights(layout: Layout, sequences: Sequence[ScoredSequence], device: torch.device) -> Tensor:
    """Count the sequences that share each token of this rank's micro-batch part, 0 for padding: float32 [tokens]."""
    if layout.packed:
        row = pack(sequences, share=layout.share)
        weights = torch.bincount(torch.cat(list(row.indices)), minlength=row.input_ids.numel())[None]
    else:
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        weights = torch.arange(int(lengths.max())) < lengths[:, None]
    if layout.context is not None:
        longest = layout.context.padded_length(weights.shape[1])
        weights = functional.pad(weights, (0, longest - weights.shape[1]))[:, layout.context.own(longest)]
    return weights.flatten().float().to(device)


class RoutingDifferences:
    """Pass hook that counts differences of free and replayed routing, in the first update of a step only."""

    def __init__(self, replay: RouterReplay) -> None:
        self._replay, self._updates = replay, 0

    def begin(
        self, runner: ModelRunner, own: Sequence[tuple[list[ScoredSequence], bool]], tokens: int, tally: SumsByName
    ) -> None:
        """Count the updates."""
        self._updates += 1

    def record(self) -> AbstractContextManager[ReplayCount | None]:
        """Count differences in this block, if the weights are those of the step's start."""
        return self._replay.count_differences() if self._updates == 1 else nullcontext()

    def end(
        self, recorded: ReplayCount | None, runner: ModelRunner, sequences: Sequence[ScoredSequence], tally: SumsByName
    ) -> None:
        """Record the share of tokens that free routing would send elsewhere, and the share with known routes."""
        if recorded is None:
            return
        tally.add("mismatch/routed_experts", torch.cat(recorded.differing))
        for sequence in sequences:
            known = 0 if sequence.routes is None else len(sequence.routes)
            tally.add("mismatch/routed_experts_known", torch.arange(len(sequence)) < known)


def moe_hooks(
    policy: ModelRunner, config: TrainerConfig, *, signals: Iterable[TokenSignal] = ()
) -> Callable[[], list[PassHook]]:
    """Set up load balancing and replay of the engine's routes, as ``trainer.moe`` configures them.

    Returns:
        A function that makes the hooks of a step's updates; it returns none without these options.

    Raises:
        ConfigError: the model has no known routers.
    """
    if config.router_replay:
        policy.replay_routes()
        for signal in signals:
            signal.replay_routes(policy)
    balance = [LoadBalancingLoss(policy.model, config.router_balance)] if config.router_balance else []
    replay = policy.passes.layout.replay
    return lambda: [*balance, *([] if replay is None else [RoutingDifferences(replay)])]
