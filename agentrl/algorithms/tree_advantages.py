"""Advantages of branching episodes: a group of episodes is a tree, and siblings are compared.

The root of a group's tree is the start of its task. Every episode is a path from the root to a leaf; an episode that
was continued from turn k of another one shares that episode's first k turns. A node is the root or a turn before which
paths branch, and an edge (u, v) is the turns between two nodes, or between a node and a leaf. With the return R:

    V(leaf) = R        V(u) = mean of V(v) over the edges (u, v)

    A(u, v) = V(v) - mean of V(w) over the other edges (u, w)

All tokens of an edge have its advantage. At a node with n edges, this is n / (n - 1) (V(v) - V(u)), the advantage of a
step in TreeRL (arXiv 2506.11902), without its second term V(v) - V(root). Tree-GRPO (arXiv 2509.21240) compares the
leaves of a tree and those of all trees, relative to their deviations.

The estimate of the policy gradient is unbiased if the choice of a branch point depends on nothing after it:

- The return of a path below an edge is a sample of the return after each of the edge's actions, and so is V(v), whose
  paths differ only after v. The baseline is a function of the siblings, which are independent of the edge's actions
  given the history up to u.
- Each path alone is a sample of the policy. A gradient that gives each path the same weight therefore counts an edge
  once for each path through it: the tokens of a shared edge occur in each of these episodes. Training them only once,
  with the mean of the paths' advantages, would weight early turns less than late ones.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from agentrl.algorithms.segments import STD_EPSILON, segment_std
from agentrl.algorithms.traits import compares_group, uses_branches
from agentrl.algorithms.types import EpisodeBatch
from agentrl.reward import MIN_DIFFERENCE, ROUNDING


@uses_branches
@compares_group
def tree(episodes: EpisodeBatch, *, normalize: bool = False) -> torch.Tensor:
    """A = V(v) - mean V of the siblings of v, V(v) = mean of its children: [tokens] (see arXiv 2506.11902, 2509.21240).

    v is the end of the tokens' edge in a group's tree of episodes (``agent.branch``): the next turn before which
    episodes branch, or the end of the episode, whose V is the return. In a group without branches this is `rloo`. With
    ``normalize``, A is divided by the standard deviation of the group's returns, plus 1e-6.
    """
    advantage = torch.zeros_like(episodes.turn_reward)
    for trees in _trees_of_groups(episodes).values():
        _compare([_first_edge(found, advantage) for found in trees], advantage)
    if normalize:
        std = segment_std(episodes.returns, episodes.group, episodes.groups)
        advantage = advantage / (std[episodes.group[episodes.turn_episode]] + STD_EPSILON)
    return advantage[episodes.token_turn]


@dataclass(slots=True)
class _Path:
    """One episode of a tree."""

    turns: range
    """Indices of its turns in the batch."""
    value: float
    """Return."""
    shared: int
    """Number of initial turns shared with the tree's trunk; for the trunk itself, all its turns."""


@dataclass(slots=True)
class _Edge:
    """Turns between two nodes, in one or several paths."""

    value: float
    """V of the edge's end."""
    turns: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Tree:
    """Episodes that share their first turns: the trunk, if it is in the batch, and its branches."""

    trunk: _Path | None = None
    branches: list[_Path] = field(default_factory=list)


def _trees_of_groups(episodes: EpisodeBatch) -> Mapping[int, list[_Tree]]:
    """Return the trees of each group; without branches, every episode is one."""
    returns = episodes.returns.tolist()
    numbers = range(len(returns)) if episodes.tree is None else episodes.tree.tolist()
    shared = [-1] * len(returns) if episodes.branch_turn is None else episodes.branch_turn.tolist()
    ends = torch.bincount(episodes.turn_episode, minlength=len(returns)).cumsum(0).tolist()
    found: dict[int, dict[int, _Tree]] = defaultdict(lambda: defaultdict(_Tree))
    for episode, group in enumerate(episodes.group.tolist()):
        turns, turn = range(ends[episode - 1] if episode else 0, ends[episode]), shared[episode]
        path = _Path(turns, returns[episode], len(turns) if turn < 0 else turn)
        own = found[group][numbers[episode]]
        if turn < 0:
            own.trunk = path
        else:
            own.branches.append(path)
    return {group: list(trees.values()) for group, trees in found.items()}


def _first_edge(tree: _Tree, advantage: torch.Tensor) -> _Edge:
    """Write the advantages of a tree's edges below its first one, from the last node to the first; return that edge."""
    paths = [*([] if tree.trunk is None else [tree.trunk]), *tree.branches]
    edge = None if tree.trunk is None else _Edge(tree.trunk.value)
    end = max(path.shared for path in paths)
    for turn in sorted({path.shared for path in tree.branches}, reverse=True):
        if edge is not None:
            edge.turns += _turns_between(paths, turn, end)
        branches = [_Edge(path.value, [*path.turns[turn:]]) for path in tree.branches if path.shared == turn]
        siblings = [*([] if edge is None else [edge]), *branches]
        if len(siblings) > 1:
            _compare(siblings, advantage)
            edge = _Edge(math.fsum(sibling.value for sibling in siblings) / len(siblings))
        else:  # the other paths of this node failed, so it is no longer a branch point
            edge = siblings[0]
        end = turn
    assert edge is not None
    edge.turns += _turns_between(paths, 0, end)
    return edge


def _turns_between(paths: Sequence[_Path], start: int, end: int) -> list[int]:
    """Return the turns from one node of the trunk to another in all paths that share them."""
    return [turn for path in paths if path.shared >= end for turn in path.turns[start:end]]


def _compare(edges: Sequence[_Edge], advantage: torch.Tensor) -> None:
    """Write the advantages of a node's edges: exactly 0 where values differ by rounding only, and for a single edge."""
    total, count = math.fsum(edge.value for edge in edges), len(edges)
    bound = MIN_DIFFERENCE + ROUNDING * max(abs(edge.value) for edge in edges)
    for edge in edges:
        difference = edge.value - (total - edge.value) / max(count - 1, 1)
        if count > 1 and abs(difference) > bound and edge.turns:
            advantage[edge.turns] = difference
