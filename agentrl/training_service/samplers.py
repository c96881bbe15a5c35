"""Samplers: engines over the base, or over the weights of a checkpoint, in a thread of their own.

Few engines serve any number of samplers: one that nobody uses takes the weights of another sampler when it is asked.
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
from agentrl.errors import UsageError
from agentrl.serving.local import LocalEngine
from agentrl.serving.request import SEED_BITS
from agentrl.training.forward.runner import ModelRunner, make_runner
from agentrl.training.forward.sequences import ScoredSequence
from agentrl.training_service.requests import SampleRequest, Sampling
from agentrl.training_service.runs import PAD_ID, BaseWeights, RunSettings, load_weights
from agentrl.training_service.store import About, Saved
from agentrl.training_service.wire import NO_TOKEN, Array, Sample, TopTokenTable, write_samples


@dataclass(frozen=True, slots=True)
class SamplerWeights:
    """What a sampler samples from."""

    folder: Path | None = None
    """A checkpoint's; ``None`` is the base."""
    settings: RunSettings | None = None
    created: str = ""
    """When the checkpoint was written: another one may take its place under the same name."""

    @classmethod
    def of(cls, saved: Saved) -> SamplerWeights:
        """Name the weights of a checkpoint."""
        return cls(saved.folder, saved.about.settings, saved.about.created)


BASE = SamplerWeights()


@dataclass(slots=True, eq=False)
class _Slot:
    """An engine, with the weights that it has now."""

    model: PreTrainedModel
    engine: LocalEngine
    runner: ModelRunner
    weights: SamplerWeights
    users: int = 0
    used: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scores:
    """Log-probabilities of a sequence's tokens given those before, [tokens]; NaN where there is none."""

    logprobs: Array
    top: TopTokenTable | None = None


@dataclass(slots=True)
class Samplers:
    """All engines; used from one event loop.

    Args:
        base: The model.
        most: Engines at once.
    """

    base: BaseWeights
    most: int
    _slots: list[_Slot] = field(default_factory=list)
    _free: asyncio.Condition = field(default_factory=asyncio.Condition)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    async def sample(self, weights: SamplerWeights, request: SampleRequest) -> bytes:
        """Answer a request, as the client reads it.

        Raises:
            UsageError: it asks for what cannot be done.
            EngineError: the engine failed.
        """
        prompt = request.prompt.ids
        self._check(request, prompt)
        number = next(self._numbers)
        async with self._slot(weights) as slot:
            requests = [self._request(request, prompt, f"{number}-{k}", k) for k in range(request.num_samples)]
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(slot.engine.generate(own)) for own in requests]
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

    def _check(self, request: SampleRequest, prompt: Sequence[int]) -> None:
        last = request.prompt_logprobs_last_n
        if last is not None and not (request.prompt_logprobs and last < len(prompt)):
            raise UsageError(
                "prompt_logprobs_last_n does not fit the prompt",
                got=last,
                expected=f"with prompt_logprobs, 1 to {len(prompt) - 1}",
            )
        most = max(request.topk_prompt_logprobs, request.topk_sample_logprobs)
        if most > self.base.vocab_size:
            raise UsageError(
                "more top tokens than the vocabulary has", got=most, expected=f"at most {self.base.vocab_size}"
            )
        ids = request.sampling_params.stop
        if isinstance(ids, list) and any(isinstance(i, int) and not 0 <= i < self.base.vocab_size for i in ids):
            raise UsageError("sampling_params.stop has a token out of the vocabulary", got=ids)

    def _request(self, request: SampleRequest, prompt: list[int], name: str, number: int) -> GenerateRequest:
        return GenerateRequest(
            prompt_ids=prompt,
            params=self._params(request.sampling_params, number),
            session_id=name,
            request_id=name,
        )

    def _params(self, asked: Sampling, number: int) -> SamplingParams:
        """Translate settings; the samples of one request differ in their seeds."""
        stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop
        tokens, texts = set[int](), list[str]()
        for end in stop or ():
            if isinstance(end, int):
                tokens.add(end)
            else:
                texts.append(end)
        if stop is None or stop:
            tokens |= self._end_tokens()
        seed = None if asked.seed is None else random.Random(f"{asked.seed} {number}").getrandbits(SEED_BITS)
        return SamplingParams(
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=max(asked.top_k, 0),
            max_tokens=asked.max_tokens or self.base.max_context,
            stop_token_ids=frozenset(tokens),
            stop=tuple(texts),
            seed=seed,
        )

    def _end_tokens(self) -> set[int]:
        """The tokens that end an answer where nothing else is said."""
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
        """Score the last tokens of a sequence."""
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
            found = slot.runner.top_logprobs([sequence], top_k=top_k or None, temperature=temperature, pad_id=PAD_ID)
            logprobs[first:] = found.logp.cpu().numpy()
            if found.top_ids is not None and found.top_logp is not None:
                top.ids[first:] = found.top_ids.cpu().numpy()
                top.logprobs[first:] = found.top_logp.cpu().numpy()
        return _Scores(logprobs=logprobs, top=top if top_k else None)

    @asynccontextmanager
    async def _slot(self, weights: SamplerWeights) -> AsyncIterator[_Slot]:
        """Hold an engine with these weights for the time of the block."""
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
        """Find or make an engine with these weights; ``None`` when all are busy with others."""
        for slot in self._slots:
            if slot.weights == weights:
                return slot
        idle = sorted((slot for slot in self._slots if not slot.users), key=lambda slot: slot.used)
        full = len(self._slots) >= self.most
        if full and not idle:
            return None
        alike = [slot for slot in idle if _layers(slot.weights) == _layers(weights) is not None]
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
        if not weights.folder.is_dir() or About.read(weights.folder).created != weights.created:
            raise UsageError(
                "the weights of this sampler are gone",
                got="a checkpoint that was deleted or overwritten, or the sampler is not among the newest of its run",
                hint="make a new sampler",
            )
        load_weights(model, weights.settings, weights.folder, self.base)

    async def _reload(self, slot: _Slot, weights: SamplerWeights) -> _Slot:
        self._slots.remove(slot)  # until it has the new weights
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
        """End all engines."""
        for slot in self._slots:
            await slot.engine.close()
        self._slots.clear()


def _layers(weights: SamplerWeights) -> tuple[int | None, float, bool, bool, bool] | None:
    return None if weights.settings is None else weights.settings.layers
