"""The settings of engines: in this process, scripted, services, and servers of vLLM and SGLang."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from agentrl.config.section import Section

FEWEST_PER_LANE = 8
"""Sequences that are worth a thread of their own."""


class LocalEngineConfig(Section):
    type: Literal["local"] = "local"
    """The model in this process, on torch; shares the trainer's weights when ``rollout.max_staleness`` is 0. On the CPU
    it keeps a second copy, laid out for inference, of a decoder of the Llama family that is not too large."""
    slots: int = Field(64, ge=1)
    """Sequences decoded together."""
    max_context: int | None = Field(None, ge=1)
    """Tokens of a sequence; the model's own limit when left out."""
    cache_tokens: int = Field(262_144, ge=1)
    """Key-value cache kept for sessions, in tokens over all of them."""
    prefill_tokens: int = Field(4096, ge=1)
    """Most prompt tokens computed in one forward pass."""
    lanes: int = Field(1, ge=1)
    """Parts of the running sequences that are computed at the same time, each on its share of torch's threads; on the
    CPU, for models so small that their operations cannot keep several cores busy. A lane needs 8 sequences."""
    timeout_s: float = Field(600.0, gt=0)
    """Deadline of one answer."""

    @model_validator(mode="after")
    def _lanes_have_work(self) -> Self:
        if self.lanes > 1 and self.slots < FEWEST_PER_LANE * self.lanes:
            raise ValueError(
                f"engine.lanes is {self.lanes} with {self.slots} engine.slots: a lane needs {FEWEST_PER_LANE} of them, "
                f"so at most {max(1, self.slots // FEWEST_PER_LANE)} lanes, or {FEWEST_PER_LANE * self.lanes} slots"
            )
        return self


class ScriptedEngineConfig(Section):
    type: Literal["scripted"] = "scripted"
    """Plays a script with an engine's semantics; for tests and for trying environments."""
    script: str | None = None
    """``module:attr`` of the script; random tokens when left out."""
    delay_s: float = Field(0.0, ge=0)
    """Seconds per token."""
    timeout_s: float = Field(600.0, gt=0)
    """Deadline of one answer."""


def address(text: str) -> str:
    """The form of an address that servers receive.

    Raises:
        ValueError: it has no scheme, or no host.
    """
    if not re.match(r"https?://[^/\s]+", text):
        raise ValueError(f"{text} is no address: write http://HOST:PORT")
    return text


class OpenAIEngineConfig(Section):
    type: Literal["openai"] = "openai"
    """Any OpenAI-compatible service; evaluation only: it gives text, not tokens."""
    url: str
    """Base address, up to and with ``/v1``."""
    model: str
    """Name of the model at the service."""
    api_key_variable: str = "OPENAI_API_KEY"
    """Environment variable that holds the key."""
    timeout_s: float = Field(120.0, gt=0)
    """Deadline of one answer."""
    retries: int = Field(4, ge=0)
    """New attempts after a refused or failed request."""
    max_concurrent: int = Field(32, ge=1)
    """Most requests at once."""

    @field_validator("url")
    @classmethod
    def _url_is_an_address(cls, url: str) -> str:
        return address(url)


