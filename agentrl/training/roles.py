"""Members of groups, in episodes of several agents: each role's part of an episode is one, and trains by itself.

    episode ─► one member per role that trains ─► group of the role ─► baseline, advantage, loss as for one agent

With s_k the reward of turn k, of which o_k counts for the turn's own role alone, and F what the scorer gives beyond the
turns, the return of role r is

    R_r = sum_k (s_k - o_k) + F + sum_{k of r} o_k

What counts for all roles is credited to the role's latest turn of that time, or to its first one if it has not spoken
yet, so that returns-to-go are those of the role's own turns. F falls on its last turn.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Mapping, Set

import torch

from agentrl.algorithms.segments import differs
from agentrl.errors import LedgerError
from agentrl.training.batch import StepBatch, StepExtras
from agentrl.trajectory import SOLE_ROLE, TokenSequence, Trajectory, Turn


def role_of(member: Trajectory) -> str:
    """Return the role that a member of a group plays."""
    return member.sequences[0].turns[0].role if member.sequences and member.sequences[0].turns else SOLE_ROLE


def has_roles(trajectory: Trajectory) -> bool:
    """Return True if somebody else than the sole agent speaks."""
    return any(turn.role != SOLE_ROLE for sequence in trajectory.sequences for turn in sequence.turns)


def role_members(trajectories: Iterable[Trajectory], roles: Set[str] | None = None) -> list[Trajectory]:
    """Return the members that episodes are: the episode itself where there is one agent, or where it cannot train.

    A role's member has the id and group ``ID:ROLE``, its own sequences, and its own return. With `roles`, those of
    other roles are left out.

    Raises:
        LedgerError: several roles speak in one sequence.
    """
    found: list[Trajectory] = []
    for trajectory in trajectories:
        if not has_roles(trajectory) or not trajectory.is_trainable:
            found.append(trajectory)
            continue
        speaking = (role for role in trajectory.trained_roles if _speaks(trajectory, role))
        found += [_member(trajectory, role) for role in speaking if roles is None or role in roles]
    return found


def _speaks(trajectory: Trajectory, role: str) -> bool:
    return any(sequence.loss_mask.any() and _role_in(sequence) == role for sequence in trajectory.sequences)


def _role_in(sequence: TokenSequence) -> str | None:
    roles = list(dict.fromkeys(turn.role for turn in sequence.turns))
    if len(roles) > 1 or (not roles and sequence.loss_mask.any()):
        got = ", ".join(roles) or "sampled tokens without a turn"
        raise LedgerError("a sequence is not that of one role", got=got, expected="one role in each sequence")
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
        sequence.with_turns([_rewarded(turn, rewards[turn.index]) for turn in sequence.turns])
        for sequence in trajectory.sequences
        if _role_in(sequence) == role
    ]
    return dataclasses.replace(
        trajectory,
        id=f"{trajectory.id}:{role}",
        group_id=f"{trajectory.group_id}:{role}",
        sequences=sequences,
        reward=trajectory.role_returns[role],
    )


def _rewarded(turn: Turn, reward: float) -> Turn:
    return dataclasses.replace(turn, reward=reward, own_reward=0.0)


def role_extras(extras: StepExtras, trajectories: Iterable[Trajectory]) -> StepExtras:
    """Return the extra rollouts and a teacher's log-probabilities under the ids of the members."""
    greedy = {
        member.group_id if has_roles(rollout) else group: member
        for group, rollout in extras.greedy.items()
        for member in role_members([rollout])
    }
    if not extras.teacher_logp:
        return dataclasses.replace(extras, greedy=greedy)
    logp, top = dict(extras.teacher_logp), dict(extras.teacher_top)
    for trajectory in trajectories:
        if not has_roles(trajectory) or trajectory.id not in logp:
            continue
        for role in trajectory.trained_roles:
            own = [number for number, s in enumerate(trajectory.sequences) if _role_in(s) == role]
            logp[f"{trajectory.id}:{role}"] = [logp[trajectory.id][number] for number in own]
            if trajectory.id in top:
                top[f"{trajectory.id}:{role}"] = [top[trajectory.id][number] for number in own]
    return dataclasses.replace(extras, greedy=greedy, teacher_logp=logp, teacher_top=top)


def weighted(advantage: torch.Tensor, batch: StepBatch, weights: Mapping[str, float]) -> torch.Tensor:
    """Advantages times the weight of each token's role, 1 where none is given: [tokens]."""
    if not weights:
        return advantage
    of_member = torch.tensor([weights.get(role_of(member), 1.0) for member in batch.trajectories])
    return advantage * of_member.to(advantage)[batch.episodes.token_episode.to(advantage.device)]


def role_metrics(batch: StepBatch, advantage: torch.Tensor) -> dict[str, float]:
    """Members, tokens, returns and advantages of each role, as ``role/ROLE/…``; empty for a sole agent."""
    roles = [role_of(member) for member in batch.trajectories]
    found: dict[str, float] = {}
    for role in dict.fromkeys(roles) if set(roles) != {SOLE_ROLE} else ():
        member = torch.tensor([other == role for other in roles])
        token = member[batch.episodes.token_episode.cpu()]
        returns, group = batch.episodes.returns.cpu()[member], batch.episodes.group.cpu()[member]
        groups, group = torch.unique(group, return_inverse=True)
        found |= {
            f"role/{role}/members": float(member.sum()),
            f"role/{role}/tokens": float(token.sum()),
            f"role/{role}/shaped_return": float(returns.mean()),
            f"role/{role}/zero_variance": float((~differs(returns, group, groups.numel())).sum()),
            f"role/{role}/advantage_abs_mean": float(advantage.cpu()[token].abs().mean()) if bool(token.any()) else 0.0,
        }
    return found
