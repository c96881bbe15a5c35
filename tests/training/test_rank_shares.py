"""Micro-batches on ranks: equal numbers, nearly equal costs, nothing lost, nothing twice."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl.training.forward.micro_batches import MicroBatch, balance, pad_to_ranks, rank_share


def batch(sequences, learns, cost):
    return MicroBatch(sequences, learns, tokens=cost, cost=cost)


def shares(work, ranks):
    return [rank_share(work, rank=rank, ranks=ranks) for rank in range(ranks)]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 8))
def test_parts_are_equal_in_number_and_nearly_in_cost(costs, parts):
    costs = costs + [1] * (-len(costs) % parts)
    found = balance(costs, parts)
    assert sorted(index for part in found for index in part) == list(range(len(costs)))
    assert {len(part) for part in found} == {len(costs) // parts}
    sums = [sum(costs[index] for index in part) for part in found]
    assert max(sums) - min(sums) <= max(costs)


def test_differencing_evens_out_what_taking_turns_does_not():
    costs = [8, 7, 6, 5]
    assert [sum(costs[index] for index in part) for part in balance(costs, parts=2)] == [13, 13]


@given(
    st.lists(st.tuples(st.integers(1, 5), st.booleans(), st.integers(1, 100)), min_size=1, max_size=12),
    st.integers(2, 5),
)
def test_every_sequence_counts_once_and_ranks_stay_in_step(batches, ranks):
    work, number = [], 0
    for size, learns, cost in batches:
        work.append(batch(list(range(number, number + size)), learns, cost * size))
        number += size
    found = shares(work, ranks)
    assert len({tuple(micro_batch.needs_grad for micro_batch in share) for share in found}) == 1
    counted = [sequence for share in found for own in share if own.counts for sequence in own.sequences]
    assert sorted(counted) == list(range(number))
    assert sum(len(share) for share in found) == len(pad_to_ranks(work, ranks))
    assert shares(pad_to_ranks(work, ranks), ranks) == found


def test_one_rank_computes_everything_in_order():
    work = [batch([0], True, 1), batch([1, 2], True, 9), batch([3], False, 5)]
    assert rank_share(work, rank=0, ranks=1) == work


def test_a_rank_without_work_computes_something_that_does_not_count():
    first, second, third = shares([batch([0], True, 9), batch([1], True, 2)], 3)
    assert [own.counts for own in (*first, *second, *third)].count(False) == 1
    assert [len(share) for share in (first, second, third)] == [1, 1, 1]


def test_a_large_micro_batch_is_split_before_a_rank_idles():
    found = shares([batch([0, 1, 2, 3], True, 40)], 2)
    assert [share[0].sequences for share in found] == [[0, 1], [2, 3]]
    assert all(share[0].counts for share in found)
