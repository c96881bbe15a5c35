"""Engine that samples at a Tinker-compatible service, from the weights that the service trains."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from agentrl.engine import Capabilities, EngineMetrics, GenerateRequest, Generation, PolicyEngine, StopReason
from agentrl.engine.answer_check import check_answer
from agentrl.errors import EngineError, UsageError, running_task
from agentrl.errors.deadlines import async_boundary
from agentrl.errors.foreign import run_in_own_thread
from agentrl.remote.tinker import TinkerClient
from agentrl.serving.request import check_request


class TinkerEngine(PolicyEngine):
    """Sampler of a training run at a service; each version of the weights has a sampler of its own.

    A running request continues with the weights that it began with.

    Args:
        client: Client of the run.
        capabilities: Context and vocabulary of the model.
        version: Version of the weights at the service.
        timeout_s: Seconds before an answer times out.
    """

    def __init__(self, client: TinkerClient, capabilities: Capabilities, *, version: int, timeout_s: float) -> None:
        self.capabilities = capabilities
        self._client, self._version, self._timeout_s = client, version, timeout_s
        self._sampler: Any = None
        self._running: dict[str, asyncio.Task[Any]] = {}
        self._may_sample = asyncio.Event()
        self._may_sample.set()
        self._sampled = self._prompted = 0
        self._waiting = 0
        self._busy_s, self._busy_since = 0.0, 0.0

    @property
    def version(self) -> int:
        """Version of the weights of the newest sampler."""
        return self._version

    async def start(self) -> None:
        """Make the first sampler."""
        if self._sampler is None:
            self._sampler = await run_in_own_thread(self._client.sampler)

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample an answer at the service."""
        self._check(request)
        self._waiting += 1
        try:
            await self._may_sample.wait()
        finally:
            self._waiting -= 1
        await self.start()
        sampler, version, began = self._sampler, self._version, time.perf_counter()
        task = asyncio.ensure_future(self._sample(sampler, request))
        if not self._running:
            self._busy_since = began
        self._running[request.request_id] = task
        try:
            sequence = await task
        except asyncio.CancelledError:
            caller = running_task()
            if request.request_id in self._running or (caller is not None and caller.cancelling()):
                raise  # the caller was cancelled
            return Generation(token_ids=[], logprobs=[], versions=[], stop_reason=StopReason.ABORT)
        finally:
            task.cancel()
            self._end(request.request_id)
        ids = [int(token) for token in sequence.tokens]
        answer = Generation(
            token_ids=ids,
            logprobs=[float(value) for value in sequence.logprobs or ()],
            versions=[version] * len(ids),
            stop_reason=StopReason.LENGTH if sequence.stop_reason == "length" else StopReason.STOP,
            decode_s=time.perf_counter() - began,
        )
        self._sampled += len(ids)
        self._prompted += len(request.prompt_ids)
        return check_answer(answer, request, self.capabilities, version=version, engine="the Tinker service")

    async def _sample(self, sampler: Any, request: GenerateRequest) -> Any:
        types, params = self._client.tinker.types, request.params
        settings = types.SamplingParams(
            max_tokens=min(params.max_tokens, self.capabilities.max_context - len(request.prompt_ids)),
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k or -1,
            seed=params.seed,
            stop=sorted(params.stop_token_ids) or None,
        )
        prompt = types.ModelInput.from_ints(list(request.prompt_ids))
        async with async_boundary(EngineError, f"request {request.request_id}", deadline_s=self._timeout_s):
            found = await sampler.sample(prompt, 1, settings)
            return found.sequences[0]

    def _check(self, request: GenerateRequest) -> None:
        """Reject requests that the service does not support, and ids outside the vocabulary.

        Raises:
            UsageError: the request does not fit.
        """
        check_request(request, self.capabilities, self._running)
        if request.params.min_p:
            raise UsageError(
                "the engine tinker does not support min_p", got=request.params.min_p, expected="sampling.min_p=0"
            )

    async def abort(self, request_id: str) -> bool:
        """Abandon a request; the service may still sample it to its end."""
        task = self._end(request_id)
        if task is not None:
            task.cancel()
        return task is not None

    def _end(self, request_id: str) -> asyncio.Task[Any] | None:
        """Remove a running request, and count the busy time once none is left."""
        task = self._running.pop(request_id, None)
        if task is not None and not self._running:
            self._busy_s += time.perf_counter() - self._busy_since
        return task

    async def pause(self) -> None:
        """Hold new requests; running ones keep their weights."""
        self._may_sample.clear()

    async def resume(self) -> None:
        """Continue."""
        self._may_sample.set()

    async def update_weights(self, weights: Mapping[str, Any] | None, version: int) -> None:
        """Sample from the weights that the service has now; `weights` are at the service, so they must be ``None``."""
        if weights is not None or version <= self._version:
            raise EngineError("the engine tinker gets its weights from the service", got=f"version {version}")
        self._sampler = await run_in_own_thread(self._client.sampler)
        self._version = version

    async def end_session(self, session_id: str) -> None:
        """Do nothing: the service manages its own cache."""

    def metrics(self) -> EngineMetrics:
        """Return the requests and tokens of this run."""
        busy = self._busy_s + (time.perf_counter() - self._busy_since if self._running else 0.0)
        return EngineMetrics(
            running=len(self._running),
            waiting=self._waiting,
            prompt_tokens=self._prompted,
            sampled_tokens=self._sampled,
            busy_s=busy,
        )

    async def close(self) -> None:
        """Abandon running requests, and end the run at the service."""
        for request_id in list(self._running):
            await self.abort(request_id)
        await run_in_own_thread(self._client.close)
