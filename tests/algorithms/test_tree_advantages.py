"""Advantages of episodes that branch: by hand, and against the exact policy gradient of small bandits."""

import itertools
import random

import pytest
import torch

from agentrl.algorithms.advantages import rloo
from agentrl.algorithms.tree_advantages import tree
from agentrl.algorithms.types import EpisodeBatch


def batch(paths, *, group=None):
    """Episodes (return, number of turns, tree, shared turns or -1), with one token in each turn."""
    turns = [index for index, path in enumerate(paths) for _ in range(path[1])]
    return EpisodeBatch(
        returns=torch.tensor([path[0] for path in paths], dtype=torch.float64),
        group=torch.tensor(group or [0] * len(paths)),
        turn_reward=torch.zeros(len(turns), dtype=torch.float64),
        turn_episode=torch.tensor(turns),
        turn_state=torch.arange(len(turns)),
        token_turn=torch.arange(len(turns)),
        tree=torch.tensor([path[2] for path in paths]),
        branch_turn=torch.tensor([path[3] for path in paths]),
    )


def by_episode(advantage, paths):
    return [part.tolist() for part in torch.split(advantage, [path[1] for path in paths])]


def test_siblings_are_compared_and_a_shared_edge_has_the_mean_of_its_paths():
    paths = [(1.0, 3, 0, -1), (0.5, 2, 1, -1), (0.0, 2, 0, 1), (0.0, 3, 0, 2)]
    # after turn 2 of tree 0: 1 and 0, so V = 0.5; after turn 1: 0.5 and 0, so V = 0.25; root: 0.25 and 0.5
    assert by_episode(tree(batch(paths)), paths) == [
        [-0.25, 0.5, 1.0],
        [0.25, 0.25],
        [-0.25, -0.5],
        [-0.25, 0.5, -1.0],
    ]


def test_a_path_that_left_the_trunk_before_has_no_part_in_its_later_edges():
    """The second branch is as good as the mean of the others, from which it parted before they parted."""
    paths = [(1.0, 3, 0, -1), (3.0, 3, 0, 2), (2.0, 3, 0, 1)]
    assert by_episode(tree(batch(paths)), paths) == [[0.0, 0.0, -2.0], [0.0, 0.0, 2.0], [0.0, 0.0, 0.0]]


def test_an_episode_that_ended_before_its_branch_counts_twice_in_its_own_edge_only():
    paths = [(1.0, 1, 0, -1), (0.0, 2, 1, -1), (1.0, 1, 0, 1), (1.0, 2, 1, 1)]
    assert by_episode(tree(batch(paths)), paths) == [[0.5], [-0.5, -1.0], [0.5], [-0.5, 1.0]]


def test_node_whose_other_paths_failed_is_no_branch_point():
    paths = [(1.0, 3, 0, 1), (0.0, 1, 1, -1)]  # the root of tree 0 is not in the batch
    assert by_episode(tree(batch(paths)), paths) == [[1.0, 1.0, 1.0], [-1.0]]
    paths = [(1.0, 3, 0, 1), (0.0, 2, 0, 1), (0.0, 1, 1, -1)]
    assert by_episode(tree(batch(paths)), paths) == [[0.5, 1.0, 1.0], [0.5, -1.0], [-0.5]]


def test_without_branches_it_is_rloo_and_rounding_is_no_difference():
    generator = torch.Generator().manual_seed(0)
    paths = [(float(torch.rand((), generator=generator)), 2, index, -1) for index in range(6)]
    episodes = batch(paths, group=[0, 0, 0, 1, 1, 1])
    torch.testing.assert_close(tree(episodes), rloo(episodes))
    plain = EpisodeBatch(
        **{name: getattr(episodes, name) for name in ("returns", "group", "turn_reward", "turn_episode", "turn_state")},
        token_turn=episodes.token_turn,
    )
    assert torch.equal(tree(plain), tree(episodes))
    equal = [(value, 1, index, -1) for index, value in enumerate((0.3, 0.1 + 0.2, 0.3))]
    assert not tree(batch(equal)).any()


def test_normalizing_divides_by_the_deviation_of_the_groups_returns():
    paths = [(1.0, 2, 0, -1), (0.0, 2, 1, -1), (0.0, 2, 0, 1)]
    std = torch.tensor([1.0, 0.0, 0.0]).double().std()
    torch.testing.assert_close(tree(batch(paths), normalize=True), tree(batch(paths)) / (std + 1e-6))
    wider = [(10 * value, turns, number, shared) for value, turns, number, shared in paths]
    both = tree(batch(paths + wider, group=[0, 0, 0, 1, 1, 1]), normalize=True)
    torch.testing.assert_close(both[:6], both[6:], atol=1e-5, rtol=0)


def test_selecting_a_group_keeps_its_branches():
    paths = [(0.5, 1, 0, -1), (0.1, 1, 1, -1), (1.0, 2, 2, -1), (0.5, 1, 3, -1), (0.0, 2, 2, 1)]
    whole = batch(paths, group=[0, 0, 1, 1, 1])
    torch.testing.assert_close(tree(whole.select_group(1)), tree(whole)[2:])


