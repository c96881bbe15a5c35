"""The contract of a policy engine: token ids in; token ids, log-probabilities, versions and a stop reason out.

Every engine guarantees (`agentrl.testing.check_engine` tests this):

- `generate` continues exactly the given ids; the answer includes the stop token if one was sampled.
- The log-probability of a token is that of the distribution *before* top-p, top-k and min-p truncation, at the
  request's temperature: ``log_softmax(logits / temperature)``; at temperature 0, that of temperature 1. With a
  `SamplingParams.structure` it is that of the tokens that the structure allows: such answers are not trained. The first
  token with `SamplingParams.first_token` has that of the distribution it was drawn from, after truncation.
- Each token has the version of the weights that sampled it.
- `abort` ends a request soon; `generate` then returns the tokens sampled so far with `StopReason.ABORT`.
- `pause` suspends running requests; after `resume` they continue with the engine's current weights and with a
  key-value cache computed from those weights.
- Requests with the same `seed` on the same weights sample the same tokens if `capabilities.seeded`.
- With `capabilities.routed_experts`, and if a request asks for them, an answer reports the routed experts of each
  token, from the token that the request names to the last but one: the last one was not computed yet.
- A prompt with images is rejected with a `UsageError` unless `capabilities.images`; images are never dropped.
- Failures are `EngineError`; an id outside the vocabulary is a `UsageError` and affects no other request.

`InferenceServer` is the contract of a process that samples from one model and is reached over HTTP.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from agentrl.errors import EngineError, UsageError
from agentrl.message import Message
from agentrl.models.routed_experts import concatenate

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from agentrl.message.image import PlacedImage
    from agentrl.models.routed_experts import RoutedExperts
TensorPart: TypeAlias = Callable[[], Awaitable[str]]
"""Function that encodes some tensors: base64 of a pickled list of names and tensors."""
Broadcast: TypeAlias = Callable[[int], Awaitable[None]]
"""Function that broadcasts the buffer with a given number to all workers of a group, and returns when they have it."""


class StopReason(enum.StrEnum):
    """Reason why the engine stopped sampling."""

    STOP = "stop"
    """A stop token was sampled, or the last token completed a stop string; both stay in the answer."""
    LENGTH = "length"
    """`max_tokens` were sampled, or the engine's context is full."""
    ABORT = "abort"
    """The request was aborted; the answer is partial."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """Settings with which the first token of an answer is sampled (FIRE, arXiv 2410.21236)."""

    temperature: float
    """Divisor of the logits, above 0."""
    top_k: int
    """Number of most probable tokens to sample from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling settings. The defaults sample from the model's own distribution."""

    temperature: float = 1.0
    """Divisor of the logits; 0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """Number of most probable tokens to sample from; 0 for all."""
    min_p: float = 0.0
    max_tokens: int = 256
    stop_token_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    """Strings that end an answer, which includes the token that completes the string. An engine that cannot decode its
    tokens, or misses a string, continues; a conversation cuts the answer there in any case
    (`agentrl.render.answer_tokens.find_stop`)."""
    first_token: FirstToken | None = None
    """Settings of the answer's first token, instead of the temperature, `top_p`, `top_k` and `min_p`. Its
    log-probability is that of the distribution *after* the cut to the most probable tokens."""
    seed: int | None = None
    """Seed of this request's random numbers; ``None`` for a random seed."""
    structure: str | None = None
    """Required structure of the answer, as a structural tag of xgrammar in JSON, for engines with
    `capabilities.structures`. An interrupted answer is sampled again from its start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One turn to sample."""

    prompt_ids: Sequence[int]
    """Token ids of the prompt. Conversations pass an ``array`` of 32-bit integers; JSON and most libraries need a list
    (`list(request.prompt_ids)`)."""
    params: SamplingParams
    session_id: str
    """Session of all turns of one sequence; engines keep its key-value cache, and pools send it to the same server."""
    request_id: str
    adapter: str | None = None
    """Adapter among the engine's `capabilities.adapters` that answers; the policy itself if ``None``."""
    images: Sequence[PlacedImage] = ()
    """Images of the placeholders among the ids, in order; only for engines with `capabilities.images`."""
    routed_experts_from: int | None = None
    """Index of the first prompt token whose routed experts are reported; only for engines with
    `capabilities.routed_experts`."""
    on_tokens: Callable[[Sequence[int]], None] | None = None
    """Called with new tokens during sampling, each once and in order. If a server is lost, another one samples the
    answer again from its start, without these calls; only the result of `generate` is reliable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Result of one request: the sampled tokens and their records."""

    token_ids: list[int]
    logprobs: list[float]
    """Log-probability of each sampled token (see the module's convention)."""
    versions: list[int]
    stop_reason: StopReason
    cached_tokens: int = 0
    """Number of prompt tokens that did not need prefill."""
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    """Seconds of sampling; includes queue and prefill if an engine does not separate them."""
    resubmissions: int = 0
    """Number of times that the request was sent to another server because one was lost."""
    routed_experts: RoutedExperts | None = None
    """Experts of the tokens from the request's `routed_experts_from` on: see `agentrl.models.routed_experts`."""

    def followed_by(self, second: Generation) -> Generation:
        """Join this answer and its continuation; the cached prompt tokens are those of this answer."""
        return replace(
            second,
            token_ids=self.token_ids + second.token_ids,
            logprobs=self.logprobs + second.logprobs,
            versions=self.versions + second.versions,
            cached_tokens=self.cached_tokens,
            queue_s=self.queue_s + second.queue_s,
            prefill_s=self.prefill_s + second.prefill_s,
            decode_s=self.decode_s + second.decode_s,
            resubmissions=self.resubmissions + second.resubmissions,
            routed_experts=concatenate(self.routed_experts, second.routed_experts),
        )

    def cut(self, tokens: int) -> Generation:
        """Return the first `tokens` tokens of the answer, with `StopReason.STOP`."""
        past = len(self.token_ids) - tokens
        experts = self.routed_experts
        return replace(
            self,
            token_ids=self.token_ids[:tokens],
            logprobs=self.logprobs[:tokens],
            versions=self.versions[:tokens],
            stop_reason=StopReason.STOP,
            routed_experts=experts[: len(experts) - past] if experts is not None else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Abilities of an engine beyond the contract."""

    max_context: int
    """Maximum number of tokens of prompt and answer together."""
    vocab_size: int
    logprobs: bool = True
    """``False`` for text-only services, which can be evaluated but not trained."""
    seeded: bool = False
    """True if equal seeds give equal samples, independent of other requests."""
    images: bool = False
    routed_experts: bool = False
    """True if answers can report the experts of tokens."""
    structures: bool = False
    """True if answers can be constrained by `SamplingParams.structure`."""
    first_tokens: bool = False
    """True if requests may have `SamplingParams.first_token`."""
    adapters: frozenset[str] = frozenset()
    """Adapters that a request may name, each of which is a separate policy."""


class AdapterVersions:
    """Versions of several adapters, each of which increases when that adapter is updated.

    An engine counts its updates of all adapters; tokens are recorded with the version of their adapter:

    >>> versions = AdapterVersions()
    >>> versions.publish(7, {"planner": 5, "worker": 7})
    >>> versions.publish(8, {"planner": 5, "worker": 8})
    >>> versions.at("planner", 8), versions.at("worker", 8)
    (5, 8)
    """

    def __init__(self) -> None:
        self._known: dict[int, dict[str, int]] = {}

    def publish(self, update: int, versions: Mapping[str, int]) -> None:
        """Record the adapters' versions after an engine's update."""
        self._known[update] = dict(versions)

    def at(self, adapter: str, update: int) -> int:
        """Return the version of an adapter after an engine's update.

        Raises:
            EngineError: no such update was published.
        """
        if update not in self._known:
            raise EngineError(
                "the engine sampled with weights that were not sent to it",
                got=f"update {update}",
                expected=list(self._known),
            )
        return self._known[update][adapter]

    def with_versions(self, generation: Generation, adapter: str) -> Generation:
        """Return an engine's answer with the versions of the adapter that sampled it."""
        return replace(generation, versions=[self.at(adapter, update) for update in generation.versions])


@dataclass(slots=True, kw_only=True)
class EngineMetrics:
    """Load of an engine at one moment."""

    running: int = 0
    waiting: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    busy_s: float = 0.0
    """Seconds in which the engine computed."""
    details: dict[str, float] = field(default_factory=dict)


class PolicyEngine(ABC):
    """A policy that samples tokens. Engines are used from one event loop."""

    capabilities: Capabilities

    @property
    @abstractmethod
    def version(self) -> int:
        """Version of the current weights."""

    @abstractmethod
    async def start(self) -> None:
        """Prepare the engine for requests; idempotent."""

    @abstractmethod
    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn; the answer has passed `check_answer`. Cancelling the awaiting task aborts the request.

        Raises:
            UsageError: No engine of this kind can serve the request (ids outside the vocabulary, a prompt longer than
                the context).
            EngineError: The engine failed.
        """

    @abstractmethod
    async def abort(self, request_id: str) -> bool:
        """End a request early; ``False`` if no such request is running."""

    @abstractmethod
    async def pause(self) -> None:
        """Stop sampling at the next token; requests wait."""

    @abstractmethod
    async def resume(self) -> None:
        """Continue sampling."""

    @abstractmethod
    async def update_weights(self, weights: Mapping[str, Any] | None, version: int) -> None:
        """Replace the weights under a new version; nothing computed from the old weights is used again.

        Args:
            weights: Tensors by parameter name; ``None`` if the engine shares the trainer's tensors, which have changed
                in place while the engine was paused.
            version: New version, greater than the current one.

        Raises:
            EngineError: The weights could not be replaced; the engine must no longer be used.
        """

    @abstractmethod
    async def end_session(self, session_id: str) -> None:
        """Release the cache of a session."""

    @abstractmethod
    def metrics(self) -> EngineMetrics:
        """Return the current load, without I/O."""

    @abstractmethod
    async def close(self) -> None:
        """Release all resources; running requests fail with `EngineError`; idempotent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """Answer of a chat service: text and counts, without token ids."""

    message: Message
    """Message with role ``assistant``; tool calls and thinking are in separate fields if the service separates them."""
    prompt_tokens: int
    """Number of prompt tokens, as the service counts them; 0 if unknown."""
    answer_tokens: int
    stop_reason: StopReason
    problems: tuple[str, ...] = ()
    """Descriptions for the model of tool calls that could not be parsed; these are not in the message."""


class ChatPolicy(ABC):
    """A policy that is reached in text: messages in, a message out.

    It can be evaluated, but not trained, because its tokens, log-probabilities and versions are unknown.
    """

    max_context: int
    """Maximum number of tokens of prompt and answer together; a bound for budgets."""
    section: str = "engine"
    """Config section of the service, for messages about its settings."""

    @abstractmethod
    async def start(self) -> None:
        """Prepare the policy for requests; idempotent."""

    @abstractmethod
    async def chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], params: SamplingParams, request_id: str
    ) -> ChatAnswer:
        """Answer a conversation.

        Args:
            messages: The whole conversation so far.
            tools: Schemas of the tools that may be called (`agentrl.tool.Tool.schema`); may be empty.
            params: Temperature, top-p, `max_tokens` and `seed` are sent; `stop_token_ids` must be empty.
            request_id: For logs.

        Raises:
            UsageError: The service rejects the request for a reason that the user must change (key, model's name).
            EngineError: The service failed, or missed the deadline, after all retries.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release all resources; idempotent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopTokens:
    """The most probable tokens at each position of a sequence, given the tokens before it."""

    ids: npt.NDArray[np.int64]
    """Token ids [T, k]; 0 for the first token, which has no prefix."""
    logp: npt.NDArray[np.float32]
    """Log-probabilities [T, k]; NaN for the first token."""


class ErrorStatus(EngineError):
    """An error status in a server's answer.

    Args:
        what: Description of the error.
        status: HTTP status.
        parts: ``got``, ``expected`` and ``hint`` of the error.
    """

    def __init__(self, what: str, *, status: int, **parts: Any) -> None:
        super().__init__(what, **parts)
        self.status = status


class ServerLost(EngineError):
    """A server that can no longer be reached, or dropped the connection; another one may take over its requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoad:
    """Load of a server, as it reports it."""

    running: int
    waiting: int
    cache_used: float
    """Share of the key-value cache in use, 0 to 1."""
    preemptions: int
    """Requests evicted from the cache."""
    prompt_tokens: int
    cached_tokens: int
    sampled_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLayout:
    """Tensors with the same data type that are sent in one contiguous buffer."""

    names: Sequence[str]
    dtype: str
    """Data type by its torch name: ``float32``."""
    shapes: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateGroup:
    """A process group of the trainer, which is rank 0, and the workers of one server."""

    name: str
    address: str
    """Address of the trainer's store."""
    port: int
    size: int
    backend: Literal["gloo", "nccl"]
    timeout_s: float
    """Seconds before the rendezvous, or a broadcast in the group, times out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTensors:
    """Tensors in the trainer's memory that a server's process on the same machine opens."""

    layout: TensorLayout
    handle: Callable[[], Mapping[str, Any]]
    """Returns JSON that one other process needs to open the buffer, see `agentrl.weights.tensors`."""
    part: TensorPart
    """Encodes the tensors for a request: their handles are pickled, not their values."""


class InferenceServer(ABC):
    """One inference server at the base address `url`; its capabilities are known once connected."""

    url: str
    capabilities: Capabilities

    @abstractmethod
    async def connect(self, *, deadline_s: float) -> None:
        """Wait until the server answers, check its version and features, and read its capabilities.

        Raises:
            UsageError: an unsupported version or setting; the message names a supported one.
            ServerLost: no answer within the deadline.
        """

    @abstractmethod
    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn, see `agentrl.engine.PolicyEngine.generate`. Cancelling the awaiting task aborts the request.

        A cancelled call returns immediately; the abort request to the server continues in the background.

        Raises:
            UsageError: no server of this kind can serve the request.
            ServerLost: the connection broke.
            EngineError: the server answered with an error.
        """

    @abstractmethod
    async def abort(self, request_id: str) -> bool:
        """End a request early; `generate` returns its partial answer. ``False`` if no such request is running."""

    @abstractmethod
    async def pause(self) -> None:
        """Suspend all requests; after this returns, nothing is sampled."""

    @abstractmethod
    async def resume(self) -> None:
        """Continue suspended requests with the current weights and a cache computed from them."""

    @abstractmethod
    async def load_weights(self, folder: Path, version: int) -> None:
        """Load new weights while paused, from a Hugging Face folder of safetensors on the server's machine.

        After this returns, nothing computed from the old weights is used again, and tokens have the new version.

        Raises:
            EngineError: the server did not load the weights; it must no longer be used.
        """

    async def load_adapter(self, folder: Path, version: int) -> None:
        """Load an adapter (PEFT's files) while paused; the base weights are unchanged."""
        raise UsageError(f"{self.url} does not load adapters", hint="remove engine.adapter_rank")

    async def load_adapters(self, folders: Mapping[str, Path], version: int) -> None:
        """Load several adapters, by their names in requests, while paused; other adapters are unchanged.

        The content of a folder never changes: an adapter is loaded again only from another folder.
        """
        raise UsageError(f"{self.url} does not load several adapters", hint="set engine=local or engine=vllm")

    async def load_tensors(self, parts: Sequence[TensorPart], version: int) -> None:
        """Load weights from the bodies of requests, in `parts` that are encoded one at a time."""
        raise UsageError(f"{self.url} does not load tensors from requests", hint="set another engine.transport")

    async def open_weights(self, shared: Sequence[SharedTensors], version: int) -> None:
        """Load weights from the trainer's memory, which stays unchanged until this returns."""
        raise UsageError(f"{self.url} does not open the trainer's memory", hint="set another engine.transport")

    async def workers(self) -> int:
        """Return the number of the server's processes that hold weights and join an `UpdateGroup`."""
        raise UsageError(f"{self.url} does not receive broadcast weights", hint="set another engine.transport")

    async def join_group(self, group: UpdateGroup) -> None:
        """Let the server's workers join a group, as ranks 1 and up; return when all members have joined."""
        raise UsageError(f"{self.url} does not receive broadcast weights", hint="set another engine.transport")

    async def leave_group(self, group: UpdateGroup) -> None:
        """Let the server's workers leave a group that they joined."""
        return

    async def receive_weights(
        self, layouts: Sequence[TensorLayout], group: UpdateGroup, broadcast: Broadcast, version: int
    ) -> None:
        """Load weights from broadcasts in a group: call `broadcast` for each layout when the workers are ready."""
        raise UsageError(f"{self.url} does not receive broadcast weights", hint="set another engine.transport")

    async def checksums(self) -> Mapping[str, str]:
        """Return the first 16 hexadecimal digits of the SHA-256 of each tensor, by the server's tensor names.

        Empty if the server does not report them.
        """
        return {}

    async def sleep(self) -> None:
        """Release the memory of weights and cache while paused; requests are not answered before `wake_up`."""
        raise UsageError(f"{self.url} cannot sleep", hint="remove engine.sleep")

    async def wake_up(self) -> None:
        """Allocate the memory again; the memory of the cache may wait until `resume`.

        The server stays paused, and its weights are undefined until they are loaded.
        """
        raise UsageError(f"{self.url} cannot sleep", hint="remove engine.sleep")

    @abstractmethod
    async def weight_version(self) -> int:
        """Return the version of the weights that the server reports; 0 for its initial weights."""

    @abstractmethod
    async def load(self) -> ServerLoad:
        """Return the server's current load."""

    @abstractmethod
    async def is_healthy(self, *, deadline_s: float) -> bool:
        """Return True if the server's health route answers in time."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connections; the server keeps running. Idempotent."""
