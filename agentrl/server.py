"""The contract of an inference server: a process that samples for one model and is reached over HTTP.

`agentrl.policy.PolicyEngine` is what agent loops talk to. A pool of servers is such an engine; one server is what the
pool routes to, and what weight sync updates. A server never hides a failure: the pool decides what becomes of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from agentrl.errors import EngineError, UsageError
from agentrl.policy import Capabilities, GenerateRequest, Generation


class ServerLost(EngineError):
    """The server cannot be reached any more, or dropped the connection: another one may take over its requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoad:
    """A server's own count of what it does."""

    running: int
    """Requests that are being sampled."""
    waiting: int
    """Requests in its queue."""
    cache_used: float
    """Share of the key-value cache in use, 0 to 1."""
    preemptions: int
    """Requests thrown out of the cache since the server started."""
    prompt_tokens: int
    """Prompt tokens since the server started."""
    cached_tokens: int
    """Those of them that were found in the prefix cache."""
    sampled_tokens: int
    """Tokens sampled since the server started."""


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
    """JSON that lets one process open the run of bytes: `agentrl.weights.shared_run`. Each call is for one process."""
    part: TensorPart
    """The same, in the form of requests: what is pickled is where the tensors are, not what they are."""


Broadcast: TypeAlias = Callable[[int], Awaitable[None]]
"""Sends the run of bytes with this number to all workers of a group; done when they have it."""


class InferenceServer(ABC):
    """One server. Used from one event loop.

    Attributes:
        url: Base address, without a slash at the end.
        capabilities: Known once connected.
    """

    url: str
    capabilities: Capabilities

    @abstractmethod
    async def connect(self, *, deadline_s: float) -> None:
        """Wait until the server answers, check its version and features, and learn its capabilities.

        Raises:
            UsageError: a version or a setting that cannot work; says which one could.
            ServerLost: it does not answer within the deadline.
        """

    @abstractmethod
    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn, as `agentrl.policy.PolicyEngine.generate` promises. Cancelling the awaiting task aborts it.

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
        """`load_weights`, of an adapter beside weights that stay: peft's files, in a folder that the server can see.

        Raises:
            UsageError: servers like this one take merged weights only.
            EngineError: as `load_weights`.
        """
        raise UsageError(f"{self.url} takes no adapters alone", hint="remove engine.adapter_rank")

    async def load_tensors(self, parts: Sequence[TensorPart], version: int) -> None:
        """`load_weights`, with the tensors in the requests themselves.

        Args:
            parts: All tensors, some in each; one is encoded at a time.
            version: What tokens are stamped with from now on.

        Raises:
            UsageError: servers like this one do not take weights so.
            EngineError: as `load_weights`.
        """
        raise UsageError(f"{self.url} takes no tensors in requests", hint="set another engine.transport")

    async def open_weights(self, shared: Sequence[SharedTensors], version: int) -> None:
        """`load_weights`, out of the trainer's memory: on a GPU, that which the server has, too.

        Args:
            shared: All tensors, some in each; they stay as they are until this returns.
            version: What tokens are stamped with from now on.

        Raises:
            UsageError: servers like this one cannot, or its weights are spread over several processes.
            EngineError: as `load_weights`.
        """
        raise UsageError(f"{self.url} does not open the trainer's memory", hint="set another engine.transport")

    async def workers(self) -> int:
        """Processes of the server that hold weights: those that join an `UpdateGroup`."""
        raise UsageError(f"{self.url} takes no broadcast of weights", hint="set another engine.transport")

    async def join_group(self, group: UpdateGroup) -> None:
        """Let the server's workers join a group, as ranks 1 and up; done when all its members have met.

        Raises:
            EngineError: they could not.
        """
        raise UsageError(f"{self.url} takes no broadcast of weights", hint="set another engine.transport")

    async def leave_group(self, group: UpdateGroup) -> None:
        """Let the server's workers leave a group that they joined, where they would keep it.

        Raises:
            EngineError: they did not.
        """
        return

    async def receive_weights(
        self, layouts: Sequence[TensorLayout], group: UpdateGroup, broadcast: Broadcast, version: int
    ) -> None:
        """`load_weights`, from a broadcast in a group that was joined.

        Args:
            layouts: What is broadcast, run by run.
            group: Was joined.
            broadcast: Is called for each run in turn, once the workers have been told to receive it.
            version: What tokens are stamped with from now on.

        Raises:
            EngineError: as `load_weights`.
        """
        raise UsageError(f"{self.url} takes no broadcast of weights", hint="set another engine.transport")

    async def checksums(self) -> Mapping[str, str]:
        """First 16 hexadecimal digits of the SHA-256 of each tensor that it computes with, by its own names for them.

        Empty where it does not tell.

        Raises:
            EngineError: it has none.
        """
        return {}

    async def sleep(self) -> None:
        """Give back the memory of weights and cache, while paused; nothing is answered before `wake_up`."""
        raise UsageError(f"{self.url} cannot sleep", hint="remove engine.sleep")

    async def wake_up(self) -> None:
        """Take the memory again, that of the cache by `resume` at the latest.

        The server stays paused, and its weights are undefined until they are loaded.
        """
        raise UsageError(f"{self.url} cannot sleep", hint="remove engine.sleep")

    @abstractmethod
    async def weight_version(self) -> int:
        """Version of the weights that the server says it serves; 0 for those that it started with."""

    @abstractmethod
    async def load(self) -> ServerLoad:
        """Its load now.

        Raises:
            ServerLost: it does not answer.
        """

    @abstractmethod
    async def is_healthy(self, *, deadline_s: float) -> bool:
        """Whether it answers its health route in time."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connections; the server goes on. Idempotent."""
