"""Train/inference correction: weights from rho = pi_old / mu, trainer against engine."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

from agentrl.algorithms.loss_input import LOG_RATIO_LIMIT, log_ratio
from agentrl.algorithms.segments import segment_sum

TOKEN_CAP = 2.0
SEQUENCE_CAP = 5.0
ICEPOP_BAND = (0.5, 5.0)


class CorrectionMode(enum.StrEnum):
    """Which weight multiplies a token's policy loss."""

    TOKEN = "token"
    SEQUENCE = "sequence"
    ICEPOP = "icepop"
    OFF = "off"

    @property
    def drops_tokens(self) -> bool:
        """Tokens may leave the loss, so that pi_old must be known before anything is counted."""
        return self is CorrectionMode.ICEPOP


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Weights of tokens; all tensors are [tokens] and carry no gradient."""

    weights: torch.Tensor
    """0 for a dropped token."""
    kept: torch.Tensor
    """Bool; a dropped token is in no denominator either."""
    truncated: torch.Tensor
    """Bool: the weight reached its cap, or the token was dropped."""


def correction(
    mode: CorrectionMode,
    old_logp: torch.Tensor,
    behaviour_logp: torch.Tensor,
    sequence: torch.Tensor,
    *,
    cap: float | None = None,
    band: tuple[float, float] | None = None,
) -> Correction:
    """The weights of a mode.

    ``token``: min(rho_t, C), C = 2. ``sequence``: min(product of rho over the sequence, C), C = 5. ``icepop``: rho_t
    inside [0.5, 5], else 0 for that token only. ``off``: 1.

    The band of icepop is its authors' default (Ring-1T, arXiv 2510.18855).

    Args:
        mode: Which.
        old_logp: log pi_old, [tokens].
        behaviour_logp: log mu, [tokens].
        sequence: Sequence of each token, int64 [tokens].
        cap: C, when not the mode's own.
        band: Of icepop, when not its own.
    """
    difference = (old_logp - behaviour_logp).detach()
    log_rho = log_ratio(old_logp, behaviour_logp).detach()
    everything = torch.ones_like(log_rho, dtype=torch.bool)
    match mode:
        case CorrectionMode.TOKEN:
            return _truncate(log_rho.exp(), TOKEN_CAP if cap is None else cap)
        case CorrectionMode.SEQUENCE:
            count = int(sequence.max()) + 1 if sequence.numel() else 0
            log_product = segment_sum(difference, sequence, count).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
            return _truncate(log_product.exp()[sequence], SEQUENCE_CAP if cap is None else cap)
        case CorrectionMode.ICEPOP:
            low, high = ICEPOP_BAND if band is None else band
            rho = log_rho.exp()
            kept = (rho >= low) & (rho <= high)
            return Correction(weights=torch.where(kept, rho, 0.0), kept=kept, truncated=~kept)
        case CorrectionMode.OFF:
            return Correction(weights=torch.ones_like(log_rho), kept=everything, truncated=~everything)


def _truncate(rho: torch.Tensor, cap: float) -> Correction:
    everything = torch.ones_like(rho, dtype=torch.bool)
    return Correction(weights=rho.clamp(max=cap), kept=everything, truncated=rho > cap)
