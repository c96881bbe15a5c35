"""The contract of a policy engine: token ids in; token ids, log-probabilities, versions and a stop reason out.

What every engine promises (`agentrl.testing.check_engine` tests it):

- `generate` continues exactly the ids it is given; the answer holds the stop token if one was sampled.
- The log-probability of a token is that of the distribution that it was sampled from *before* top-p, top-k and min-p
  cut it, at the request's temperature: ``log_softmax(logits / temperature)``; at temperature 0 that of temperature 1.
  With a `SamplingParams.structure` it is that of the tokens that the structure allows: such answers are not trained.
- Each token carries the version of the weights that sampled it.
- `abort` ends a request soon; `generate` then returns what was sampled so far with `StopReason.ABORT`.
- `pause` holds running requests; after `resume` they go on with the engine's current weights and with a key-value
  cache computed from those weights.
- Requests with the same `seed` on the same weights sample the same tokens where `capabilities.seeded` says so.
- With `capabilities.routed_experts`, and where a request asks for them, an answer tells to which experts each token was
  routed, from the token that the request names to the last but one: the last was not computed yet.
- A prompt with images is refused with a `UsageError` unless `capabilities.images`; never are images left out.
- Failures are `EngineError`; an id outside the vocabulary is a `UsageError` and affects no other request.

`InferenceServer` is the contract of a process that samples for one model and is reached over HTTP.
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
from agentrl.routed_experts import joined

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from agentrl.image import PlacedImage
    from agentrl.routed_experts import RoutedExperts


class StopReason(enum.StrEnum):
    """Why the engine stopped sampling."""

    STOP = "stop"
    """A stop token was sampled, or the last token completed a stop text; both stay in the answer."""
    LENGTH = "length"
    """`max_tokens` were sampled, or the engine's context is full."""
    ABORT = "abort"
    """The request was aborted; the answer is partial."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling settings. The defaults sample from the model's own distribution."""

    temperature: float = 1.0
    """Logits are divided by it; 0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    min_p: float = 0.0
    max_tokens: int = 256
    stop_token_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    """Texts that end an answer, each with the token that completes it. An engine that cannot read its tokens, or misses
    one, goes on; a conversation cuts the answer there in any case (`agentrl.rollout.answer_tokens.find_stop`)."""
    seed: int | None = None
    """Seed of this request's own random numbers; ``None`` draws one."""
    structure: str | None = None
    """What the answer must look like, as a structural tag of xgrammar in JSON, for engines whose
    `capabilities.structures` says so. An answer that is interrupted begins anew: a structure has one beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One turn to sample."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    session_id: str
    """Turns of one sequence share it; engines keep its key-value cache, pools send it to the same server."""
    request_id: str
    adapter: str | None = None
    """Which of the engine's `capabilities.adapters` answers; the policy itself when left out."""
    images: Sequence[PlacedImage] = ()
    """What placeholders among the ids stand for, in order; only for engines whose `capabilities.images` says so."""
    routed_experts_from: int | None = None
    """Tell the experts of the tokens from this one of the prompt on; only for engines with
    `capabilities.routed_experts`."""
    on_tokens: Callable[[Sequence[int]], None] | None = None
    """Called with new tokens while they are sampled, each once and in order. What `generate` returns counts: an answer
    that another server gives again after one was lost begins anew, and is not told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Result of one request: the sampled tokens and their records."""

    token_ids: list[int]
    logprobs: list[float]
    """Log-probability of each sampled token (see the module's convention)."""
    versions: list[int]
    stop_reason: StopReason
    cached_tokens: int = 0
    """Prompt tokens that did not need prefill."""
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    """Seconds of sampling; includes queue and prefill where an engine does not separate them."""
    resubmissions: int = 0
    """How often the request was given to another server because one was lost."""
    routed_experts: RoutedExperts | None = None
    """Experts of the tokens from the request's `routed_experts_from` on: see `agentrl.routed_experts`."""

    def followed_by(self, second: Generation) -> Generation:
        """Join this answer and a second that continued it; the prompt's cached tokens are the first's."""
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
            routed_experts=joined(self.routed_experts, second.routed_experts),
        )

    def cut(self, tokens: int) -> Generation:
        """Return the answer up to its first `tokens` tokens, as one that was meant to stop there."""
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
    """``False`` for text-only services: they can evaluate, not train."""
    seeded: bool = False
    """Equal seeds give equal samples, whatever else runs."""
    images: bool = False
    routed_experts: bool = False
    """Answers may report the experts of tokens."""
    structures: bool = False
    """Answers can be held to a `SamplingParams.structure`."""
    adapters: frozenset[str] = frozenset()
    """Adapters that a request may name, each a policy of its own."""