def random_tree(rng):
    """Episodes of one group: roots, some of them lost, and branches from some of their turns."""
    paths = []
    for number in range(rng.randint(2, 4)):
        length = rng.randint(1, 5)
        root = (rng.choice([0.0, 0.5, 1.0]) + rng.random(), length, number, -1)
        points = sorted({rng.randint(1, length + 1) for _ in range(rng.randint(0, 2))})
        branches = [(rng.random(), min(k, length), k) for k in points for _ in range(rng.randint(1, 2))]
        own = [
            (root[0] if k > length else value, shared + (0 if k > length else rng.randint(1, 3)), number, shared)
            for value, shared, k in branches
            if k != length
        ]
        paths += [*([root] if not own or rng.random() < 0.8 else []), *own]
    rng.shuffle(paths)
    return paths


def reference(paths):
    """Advantages by a walk over sets of episodes that have the same turns so far."""
    labels = [
        [(tree_, k) if shared < 0 or k < shared else (index, tree_, k) for k in range(turns)]
        for index, (_, turns, tree_, shared) in enumerate(paths)
    ]
    found = [[0.0] * turns for _, turns, _, _ in paths]

    def edges(members, depth):
        """The sets into which episodes part at this turn; each that has ended is one."""
        parts = {}
        for e in members:
            parts.setdefault(labels[e][depth] if depth < len(labels[e]) else e, []).append(e)
        return list(parts.values())

    def value(members, depth):
        parts = edges(members, depth)
        if len(parts) > 1:
            return sum(value(part, depth) for part in parts) / len(parts)
        return paths[members[0]][0] if depth >= len(labels[members[0]]) else value(members, depth + 1)

    def walk(members, depth, advantage):
        parts = edges(members, depth)
        for part in parts:
            if len(parts) > 1:
                others = [value(other, depth) for other in parts if other is not part]
                advantage = value(part, depth) - sum(others) / len(others)
            if depth < len(labels[part[0]]):
                for e in part:
                    found[e][depth] = advantage
                walk(part, depth + 1, advantage)

    walk(range(len(paths)), 0, 0.0)
    return found


def test_random_trees_equal_a_reference():
    rng = random.Random(0)
    for number in range(300):
        paths = random_tree(rng)
        found = by_episode(tree(batch(paths)), paths)
        for own, expected in zip(found, reference(paths), strict=True):
            assert own == pytest.approx(expected, abs=1e-9), (number, paths)


class Bandit:
    """Two turns of two actions; action 1 may end the episode at once."""

    def __init__(self, *, ends_early):
        generator = torch.Generator().manual_seed(3)
        self.ends_early = ends_early
        self.first = torch.randn(2, generator=generator, dtype=torch.float64).requires_grad_()
        self.second = torch.randn(2, 2, generator=generator, dtype=torch.float64).requires_grad_()
        self.reward = torch.tensor([[1.0, -0.5], [0.25, 2.0]], dtype=torch.float64)

    def actions(self):
        """All paths."""
        return [(1,), (0, 0), (0, 1)] if self.ends_early else list(itertools.product((0, 1), (0, 1)))

    def logps(self, path):
        found = [torch.log_softmax(self.first, 0)[path[0]]]
        return [*found, torch.log_softmax(self.second[path[0]], 0)[path[1]]] if len(path) > 1 else found

    def value(self, path):
        return float(self.reward[path] if len(path) > 1 else self.reward[path[0]].mean())

    def gradient(self, scalar):
        every = scalar + 0 * self.second.sum()  # a group of short episodes does not reach the second turn
        return torch.cat([part.flatten() for part in torch.autograd.grad(every, (self.first, self.second))])

    def exact(self):
        return self.gradient(sum(sum(self.logps(path)).exp() * self.value(path) for path in self.actions()))

    def trees(self):
        """All outcomes of one root and a branch after its first turn, with log-probabilities."""
        for path in self.actions():
            if len(path) == 1:
                yield (path, path), self.logps(path)
            else:
                for other in (0, 1):
                    branch = (path[0], other)
                    yield (path, branch), [*self.logps(path), self.logps(branch)[1]]


def expected_gradient(bandit, weigh):
    """Mean, over all groups of two roots with a branch each, of the estimated gradient."""
    total = torch.zeros(6, dtype=torch.float64)
    for first, second in itertools.product(bandit.trees(), repeat=2):
        roots_and_branches = [first[0][0], second[0][0], first[0][1], second[0][1]]
        paths = [
            (bandit.value(path), len(path), index % 2, 1 if index > 1 else -1)
            for index, path in enumerate(roots_and_branches)
        ]
        advantage = weigh(tree(batch(paths)), paths)
        logps = [logp for path in roots_and_branches for logp in bandit.logps(path)]
        estimate = sum(a * logp for a, logp in zip(advantage.tolist(), logps, strict=True)) / len(paths)
        probability = sum([*first[1], *second[1]]).exp().detach()
        total += probability * bandit.gradient(estimate)
    return total


@pytest.mark.parametrize("ends_early", [False, True])
def test_the_gradient_is_unbiased(ends_early):
    bandit = Bandit(ends_early=ends_early)
    torch.testing.assert_close(expected_gradient(bandit, lambda advantage, paths: advantage), bandit.exact())


def test_training_shared_turns_once_would_be_biased():
    def once(advantage, paths):
        mask = [index < 2 or turn > 0 for index, path in enumerate(paths) for turn in range(path[1])]
        return advantage * torch.tensor(mask)

    bandit = Bandit(ends_early=False)
    found, exact = expected_gradient(bandit, once), bandit.exact()
    torch.testing.assert_close(2 * found[:2], exact[:2])  # the first turn has half of its weight
    torch.testing.assert_close(found[2:], exact[2:])
    assert float(exact[:2].abs().max()) > 0.01
