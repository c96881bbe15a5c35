"""Rows of the key-value cache, and who gets them."""

import asyncio

import pytest
import torch

from agentrl.serving.local.cache import RowStore, capacity_for
from agentrl.serving.local.scheduler import ScheduledRequest, Scheduler


@pytest.mark.parametrize(
    ("length", "capacity"),
    [
        (1, 128),
        (128, 128),
        (129, 256),
        (257, 384),
        (1025, 1280),
        (2048, 2048),
        (2049, 2560),
        (9999, 10_000),
    ],
)
def test_capacities_are_at_most_a_quarter_or_a_step_too_large(length, capacity):
    assert capacity_for(length, 10_000) == capacity
    assert length <= capacity <= max(length + 128, 1.25 * length)


def test_the_lowest_free_row_is_used_first():
    store = RowStore(max_tokens=10_000, max_context=1024)
    rows = [store.take(100) for _ in range(10)]
    assert [row.index for row in rows] == list(range(10))
    for index in (7, 2, 5):
        store.give_back(rows[index])
    assert [store.take(100).index for _ in range(3)] == [2, 5, 7]


def test_a_move_keeps_what_was_computed():
    store = RowStore(max_tokens=4096, max_context=1024)
    row = store.take(200)
    keys, values = row.block.layer(0, torch.zeros(1, 2, 4), torch.zeros(1, 2, 4))
    keys[row.index] = torch.randn(2, 256, 4)
    values[row.index] = torch.randn(2, 256, 4)
    old_keys, old_values = keys[row.index].clone(), values[row.index].clone()
    row.computed = 150
    store.move(row, 300)
    assert (row.block.capacity, store.reserved_tokens) == (384, 384)
    assert torch.equal(row.block.keys[0][row.index, :, :150], old_keys[:, :150])
    assert torch.equal(row.block.values[0][row.index, :, :150], old_values[:, :150])
    assert torch.isfinite(row.block.keys[0]).all()


def test_a_cleared_cache_allocates_the_rows_that_were_used_before():
    store = RowStore(max_tokens=128 * 40, max_context=1024)
    rows = [store.take(100) for _ in range(33)]
    block = rows[0].block
    assert (block.rows, block.most_used) == (64, 33)
    for row in rows:
        store.give_back(row)
    store.clear()
    first = store.take(100)
    keys, values = first.block.layer(0, torch.ones(1, 2, 4), torch.ones(1, 2, 4))
    assert first.block.rows == len(keys) == len(values) == 33
    assert not keys.any()
    assert not values.any()
    store.give_back(first)
    store.clear()
    assert store.take(100).block.rows == 8  # one row was used, and the smallest block has 8


def test_expected_rows_stay_within_the_budget():
    store = RowStore(max_tokens=128 * 16, max_context=1024)
    for row in [store.take(100) for _ in range(16)]:
        store.give_back(row)
    store.clear()
    other = store.take(1024)  # takes 8 rows of 1024 tokens: nothing is left to allocate in advance
    assert store.take(100).block.rows == 8
    assert other.block.rows == 8


def test_empty_blocks_make_room_for_others():
    store = RowStore(max_tokens=600, max_context=1024)
    for length in (128, 512, 1024):
        store.give_back(store.take(length))
        assert [*store._blocks] == [length]


def test_room_counts_the_row_that_a_move_gives_back():
    store = RowStore(max_tokens=640, max_context=640)
    row = store.take(128)
    assert store.has_room(512)
    assert not store.has_room(513)
    assert store.has_room(513, instead_of=row)


@pytest.fixture
def job_of(request_of):
    def build(name, length, session=None, *, shared=None):
        """Make a request of a session; sessions share no token, or else the first `shared` ones of all."""
        own = 1000 * sum(map(ord, session or name.rstrip("0123456789")))
        ids = [i if shared is not None and i < shared else own + i for i in range(length)]
        request = request_of(ids, name, session)
        future = asyncio.get_running_loop().create_future()
        return ScheduledRequest(request=request, future=future, seed=0, ids=list(request.prompt_ids))

    return build