class AdapterVersions:
    """Versions of several adapters, each of which grows when that adapter has learned.

    An engine counts its updates, of whichever adapters; tokens are recorded with the version of their own:

    >>> versions = AdapterVersions()
    >>> versions.publish(7, {"planner": 5, "worker": 7})
    >>> versions.publish(8, {"planner": 5, "worker": 8})
    >>> versions.at("planner", 8), versions.at("worker", 8)
    (5, 8)
    """

    def __init__(self) -> None:
        self._known: dict[int, dict[str, int]] = {}

    def publish(self, update: int, versions: Mapping[str, int]) -> None:
        """Record the versions that the engine has from one of its updates on."""
        self._known[update] = dict(versions)

    def at(self, adapter: str, update: int) -> int:
        """Return the version of an adapter at an engine's update.

        Raises:
            EngineError: no such update was published.
        """
        if update not in self._known:
            raise EngineError(
                "the engine sampled with weights that nobody sent it",
                got=f"update {update}",
                expected=list(self._known),
            )
        return self._known[update][adapter]

    def stamped(self, generation: Generation, adapter: str) -> Generation:
        """Return an engine's answer with the versions of the adapter that gave it."""
        return replace(generation, versions=[self.at(adapter, update) for update in generation.versions])


@dataclass(slots=True, kw_only=True)
class EngineMetrics:
    """A reading of an engine's load."""

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
        """Version of the weights that sample now."""

    @abstractmethod
    async def start(self) -> None:
        """Make the engine ready to serve; idempotent."""

    @abstractmethod
    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn. Cancelling the awaiting task aborts the request.

        Raises:
            UsageError: The request cannot be served by any engine like this one (ids out of the vocabulary, a prompt
                longer than the context).
            EngineError: The engine failed.
        """

    @abstractmethod
    async def abort(self, request_id: str) -> bool:
        """End a request early; ``False`` when no such request runs."""

    @abstractmethod
    async def pause(self) -> None:
        """Stop sampling at the next token; requests wait."""

    @abstractmethod
    async def resume(self) -> None:
        """Go on sampling."""

    @abstractmethod
    async def update_weights(self, weights: Mapping[str, Any] | None, version: int) -> None:
        """Serve new weights under a new version; nothing computed from the old ones is used again.

        Args:
            weights: Tensors by parameter name; ``None`` when the engine shares the trainer's tensors, which have
                changed in place while the engine was paused.
            version: Greater than the current one.

        Raises:
            EngineError: The weights were not taken; the engine must not serve on.
        """

    @abstractmethod
    async def end_session(self, session_id: str) -> None:
        """Forget what is kept for a session."""

    @abstractmethod
    def metrics(self) -> EngineMetrics:
        """The load now, without I/O."""

    @abstractmethod
    async def close(self) -> None:
        """Release everything; requests that run end as `EngineError`; idempotent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """Answer of a text service: words and counts, no token ids."""

    message: Message
    """Role ``assistant``; tool calls and thinking in their own fields where the service separates them."""
    prompt_tokens: int
    """As the service counts; 0 when unknown."""
    answer_tokens: int
    stop_reason: StopReason
    problems: tuple[str, ...] = ()
    """Tool calls that could not be read, in words that the model can act on; they are not in the message."""


class ChatPolicy(ABC):
    """A policy that is reached in text: messages in, a message out.

    It can be evaluated and never trained: its tokens, log-probabilities and versions are unknown.
    """

    max_context: int
    """Maximum number of tokens of prompt and answer together; a bound for budgets."""

    @abstractmethod
    async def start(self) -> None:
        """Make the policy ready to serve; idempotent."""

    @abstractmethod
    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        request_id: str,
    ) -> ChatAnswer:
        """Answer a conversation.

        Args:
            messages: The whole conversation so far.
            tools: Schemas of the tools that may be called (`agentrl.tool.Tool.schema`); may be empty.
            params: Temperature, top-p, `max_tokens` and `seed` are sent; `stop_token_ids` must be empty.
            request_id: For logs.

        Raises:
            UsageError: The service refuses the request for a reason that the user must change (key, model's name).
            EngineError: The service failed, or missed the deadline, after all retries.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release everything; idempotent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopTokens:
    """The most probable tokens at each position of a sequence, given those before it."""

    ids: npt.NDArray[np.int64]
    """[T, k]; the first token, which has nothing before it, has a row of 0."""
    logp: npt.NDArray[np.float32]
    """[T, k]; NaN for the first token."""


class ErrorStatus(EngineError):
    """An error status with which a server answered.

    Args:
        what: What went wrong.
        status: The HTTP status.
        parts: ``got``, ``expected`` and ``hint``, as all errors have them.
    """

    def __init__(self, what: str, *, status: int, **parts: Any) -> None:
        super().__init__(what, **parts)
        self.status = status


class ServerLost(EngineError):
    """The server cannot be reached any more, or dropped the connection: another one may take over its requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoad:
    """A server's own count of what it does."""

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
    """Tensors of one number format that travel as one run of bytes, one after the other."""

    names: Sequence[str]
    dtype: str
    """As torch calls it: ``float32``."""
    shapes: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateGroup:
    """A process group of the trainer, which is rank 0, and the workers of one server."""

    name: str
    address: str
    """Where the trainer's store listens."""
    port: int
    size: int
    backend: Literal["gloo", "nccl"]
    timeout_s: float
    """Deadline of its meeting, and of each broadcast in it."""


