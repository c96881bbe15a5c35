"""Train/inference correction: weights from rho = pi_old / mu, the ratio of trainer and engine.

Filters reject tokens by the distance of trainer and engine, or by entropy.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

import torch

from agentrl.algorithms.options import NotNegative, Share
from agentrl.algorithms.segments import segment_mean, segment_sum, top_shares
from agentrl.algorithms.traits import Input, needs, reads_policy
from agentrl.algorithms.types import LOG_RATIO_LIMIT, LossInput, log_ratio, require
from agentrl.errors import ConfigError

TOKEN_CAP = 2.0
SEQUENCE_CAP = 5.0
ICEPOP_BAND = (0.5, 5.0)
GEOMETRIC_BAND = (0.99, 1.01)
Unit = Literal["token", "sequence"]


class CorrectionMode(enum.StrEnum):
    """Mode of the correction: the weight that multiplies a token's policy loss."""

    TOKEN = "token"
    SEQUENCE = "sequence"
    ICEPOP = "icepop"
    OFF = "off"

    @property
    def drops_tokens(self) -> bool:
        """True if tokens may be dropped, so that pi_old must be known before the denominators are computed."""
        return self is CorrectionMode.ICEPOP


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Weights of tokens; all tensors are [tokens] without gradient."""

    weights: torch.Tensor
    """Weight of each token; 0 for a dropped token."""
    kept: torch.Tensor
    """Mask of kept tokens: bool; dropped tokens do not count in denominators."""
    truncated: torch.Tensor
    """Mask of tokens whose weight reached its cap, or that were dropped: bool."""


def correction(
    mode: CorrectionMode,
    old_logp: torch.Tensor,
    behaviour_logp: torch.Tensor,
    sequence: torch.Tensor,
    *,
    cap: float | None = None,
    band: tuple[float, float] | None = None,
) -> Correction:
    """Compute the correction weights of a mode.

    ``token``: min(rho_t, C), C = 2. ``sequence``: min(product of rho over the sequence, C), C = 5. ``icepop``: rho_t
    inside [0.5, 5], else 0 for that token only. ``off``: 1.

    The band of icepop is its authors' default (Ring-1T, arXiv 2510.18855). ``cap`` and ``band`` replace C and the band.

    Log-probabilities are [tokens]; ``sequence`` is the sequence of each token, int64 [tokens].
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


def k1(tokens: LossInput, *, limit: NotNegative, of: Unit = "token") -> torch.Tensor:
    """abs(q) at most `limit`, or abs(mean q) for whole sequences: bool [tokens].

    With ``of: token``, single tokens are rejected; with ``of: sequence``, whole sequences, by their mean.
    """
    return _distance(tokens, _difference(tokens), of).abs() <= limit


@reads_policy
def off_policy_sequence(tokens: LossInput, *, delta: NotNegative = 1e-4) -> torch.Tensor:
    """Tokens with A >= 0, and those of sequences whose mean log mu / pi is at most `delta`: bool [tokens].

    Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556): negative advantages do not train in a sequence that
    the policy would no longer sample. The mean includes stale weights, earlier updates of the step, and the difference
    of trainer and engine. The default is slime's; a sequence that is not dropped may need a far larger one.
    """
    distance = segment_mean(tokens.behaviour_logp - tokens.logp.detach(), tokens.sequence, tokens.sequences)
    return (tokens.advantage >= 0) | (distance <= delta)[tokens.sequence]


def k2(tokens: LossInput, *, limit: NotNegative, of: Unit = "token") -> torch.Tensor:
    """q^2 / 2 at most `limit`, or its mean for whole sequences: bool [tokens]."""
    return _distance(tokens, _difference(tokens).square() / 2, of) <= limit


def k3(tokens: LossInput, *, limit: NotNegative, of: Unit = "token") -> torch.Tensor:
    """exp(q) - q - 1 at most `limit`, or its mean for whole sequences: bool [tokens]."""
    log_rho = log_ratio(tokens.old_logp, tokens.behaviour_logp).detach()
    return _distance(tokens, log_rho.exp() - log_rho - 1, of) <= limit


def geometric(tokens: LossInput, *, band: tuple[float, float] = GEOMETRIC_BAND) -> torch.Tensor:
    """Sequences whose geometric mean of pi_old / mu, exp(mean q), is in the band, 0.99 to 1.01: bool [tokens].

    Raises:
        ConfigError: the band is not 0 <= low < high.
    """
    low, high = band
    if not 0 <= low < high:
        raise ConfigError("geometric keeps sequences inside a band", got=list(band), expected="0 <= low < high")
    mean = _distance(tokens, _difference(tokens), "sequence").clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return (mean >= low) & (mean <= high)


@needs(Input.ENTROPY)
def top_entropy(tokens: LossInput, *, share: Share = 0.2) -> torch.Tensor:
    """The share of tokens, 20 %, with the highest entropy under the proximal policy: bool [tokens] (arXiv 2506.01939).

    All tokens that tie with the last selected one are kept; for example, the first tokens of a group's members have
    equal entropy.
    """
    entropy = require(tokens.entropy, Input.ENTROPY)
    return top_shares(entropy, min(max(1, round(share * entropy.numel())), entropy.numel())) > 0


def _difference(tokens: LossInput) -> torch.Tensor:
    """Compute q = log pi_old - log mu of each token, unbounded, so that means over sequences are exact: [tokens]."""
    return (tokens.old_logp - tokens.behaviour_logp).detach()


def _distance(tokens: LossInput, values: torch.Tensor, of: Unit) -> torch.Tensor:
    if of == "token":
        return values
    return segment_mean(values, tokens.sequence, tokens.sequences)[tokens.sequence]


def loglinear(
    logp: torch.Tensor, behaviour_logp: torch.Tensor, version: torch.Tensor, *, old_version: int
) -> torch.Tensor:
    """Estimate log pi_old = log mu + a (log pi - log mu), a = (v_old - v_mu) / (v_pi - v_mu): [tokens], no gradient.

    This assumes that log-probabilities changed linearly from the version that sampled the token, v_mu, to the version
    in training, v_pi = v_old + 1, where v_old is the version at the start of the step (AReaL). ``version`` is v_mu of
    each token: [tokens].
    """
    age = (old_version - version).to(logp.dtype)
    return (behaviour_logp + age / (age + 1) * (logp - behaviour_logp)).detach()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Distances between pi_old (trainer) and mu (engine)."""

    prob_abs_mean: float
    """Mean |pi_old - mu|."""
    prob_abs_max: float
    k3: float
    """Estimate mean(rho - log rho - 1) of KL(mu, pi_old)."""
    effective_sample_size: float
    """Effective sample size (sum rho)^2 / (n sum rho^2): 1 if trainer and engine agree."""


def mismatch(old_logp: torch.Tensor, behaviour_logp: torch.Tensor) -> Mismatch:
    """Compare the trainer's and the engine's log-probabilities of the same tokens: [tokens] each, at least one."""
    old, behaviour = old_logp.double(), behaviour_logp.double()
    difference = (old.exp() - behaviour.exp()).abs()
    log_rho = log_ratio(old, behaviour)
    rho = log_rho.exp()
    return Mismatch(
        prob_abs_mean=float(difference.mean()),
        prob_abs_max=float(difference.max()),
        k3=float((rho - log_rho - 1).mean()),
        effective_sample_size=float(rho.sum().square() / (rho.numel() * rho.square().sum())),
    )
