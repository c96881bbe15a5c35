import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.engine import ServerLoad
from agentrl.serving.pool.member import ROOMY, AdaptiveConcurrency


def load(running=8, waiting=0, cache_used=0.3, preemptions=0):
    return ServerLoad(
        running=running,
        waiting=waiting,
        cache_used=cache_used,
        preemptions=preemptions,
        prompt_tokens=0,
        cached_tokens=0,
        sampled_tokens=0,
    )


def limits(concurrency, *readings, in_flight=None):
    found = []
    for reading in readings:
        concurrency.read(reading, in_flight=concurrency.limit if in_flight is None else in_flight)
        found.append(concurrency.limit)
    return found


def test_it_grows_while_the_cache_has_room_and_the_limit_holds_requests_back():
    assert limits(AdaptiveConcurrency(limit=8), load(), load(), load()) == [10, 12, 14]


@pytest.mark.parametrize("reading", [load(cache_used=0.8), load(waiting=1)])
def test_it_does_not_grow_when_the_cache_is_nearly_full_or_something_waits(reading):
    assert limits(AdaptiveConcurrency(limit=8), reading) == [8]


def test_it_does_not_grow_when_nothing_is_held_back():
    assert limits(AdaptiveConcurrency(limit=8), load(), load(), in_flight=7) == [8, 8]


def test_a_preemption_leaves_what_still_runs_and_is_counted_once():
    readings = [load(running=40, waiting=24, cache_used=0.95, preemptions=count) for count in (5, 6, 6)]
    assert limits(AdaptiveConcurrency(limit=64), *readings[:2]) == [64, 40]
    assert limits(AdaptiveConcurrency(limit=40), *readings[1:]) == [40, 40]


def test_a_preemption_counts_from_the_use_of_the_cache_on_at_which_it_is_no_longer_roomy():
    readings = [load(running=40, waiting=24, cache_used=ROOMY, preemptions=count) for count in (5, 6)]
    assert limits(AdaptiveConcurrency(limit=64), *readings) == [64, 40]


def test_a_preemption_that_is_over_takes_off_an_eighth_of_what_was_given():
    concurrency = AdaptiveConcurrency(limit=64)
    limits(concurrency, load(cache_used=0.95))
    assert limits(concurrency, load(cache_used=0.95, preemptions=1), in_flight=64) == [55]
    assert limits(concurrency, load(cache_used=0.95, preemptions=2), in_flight=64) == [55]  # the first is not felt yet
    assert limits(concurrency, load(cache_used=0.95, preemptions=3), in_flight=55) == [48]


def test_what_is_thrown_out_by_an_update_of_the_weights_costs_nothing():
    readings = [load(running=64), load(running=20, waiting=44, cache_used=0.2, preemptions=64)]
    assert limits(AdaptiveConcurrency(limit=64), *readings, in_flight=63) == [64, 64]


def test_a_queue_counts_when_it_stays_and_takes_off_only_what_does_not_run():
    queue = load(running=60, waiting=12, cache_used=0.9)
    assert limits(AdaptiveConcurrency(limit=72), *[queue] * 4) == [72, 68, 68, 68]


def test_a_queue_at_a_cache_with_room_takes_off_only_what_was_added():
    concurrency = AdaptiveConcurrency(limit=64)
    assert limits(concurrency, load(running=64), load(running=64)) == [73, 83]
    queue = load(running=40, waiting=43)
    assert limits(concurrency, *[queue] * 5) == [83, 72, 64, 64, 64]


def test_a_new_server_keeps_the_limit_and_forgets_the_counts():
    concurrency = AdaptiveConcurrency(limit=64)
    limits(concurrency, load(preemptions=9, cache_used=0.9))
    concurrency.forget()
    assert limits(concurrency, load(preemptions=10, cache_used=0.9)) == [64]


READINGS = st.builds(
    load,
    running=st.integers(0, 500),
    waiting=st.integers(0, 500),
    cache_used=st.floats(0, 1),
    preemptions=st.integers(0, 50),
)


@given(st.lists(st.tuples(READINGS, st.integers(0, 300)), max_size=40))
def test_the_limit_stays_between_its_bounds(readings):
    concurrency = AdaptiveConcurrency(limit=16, least=2, most=40)
    for reading, in_flight in readings:
        before = concurrency.limit
        concurrency.read(reading, in_flight=in_flight)
        assert 2 <= concurrency.limit <= 40
        assert concurrency.limit <= before or (reading.waiting == 0 and reading.cache_used < 0.8)
