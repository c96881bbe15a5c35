"""How far trainer and engine are apart by a turn's position in its episode: drift over long episodes shows here."""

from __future__ import annotations

import torch

from agentrl.training.step.batch import StepBatch

LAST = 64
"""Turns from this one on are one position."""


def mismatch_by_turn(
    batch: StepBatch, trainer_logp: torch.Tensor, behaviour_logp: torch.Tensor, read: torch.Tensor
) -> dict[str, float]:
    """Mean |pi_old - mu| by position, as ``mismatch/turn_0``, ``turn_1``, ``turn_2_to_3``, … ``turn_64_on``.

    Args:
        batch: The step.
        trainer_logp: log pi_old of its tokens.
        behaviour_logp: log mu of its tokens.
        read: The tokens that the trainer has read: int64 [read].
    """
    read = read.cpu()
    apart = (trainer_logp.cpu()[read].double().exp() - behaviour_logp.cpu()[read].double().exp()).abs()
    turn_episode = batch.episodes.turn_episode
    first = torch.searchsorted(turn_episode, turn_episode)  # of the episode of each turn
    turn = batch.episodes.token_turn[read]
    position = (turn - first[turn]).clamp(max=LAST)
    names: dict[str, float] = {}
    low = 0
    while low <= LAST:
        high = max(low, 2 * low - 1)
        here = (position >= low) & (position <= high)
        if bool(here.any()):
            names[f"mismatch/{_name(low, high)}"] = float(apart[here].mean())
        low = high + 1
    return names


def _name(low: int, high: int) -> str:
    if low >= LAST:
        return f"turn_{LAST}_on"
    return f"turn_{low}" if low == high else f"turn_{low}_to_{high}"
