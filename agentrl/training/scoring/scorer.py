"""A model that says how probable it finds tokens: the policy before its updates, a reference, a teacher."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from transformers import PreTrainedModel

from agentrl.training.models.lora import adapters_off
from agentrl.training.passes import Passes
from agentrl.training.scoring.head_scores import TokenScores
from agentrl.training.scoring.logprobs import score_all
from agentrl.training.scoring.sequences import ScoredSequence
from agentrl.training.scoring.top_tokens import TokenOpinions, opinions_of_all


class Scorer:
    """Scores any number of sequences under one model, without gradients.

    Args:
        model: As it is at the time of each call.
        passes: How to compute.
        base_only: Leave the model's adapters out.
    """

    def __init__(self, model: PreTrainedModel, passes: Passes, *, base_only: bool = False) -> None:
        self.model, self.passes, self._base_only = model, passes, base_only

    def scores(self, sequences: Sequence[ScoredSequence], *, temperature: float, pad_id: int) -> TokenScores:
        """The wanted tokens of all sequences, in their order, on every rank: see `score_all`."""
        with self._without_adapters():
            return score_all(self.model, sequences, temperature=temperature, pad_id=pad_id, **self._computing())

    def opinions(
        self, sequences: Sequence[ScoredSequence], *, top_k: int | None, temperature: float, pad_id: int
    ) -> TokenOpinions:
        """The same, with the model's own `top_k` tokens in each place: see `opinions_of_all`."""
        if top_k is None:
            return TokenOpinions(logp=self.scores(sequences, temperature=temperature, pad_id=pad_id).logp)
        with self._without_adapters():
            return opinions_of_all(
                self.model, sequences, top_k=top_k, temperature=temperature, pad_id=pad_id, **self._computing()
            )

    def _without_adapters(self) -> AbstractContextManager[None]:
        return adapters_off(self.model) if self._base_only else nullcontext()

    def _computing(self) -> dict[str, Any]:
        passes = self.passes
        return {"layout": passes.layout, "lanes": passes.lanes, "ranks": passes.ranks, "reader": passes.reader}