def _scheduler(max_num_seqs=8, max_tokens=1024, prefill_tokens=4096):
    rows = RowStore(max_tokens=max_tokens, max_context=1024)
    return Scheduler(max_num_seqs=max_num_seqs, prefill_tokens=prefill_tokens, rows=rows)


def _compute(scheduler):
    """Do what the engine does with a plan: all tokens of the chunks are computed."""
    chunks = scheduler.plan()
    for chunk in chunks:
        chunk.row.computed += chunk.count
    return [chunk.count for chunk in chunks]


async def test_requests_are_admitted_in_order_of_arrival_up_to_the_slots(job_of):
    scheduler = _scheduler(max_num_seqs=2)
    jobs = [job_of(f"j{i}", 5) for i in range(4)]
    for job in jobs:
        scheduler.submit(job)
    scheduler.plan()
    assert scheduler.running == jobs[:2]
    scheduler.finish(jobs[0])
    scheduler.finish(jobs[3])
    scheduler.plan()
    assert scheduler.running == [jobs[1], jobs[2]]
    assert not scheduler.waiting


async def test_long_prompts_are_computed_in_parts_within_the_budget(job_of):
    scheduler = _scheduler(prefill_tokens=20)
    for job in (job_of("a", 12), job_of("b", 30), job_of("c", 1)):
        scheduler.submit(job)
    assert _compute(scheduler) == [12, 8, 1]
    assert _compute(scheduler) == [20]
    assert _compute(scheduler) == [2]
    assert _compute(scheduler) == []
    scheduler = _scheduler(prefill_tokens=4)
    for name in "abc":
        scheduler.submit(job_of(name, 2))
    assert [_compute(scheduler), _compute(scheduler)] == [[2, 2], [2]]


async def test_the_least_recently_used_idle_session_is_evicted(job_of):
    scheduler = _scheduler(max_tokens=384)
    for name in "abc":
        job = job_of(name, 10)
        scheduler.submit(job)
        _compute(scheduler)
        scheduler.finish(job)
    again = job_of("a2", 11, "a")
    scheduler.submit(again)
    _compute(scheduler)
    scheduler.finish(again)
    scheduler.submit(job_of("d", 10))
    scheduler.plan()
    assert scheduler.evictions == 1
    cached = []
    for name in "abc":
        job = job_of(f"{name}3", 12, name)
        scheduler.submit(job)
        scheduler.plan()
        cached.append(job.cached_tokens)
        scheduler.finish(job)
    assert again.cached_tokens == 10
    assert cached[:2] == [11, 0]


async def test_what_is_preempted_is_computed_again(job_of):
    scheduler = _scheduler(max_tokens=512)
    first, second = job_of("a", 150), job_of("b", 150)
    for job in (first, second):
        scheduler.submit(job)
    assert _compute(scheduler) == [150, 150]
    first.ids.extend(range(150))
    assert _compute(scheduler) == [150]
    assert (scheduler.preemptions, scheduler.running, second.row) == (1, [first], None)
    scheduler.finish(first)
    assert _compute(scheduler) == [150]
    scheduler.finish(second)
    scheduler.submit(job_of("next", 151, "b"))
    assert _compute(scheduler) == [1], "its session is cached again"


async def test_what_new_sequences_begin_with_is_computed_once(job_of):
    scheduler = _scheduler(max_tokens=4096, prefill_tokens=60)
    jobs = [job_of(name, length, shared=100) for name, length in (("a", 130), ("b", 120), ("c", 100), ("d", 90))]
    for job in jobs:
        scheduler.submit(job)
    assert _compute(scheduler) == [60]
    assert _compute(scheduler) == [60], "the others wait"
    late = job_of("e", 400, shared=15)
    scheduler.submit(late)
    assert _compute(scheduler) == [10, 20, 1, 1, 30], "the latest shares too little to copy or to wait"
    assert [job.cached_tokens for job in [*jobs, late]] == [0, 100, 99, 89, 0]