TensorPart: TypeAlias = Callable[[], Awaitable[str]]
"""Encodes some tensors: base64 of a pickled list of names and tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTensors:
    """Tensors in memory of the trainer that a server's process on the same machine opens."""

    layout: TensorLayout
    handle: Callable[[], Mapping[str, Any]]
    """JSON with which one other process opens the run of bytes, see `agentrl.weights.shared_memory`."""
    part: TensorPart
    """The same in the form of requests: handles of the tensors are pickled, not their values."""


Broadcast: TypeAlias = Callable[[int], Awaitable[None]]
"""Sends the run of bytes with this number to all workers of a group; done when they have it."""


class InferenceServer(ABC):
    """One inference server at the base address `url`; its capabilities are known once connected."""

    url: str
    capabilities: Capabilities

    @abstractmethod
    async def connect(self, *, deadline_s: float) -> None:
        """Wait until the server answers, check its version and features, and read its capabilities.

        Raises:
            UsageError: a version or a setting that cannot work; the message names one that can.
            ServerLost: it does not answer within the deadline.
        """

    @abstractmethod
    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn, as `agentrl.engine.PolicyEngine.generate` promises. Cancelling the awaiting task aborts it.

        A cancelled call ends at once: whatever the server still has to be told goes on behind it.

        Raises:
            UsageError: no server like this one can serve it.
            ServerLost: the connection broke.
            EngineError: the server answered with an error.
        """

    @abstractmethod
    async def abort(self, request_id: str) -> bool:
        """End a request early; `generate` returns what it has. ``False`` when no such request runs."""

    @abstractmethod
    async def pause(self) -> None:
        """Hold all requests; when this returns, nothing is sampled."""

    @abstractmethod
    async def resume(self) -> None:
        """Go on. Requests that were held continue with the current weights and a cache computed from them."""

    @abstractmethod
    async def load_weights(self, folder: Path, version: int) -> None:
        """Read new weights while paused: a Hugging Face folder of safetensors that the server's machine can see.

        When this returns, nothing computed from the old weights is used again, and tokens are stamped `version`.

        Raises:
            EngineError: the server did not take them; it must not be used any more.
        """

    async def load_adapter(self, folder: Path, version: int) -> None:
        """Load an adapter alone (peft's files) while paused; the base weights stay."""
        raise UsageError(f"{self.url} takes no adapters alone", hint="remove engine.adapter_rank")

    async def load_adapters(self, folders: Mapping[str, Path], version: int) -> None:
        """Load several adapters, by the names that requests give, while paused; those that it has stay as they are.

        A folder never changes: an adapter is loaded again only from another one.
        """
        raise UsageError(f"{self.url} does not take several adapters", hint="set engine=local or engine=vllm")

    async def load_tensors(self, parts: Sequence[TensorPart], version: int) -> None:
        """Load weights from the requests themselves, in `parts` that are encoded one at a time."""
        raise UsageError(f"{self.url} takes no tensors in requests", hint="set another engine.transport")

    async def open_weights(self, shared: Sequence[SharedTensors], version: int) -> None:
        """Load weights out of the trainer's memory, which stays unchanged until this returns."""
        raise UsageError(f"{self.url} does not open the trainer's memory", hint="set another engine.transport")

    async def workers(self) -> int:
        """Return the number of the server's processes that hold weights and join an `UpdateGroup`."""
        raise UsageError(f"{self.url} takes no broadcast of weights", hint="set another engine.transport")

    async def join_group(self, group: UpdateGroup) -> None:
        """Let the server's workers join a group, as ranks 1 and up; done when all its members have met."""
        raise UsageError(f"{self.url} takes no broadcast of weights", hint="set another engine.transport")

    async def leave_group(self, group: UpdateGroup) -> None:
        """Let the server's workers leave a group that they joined."""
        return

    async def receive_weights(
        self, layouts: Sequence[TensorLayout], group: UpdateGroup, broadcast: Broadcast, version: int
    ) -> None:
        """Load weights from a broadcast in a group: call `broadcast` for each layout when the workers are ready."""
        raise UsageError(f"{self.url} takes no broadcast of weights", hint="set another engine.transport")

    async def checksums(self) -> Mapping[str, str]:
        """Return the first 16 hexadecimal digits of the SHA-256 of each tensor, by the server's own names.

        Empty where the server does not report them.
        """
        return {}

    async def sleep(self) -> None:
        """Release the memory of weights and cache, while paused; nothing is answered before `wake_up`."""
        raise UsageError(f"{self.url} cannot sleep", hint="remove engine.sleep")

    async def wake_up(self) -> None:
        """Take the memory again, that of the cache by `resume` at the latest.

        The server stays paused, and its weights are undefined until they are loaded.
        """
        raise UsageError(f"{self.url} cannot sleep", hint="remove engine.sleep")

    @abstractmethod
    async def weight_version(self) -> int:
        """Return the version of the weights that the server reports; 0 for those that it started with."""

    @abstractmethod
    async def load(self) -> ServerLoad:
        """Return its load now."""

    @abstractmethod
    async def is_healthy(self, *, deadline_s: float) -> bool:
        """Ask the health route; true if it answers in time."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connections; the server goes on. Idempotent."""
