"""Group members in multi-agent episodes: each role's part of an episode is a member and trains separately.

    episode ─► one member per role that trains ─► group of the role ─► baseline, advantage, loss as for one agent

Let s_k be the reward of turn k, o_k the part of s_k that counts only for the turn's own role, and F the part of the
scorer's reward beyond the turns. The return of role r is

    R_r = sum_k (s_k - o_k) + F + sum_{k of r} o_k

The shared part s_k - o_k is credited to the role's latest turn up to turn k, or to its first turn if it has had none
yet, so that returns-to-go are defined on the role's own turns. F is credited to its last turn.

Roles named ``solver#1``, ``solver#2``, … are attempts of the role ``solver`` at one problem, which another role of the
episode may have proposed. They are compared with each other, within their episode (hierarchical GRPO of prime-rl).
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Mapping, Set
from typing import Any

import torch

from agentrl.algorithms.segments import differs
from agentrl.errors import LedgerError
from agentrl.training.batch import StepBatch, StepExtras
from agentrl.trajectory import ATTEMPT, SOLE_ROLE, TokenSequence, Trajectory, Turn, base_role, role_of


def has_roles(trajectory: Trajectory) -> bool:
    """Return True unless the episode has a single agent without a role."""
    return any(turn.role != SOLE_ROLE for sequence in trajectory.sequences for turn in sequence.turns)


def role_members(trajectories: Iterable[Trajectory], roles: Set[str] | None = None) -> list[Trajectory]:
    """Divide episodes into group members, one for each trained role.

    An episode of one agent, or one that cannot train, is itself the member. The member of a role has the id ``ID:ROLE``
    and the group ``GROUP:ROLE`` (an attempt, ``ID:ROLE`` without its number), the role's sequences, and the role's
    return. `roles` restricts the result to these roles.

    Raises:
        LedgerError: several roles have turns in one sequence.
    """
    found: list[Trajectory] = []
    for trajectory in trajectories:
        if not has_roles(trajectory) or not trajectory.is_trainable:
            found.append(trajectory)
            continue
        sampling = (role for role in trajectory.trained_roles if _has_samples(trajectory, role))
        found += [_member(trajectory, role) for role in sampling if roles is None or role in roles]
    return found


def _has_samples(trajectory: Trajectory, role: str) -> bool:
    return any(sequence.loss_mask.any() and _role_in(sequence) == role for sequence in trajectory.sequences)


def _role_in(sequence: TokenSequence) -> str | None:
    roles = list(dict.fromkeys(turn.role for turn in sequence.turns))
    if len(roles) > 1 or (not roles and sequence.loss_mask.any()):
        got = ", ".join(roles) or "sampled tokens without a turn"
        raise LedgerError("a sequence does not belong to exactly one role", got=got, expected="one role per sequence")
    return roles[0] if roles else None


def _member(trajectory: Trajectory, role: str) -> Trajectory:
    turns = trajectory.turns
    own = [turn for turn in turns if turn.role == role]
    rewards = {turn.index: turn.own_reward for turn in own}
    times = [turn.index for turn in own]
    for turn in turns:
        credited = times[max(0, bisect.bisect_right(times, turn.index) - 1)]
        rewards[credited] += turn.reward - turn.own_reward
    sequences = [
        sequence.with_turns([_with_reward(turn, rewards[turn.index]) for turn in sequence.turns])
        for sequence in trajectory.sequences
        if _role_in(sequence) == role
    ]
    return dataclasses.replace(
        trajectory,
        id=f"{trajectory.id}:{role}",
        group_id=f"{trajectory.id if ATTEMPT in role else trajectory.group_id}:{base_role(role)}",
        sequences=sequences,
        reward=trajectory.role_returns[role],
    )


def _with_reward(turn: Turn, reward: float) -> Turn:
    return dataclasses.replace(turn, reward=reward, own_reward=0.0)


def role_extras(extras: StepExtras, trajectories: Iterable[Trajectory]) -> StepExtras:
    """Map extra rollouts and a teacher's log-probabilities from episodes to the ids of the members."""
    greedy = {
        member.group_id if has_roles(rollout) else group: member
        for group, rollout in extras.greedy.items()
        for member in role_members([rollout])
    }
    hints = dict(extras.hints)
    for trajectory in trajectories if hints else ():
        hints |= {f"{trajectory.id}:{role}": hints[trajectory.id] for role in _hinted_roles(trajectory, hints)}
    logp, top, translations = dict(extras.teacher_logp), dict(extras.teacher_top), dict(extras.translations)
    by_sequence: tuple[dict[str, Any], ...] = (logp, top, translations)
    for trajectory in trajectories if any(by_sequence) else ():
        for role in trajectory.trained_roles if has_roles(trajectory) else ():
            own = [number for number, s in enumerate(trajectory.sequences) if _role_in(s) == role]
            for known in by_sequence:
                if trajectory.id in known:
                    known[f"{trajectory.id}:{role}"] = [known[trajectory.id][number] for number in own]
    return dataclasses.replace(
        extras, greedy=greedy, hints=hints, teacher_logp=logp, teacher_top=top, translations=translations
    )


def _hinted_roles(trajectory: Trajectory, hints: Mapping[str, object]) -> Iterable[str]:
    return trajectory.trained_roles if has_roles(trajectory) and trajectory.id in hints else ()


def weigh_by_role(advantage: torch.Tensor, batch: StepBatch, weights: Mapping[str, float]) -> torch.Tensor:
    """Multiply advantages by the weight of each token's role, 1 for roles without a weight: [tokens]."""
    if not weights:
        return advantage
    of_member = torch.tensor([weights.get(base_role(role_of(member)), 1.0) for member in batch.trajectories])
    return advantage * of_member.to(advantage)[batch.episodes.token_episode.to(advantage.device)]


def role_metrics(batch: StepBatch) -> dict[str, float]:
    """Compute members, tokens, returns and advantages of each role, as ``role/ROLE/…``; empty for a sole agent."""
    roles = [base_role(role_of(member)) for member in batch.trajectories]
    found: dict[str, float] = {}
    for role in dict.fromkeys(roles) if set(roles) != {SOLE_ROLE} else ():
        member = torch.tensor([other == role for other in roles])
        token = member[batch.episodes.token_episode.cpu()]
        advantage = batch.advantage.cpu()[token]
        returns, group = batch.episodes.returns.cpu()[member], batch.episodes.group.cpu()[member]
        groups, group = torch.unique(group, return_inverse=True)
        found |= {
            f"role/{role}/members": float(member.sum()),
            f"role/{role}/tokens": float(token.sum()),
            f"role/{role}/shaped_return": float(returns.mean()),
            f"role/{role}/zero_variance": float((~differs(returns, group, groups.numel())).sum()),
            f"role/{role}/advantage_abs_mean": float(advantage.abs().mean()) if advantage.numel() else 0.0,
        }
    return found
