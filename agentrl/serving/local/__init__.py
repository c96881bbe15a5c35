"""Engine that runs a Hugging Face model in this process: continuous batching with a cache per session.

    generate() ──► waiting ──► running ──► one step: new tokens of all running requests, in one forward pass per thread
       ▲             ▲            │                      │
       │             │ preempted  │ row stays with       ▼
       │             └────────────┤ the session      sample, deliver answers
       │                          ▼                      │
       └── next turn of a caller ◄── let the event loop settle ◄┘

One task runs all steps. A step blocks the event loop. Between two steps, the event loop runs until no request has
arrived for a few of its turns, so that sessions whose answer is ready can send their next turn. Only the order of
events, never time, determines which requests share a step: with inline environments, a run repeated from the same state
computes the same bits; with other environments it does so in lockstep (`Lockstep`).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.config.engines import LocalEngineConfig
from agentrl.engine import (
    Capabilities,
    EngineMetrics,
    GenerateRequest,
    Generation,
    PolicyEngine,
    SamplingParams,
    StopReason,
)
from agentrl.engine.answer_check import check_answer
from agentrl.errors import EngineError, UsageError
from agentrl.message.image import ImageReader
from agentrl.models.cores import pinned_process
from agentrl.models.packing import batch_dependent_rope, fixed_length
from agentrl.models.threads import ThreadWorkers, check_lanes, torch_threads
from agentrl.serving.local.cache import RowStore
from agentrl.serving.local.forward import ForwardStep, SequenceChunk
from agentrl.serving.local.runner import LocalModelRunner
from agentrl.serving.local.scheduler import Decode, ScheduledRequest, Scheduler, split_chunks
from agentrl.serving.request import SEED_BITS, check_request, seed_of

__all__ = ["LocalEngine"]

_STEP = np.uint64(0x9E3779B97F4A7C15)
QUIET_TICKS = 10
"""Turns of the event loop without a new request before the next step begins."""
MAX_TICKS = 1000
"""Maximum turns of the event loop before the next step begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """Sampled tokens and their log-probabilities, one per row."""

    token_ids: list[int]
    logprobs: list[float]
    """Log-probabilities before truncation, at the row's temperature; at temperature 1 for greedy rows, and after
    truncation for first tokens with their own settings."""


def sample(
    logits: Tensor, params: Sequence[SamplingParams], uniforms: npt.NDArray[np.float64], first: Set[int] = frozenset()
) -> SampledTokens:
    """Sample by inverting the cumulative distribution, in the order of the vocabulary.

    Args:
        logits: float[n, vocabulary].
        params: Sampling settings of each row.
        uniforms: float64[n] in [0, 1), one random number per row.
        first: Rows of the first token of an answer, whose settings are those of `SamplingParams.first_token`, if any.

    Raises:
        FloatingPointError: a row's logits are not finite.
    """
    hot = [row for row in sorted(first) if params[row].first_token is not None]
    params = [_first_params(p) if row in hot else p for row, p in enumerate(params)]
    temperatures = [p.temperature or 1.0 for p in params]
    logits = logits.float()
    if any(temperature != 1.0 for temperature in temperatures):
        logits = logits / torch.tensor(temperatures, device=logits.device)[:, None]
    logprobs = torch.log_softmax(logits, dim=-1)
    kept = _apply_truncation(logprobs, params)
    tokens = _draw(kept, torch.from_numpy(uniforms).to(logits.device))
    if any(p.temperature == 0 for p in params):
        greedy = torch.tensor([p.temperature == 0 for p in params], device=logits.device)
        tokens = torch.where(greedy, logits.argmax(dim=-1), tokens)
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]
    _check_finite(chosen)
    if hot:
        chosen[hot] -= kept[hot].sum(dim=-1).log()
    return SampledTokens(token_ids=tokens.tolist(), logprobs=chosen.clamp(max=0.0).tolist())


def _check_finite(values: Tensor) -> None:
    """Raise `FloatingPointError` for rows of logits that have no finite one, or log-probabilities of sampled tokens."""
    if not bool(torch.isfinite(values).reshape(len(values), -1).any(dim=1).all()):
        raise FloatingPointError("the model's logits are not finite")


def _first_params(params: SamplingParams) -> SamplingParams:
    """Return the settings of an answer's first token."""
    hot = params.first_token
    assert hot is not None
    return replace(params, temperature=hot.temperature, top_k=hot.top_k, top_p=1.0, min_p=0.0)