class ServerEngineConfig(Section):
    """Settings that vLLM and SGLang servers have in common."""

    servers: Literal["launch"] | list[str] = "launch"
    """``launch`` starts servers on this machine; addresses (``[http://host:8000]``) attach to running ones."""
    replicas: int = Field(1, ge=1, le=1024)
    """Servers to launch."""
    python: str | None = None
    """Interpreter of the virtual environment that holds the engine, for launching; the one that ``make engines`` made,
    or else this one, when left out."""
    arguments: list[str] = Field(default_factory=list)
    """More command line arguments for launched servers."""
    tensor_parallel: int = Field(1, ge=1, le=1024)
    """GPUs per launched server."""
    gpus: list[int] | None = None
    """GPUs for launched servers, ``tensor_parallel`` of them for each; all of this machine's when left out."""
    max_context: int | None = Field(None, ge=1)
    """Tokens of a sequence; the model's own limit when left out."""
    max_running: int = Field(64, ge=1)
    """Sequences that a server samples at once."""
    api_key_variable: str | None = None
    """Environment variable that holds the key of servers that ask for one."""
    start_timeout_s: float = Field(600.0, gt=0)
    """Deadline of a server's start; how much longer than ``timeout_s`` an episode waits for a server to come back."""
    health_timeout_s: float = Field(30.0, gt=0)
    """A server that does not answer its health route for so long is lost."""
    timeout_s: float = Field(600.0, gt=0)
    """Deadline of one answer of a server, and of each request that changes its weights or holds it."""
    transport: Literal["shared_memory", "disk", "collective", "cuda_ipc", "tensor"] = "shared_memory"
    """How weights reach the servers: a memory file system of this machine; a folder in ``run.directory``; a broadcast
    (over NCCL from GPU to GPU, else over gloo); out of the trainer's own memory, for servers on its GPU; or in
    requests, SGLang only."""
    bucket_mib: int = Field(128, ge=1)
    """Most MiB of weights that go together; a tensor that is larger goes alone. Only collective, cuda_ipc and
    tensor."""
    sleep: bool = False
    """Servers give back their GPU memory while the trainer trains, and wake with the next weights; for servers on the
    trainer's GPUs, with ``rollout.max_staleness`` 0."""
    adapter_rank: int | None = Field(None, ge=1, le=512)
    """vLLM servers keep the weights that they start with, and are sent adapters (``model.lora``) of up to this rank
    alone; merged weights are sent when left out."""
    max_adapters: int = Field(1, ge=1)
    """Adapters that a server has room for at once, for ``adapters``; with ``adapter_rank``."""

    @field_validator("arguments", mode="before")
    @classmethod
    def _numbers_are_words(cls, arguments: object) -> object:
        """A number in YAML, such as the 0.5 of ``[--gpu-memory-utilization, 0.5]``, is a word of the command line."""
        if not isinstance(arguments, list):
            return arguments
        return [str(word) if type(word) in (int, float) else word for word in arguments]

    @field_validator("servers")
    @classmethod
    def _servers_have_addresses(cls, servers: str | list[str]) -> str | list[str]:
        return servers if isinstance(servers, str) else [address(url) for url in servers]

    @model_validator(mode="after")
    def _transport_fits(self) -> Self:
        if self.bucket_mib != 128 and self.transport in ("shared_memory", "disk"):
            raise ValueError(
                f"engine.bucket_mib is ignored with engine.transport {self.transport}: "
                "remove it, or use collective, cuda_ipc or tensor"
            )
        if self.transport == "cuda_ipc" and self.replicas > 1:
            raise ValueError(
                f"engine.transport is cuda_ipc with {self.replicas} engine.replicas: of servers with GPUs of their "
                "own only one can have the trainer's; use collective or shared_memory"
            )
        if self.transport == "cuda_ipc" and self.tensor_parallel > 1:
            raise ValueError(
                f"engine.transport is cuda_ipc with engine.tensor_parallel {self.tensor_parallel}: a server on "
                "the trainer's GPU has one GPU; use collective or shared_memory"
            )
        return self

    @model_validator(mode="after")
    def _adapters_can_be_sent(self) -> Self:
        if self.adapter_rank is None:
            if self.max_adapters > 1:
                raise ValueError("engine.max_adapters is ignored without engine.adapter_rank: set that, or remove it")
            return self
        if self.transport not in ("shared_memory", "disk"):
            raise ValueError(
                f"engine.adapter_rank is set with engine.transport {self.transport}: servers read adapters from files; "
                "use shared_memory or disk"
            )
        if self.sleep:
            raise ValueError(
                "engine.adapter_rank is set with engine.sleep: a server that sleeps forgets weights which an adapter "
                "does not bring back; remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _launch_keys_are_used(self) -> Self:
        if self.servers == "launch":
            return self
        if not self.servers:
            raise ValueError("engine.servers is empty: give addresses, or launch")
        for name in ("replicas", "python", "arguments", "tensor_parallel", "gpus"):
            if getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True):
                raise ValueError(f"engine.{name} is ignored with addresses in engine.servers: remove it, or use launch")
        return self


class VLLMEngineConfig(ServerEngineConfig):
    type: Literal["vllm"] = "vllm"
    """vLLM servers."""

    @model_validator(mode="after")
    def _takes_the_transport(self) -> Self:
        if self.transport == "tensor":
            raise ValueError(
                "engine.transport tensor is SGLang's: vLLM servers take collective, cuda_ipc, shared_memory or disk"
            )
        return self


class SGLangEngineConfig(ServerEngineConfig):
    type: Literal["sglang"] = "sglang"
    """SGLang servers."""

    @model_validator(mode="after")
    def _takes_merged_weights(self) -> Self:
        if self.adapter_rank is not None:
            raise ValueError(
                "engine.adapter_rank is vLLM's: SGLang exchanges an adapter only when no request uses the old one, "
                "and a sync holds requests; remove it, and merged weights are sent"
            )
        return self


EngineConfig = Annotated[
    LocalEngineConfig | ScriptedEngineConfig | OpenAIEngineConfig | VLLMEngineConfig | SGLangEngineConfig,
    Field(discriminator="type"),
]
