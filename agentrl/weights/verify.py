"""Probe of an engine's weights: fixed prompts on which its log-probabilities must match the trainer's.

A server can accept an update and still serve old tensors; only its log-probabilities reveal that. Therefore the server
answers a few fixed prompts greedily, and the trainer scores the same tokens. If servers report checksums, these
identify the differing tensors.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean
from typing import TypeAlias, TypedDict

import torch
from torch import Tensor

from agentrl.engine import GenerateRequest, Generation, InferenceServer, PolicyEngine, SamplingParams, ServerLost
from agentrl.engine.answer_check import check_answer
from agentrl.errors import AgentRLError, EngineError, TrainingError
from agentrl.errors.deadlines import async_boundary
from agentrl.errors.foreign import run_in_own_thread
from agentrl.weights.contract import WeightSource


class ProbeTolerance(TypedDict):
    """Tolerances of a probe."""

    tolerance: float
    """Maximum difference of a log-probability."""
    mean_tolerance: float
    """Maximum mean difference over all tokens of the probe."""


TOLERANCE: Mapping[str, ProbeTolerance] = {
    "float32": {"tolerance": 1e-3, "mean_tolerance": 1e-3},
    "bfloat16": {"tolerance": 2.0, "mean_tolerance": 0.25},
}
"""Tolerances for rounding, by the weights' data type. In bfloat16, a pretrained model with 30 layers had
a mean difference of 0.07 and a maximum of 0.6, because random prompts are unlike its training data."""


PROBE_ATTEMPTS = 3
"""Maximum number of requests per probe answer; failed or invalid answers say nothing about the weights.
"""

ProbedEngine: TypeAlias = PolicyEngine | InferenceServer
_Scored: TypeAlias = tuple[Sequence[int], Generation, Sequence[float]]
"""Prompt, answer, and expected log-probabilities of the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedAnswer:
    """Answer of an engine with verified weights, scored by the trainer."""

    prompt: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """Log-probabilities under the trainer, at temperature 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Result of a comparison within the tolerances."""

    difference: float
    """Maximum difference of a log-probability."""
    answers: Sequence[RecordedAnswer]
    """Answers for `Probe.compare_recorded`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Prompts and tolerances of a comparison of engine and trainer."""

    prompts: Sequence[Sequence[int]]
    """Token ids: at least one prompt of at least one token."""
    answer_tokens: int = 4
    tolerance: float = 1e-3
    """Maximum difference of a log-probability."""
    mean_tolerance: float = math.inf
    """Maximum mean difference over all tokens."""
    adapter: str | None = None
    """Adapter that answers, if the engine has several."""
    answer_timeout_s: float = 600.0
    """Timeout of an answer in seconds."""
    scores_in_thread: bool = False
    """True if the trainer's log-probabilities come from a service, which must not block the event loop."""

    @classmethod
    def random(
        cls, vocab_size: int, *, tolerance: float, mean_tolerance: float = math.inf, prompts: int = 4, length: int = 24
    ) -> Probe:
        """Make a probe with random prompts, which depend only on the arguments."""
        draw = random.Random("probe")
        drawn = [[draw.randrange(vocab_size) for _ in range(length)] for _ in range(prompts)]
        return cls(prompts=drawn, tolerance=tolerance, mean_tolerance=mean_tolerance)

    async def compare(
        self, engine: ProbedEngine, trainer: WeightSource, *, version: int, name: str = "the engine"
    ) -> Comparison:
        """Compare an engine's log-probabilities with those of the trainer, whose weights it should have as `version`.

        Raises:
            TrainingError: a difference exceeds its tolerance, or the engine samples with another version.
        """
        answers = await self._answers(engine, version, name)
        recorded = [
            RecordedAnswer(
                prompt=prompt,
                token_ids=answer.token_ids,
                logprobs=await self._score(trainer, prompt, answer.token_ids),
            )
            for prompt, answer in zip(self.prompts, answers, strict=True)
        ]
        scored = [(right.prompt, answer, right.logprobs) for right, answer in zip(recorded, answers, strict=True)]
        return Comparison(difference=self._judge(name, version, scored), answers=recorded)

    async def _score(self, trainer: WeightSource, prompt: Sequence[int], answer_ids: Sequence[int]) -> list[float]:
        if self.scores_in_thread:
            return await run_in_own_thread(trainer.token_logprobs, prompt, answer_ids)
        return trainer.token_logprobs(prompt, answer_ids)

    async def compare_recorded(
        self, engine: ProbedEngine, recorded: Sequence[RecordedAnswer], *, version: int, name: str = "the engine"
    ) -> float:
        """Compare the engine's log-probabilities with recorded ones, up to the first token that differs.

        If the first token of an answer differs, its log-probability must be within the tolerance of the recorded
        token's: two tokens may be equally likely.

        Raises:
            TrainingError: a difference exceeds its tolerance, or the engine samples with another version.
        """
        scored = []
        for right, answer in zip(recorded, await self._answers(engine, version, name), strict=True):
            pairs = zip(right.token_ids, answer.token_ids, strict=False)
            same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(answer.token_ids))
            scored.append((right.prompt, answer, right.logprobs[: max(same, 1)]))
        return self._judge(name, version, scored)

    async def _answers(self, engine: ProbedEngine, version: int, name: str) -> list[Generation]:
        prefix = f"probe-{version}" if self.adapter is None else f"probe-{self.adapter}-{version}"
        asked = (self._ask(engine, version, name, f"{prefix}-{i}", prompt) for i, prompt in enumerate(self.prompts))
        return await asyncio.gather(*asked)

    async def _ask(
        self, engine: ProbedEngine, version: int, name: str, request_id: str, prompt: Sequence[int]
    ) -> Generation:
        """Request an answer; retry if it fails, is invalid or has another version. Return the last one in any case."""
        for attempt in range(1, PROBE_ATTEMPTS):
            try:
                return await self._ask_once(engine, version, name, f"{request_id}.{attempt}", prompt, checks=True)
            except ServerLost:
                raise
            except (EngineError, TrainingError) as error:
                _log.warning("the probe is repeated: %s", error)
        return await self._ask_once(engine, version, name, request_id, prompt, checks=False)

    async def _ask_once(
        self, engine: ProbedEngine, version: int, name: str, request_id: str, prompt: Sequence[int], *, checks: bool
    ) -> Generation:
        params = SamplingParams(max_tokens=self.answer_tokens, temperature=0.0)
        request = GenerateRequest(
            prompt_ids=prompt, params=params, session_id=request_id, request_id=request_id, adapter=self.adapter
        )
        try:
            async with async_boundary(EngineError, f"request {request_id}", deadline_s=self.answer_timeout_s):
                answer = await engine.generate(request)
                if checks:
                    newest = max(answer.versions, default=version)
                    answer = check_answer(answer, request, engine.capabilities, version=newest, engine=name)
        finally:
            if isinstance(engine, PolicyEngine):
                await engine.end_session(request_id)
        if set(answer.versions) != {version}:
            raise TrainingError(
                f"{name} samples with weights of another version after a sync",
                got=sorted(set(answer.versions)),
                expected=version,
            )
        return answer

    def _judge(self, name: str, version: int, scored: Sequence[_Scored]) -> float:
        """Return the maximum difference; raise if it or the mean exceeds its tolerance."""
        found = [
            (_distance(got, right), len(prompt) + index, answer.token_ids[index], got, right)
            for prompt, answer, expected in scored
            for index, (got, right) in enumerate(zip(answer.logprobs, expected, strict=False))
        ]
        worst, after, token, got, right = max(found)
        mean = fmean(distance for distance, *_ in found)
        if worst <= self.tolerance and mean <= self.mean_tolerance:
            return worst
        on_average = "" if math.isinf(self.mean_tolerance) else f"; {self.mean_tolerance:g} on average"
        raise TrainingError(
            f"{name} does not serve the trainer's weights of version {version}: log-probability of token {token} "
            f"after {after} tokens",
            got=f"{got:.6g} from the engine; {len(found)} tokens differ by {mean:.2g} on average",
            expected=f"{right:.6g} within {self.tolerance:g}, the trainer's{on_average}",
            hint="the engine serves another model, an update did not reach every tensor, or engine and trainer "
            "compute the model differently",
        )