def _draw(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    below_total = torch.nextafter(total, torch.zeros_like(total))
    targets = torch.minimum(uniforms[:, None] * total, below_total)
    return torch.searchsorted(cumulative, targets, right=True)[:, 0].clamp_(max=probabilities.shape[1] - 1)


def _apply_truncation(logprobs: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return probabilities, set to zero where top-k, top-p or min-p excludes a token."""
    probabilities = logprobs.exp()
    cut = [i for i, p in enumerate(params) if p.top_k or p.top_p < 1 or p.min_p]
    if cut:
        rows = torch.tensor(cut, device=logprobs.device)
        probabilities[rows] = _truncate(probabilities[rows], [params[i] for i in cut])
    return probabilities


def _truncate(probabilities: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Apply top-k, then top-p to the remaining tokens, then min-p; always keeps the most likely token."""
    size = probabilities.shape[1]
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=probabilities.device, dtype=torch.float64)[:, None]

    ranks = torch.arange(size, device=probabilities.device)
    keep = ranks < column([p.top_k or size for p in params])
    left = torch.where(keep, ordered, 0.0).to(torch.float64)
    before = left.cumsum(dim=-1) - left
    keep &= before < column([p.top_p for p in params]) * left.sum(dim=-1, keepdim=True)
    keep &= ordered >= column([p.min_p for p in params]) * ordered[:, :1]
    keep[:, 0] = True
    return torch.zeros_like(probabilities).scatter_(1, order, torch.where(keep, ordered, 0.0))


def uniform(seeds: list[int], counters: list[int]) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) per pair of seed and counter. It depends only on the pair.

    SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014), applied to the seed and then
    to the counter.

    Returns:
        float64[n] with 53 random bits each.
    """
    keys = np.array([seed % (1 << SEED_BITS) for seed in seeds], dtype=np.uint64)
    bits = _mix(_mix(keys) + np.array(counters, dtype=np.uint64) * _STEP)
    numbers: npt.NDArray[np.float64] = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = values + _STEP
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed


def _check_positions(model: PreTrainedModel, max_context: int) -> None:
    """Raise `UsageError` if long sequences would change the rotary positions of others, and of their own beginnings."""
    limit = fixed_length(model.config)
    if limit is not None and max_context > limit:
        raise UsageError(
            f"the rotary positions of this model change at {limit} tokens, for all sequences of a step",
            got=f"a context of {max_context} tokens, rope_type {batch_dependent_rope(model.config)}",
            expected=f"engine.max_context of at most {limit}",
            hint="or use engine=vllm or engine=sglang",
        )


class Lockstep(Protocol):
    """Episodes that the engine serves in lockstep."""

    changes: int
    """Counter that grows whenever an episode begins or ends a wait."""

    async def wait_for_episodes(self) -> None:
        """Wait until every running episode waits for the engine."""


class LocalEngine(PolicyEngine):
    """Engine that runs a model in this process, with any number of adapters that requests select by name.

    In every step, each adapter has its own forward pass for its requests.

    Args:
        model: Model, which a trainer may change in place (see `update_weights`). Its mode and settings do not change.
        config: Sizes and deadline.
        version: Initial weight version.
        reader: Image processor of a model that accepts images.
        decode: Converts token ids to text, for requests with stop strings; without it, stop strings are ignored.
        routed_experts: Report the routed experts of a mixture-of-experts model.
        adapters: Models with adapters by name; they share the frozen weights of `model`.

    Raises:
        UsageError: the engine does not support the model or the sizes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: LocalEngineConfig,
        *,
        version: int = 0,
        reader: ImageReader | None = None,
        decode: Decode | None = None,
        routed_experts: bool = False,
        adapters: Mapping[str, PreTrainedModel] = MappingProxyType({}),
    ) -> None:
        self.config = config
        self._decode = decode
        text = model.config.get_text_config()
        max_context = int(config.max_context or text.max_position_embeddings)
        if config.cache_tokens < max_context:
            raise UsageError(
                "engine.cache_tokens cannot hold one sequence",
                got=config.cache_tokens,
                expected=f"at least the context of {max_context} tokens",
                hint="set engine.max_context to the length of the longest sequence that you need",
            )
        _check_positions(model, max_context)
        self.capabilities = Capabilities(
            max_context=max_context,
            vocab_size=int(text.vocab_size),
            seeded=True,
            first_tokens=True,
            images=reader is not None,
            routed_experts=routed_experts,
            adapters=frozenset(adapters),
        )
        self.lockstep: Lockstep | None = None
        """Episodes in lockstep: a step waits until all have sent a request, so that batches do not depend on time."""
        copies = 1 + len(adapters)
        self._runners: dict[str | None, LocalModelRunner] = {
            name: LocalModelRunner(own, reader, routed_experts=routed_experts, copies=copies)
            for name, own in ((None, model), *adapters.items())
        }
        check_lanes("engine.lanes", config.lanes, model)
        self._lanes = ThreadWorkers(config.lanes)
        rows = RowStore(max_tokens=config.cache_tokens, max_context=max_context)
        self._scheduler = Scheduler(
            max_num_seqs=config.max_num_seqs,
            prefill_tokens=config.prefill_tokens,
            rows=rows,
            draft_tokens=config.draft_tokens,
        )
        self._version = version
        self._seeds = random.Random()
        self._jobs: dict[str, ScheduledRequest] = {}
        self._totals = EngineMetrics()
        self._steps = 0
        self._arrivals = 0
        self._paused = False
        self._failure: EngineError | None = None
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._cpus, self._pin = config.cpus or [], ExitStack()

    @property
    def version(self) -> int:
        """Version of the weights that sample now."""
        return self._version

    async def start(self) -> None:
        """Start serving; idempotent."""
        if self._failure is not None:
            raise EngineError("the local engine has stopped", got=self._failure)
        if self._task is None:
            self._pin = ExitStack()
            self._pin.enter_context(pinned_process(self._cpus))
            self._pin.enter_context(torch_threads(len(self._cpus)))
            self._task = asyncio.create_task(self._serve(), name="local engine")

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn; the caller sets the deadline."""
        check_request(request, self.capabilities, self._jobs)
        await self.start()
        request = seed_of(request, self._seeds)
        job = ScheduledRequest(
            request=request,
            future=asyncio.get_running_loop().create_future(),
            seed=request.params.seed or 0,
            ids=list(request.prompt_ids),
        )
        self._submit(job)
        try:
            answer = await job.future
        finally:
            self._leave(job)
        return check_answer(answer, request, self.capabilities, version=self._version, engine="the engine")

    def _submit(self, job: ScheduledRequest) -> None:
        self._jobs[job.request.request_id] = job
        self._scheduler.submit(job)
        self._arrivals += 1
        self._totals.prompt_tokens += len(job.ids)
        self._work.set()

    def _leave(self, job: ScheduledRequest) -> None:
        if self._jobs.pop(job.request.request_id, None) is not None:
            self._scheduler.finish(job)

    def _answer(self, job: ScheduledRequest, reason: StopReason) -> None:
        del self._jobs[job.request.request_id]
        self._scheduler.finish(job)
        self._totals.cached_tokens += job.cached_tokens
        if not job.future.done():
            job.future.set_result(job.generation(reason))

    def _fail_all(self, error: EngineError) -> None:
        for job in list(self._jobs.values()):
            self._leave(job)
            if not job.future.done():
                job.future.set_exception(error)

    async def _serve(self) -> None:
        try:
            while True:
                await self._work.wait()
                await self._settle()
                if self._paused or not self._scheduler.has_work:
                    self._work.clear()
                else:
                    self._step_or_fail()
        finally:
            self._failure = self._failure or EngineError("the local engine has stopped")
            self._fail_all(self._failure)

    async def _settle(self) -> None:
        quiet = 0
        for _ in range(MAX_TICKS):
            before = self._events
            await asyncio.sleep(0)
            if self.lockstep is not None:
                await self.lockstep.wait_for_episodes()
            quiet = quiet + 1 if self._events == before else 0
            if quiet == QUIET_TICKS:
                return

    @property
    def _events(self) -> int:
        return self._arrivals + (0 if self.lockstep is None else self.lockstep.changes)

    def _step_or_fail(self) -> None:
        start = time.perf_counter()
        try:
            with torch.inference_mode():
                self._step()
        except Exception as error:  # boundary of the model: any exception fails the requests in flight
            self._fail_all(EngineError("the model failed", got=f"{type(error).__name__}: {error}"))
            self._scheduler.reset()
        self._totals.busy_s += time.perf_counter() - start

    def _step(self) -> None:
        if self.lockstep is not None:
            self._scheduler.order_waiting()
        chunks = self._scheduler.plan()
        steps = self._forward_steps(chunks)
        parts = self._lanes.run(lambda step: self._runners[step.adapter].logits(step), steps)
        logits = parts[0] if len(parts) == 1 else torch.cat(parts)
        jobs = {job.row: job for job in self._scheduler.running}
        ready: list[tuple[ScheduledRequest, Sequence[int]]] = []
        ended: list[int] = []
        for step in steps:
            step.keep_routed_experts()
        index = 0
        for chunk in (chunk for step in steps for chunk in step.chunks):
            job = jobs[chunk.row]
            job.add_routed_experts(chunk.row)
            chunk.row.computed += chunk.num_known
            count = 1 + len(chunk.draft)
            if chunk.row.computed == len(job.ids):
                ready.append((job, chunk.draft))
                ended += range(index, index + count)
            index += count
        if len(ready) < len(chunks):
            _check_finite(logits)  # keys and values that are not would outlive the request and spoil others
            logits = logits[ended]
        self._steps += 1
        if ready:
            self._sample(ready, logits)

    def _forward_steps(self, chunks: Sequence[SequenceChunk]) -> list[ForwardStep]:
        """Split a step by adapter and across worker threads."""
        by_adapter: dict[str | None, list[SequenceChunk]] = {}
        for chunk in chunks:
            by_adapter.setdefault(chunk.row.adapter, []).append(chunk)
        steps = []
        for adapter, own in by_adapter.items():
            runner = self._runners[adapter]
            runner.prepare()
            steps += [ForwardStep(part, runner.device, adapter) for part in split_chunks(own, self._lanes.count)]
        return steps

    def _sample(self, jobs: list[tuple[ScheduledRequest, Sequence[int]]], logits: torch.Tensor) -> None:
        """Sample a token of each request, and those after guesses of its draft that turn out to be right."""
        rows = [(job, offset) for job, draft in jobs for offset in range(1 + len(draft))]
        numbers = uniform([job.seed for job, _ in rows], [job.num_sampled + offset for job, offset in rows])
        first = {row for row, (job, offset) in enumerate(rows) if job.num_sampled + offset == 0}
        sampled = sample(logits, [job.request.params for job, _ in rows], numbers, first)
        found = zip(sampled.token_ids, sampled.logprobs, strict=True)
        for job, draft in jobs:
            self._accept(job, draft, [next(found) for _ in range(1 + len(draft))])

    def _accept(self, job: ScheduledRequest, draft: Sequence[int], sampled: Sequence[tuple[int, float]]) -> None:
        """Append sampled tokens up to the first one that the draft has not guessed, or that ends the answer."""
        row, before, reason, guessed = job.row, job.num_sampled, None, 0
        assert row is not None
        for (token, logprob), guess in zip_longest(sampled, draft):
            job.add(token, logprob, self._version)
            guessed += token == guess
            reason = job.stop_reason(self.capabilities.max_context, self._decode)
            if reason is not None or token != guess:
                break
        row.computed += guessed
        self._totals.sampled_tokens += job.num_sampled - before
        self._scheduler.drafts.record(len(draft), guessed, job.num_sampled - before)
        if reason is not None:
            self._answer(job, reason)

    async def abort(self, request_id: str) -> bool:
        """End a request with the tokens sampled so far; returns False if it is not running."""
        job = self._jobs.get(request_id)
        if job is None:
            return False
        self._answer(job, StopReason.ABORT)
        return True

    async def pause(self) -> None:
        """Stop sampling; after this returns, no step runs and none begins."""
        self._paused = True

    async def resume(self) -> None:
        """Resume sampling."""
        self._paused = False
        self._work.set()

    async def update_weights(self, weights: Mapping[str, Any] | None, version: int) -> None:
        """Use new weights: copy `weights`, or with ``None`` use the current values of the shared parameters."""
        try:
            if version <= self._version:
                raise EngineError("weight versions must increase", got=version, expected=f"more than {self._version}")
            if weights is not None:
                self._load(weights)
        except EngineError as error:
            self._failure = error
            self._fail_all(error)
            raise
        for runner in self._runners.values():
            runner.weights_changed()
        self._version = version
        self._scheduler.forget_computed()

    def _load(self, weights: Mapping[str, Any]) -> None:
        """Copy weights. An engine with adapters loads only adapter weights, named ``ADAPTER/PARAMETER``."""
        if not self.capabilities.adapters:
            self._runners[None].load(weights)
            return
        own: dict[str, dict[str, Any]] = {name: {} for name in sorted(self.capabilities.adapters)}
        for name, tensor in weights.items():
            adapter, _, parameter = name.partition("/")
            if adapter not in own:
                raise EngineError("the engine does not have this adapter", got=adapter, expected=list(own))
            own[adapter][parameter] = tensor
        for adapter, tensors in own.items():
            self._runners[adapter].load(tensors)

    async def end_session(self, session_id: str) -> None:
        """Release a session's cache row."""
        self._scheduler.end_session(session_id)

    def metrics(self) -> EngineMetrics:
        """Return the current load and the counts since the start."""
        return EngineMetrics(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            prompt_tokens=self._totals.prompt_tokens,
            cached_tokens=self._totals.cached_tokens,
            sampled_tokens=self._totals.sampled_tokens,
            busy_s=self._totals.busy_s,
            details={
                "steps": self._steps,
                "evictions": self._scheduler.evictions,
                "preemptions": self._scheduler.preemptions,
                "reserved_tokens": self._scheduler.rows.reserved_tokens,
                "draft_tokens": self._scheduler.drafts.drafted,
                "accepted_draft_tokens": self._scheduler.drafts.accepted,
            },
        )

    async def close(self) -> None:
        """Stop serving; running requests raise `EngineError`."""
        self._failure = self._failure or EngineError("the local engine is closed")
        self._fail_all(self._failure)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
            self._pin.close()
        self._lanes.close()
