"""Which tokens of an update train at all: rejection by the distance of trainer and engine, and by certainty.

A filter is a function of a `LossInput` of the whole update, without gradients; its keyword-only parameters are the
config's options. What it rejects is in no loss and in no denominator. q = log pi_old - log mu throughout.
"""

from __future__ import annotations

from typing import Literal

import torch

from agentrl.algorithms.given import given
from agentrl.algorithms.loss_input import LOG_RATIO_LIMIT, LossInput, log_ratio
from agentrl.algorithms.marks import Input, needs
from agentrl.algorithms.ranges import NotNegative, Share
from agentrl.algorithms.segments import segment_mean
from agentrl.errors import ConfigError

GEOMETRIC_BAND = (0.99, 1.01)
Unit = Literal["token", "sequence"]


def k1(tokens: LossInput, *, limit: NotNegative, of: Unit = "token") -> torch.Tensor:
    """abs(q) at most `limit`, or abs(mean q) for whole sequences: bool [tokens].

    Args:
        tokens: The tokens.
        limit: The greatest distance that trains.
        of: ``token`` rejects single tokens; ``sequence`` all tokens of a sequence, by its mean.
    """
    return _distance(tokens, _difference(tokens), of).abs() <= limit


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
        ConfigError: the band is none.
    """
    low, high = band
    if not 0 <= low < high:
        raise ConfigError("geometric keeps sequences inside a band", got=list(band), expected="0 <= low < high")
    mean = _distance(tokens, _difference(tokens), "sequence").clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return (mean >= low) & (mean <= high)


@needs(Input.ENTROPY)
def top_entropy(tokens: LossInput, *, share: Share = 0.2) -> torch.Tensor:
    """The share of tokens, 20 %, at which the proximal policy was most uncertain: bool [tokens] (arXiv 2506.01939)."""
    entropy = given(tokens.entropy, Input.ENTROPY)
    kept = torch.zeros_like(entropy, dtype=torch.bool)
    kept[entropy.topk(min(max(1, round(share * entropy.numel())), entropy.numel())).indices] = True
    return kept


def _difference(tokens: LossInput) -> torch.Tensor:
    """Give q of each token, not bounded, so that a mean is the sequence's own: [tokens]."""
    return (tokens.old_logp - tokens.behaviour_logp).detach()


def _distance(tokens: LossInput, values: torch.Tensor, of: Unit) -> torch.Tensor:
    if of == "token":
        return values
    return segment_mean(values, tokens.sequence, tokens.sequences)[tokens.sequence]