def _distance(first: float, second: float) -> float:
    distance = abs(first - second)
    return math.inf if math.isnan(distance) else distance


STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Tensors that servers stack, by the name of the stacked tensor."""
ROWS = 64
"""Number of rows to whose multiples servers pad the vocabulary with zeros."""
MAX_NAMED = 8
NAMING_S = 30.0
"""Timeout in seconds of the search for differing tensors, after which the error is raised without their names."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChecksumDifference:
    """Tensors whose checksums differ, by their names in the trainer."""

    differing: Sequence[str]
    unknown: Sequence[str]
    """Tensors without a checksum of the server."""

    def __str__(self) -> str:
        if self.differing:
            return f"tensors that differ by checksum: {_list_names(self.differing)}"
        if self.unknown:
            return f"all checksums agree; the server reports none for {_list_names(self.unknown)}"
        return "all checksums agree: engine and trainer compute the model differently"


async def name_tensors(
    error: TrainingError, server: InferenceServer, weights: Callable[[], Mapping[str, Tensor]]
) -> TrainingError:
    """Add the names of differing tensors to a probe error, if the server reports checksums.

    `weights` returns the weights that the server should have; it is called in a thread.
    """
    try:
        async with async_boundary(EngineError, "the search for tensors that differ", deadline_s=NAMING_S):
            checksums = await server.checksums()
            found = await run_in_own_thread(lambda: compare_checksums(checksums, weights()))
    except AgentRLError as failure:
        _log.info("cannot find the tensors of %s that differ: %s", server.url, failure)
        return error
    if found is None:
        return error
    return TrainingError(error.what, got=error.got, expected=error.expected, hint=str(found))


