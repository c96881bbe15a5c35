"""What a run does with a service that does not answer, or answers something else."""

from __future__ import annotations

import asyncio
import math
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from training_service.test_tinker_runs import episodes, words

from agentrl.config import load_config
from agentrl.engine import Capabilities, FirstToken, GenerateRequest, SamplingParams, StopReason
from agentrl.errors import TrainingError, UsageError
from agentrl.remote.tinker import TinkerClient, TinkerRun
from agentrl.serving.scripted import ScriptedEngine
from agentrl.serving.tinker import TinkerEngine
from agentrl.training.tinker_trainer import TinkerTrainer
from agentrl.weights import Probe

RUN = TinkerRun(url="http://127.0.0.1:1", base_model="m", rank=4, seed=0, timeout_s=0.2)


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_service_that_never_answers_is_given_up(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-any")
    client = TinkerClient(TinkerRun(url=silent, base_model="m", rank=4, seed=0, timeout_s=0.2))
    with pytest.raises(TrainingError, match="does not answer"):
        client.open()
    with pytest.raises(TrainingError, match=r"does not answer: a sampler.*longer engine\.timeout_s"):
        client.sampler()


class Odd:
    """A trainer of the package whose answers lack what is needed."""

    def forward(self, data: Sequence[Any], loss: str) -> Any:
        row = {"logprobs": SimpleNamespace(data=[-1.0])}
        return SimpleNamespace(result=lambda: SimpleNamespace(loss_fn_outputs=[row] * len(data)))

    def forward_backward(self, *_: Any) -> Any:
        return SimpleNamespace(result=lambda: SimpleNamespace(metrics={}))


def test_answers_that_cannot_be_used_are_training_errors() -> None:
    client = TinkerClient(RUN)
    client._trainer = Odd()
    assert client.logprobs([[1, 2]]) == [[-1.0]]
    with pytest.raises(TrainingError, match="for the wrong number of tokens"):
        client.logprobs([[1, 2, 3]])
    with pytest.raises(TrainingError, match=r"failed: a gradient.*loss:sum"):
        client.add_gradients([[1, 2]], [[-1.0]], [[1.0]], (0.8, 1.2))


class Norms(TinkerClient):
    """A service that reports these norms of its gradients."""

    def __init__(self, norms: list[float | None]) -> None:
        self._norms = norms

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[-5.0] * (len(ids) - 1) for ids in sequences]

    def add_gradients(self, *_: Any) -> float:
        return 0.5

    def update(self, **_: Any) -> float | None:
        return self._norms.pop(0)


@pytest.mark.parametrize(
    ("norms", "updates", "skipped", "norm"),
    [([math.nan, 2.0], 1, 1, 2.0), ([None, None], 2, 0, None), ([math.inf, math.nan], 0, 2, None)],
)
def test_updates_without_a_finite_gradient_are_counted(
    norms: list[float | None], updates: int, skipped: int, norm: float | None, tmp_path: Any
) -> None:
    trainer = TinkerTrainer(Norms(norms), load_config(None, words(tmp_path, "http://127.0.0.1:1")))
    metrics = trainer.step(episodes(0), temperature=1.0).metrics
    assert (metrics["train/updates"], metrics["train/updates_skipped"]) == (updates, skipped)
    assert metrics.get("train/grad_norm") == norm


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(first_token=FirstToken(temperature=30.0, top_k=16)), "first token"),
        (SamplingParams(min_p=0.1), "min_p"),
        (SamplingParams(max_tokens=0), "no tokens"),
    ],
)
async def test_unsupported_settings_are_rejected(params: SamplingParams, message: str) -> None:
    engine = TinkerEngine(TinkerClient(RUN), Capabilities(max_context=8, vocab_size=9), version=0, timeout_s=1)
    with pytest.raises(UsageError, match=message):
        await engine.generate(GenerateRequest(prompt_ids=[1], params=params, session_id="s", request_id="r"))


async def test_the_event_loop_runs_while_the_service_scores_the_probe() -> None:
    loop, seen = asyncio.get_running_loop(), threading.Event()

    class Source:
        def weights(self) -> dict[str, Any]:
            return {}

        def token_logprobs(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> list[float]:
            loop.call_soon_threadsafe(seen.set)
            assert seen.wait(10), "the event loop is blocked"
            return [0.0] * len(answer_ids)

    engine = ScriptedEngine(script=lambda request: [5] * 4, vocab_size=9, max_context=64)
    probe = Probe(prompts=[[1, 2]], scores_in_thread=True, tolerance=100)
    assert (await probe.compare(engine, Source(), version=0)).difference < 100


class Hanging:
    """A sampler that does not answer."""

    async def sample(self, *_: Any) -> Any:
        await asyncio.Event().wait()


async def asking(engine: TinkerEngine, *names: str) -> list[asyncio.Task[Any]]:
    """Ask, and return once the requests are running."""
    params = SamplingParams(max_tokens=4)
    requests = [GenerateRequest(prompt_ids=[1], params=params, session_id=name, request_id=name) for name in names]
    tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
    async with asyncio.timeout(20):
        while engine.metrics().running < len(names):  # noqa: ASYNC110
            await asyncio.sleep(0)
    return tasks


async def test_aborted_requests_end_are_counted_once_and_hide_no_cancellation() -> None:
    engine = TinkerEngine(TinkerClient(RUN), Capabilities(max_context=8, vocab_size=9), version=0, timeout_s=60)
    engine._sampler = Hanging()
    began = time.perf_counter()
    tasks = await asking(engine, "a", "b")
    await asyncio.sleep(0.05)
    assert [await engine.abort(name) for name in ("a", "b", "a")] == [True, True, False]
    assert [(await task).stop_reason for task in tasks] == [StopReason.ABORT] * 2
    assert 0.05 <= engine.metrics().busy_s <= time.perf_counter() - began
    (task,) = await asking(engine, "c")
    await engine.abort("c")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
