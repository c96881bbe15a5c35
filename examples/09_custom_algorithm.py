"""Your own advantage estimator and loss: plain functions of tensors, given by name or as objects.

    python examples/09_custom_algorithm.py

An estimator returns one number per sampled token, a loss one value per sampled token; keyword-only parameters are
options. An exception in such a function ends the run with an error that names the function, file and line.

Prints the mean advantage and the loss of the last step.
"""

from __future__ import annotations

import argparse

import torch

import agentrl
from agentrl.algorithms.segments import segment_mean
from agentrl.algorithms.traits import compares_group
from agentrl.algorithms.types import EpisodeBatch, LossInput, TokenLoss, log_ratio, plain_loss


@compares_group
def above_average(episodes: EpisodeBatch, *, below: float = 0.0) -> torch.Tensor:
    """A = R - mean_g if it is positive, otherwise `below` times it."""
    means = segment_mean(episodes.returns, episodes.group, episodes.groups)
    centred = episodes.returns - means[episodes.group]
    return episodes.to_tokens(torch.where(centred > 0, centred, below * centred))


def squared(tokens: LossInput, *, coef: float = 0.5) -> TokenLoss:
    """-A r + coef d^2, where d is the log of the ratio r."""
    distance = log_ratio(tokens.logp, tokens.old_logp)
    return plain_loss(-tokens.advantage * distance.exp() + coef * distance.square())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("overrides", nargs="*", help="further config keys, key=value")
    given = parser.parse_args()
    run = agentrl.train(
        env="guess_number",
        model="scratch",
        algorithm=above_average,
        loss=squared,
        steps=given.steps,
        overrides=["algorithm.advantage_options={below: 0.5}", *given.overrides],
    )
    print({name: run.metrics[name] for name in ("train/advantage_abs_mean", "train/loss", "groups/trained")})


if __name__ == "__main__":
    main()
