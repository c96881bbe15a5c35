import asyncio
import math
import time

import pytest

from agentrl.config.engines import ScriptedEngineConfig
from agentrl.engine import StopReason
from agentrl.errors import EngineError, UsageError
from agentrl.serving.scripted import (
    Failure,
    ScriptedAnswer,
    ScriptedEngine,
    cut_answer,
    random_script,
)


@pytest.mark.parametrize(
    ("script", "stops", "room", "tokens", "reason"),
    [
        ([4, 5, 6], {6}, 9, [4, 5, 6], StopReason.STOP),
        ([4, 6, 5], {6}, 9, [4, 6], StopReason.STOP),
        ([4, 5], {6, 7}, 9, [4, 5, 6], StopReason.STOP),
        ([4, 5], set(), 9, [4, 5], StopReason.LENGTH),
        ([4, 5, 6], {6}, 2, [4, 5], StopReason.LENGTH),
        ([4, 5], {6}, 2, [4, 5], StopReason.LENGTH),
        ([], {6}, 9, [6], StopReason.STOP),
    ],
)
def test_a_script_is_cut_as_an_engine_would_stop(script, stops, room, tokens, reason):
    assert cut_answer(ScriptedAnswer(token_ids=script), frozenset(stops), room) == (tokens, reason)


def test_a_script_may_name_its_stop_reason():
    answer = ScriptedAnswer(token_ids=[4, 5], stop_reason=StopReason.ABORT)
    assert cut_answer(answer, frozenset({6}), 9) == ([4, 5], StopReason.ABORT)


async def test_tokens_logprobs_versions_and_drift(request_of):
    engine = ScriptedEngine(script=lambda _: ScriptedAnswer(token_ids=[3, 1], drift=-0.5), vocab_size=8, version=4)
    answer = await engine.generate(request_of([2], stop_token_ids=frozenset({1})))
    assert (answer.token_ids, answer.versions, answer.stop_reason) == ([3, 1], [4, 4], StopReason.STOP)
    assert answer.logprobs == pytest.approx([-math.log(8) - 0.5] * 2)


async def test_given_logprobs_and_version_are_reported(request_of):
    told = ScriptedAnswer(token_ids=[3, 1], logprobs=[-1.0, -2.0], version=9)
    engine = ScriptedEngine(script=lambda _: told, version=12)
    answer = await engine.generate(request_of([2]))
    assert (answer.logprobs, answer.versions) == ([-1.0, -2.0], [9, 9])


async def test_too_few_logprobs_are_a_usage_error(request_of):
    engine = ScriptedEngine(script=lambda _: ScriptedAnswer(token_ids=[3, 1], logprobs=[-1.0]))
    with pytest.raises(UsageError, match="got 1, expected 2"):
        await engine.generate(request_of([2]))


async def test_the_script_sees_the_request_and_sessions_count_their_prefix(request_of):
    seen = []

    def script(request):
        seen.append(list(request.prompt_ids))
        return [5]

    engine = ScriptedEngine(script=script)
    first = await engine.generate(request_of([1, 2, 3], "a", "s"))
    second = await engine.generate(request_of([1, 2, 3, 5, 8], "b", "s"))
    rewritten = await engine.generate(request_of([1, 9], "c", "s"))
    assert seen == [[1, 2, 3], [1, 2, 3, 5, 8], [1, 9]]
    assert [a.cached_tokens for a in (first, second, rewritten)] == [0, 4, 1]
    metrics = engine.metrics()
    assert (metrics.prompt_tokens, metrics.cached_tokens, metrics.sampled_tokens) == (10, 5, 3)


async def test_a_failure_is_an_engine_error_and_the_next_request_is_served(request_of):
    answers = iter([ScriptedAnswer(token_ids=[1], failure=Failure.RAISE), [2]])
    engine = ScriptedEngine(script=lambda _: next(answers))
    with pytest.raises(EngineError, match="a failure set by the script"):
        await engine.generate(request_of([1], "a"))
    assert (await engine.generate(request_of([1], "b"))).token_ids == [2]


