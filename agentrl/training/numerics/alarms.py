"""Alarms: a step's numbers against limits, each cause said once and not at every step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, median

import torch

from agentrl.config.numerics import NumericsConfig
from agentrl.errors import AgentRLError

PREFIX = "alarms/"
"""Metrics: 1 at steps whose number is beyond the limit, else 0."""
CAUSES = ("skipped", "mismatch", "kl", "kl_reference", "entropy", "grad_norm")
CALM = 10
"""Steps within the limit after which a cause is said again."""
FIRST_STEPS = 5
"""Steps whose mean entropy others are compared with."""
HISTORY, LEAST_HISTORY = 32, 8
"""Steps whose median gradient norm others are compared with: most, and fewest."""
_CHECK_FORMATS = "check that both have the same weights, number format and chat template"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What the alarms say about a step."""

    metrics: dict[str, float]
    messages: tuple[str, ...]


class Alarms:
    """Compares the metrics of one step after the other with limits.

    Args:
        config: The limits.
    """

    def __init__(self, config: NumericsConfig) -> None:
        self._config = config
        self._calm = dict.fromkeys(CAUSES, float(CALM))
        self._entropies: list[float] = []
        self._norms: list[float] = []

    def judge(self, metrics: Mapping[str, float], *, skipped: str = "", hint: str | None = None) -> Judgement:
        """Judge a step.

        Args:
            metrics: Of the step, by their final names.
            skipped: What is known of updates that were left out, for the message.
            hint: How to look at one of them.
        """
        found = {
            cause: str(error) for cause, error in self._beyond(metrics, skipped, hint).items() if error is not None
        }
        said = tuple(message for cause, message in found.items() if self._calm[cause] >= CALM)
        self._calm = {cause: 0.0 if cause in found else min(calm + 1, CALM) for cause, calm in self._calm.items()}
        self._remember(metrics)
        return Judgement(metrics={PREFIX + cause: float(cause in found) for cause in CAUSES}, messages=said)

    def _beyond(self, metrics: Mapping[str, float], skipped: str, hint: str | None) -> dict[str, AgentRLError | None]:
        limits = self._config
        return {
            "skipped": _skips(metrics, skipped, hint),
            "mismatch": _above(
                "trainer and engine disagree: mean |pi_old - mu|",
                metrics.get("mismatch/prob_abs_mean"),
                limits.mismatch,
                _CHECK_FORMATS,
            ),
            "kl": _above(
                "the policy runs away within a step: train/kl_old",
                metrics.get("train/kl_old"),
                limits.kl,
                "lower trainer.learning_rate, trainer.epochs or trainer.mini_batches",
            ),
            "kl_reference": _above(
                "the policy is far from its reference: train/kl_reference",
                metrics.get("train/kl_reference"),
                limits.kl_reference,
                "raise algorithm.kl_coef, or lower trainer.learning_rate",
            ),
            "entropy": self._collapse(metrics.get("train/entropy")),
            "grad_norm": self._spike(metrics.get("train/grad_norm")),
        }

    def _collapse(self, entropy: float | None) -> AgentRLError | None:
        if entropy is None or len(self._entropies) < FIRST_STEPS:
            return None
        least = self._config.entropy_share * fmean(self._entropies)
        if not entropy < least:
            return None
        return AgentRLError(
            "the policy's entropy has collapsed",
            got=f"train/entropy {entropy:.4g}",
            expected=f"at least {least:.4g}, {self._config.entropy_share:g} of that of the first {FIRST_STEPS} steps",
            hint="lower trainer.learning_rate, or set algorithm.entropy_coef or loss_options.clip_high; "
            "a policy that has solved its task has little entropy, too",
        )

    def _spike(self, norm: float | None) -> AgentRLError | None:
        if norm is None or len(self._norms) < LEAST_HISTORY:
            return None
        usual = median(self._norms)
        if not norm > self._config.grad_norm_ratio * usual > 0:
            return None
        return AgentRLError(
            "the gradient is much larger than usual",
            got=f"train/grad_norm {norm:.4g}",
            expected=f"at most {self._config.grad_norm_ratio:g} times {usual:.4g}, the median of the last steps",
            hint="see train/grad_norm/* for where it comes from; lower trainer.max_grad_norm or trainer.learning_rate",
        )

    def _remember(self, metrics: Mapping[str, float]) -> None:
        entropy, norm = metrics.get("train/entropy", math.nan), metrics.get("train/grad_norm", math.nan)
        if math.isfinite(entropy) and len(self._entropies) < FIRST_STEPS:
            self._entropies.append(entropy)
        if math.isfinite(norm):
            self._norms = [*self._norms, norm][-HISTORY:]

    def state(self) -> torch.Tensor:
        """What a resumed run needs to judge alike: float64 [causes + first steps + history], NaN where unknown."""
        entropies = self._entropies + [math.nan] * (FIRST_STEPS - len(self._entropies))
        norms = self._norms + [math.nan] * (HISTORY - len(self._norms))
        return torch.tensor([*self._calm.values(), *entropies, *norms], dtype=torch.float64)

    def restore(self, state: torch.Tensor) -> None:
        """Take what `state` gave."""
        values = state.tolist()
        first, last = len(CAUSES), len(CAUSES) + FIRST_STEPS
        self._calm = dict(zip(CAUSES, values[:first], strict=True))
        self._entropies = [value for value in values[first:last] if math.isfinite(value)]
        self._norms = [value for value in values[last:] if math.isfinite(value)]


def _above(what: str, value: float | None, limit: float, hint: str) -> AgentRLError | None:
    if value is None or not value > limit:
        return None
    return AgentRLError(what, got=f"{value:.4g}", expected=f"at most {limit:g}", hint=hint)


def _skips(metrics: Mapping[str, float], skipped: str, hint: str | None) -> AgentRLError | None:
    count = metrics.get("train/updates_skipped", 0.0)
    if not count:
        return None
    return AgentRLError(
        f"{count:.0f} of {count + metrics.get('train/updates', 0.0):.0f} updates skipped, which left the weights as "
        f"they were: {skipped}",
        hint=hint,
    )
