"""Samplers: engines with the weights of the base or of a checkpoint, in a separate thread.

A few engines serve any number of samplers: an idle engine loads the weights of the sampler with the next request.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from agentrl.config.engines import LocalEngineConfig
from agentrl.engine import GenerateRequest, Generation, SamplingParams, StopReason
from agentrl.errors import EngineError, UsageError
from agentrl.errors.deadlines import async_boundary
from agentrl.serving.local import LocalEngine
from agentrl.serving.request import SEED_BITS
from agentrl.training.forward.runner import ModelRunner, make_runner
from agentrl.training.forward.sequences import ScoredSequence
from agentrl.training_service.requests import SampleRequest, Sampling
from agentrl.training_service.runs import BaseWeights, RunSettings, load_weights
from agentrl.training_service.store import CheckpointInfo, StoredCheckpoint
from agentrl.training_service.wire import NO_TOKEN, Array, Sample, TopTokenTable, write_samples


@dataclass(frozen=True, slots=True)
class SamplerWeights:
    """Weights that a sampler uses."""

    folder: Path | None = None
    """Folder of the checkpoint; ``None`` for the base."""
    settings: RunSettings | None = None
    created: str = ""
    """Creation time of the checkpoint, which reveals that a checkpoint of the same name has replaced it."""

    @classmethod
    def of(cls, saved: StoredCheckpoint) -> SamplerWeights:
        """Return the weights of a checkpoint."""
        return cls(saved.folder, saved.about.settings, saved.about.created)


BASE = SamplerWeights()


@dataclass(slots=True, eq=False)
class _Slot:
    """An engine and the weights that it has loaded."""

    model: PreTrainedModel
    engine: LocalEngine
    runner: ModelRunner
    weights: SamplerWeights
    users: int = 0
    used: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scores:
    """Log-probabilities of a sequence's tokens given the previous ones, [tokens]; NaN where not computed."""

    logprobs: Array
    top: TopTokenTable | None = None


