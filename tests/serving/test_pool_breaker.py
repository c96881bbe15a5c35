import pytest

from agentrl.serving.pool.member import MAX_REST_FACTOR, BreakerState, CircuitBreaker


@pytest.fixture
def clock():
    class Clock:
        now = 100.0

        def __call__(self):
            return self.now

    return Clock()


@pytest.fixture
def breaker(clock):
    return CircuitBreaker(failures=3, open_s=5, clock=clock)


def fail(breaker, times):
    for _ in range(times):
        breaker.record_failure()


def test_only_failures_in_a_row_open_it(breaker):
    fail(breaker, 2)
    breaker.record_success()
    fail(breaker, 2)
    assert (breaker.state, breaker.limit(8)) == (BreakerState.CLOSED, 8)
    fail(breaker, 1)
    assert (breaker.state, breaker.limit(8)) == (BreakerState.OPEN, 0)


def test_after_its_rest_one_request_is_a_trial_and_its_success_closes_it(breaker, clock):
    fail(breaker, 3)
    clock.now += 4.9
    assert breaker.state is BreakerState.OPEN
    clock.now += 0.1
    assert (breaker.state, breaker.limit(8), breaker.limit(0)) == (BreakerState.HALF_OPEN, 1, 0)
    breaker.record_success()
    assert breaker.limit(8) == 8
    fail(breaker, 2)
    assert breaker.state is BreakerState.CLOSED


def test_each_failed_trial_doubles_the_rest_up_to_a_limit(breaker, clock):
    fail(breaker, 3)
    rests = []
    for _ in range(7):
        opened = clock.now
        while breaker.state is BreakerState.OPEN:
            clock.now += 5
        rests.append((clock.now - opened) / 5)
        fail(breaker, 1)
    assert rests == [1, 2, 4, 8, 16, 16, 16]
    assert max(rests) == MAX_REST_FACTOR


def test_late_answers_do_not_end_or_prolong_the_rest(breaker, clock):
    fail(breaker, 3)
    clock.now += 3
    breaker.record_success()
    fail(breaker, 5)
    assert breaker.state is BreakerState.OPEN
    clock.now += 2
    assert breaker.state is BreakerState.HALF_OPEN


def test_a_new_server_starts_without_a_past(breaker, clock):
    fail(breaker, 3)
    breaker.reset()
    fail(breaker, 2)
    assert breaker.state is BreakerState.CLOSED


def test_it_says_when_it_opens_and_closes(breaker, clock):
    assert [breaker.record_failure() for _ in range(4)] == [None, None, 5, None]
    clock.now += 5
    assert breaker.record_failure() == 10
    assert not breaker.record_success()
    clock.now += 10
    assert breaker.record_success()
    assert not breaker.record_success()
