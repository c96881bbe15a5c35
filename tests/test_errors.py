from __future__ import annotations

import asyncio
import json

import pytest

from agentrl.errors import ConfigError, EngineError, EnvironmentFailure, Outcome, UsageError, boundary, raised_at
from agentrl.errors.deadlines import async_boundary


@pytest.mark.parametrize("outcome", Outcome)
def test_an_outcome_either_trains_or_is_infrastructure(outcome: Outcome) -> None:
    assert outcome.is_trainable != outcome.is_infrastructure
    assert not (outcome.is_truncated and outcome.is_infrastructure)
    assert not (outcome.is_retryable and outcome.is_trainable)


def test_a_cancelled_episode_is_not_retried() -> None:
    assert Outcome.CANCELLED.is_infrastructure
    assert not Outcome.CANCELLED.is_retryable


def test_the_place_of_an_error_is_the_innermost_line_or_that_of_a_file() -> None:
    def read() -> None:
        json.loads("{")

    with pytest.raises(json.JSONDecodeError) as raised:
        read()
    innermost, own = raised_at(raised.value), raised_at(raised.value, __file__)
    assert innermost is not None
    assert innermost.file.endswith("decoder.py")
    assert innermost.code
    assert own is not None
    assert (own.file, own.code) == (__file__, 'json.loads("{")')
    assert raised_at(raised.value, "elsewhere.py") is None
    assert raised_at(ValueError("never raised")) is None


def test_a_message_says_what_got_expected_and_the_next_step() -> None:
    error = UsageError("split", got="tset", expected="train or test", hint="did you mean 'test'?")
    assert str(error) == "split: got tset, expected train or test. Did you mean 'test'?"


@pytest.mark.parametrize("hint", ["runs/a/log.txt says why", "engine.servers names them", "--folder names one"])
def test_a_hint_that_begins_with_a_name_keeps_it(hint: str) -> None:
    assert str(UsageError("no", hint=hint)).endswith(f". {hint}")


def test_a_boundary_classifies_foreign_errors_once() -> None:
    with (
        pytest.raises(EnvironmentFailure, match="step of x failed: got ValueError: boom") as raised,
        boundary(EngineError, "outer"),
        boundary(EnvironmentFailure, "step of x"),
    ):
        raise ValueError("boom")
    assert isinstance(raised.value.__cause__, ValueError)


def test_a_boundary_lets_our_own_errors_pass() -> None:
    with pytest.raises(ConfigError), boundary(EngineError, "anything"):
        raise ConfigError("typo")


async def test_a_missed_deadline_says_how_long_it_waited() -> None:
    with pytest.raises(EngineError, match=r"turn 3 missed its deadline: got no answer in 0.01 s"):
        async with async_boundary(EngineError, "turn 3", deadline_s=0.01):
            await asyncio.Event().wait()


async def test_a_timeout_inside_the_boundary_is_the_inner_codes_error() -> None:
    with pytest.raises(EngineError, match="turn 3 failed: got TimeoutError"):
        async with async_boundary(EngineError, "turn 3", deadline_s=10):
            raise TimeoutError


async def test_cancellation_passes_through_a_boundary() -> None:
    async def wait() -> None:
        async with async_boundary(EngineError, "turn 3", deadline_s=10):
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_stop_iteration_keeps_its_place_and_type() -> None:
    async def step() -> int:
        return next(iter(()))

    with pytest.raises(EnvironmentFailure) as failed:
        async with async_boundary(EnvironmentFailure, "step", deadline_s=60):
            await step()
    assert "got StopIteration. It was raised in " in str(failed.value)
    assert failed.value.location is not None
    assert (failed.value.location.file, failed.value.location.code) == (__file__, "return next(iter(()))")
