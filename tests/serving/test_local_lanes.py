"""Lanes: a step's sequences in parts that are computed at the same time."""

import threading

import pytest
import torch

from agentrl.config.schema import FEWEST_PER_LANE, LocalEngineConfig
from agentrl.errors import EngineError, UsageError
from agentrl.serving.local import LocalEngine
from agentrl.serving.local.lanes import Lanes
from agentrl.serving.local.rows import RowStore
from agentrl.serving.local.step import Piece
from agentrl.testing.models import tiny_model

SESSIONS = 3 * FEWEST_PER_LANE


def pieces(lengths):
    rows = RowStore(max_tokens=10**9, max_context=4096)
    found = []
    for length, count in lengths:
        row = rows.take(length)
        row.computed = length - count
        found.append(Piece(row, count))
    return found


@pytest.mark.parametrize("lanes", [1, 2, 3])
@pytest.mark.parametrize(
    "lengths",
    [[(100, 1)] * 40, [(50 * (1 + i % 20), 1 + 7 * (i % 3)) for i in range(60)], [(900, 1)] + [(200, 1)] * 30],
)
def test_every_piece_is_in_one_part(lanes, lengths):
    plan = pieces(lengths)
    parts = Lanes(lanes).split(plan)
    assert sorted(map(id, plan)) == sorted(id(piece) for part in parts for piece in part)
    assert len(parts) == lanes


def test_parts_cost_about_the_same_and_keep_neighbours_together():
    plan = pieces([(600, 1)] * 16 + [(300, 20)] * 16 + [(250, 1)] * 16)
    first, second = Lanes(2).split(plan)
    costs = [sum(24 * piece.count + piece.end for piece in part) for part in (first, second)]
    assert max(costs) < 1.1 * min(costs)
    order = [(piece.row.shelf.capacity, piece.row.index) for piece in (*first, *second)]
    assert order == sorted(order)


@pytest.mark.parametrize("count", [1, FEWEST_PER_LANE, 2 * FEWEST_PER_LANE - 1])
def test_few_sequences_are_not_split(count):
    assert len(Lanes(4).split(pieces([(10, 1)] * count))) == 1


def test_parts_run_together_in_threads_of_their_own_and_in_order():
    lanes, meeting = Lanes(3), threading.Barrier(3, timeout=20)
    before = torch.get_num_threads()

    def compute(part):
        meeting.wait()
        return part, threading.current_thread().name

    results = lanes.run(compute, ["a", "b", "c"])
    assert [part for part, _ in results] == ["a", "b", "c"]
    assert len({name for _, name in results} - {threading.current_thread().name}) == 3
    assert torch.get_num_threads() == before
    lanes.close()


def test_each_lane_takes_its_share_of_the_threads():
    torch.set_num_threads(4)
    lanes = Lanes(2)
    assert lanes.run(lambda _: torch.get_num_threads(), ["a", "b"]) == [2, 2]
    torch.ones(100, 100) @ torch.ones(100, 100)
    assert torch.get_num_threads() == 4
    lanes.close()
    assert lanes.run(lambda _: torch.get_num_threads(), ["a", "b"]) == [2, 2]
    lanes.close()


def test_an_error_is_raised_when_no_part_runs_any_more():
    lanes, failed, ended = Lanes(2), threading.Event(), []

    def compute(part):
        if part == "bad":
            failed.set()
            raise ArithmeticError("bad")
        failed.wait(20)
        ended.append(part)

    with pytest.raises(ArithmeticError):
        lanes.run(compute, ["bad", "good"])
    assert ended == ["good"]
    lanes.close()


async def test_lanes_change_nothing_but_rounding_and_repeat_bit_by_bit(request_of, play_sessions):
    model = tiny_model(max_context=512)
    answers = []
    for lanes in (1, 3, 3):
        engine = LocalEngine(model, LocalEngineConfig(lanes=lanes, slots=SESSIONS))
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
        LocalEngine(model, LocalEngineConfig(lanes=2, slots=16))


async def test_an_error_in_a_lane_fails_the_requests_and_later_ones_are_served(request_of, monkeypatch, play_sessions):
    engine = LocalEngine(tiny_model(max_context=512), LocalEngineConfig(lanes=2, slots=SESSIONS))
    logits, broken = engine._runner.logits, [True]

    def fail_once(step):
        if len(step.pieces) < SESSIONS and broken:
            broken.clear()
            raise RuntimeError("out of luck")
        return logits(step)

    monkeypatch.setattr(engine._runner, "logits", fail_once)
    with pytest.raises(EngineError, match="out of luck"):
        await play_sessions(engine, request_of, sessions=SESSIONS)
    assert len(await play_sessions(engine, request_of, sessions=SESSIONS)) == SESSIONS
    await engine.close()