async def test_what_is_copied_is_what_was_computed(job_of):
    scheduler = _scheduler(max_tokens=4096)
    first, second = job_of("a", 300, shared=300), job_of("b", 50, shared=40)
    scheduler.submit(first)
    (chunk,) = scheduler.plan()
    keys, values = chunk.row.block.layer(0, torch.zeros(1, 2, 4), torch.zeros(1, 2, 4))
    keys[chunk.row.index], values[chunk.row.index] = torch.randn(2, 384, 4), torch.randn(2, 384, 4)
    chunk.row.computed = 300
    scheduler.submit(second)
    scheduler.plan()
    row = second.row
    assert (row.block.capacity, row.computed) == (128, 40)
    assert torch.equal(row.block.keys[0][row.index, :, :40], keys[chunk.row.index, :, :40])
    assert torch.equal(row.block.values[0][row.index, :, :40], values[chunk.row.index, :, :40])
    assert row.origin is chunk.row.origin is not None
    assert (chunk.row.shared, row.shared) == (40, 40)
    row.keep(30)
    assert (row.computed, row.shared, row.origin) == (30, 30, chunk.row.origin)
    row.keep(0)
    assert row.origin is None


async def test_an_idle_session_is_copied_as_far_as_it_was_computed(job_of):
    scheduler = _scheduler(max_tokens=4096)
    first = job_of("a", 50, shared=200)
    scheduler.submit(first)
    _compute(scheduler)
    first.ids.extend(range(50, 53))  # sampled; the last one was not computed
    _compute(scheduler)
    first.row.computed = 52
    scheduler.finish(first)
    second = job_of("b", 60, shared=200)
    scheduler.submit(second)
    assert _compute(scheduler) == [8]
    assert second.cached_tokens == 52


async def test_after_new_weights_running_requests_share_again(job_of):
    scheduler = _scheduler(max_tokens=4096)
    jobs = [job_of(name, 50, shared=40) for name in "ab"]
    for job in jobs:
        scheduler.submit(job)
    assert [_compute(scheduler), _compute(scheduler)] == [[50], [10]]
    scheduler.forget_computed()
    assert [_compute(scheduler), _compute(scheduler)] == [[50], [10]]
    assert [job.cached_tokens for job in jobs] == [0, 40], "as they were admitted"


async def test_a_session_whose_next_turn_waits_is_evicted_last(job_of):
    scheduler = _scheduler(max_num_seqs=1, max_tokens=512)
    for name in ("queued", "idle"):
        job = job_of(name, 10)
        scheduler.submit(job)
        _compute(scheduler)
        scheduler.finish(job)
    new, turn = job_of("new", 10), job_of("turn", 12, "queued")
    scheduler.submit(new)
    scheduler.submit(turn)
    _compute(scheduler)
    scheduler.finish(new)
    scheduler.plan()
    assert turn.cached_tokens == 10


async def test_a_session_ended_while_it_runs_gives_its_row_back_at_the_end(job_of):
    scheduler = _scheduler()
    job = job_of("a", 10)
    scheduler.submit(job)
    scheduler.plan()
    scheduler.end_session("a")
    assert scheduler.rows.reserved_tokens == 128
    scheduler.finish(job)
    assert scheduler.rows.reserved_tokens == 0


async def test_new_weights_leave_nothing_computed(job_of):
    scheduler = _scheduler()
    running, idle = job_of("a", 10), job_of("b", 10)
    for job in (running, idle):
        scheduler.submit(job)
    _compute(scheduler)
    scheduler.finish(idle)
    scheduler.forget_computed()
    assert scheduler.rows.reserved_tokens == 128
    assert _compute(scheduler) == [10]
