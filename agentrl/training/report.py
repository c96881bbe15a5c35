"""Metrics of a training step, including the trainer/engine mismatch by turn, which shows drift over long episodes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from agentrl.algorithms.correction import mismatch
from agentrl.errors import Outcome
from agentrl.observe.token_table import TokenColumns
from agentrl.training.batch import StepBatch
from agentrl.training.optimizer import Update
from agentrl.trajectory import Trajectory

LAST = 64
CUT_SHORT_SHARE = 0.9
"""Minimum share of episodes truncated in their first turn at which the report warns about the token budget."""


def mismatch_by_turn(
    batch: StepBatch, trainer_logp: torch.Tensor, behaviour_logp: torch.Tensor, read: torch.Tensor
) -> dict[str, float]:
    """Compute mean |pi_old - mu| by turn, as ``mismatch/turn_0``, ``turn_1``, ``turn_2_to_3``, … ``turn_64_on``.

    `read` holds the indices of the tokens that the trainer has scored: int64 [read]; others do not count.
    """
    read = read.cpu()
    apart = (trainer_logp.cpu()[read].double().exp() - behaviour_logp.cpu()[read].double().exp()).abs()
    turn_episode = batch.episodes.turn_episode
    first = torch.searchsorted(turn_episode, turn_episode)  # first turn of each turn's episode
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Metrics and warnings of one training step."""

    metrics: dict[str, float]
    """Values by name: ``train/``, ``mismatch/``, ``reward/``, ``groups/``, ``trajectories/``; with such a signal also
    ``critic/`` or ``process_reward/``.

    ``train/grad_norm`` is the largest of the step's updates, and is missing if all updates were skipped;
    ``train/grad_norm/GROUP`` is that of a group of parameters.
    """
    warnings: tuple[str, ...] = ()
    """Problems that need attention, such as skipped updates or a mismatch of trainer and engine."""
    tokens: tuple[TokenColumns, ...] = ()
    """Values of the step's tokens: one entry, or one for each adapter or environment with its own algorithm."""


def step_report(
    batch: StepBatch,
    trainer_logp: torch.Tensor,
    *,
    differing: torch.Tensor,
    updates: Sequence[Update],
    losses: Sequence[float],
    means: dict[str, float],
    seconds: float,
    columns: TokenColumns,
) -> StepReport:
    """Report a step's metrics; rewards and counts of the policy exclude an expert's episodes.

    `trainer_logp` holds the tokens' log-probabilities before the first update, [tokens]. `differing` marks the groups
    whose episodes the estimator tells apart: bool [groups].
    """
    own = [trajectory for trajectory in batch.trajectories if trajectory.id not in batch.extras.expert_ids]
    read = batch.sampled_index([i for i, reads in enumerate(batch.needs_forward) if reads])
    trainer_logp = trainer_logp.cpu()
    distance = mismatch(trainer_logp[read], batch.behaviour_logp[read])
    applied = [update for update in updates if not update.non_finite]
    metrics = {
        "train/loss": sum(losses) / len(losses),
        "train/learning_rate": updates[-1].learning_rate if updates else 0.0,
        "train/updates": float(len(applied)),
        "train/updates_skipped": float(len(updates) - len(applied)),
        "train/tokens": float(batch.tokens),
        "train/seconds": seconds,
        "train/idle_sequences": float(batch.needs_forward.count(False)),
        "train/tokens_per_s": sum(map(len, itertools.compress(batch.sequences, batch.needs_forward))) / seconds,
        "train/advantage_abs_mean": float(batch.advantage.abs().mean()),
        **means,
        **mismatch_by_turn(batch, trainer_logp, batch.behaviour_logp, read),
        **{f"mismatch/{name}": value for name, value in asdict(distance).items()},
        **_rewards(own, batch, differing),
        "trajectories/trained": float(len(own)),
    }
    if applied:
        metrics["train/grad_norm"] = max(update.grad_norm for update in applied)
        for group in applied[0].group_norms:
            metrics[f"train/grad_norm/{group}"] = max(update.group_norms.get(group, 0.0) for update in applied)
    return StepReport(metrics=metrics, warnings=tuple(_room_warnings(own)), tokens=(columns,))


def _rewards(own: Sequence[Trajectory], batch: StepBatch, differing: torch.Tensor) -> dict[str, float]:
    scored = [trajectory.reward for trajectory in own if trajectory.reward is not None]
    episodes = batch.episodes
    return {
        "reward/mean": sum(scored) / len(scored),
        "reward/shaped_mean": float(episodes.returns[: len(scored)].mean()),  # experts' episodes come last
        "groups/trained": float(int(episodes.group.max()) + 1),
        "groups/zero_variance": float((~differing).sum()),
    }


def _room_warnings(trajectories: Sequence[Trajectory]) -> list[str]:
    cut = sum(t.outcome is Outcome.TRUNCATED_TOKENS and len(t.turns) <= 1 for t in trajectories)
    if cut < CUT_SHORT_SHARE * len(trajectories):
        return []
    return [
        f"{cut} of {len(trajectories)} episodes ran out of tokens in their first turn, so the policy cannot learn: "
        "raise agent.max_tokens, and engine.max_context if it is set"
    ]