async def test_a_script_that_raises_is_an_engine_error(request_of):
    engine = ScriptedEngine(script=lambda _: [][0])
    with pytest.raises(EngineError, match="IndexError"):
        await engine.generate(request_of([1]))


async def test_a_hang_that_is_given_up_leaves_nothing(request_of):
    engine = ScriptedEngine(script=lambda _: ScriptedAnswer(token_ids=[1], failure=Failure.HANG))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engine.generate(request_of([1])), 0.01)
    assert engine.metrics().running + engine.metrics().waiting == 0


async def test_a_hang_can_be_aborted(request_of):
    engine = ScriptedEngine(script=lambda _: ScriptedAnswer(token_ids=[1, 2], failure=Failure.HANG))
    task = asyncio.ensure_future(engine.generate(request_of([1], "hung")))
    for _ in range(5):
        await asyncio.sleep(0)
    assert engine.metrics().sampled_tokens == 2
    assert await engine.abort("hung")
    answer = await task
    assert (answer.token_ids, answer.stop_reason) == ([1, 2], StopReason.ABORT)


async def test_delays_take_time(request_of):
    engine = ScriptedEngine(
        ScriptedEngineConfig(delay_s=0.01), script=lambda _: ScriptedAnswer(token_ids=[1, 2], first_delay_s=0.02)
    )
    began = time.perf_counter()
    answer = await engine.generate(request_of([1]))
    assert answer.queue_s + answer.decode_s <= time.perf_counter() - began
    assert answer.queue_s >= 0.02
    assert answer.decode_s >= 0.02


async def test_a_script_named_in_the_config_is_played(request_of):
    engine = ScriptedEngine(ScriptedEngineConfig(script="agentrl.serving.scripted:random_script"))
    with pytest.raises(EngineError):
        await engine.generate(request_of([1]))
    config = ScriptedEngineConfig(script="json.encoder:escape")
    with pytest.raises(UsageError, match="escape"):
        ScriptedEngine(config)


def test_random_answers_depend_on_the_seed_and_end_with_a_stop_token(request_of):
    play = random_script(100)
    answers = [play(request_of([1], seed=seed, stop_token_ids=frozenset({7}))) for seed in (1, 1, 2)]
    assert answers[0] == answers[1] != answers[2]
    for answer in answers:
        assert answer[-1] == 7
        assert 7 not in answer[:-1]


def test_random_answers_are_as_long_as_allowed(request_of):
    play = random_script(10**6, shortest=3, longest=5)
    lengths = {len(play(request_of([1], seed=seed, stop_token_ids=frozenset({7})))) for seed in range(50)}
    assert lengths == {3, 4, 5}
    assert len(play(request_of([1], seed=1, max_tokens=9))) == 9


async def test_requests_that_a_pause_holds_wait_and_then_run(request_of):
    hang = ScriptedAnswer(token_ids=[1], failure=Failure.HANG)
    engine = ScriptedEngine(script=lambda _: hang)
    await engine.pause()
    tasks = [asyncio.ensure_future(engine.generate(request_of([1], name))) for name in ("a", "b")]
    seen = []
    for change in (engine.resume, lambda: engine.abort("a"), lambda: engine.abort("b")):
        for _ in range(5):
            await asyncio.sleep(0)
        seen.append((engine.metrics().running, engine.metrics().waiting))
        await change()
    await asyncio.gather(*tasks)
    assert seen == [(0, 2), (2, 0), (1, 0)]


async def test_a_thousand_concurrent_requests_share_the_loop(request_of):
    engine = ScriptedEngine()
    stops = frozenset({0})
    requests = [request_of([1 + i % 500], f"r{i}", seed=i, stop_token_ids=stops) for i in range(1000)]
    answers = await asyncio.gather(*map(engine.generate, requests))
    assert len({tuple(answer.token_ids) for answer in answers}) > 900
    assert engine.metrics().running + engine.metrics().waiting == 0