def compare_checksums(found: Mapping[str, str], weights: Mapping[str, Tensor]) -> ChecksumDifference | None:
    """Compare a server's checksums with those of tensors; return ``None`` if they use another algorithm."""
    parts = {name: sent for name in found if (sent := _parts(name, weights))}
    agree = {name: found[name] in _checksums([weights[part] for part in sent]) for name, sent in parts.items()}
    if not any(agree.values()):
        return None
    known = {part for sent in parts.values() for part in sent}
    return ChecksumDifference(
        differing=[part for name, sent in parts.items() if not agree[name] for part in sent],
        unknown=[name for name in weights if name not in known],
    )


def _parts(name: str, weights: Mapping[str, Tensor]) -> list[str]:
    """Return the trainer's names of the tensors in a server's (possibly stacked) tensor."""
    if name in weights:
        return [name]
    for stacked, parts in STACKED.items():
        names = [name.replace(stacked, part) for part in parts]
        if stacked in name and all(part in weights for part in names):
            return names
    return []


def _checksums(tensors: Sequence[Tensor]) -> set[str]:
    """Compute the checksums of consecutive tensors, without and with padding."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    filled = digest.copy()
    missing = -sum(tensor.shape[0] for tensor in tensors if tensor.dim()) % ROWS
    filled.update(bytes(missing * tensors[0][:1].nbytes if tensors[0].dim() else 0))
    return {digest.hexdigest()[:16], filled.hexdigest()[:16]}


def _list_names(names: Sequence[str]) -> str:
    shown = ", ".join(islice(names, MAX_NAMED))
    return shown if len(names) <= MAX_NAMED else f"{shown} and {len(names) - MAX_NAMED} more"
