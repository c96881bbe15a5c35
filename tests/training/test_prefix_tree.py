"""Rows in which common prefixes stand once: every sequence is there, sees itself alone, and budgets hold."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.training.forward.sequences import PrefixNode, ScoredSequence, pack, shared_rows
from agentrl.training.forward.tree_attention import AttentionTree


def sequence(ids):
    ids = torch.tensor(ids)
    return ScoredSequence(input_ids=ids, positions=torch.arange(len(ids)), targets=ids)


@st.composite
def families(draw):
    """Sequences of which many begin alike."""
    ids = st.lists(st.integers(0, 2), min_size=1, max_size=6)
    found = [draw(ids)]
    for _ in range(draw(st.integers(0, 7))):
        parent = draw(st.sampled_from(found))
        found.append(parent[: draw(st.integers(0, len(parent)))] + draw(ids))
    return [sequence(own) for own in draw(st.permutations(found))]


@settings(max_examples=60, deadline=None)
@given(families(), st.integers(0, 4))
def test_each_sequence_sees_exactly_itself(sequences, share):
    row = pack(sequences, share=share)
    tree = AttentionTree(row, torch.device("cpu"))
    expected = torch.zeros_like(tree.mask(None))
    near = expected.clone()
    for own, place in zip(sequences, row.indices, strict=True):
        assert row.input_ids[place].tolist() == own.input_ids.tolist()
        assert row.depths[place].tolist() == list(range(len(own)))
        causal = torch.ones(len(own), len(own), dtype=torch.bool).tril()
        expected[place[:, None], place] = causal
        near[place[:, None], place] = causal.triu(-1)
    assert torch.equal(tree.mask(None), expected)
    assert torch.equal(tree.mask(2), near)
    held = np.concatenate([np.arange(node.start, node.end) for node in row.nodes])
    assert held.tolist() == list(range(len(row.input_ids)))
    prefixes = {tuple(own.input_ids[:n].tolist()) for own in sequences for n in range(1, len(own) + 1)}
    everything = sum(map(len, sequences))
    assert len(prefixes) <= len(row.input_ids) <= everything
    assert share != 1 or len(row.input_ids) == len(prefixes)
    assert share != 0 or len(row.input_ids) == everything


@settings(max_examples=60, deadline=None)
@given(families(), st.integers(1, 30), st.integers(1, 4))
def test_rows_hold_every_sequence_once_within_the_budget(sequences, budget, share):
    rows = shared_rows(sequences, budget, share=share)
    assert sorted(i for row in rows for i in row) == list(range(len(sequences)))
    for row in rows:
        packed = pack([sequences[i] for i in row], share=share)
        assert len(packed.input_ids) <= budget or len(row) == 1


def test_the_example():
    row = pack([sequence([7, 8, 1, 2]), sequence([7, 8, 3, 4, 5])], share=1)
    assert row.nodes == (PrefixNode(0, 2, 7), PrefixNode(2, 4, 4), PrefixNode(4, 7, 7))
    assert row.ends().tolist() == [7, 7, 4, 4, 7, 7, 7]
    assert row.depths.tolist() == [0, 1, 2, 3, 2, 3, 4]


def test_a_little_in_common_is_not_worth_a_node():
    assert len(pack([sequence([7, 8, 1, 2]), sequence([7, 8, 3, 4, 5])], share=3).nodes) == 2


def test_a_trie_is_cut_where_least_is_shared():
    groups = [[sequence([group] * 10 + [member] * 5) for member in (7, 8, 9)] for group in (1, 2)]
    sequences = [own for group in groups for own in group]
    assert shared_rows(sequences, 45, share=2) == [[0, 1, 2], [3, 4, 5]]
    assert shared_rows(sequences, 20, share=2) == [[0, 1], [2], [3, 4], [5]]