@dataclass(slots=True)
class Samplers:
    """All engines; they belong to one event loop."""

    base: BaseWeights
    most: int
    _slots: list[_Slot] = field(default_factory=list)
    _free: asyncio.Condition = field(default_factory=asyncio.Condition)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    async def sample(self, weights: SamplerWeights, request: SampleRequest) -> bytes:
        """Sample the answers of a request and return the message for the client.

        Raises:
            UsageError: the request is invalid or not supported.
            EngineError: the engine failed.
        """
        prompt = request.prompt.ids
        self._check(request, prompt)
        number = next(self._numbers)
        async with self._slot(weights) as slot:
            requests = [self._request(request, prompt, f"{number}-{k}", k) for k in range(request.num_samples)]
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._generate(slot, own)) for own in requests]
            except ExceptionGroup as failed:
                raise failed.exceptions[0] from failed
            finally:
                for own in requests:
                    await slot.engine.end_session(own.session_id)
            answers = [task.result() for task in tasks]
            samples = [self._sample(slot, prompt, answer, request) for answer in answers]
            scores = self._prompt_scores(slot, prompt, request)
        return write_samples(
            samples,
            prompt_logprobs=None if scores is None or not request.prompt_logprobs else scores.logprobs,
            prompt_top=None if scores is None else scores.top,
            cached_tokens=answers[0].cached_tokens,
        )

    async def _generate(self, slot: _Slot, request: GenerateRequest) -> Generation:
        deadline_s = self.base.config.engine.timeout_s
        async with async_boundary(EngineError, f"request {request.request_id}", deadline_s=deadline_s):
            return await slot.engine.generate(request)

    def _check(self, request: SampleRequest, prompt: Sequence[int]) -> None:
        last = request.prompt_logprobs_last_n
        if last is not None and not (request.prompt_logprobs and last < len(prompt)):
            raise UsageError(
                "prompt_logprobs_last_n does not fit the prompt",
                got=last,
                expected=f"1 to {len(prompt) - 1}, together with prompt_logprobs",
            )
        most = max(request.topk_prompt_logprobs, request.topk_sample_logprobs)
        if most > self.base.vocab_size:
            raise UsageError(
                "the number of top tokens exceeds the vocabulary", got=most, expected=f"at most {self.base.vocab_size}"
            )
        ids = request.sampling_params.stop
        if isinstance(ids, list) and any(isinstance(i, int) and not 0 <= i < self.base.vocab_size for i in ids):
            raise UsageError(
                "sampling_params.stop has a token out of the vocabulary",
                got=ids,
                expected=f"0 to {self.base.vocab_size - 1}",
            )

    def _request(self, request: SampleRequest, prompt: list[int], name: str, number: int) -> GenerateRequest:
        return GenerateRequest(
            prompt_ids=prompt, params=self._params(request.sampling_params, number), session_id=name, request_id=name
        )

    def _params(self, sampling: Sampling, number: int) -> SamplingParams:
        """Convert the client's parameters; each sample of a request has its own seed."""
        stop = [sampling.stop] if isinstance(sampling.stop, str) else sampling.stop
        tokens, texts = set[int](), list[str]()
        for end in stop or ():
            if isinstance(end, int):
                tokens.add(end)
            else:
                texts.append(end)
        if stop is None or stop:
            tokens |= self._end_tokens()
        seed = None if sampling.seed is None else random.Random(f"{sampling.seed} {number}").getrandbits(SEED_BITS)
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=max(sampling.top_k, 0),
            max_tokens=sampling.max_tokens or self.base.max_context,
            stop_token_ids=frozenset(tokens),
            stop=tuple(texts),
            seed=seed,
        )

    def _end_tokens(self) -> set[int]:
        """Return the model's end-of-sequence tokens, which end an answer by default."""
        generation = getattr(self.base.model, "generation_config", None)
        found = [self.base.tokenizer.eos_token_id, getattr(generation, "eos_token_id", None)]
        flat = [own for ids in found for own in (ids if isinstance(ids, list) else [ids])]
        return {own for own in flat if own is not None}

    def _sample(self, slot: _Slot, prompt: list[int], answer: Generation, request: SampleRequest) -> Sample:
        top = None
        if request.topk_sample_logprobs:
            ids = [*prompt, *answer.token_ids]
            temperature = request.sampling_params.temperature
            top = self._scores(slot, ids, len(answer.token_ids), request.topk_sample_logprobs, temperature).top
            assert top is not None
            top = TopTokenTable(ids=top.ids[len(prompt) :], logprobs=top.logprobs[len(prompt) :])
        stopped = answer.stop_reason is StopReason.STOP
        return Sample(token_ids=answer.token_ids, logprobs=answer.logprobs, is_stopped=stopped, top=top)

    def _prompt_scores(self, slot: _Slot, prompt: list[int], request: SampleRequest) -> _Scores | None:
        if not request.prompt_logprobs and not request.topk_prompt_logprobs:
            return None
        last = request.prompt_logprobs_last_n or len(prompt) - 1
        return self._scores(slot, prompt, last, request.topk_prompt_logprobs, 1.0)

    def _scores(self, slot: _Slot, ids: list[int], last: int, top_k: int, temperature: float) -> _Scores:
        """Compute log-probabilities and `top_k` tokens for the last `last` tokens of a sequence."""
        logprobs = np.full(len(ids), np.nan, dtype=np.float32)
        shape = (len(ids), top_k)
        top = TopTokenTable(ids=np.zeros(shape, np.int32), logprobs=np.full(shape, NO_TOKEN, np.float32))
        if last > 0:
            first = len(ids) - last
            sequence = ScoredSequence(
                input_ids=torch.tensor(ids[:-1]),
                positions=torch.arange(first - 1, len(ids) - 1),
                targets=torch.tensor(ids[first:]),
            )
            found = slot.runner.top_logprobs([sequence], top_k=top_k or None, temperature=temperature)
            logprobs[first:] = found.logp.cpu().numpy()
            if found.top_ids is not None and found.top_logp is not None:
                top.ids[first:] = found.top_ids.cpu().numpy()
                top.logprobs[first:] = found.top_logp.cpu().numpy()
        return _Scores(logprobs=logprobs, top=top if top_k else None)

    @asynccontextmanager
    async def _slot(self, weights: SamplerWeights) -> AsyncIterator[_Slot]:
        """Reserve an engine with these weights until the block ends."""
        async with self._free:
            while (slot := await self._take(weights)) is None:
                await self._free.wait()
            slot.users += 1
            slot.used = next(self._numbers)
        try:
            yield slot
        finally:
            async with self._free:
                slot.users -= 1
                self._free.notify_all()

    async def _take(self, weights: SamplerWeights) -> _Slot | None:
        """Find or make an engine with these weights; ``None`` if all engines are busy with other weights."""
        for slot in self._slots:
            if slot.weights == weights:
                return slot
        idle = sorted((slot for slot in self._slots if not slot.users), key=lambda slot: slot.used)
        full = len(self._slots) >= self.most
        if full and not idle:
            return None
        alike = [slot for slot in idle if _compatibility_key(slot.weights) == _compatibility_key(weights) is not None]
        if full and alike:
            return await self._reload(alike[0], weights)
        if full:
            self._slots.remove(idle[0])
            await idle[0].engine.close()
        slot = self._make(weights)
        self._slots.append(slot)
        return slot

    def _make(self, weights: SamplerWeights) -> _Slot:
        model = self.base.copy(weights.settings)
        self._load(model, weights)
        assert isinstance(self.base.config.engine, LocalEngineConfig)
        engine = LocalEngine(model, self.base.config.engine, decode=self.base.tokenizer.decode)
        return _Slot(model, engine, make_runner(model, self.base.config.trainer), weights)

    def _load(self, model: PreTrainedModel, weights: SamplerWeights) -> None:
        if weights.folder is None or weights.settings is None:
            return
        if not weights.folder.is_dir() or CheckpointInfo.read(weights.folder).created != weights.created:
            raise UsageError(
                "the weights of this sampler no longer exist",
                got="a checkpoint that was deleted or overwritten, or too many newer samplers of the same run",
                hint="make a new sampler",
            )
        load_weights(model, weights.settings, weights.folder, self.base)

    async def _reload(self, slot: _Slot, weights: SamplerWeights) -> _Slot:
        self._slots.remove(slot)  # added again once it has the new weights
        await slot.engine.pause()
        try:
            self._load(slot.model, weights)
        except BaseException:
            await slot.engine.close()
            raise
        await slot.engine.update_weights(None, slot.engine.version + 1)
        await slot.engine.resume()
        slot.weights = weights
        self._slots.append(slot)
        return slot

    async def close(self) -> None:
        """Close all engines."""
        for slot in self._slots:
            await slot.engine.close()
        self._slots.clear()


def _compatibility_key(weights: SamplerWeights) -> tuple[int | None, float, bool, bool, bool] | None:
    return None if weights.settings is None else weights.settings.compatibility_key
