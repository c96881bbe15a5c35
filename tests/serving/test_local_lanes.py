"""Lanes: a step's sequences in parts that are computed at the same time."""

import pytest
from support.models import tiny_model

from agentrl.config.engines import MIN_SEQS_PER_LANE, LocalEngineConfig
from agentrl.errors import EngineError, UsageError
from agentrl.serving.local import LocalEngine
from agentrl.serving.local.cache import RowStore
from agentrl.serving.local.forward import SequenceChunk
from agentrl.serving.local.scheduler import split_chunks

SESSIONS = 3 * MIN_SEQS_PER_LANE


def chunks(lengths):
    rows = RowStore(max_tokens=10**9, max_context=4096)
    found = []
    for length, count in lengths:
        row = rows.take(length)
        row.computed = length - count
        found.append(SequenceChunk(row, count))
    return found


@pytest.mark.parametrize("lanes", [1, 2, 3])
@pytest.mark.parametrize(
    "lengths",
    [[(100, 1)] * 40, [(50 * (1 + i % 20), 1 + 7 * (i % 3)) for i in range(60)], [(900, 1)] + [(200, 1)] * 30],
)
def test_every_piece_is_in_one_part(lanes, lengths):
    plan = chunks(lengths)
    parts = split_chunks(plan, lanes)
    assert sorted(map(id, plan)) == sorted(id(chunk) for part in parts for chunk in part)
    assert len(parts) == lanes


def test_parts_cost_about_the_same_and_keep_neighbours_together():
    plan = chunks([(600, 1)] * 16 + [(300, 20)] * 16 + [(250, 1)] * 16)
    first, second = split_chunks(plan, 2)
    costs = [sum(24 * chunk.count + chunk.end for chunk in part) for part in (first, second)]
    assert max(costs) < 1.1 * min(costs)
    order = [(chunk.row.block.capacity, chunk.row.index) for chunk in (*first, *second)]
    assert order == sorted(order)


@pytest.mark.parametrize("count", [1, MIN_SEQS_PER_LANE, 2 * MIN_SEQS_PER_LANE - 1])
def test_few_sequences_are_not_split(count):
    assert len(split_chunks(chunks([(10, 1)] * count), 4)) == 1


async def test_lanes_change_nothing_but_rounding_and_repeat_bit_by_bit(request_of, play_sessions):
    model = tiny_model(max_context=512)
    answers = []
    for lanes in (1, 3, 3):
        engine = LocalEngine(model, LocalEngineConfig(lanes=lanes, max_num_seqs=SESSIONS))
        played = await play_sessions(engine, request_of, sessions=SESSIONS, top_p=0.9)
        answers.append([answer for session in played for _, answer in session])
        await engine.close()
    one, three, again = answers
    assert [a.token_ids for a in one] == [a.token_ids for a in three]
    for a, b in zip(one, three, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
    assert [(a.token_ids, a.logprobs) for a in three] == [(a.token_ids, a.logprobs) for a in again]


@pytest.mark.parametrize(
    "rope",
    ["dynamic", "longrope"],
)
def test_lanes_are_refused_where_positions_depend_on_the_batch(rope):
    model = tiny_model()
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_type": rope}
    with pytest.raises(UsageError, match=f"rope_type {rope}, 2 lanes"):
        LocalEngine(model, LocalEngineConfig(lanes=2, max_num_seqs=16))


async def test_an_error_in_a_lane_fails_the_requests_and_later_ones_are_served(request_of, monkeypatch, play_sessions):
    engine = LocalEngine(tiny_model(max_context=512), LocalEngineConfig(lanes=2, max_num_seqs=SESSIONS))
    logits, broken = engine._runners[None].logits, [True]

    def fail_once(step):
        if len(step.chunks) < SESSIONS and broken:
            broken.clear()
            raise RuntimeError("out of luck")
        return logits(step)

    monkeypatch.setattr(engine._runners[None], "logits", fail_once)
    with pytest.raises(EngineError, match="out of luck"):
        await play_sessions(engine, request_of, sessions=SESSIONS)
    assert len(await play_sessions(engine, request_of, sessions=SESSIONS)) == SESSIONS
    await engine.close()
