"""Settings of engines: local, scripted, OpenAI-compatible services, and vLLM and SGLang servers."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from agentrl.config.section import Section

MIN_SEQS_PER_LANE = 8
"""Minimum number of sequences per lane."""


class LocalEngineConfig(Section):
    type: Literal["local"] = "local"
    """Model in this process, on torch; shares the trainer's weights if ``rollout.max_staleness`` is 0. On the CPU,
    Llama-like decoders that are not too large also have a second copy, laid out for inference."""
    max_num_seqs: int = Field(64, ge=1)
    """Maximum number of sequences that are decoded together."""
    max_context: int | None = Field(None, ge=1)
    """Maximum number of tokens in a sequence; the model's limit if not set."""
    cache_tokens: int = Field(262_144, ge=1)
    """Size of the key-value cache for sessions, in tokens over all sessions."""
    prefill_tokens: int = Field(4096, ge=1)
    """Maximum number of prompt tokens per forward pass."""
    draft_tokens: int = Field(3, ge=0)
    """Maximum number of next tokens of a sequence that are guessed per step, and checked in the same forward pass. A
    guess is what followed the latest tokens when they last occurred, so agents that repeat themselves answer sooner.
    Answers do not change, up to rounding. Guessing pauses if few guesses are right; 0 turns it off."""
    lanes: int = Field(1, ge=1)
    """Groups of running sequences that are computed in parallel, each on its share of torch's threads; on the CPU, for
    models whose operations are too small to use several cores. Each lane needs at least 8 of `max_num_seqs`."""
    cpus: list[int] | None = None
    """Cores of this process, except for training, which then needs ``trainer.cpus``; any if not set."""
    timeout_s: float = Field(600.0, gt=0)
    """Seconds before an answer times out."""

    @model_validator(mode="after")
    def _lanes_have_work(self) -> Self:
        if self.lanes > 1 and self.max_num_seqs < MIN_SEQS_PER_LANE * self.lanes:
            raise ValueError(
                f"engine.lanes is {self.lanes} with engine.max_num_seqs {self.max_num_seqs}: each lane needs "
                f"{MIN_SEQS_PER_LANE} sequences; set at most {max(1, self.max_num_seqs // MIN_SEQS_PER_LANE)} lanes, "
                f"or max_num_seqs to at least {MIN_SEQS_PER_LANE * self.lanes}"
            )
        return self


class ScriptedEngineConfig(Section):
    type: Literal["scripted"] = "scripted"
    """Answers from a script, with the semantics of an engine; for tests and for trying environments."""
    script: str | None = None
    """``module:attr`` of the script; random tokens if not set."""
    delay_s: float = Field(0.0, ge=0)
    """Seconds per token."""
    timeout_s: float = Field(600.0, gt=0)
    """Seconds before an answer times out."""


def address(text: str) -> str:
    """Return the address of a server if it is well-formed.

    Raises:
        ValueError: no scheme, or no host.
    """
    if not re.match(r"https?://[^/\s]+", text):
        raise ValueError(f"{text} is not an address: write http://HOST:PORT")
    return text


class OpenAIEngineConfig(Section):
    type: Literal["openai"] = "openai"
    """OpenAI-compatible service; as the policy's engine for evaluation only, because it returns text without tokens."""
    url: str
    """Base address, including ``/v1``."""
    model: str
    """Name of the model at the service."""
    api_key_variable: str = "OPENAI_API_KEY"
    """Environment variable that holds the API key."""
    timeout_s: float = Field(120.0, gt=0)
    """Seconds before an answer times out."""
    retries: int = Field(4, ge=0)
    """Maximum number of retries of a rejected or failed request."""
    max_concurrent: int = Field(32, ge=1)
    """Maximum number of concurrent requests."""

    @field_validator("url")
    @classmethod
    def _url_is_an_address(cls, url: str) -> str:
        return address(url)


class TinkerEngineConfig(Section):
    type: Literal["tinker"] = "tinker"
    """Tinker-compatible service that trains and samples; see docs/tinker.md."""
    url: str
    """Address of the service."""
    base_model: str | None = None
    """Name of the model on the service; ``model.path``, which also provides the tokenizer, if not set."""
    api_key_variable: str = "TINKER_API_KEY"
    """Environment variable that holds the service's key."""
    max_context: int = Field(32_768, ge=2)
    """Maximum number of tokens in a sequence."""
    timeout_s: float = Field(600.0, gt=0)
    """Time limit of a sampling or training request in seconds."""

    @field_validator("url")
    @classmethod
    def _url_is_an_address(cls, url: str) -> str:
        return address(url)


class ServerEngineConfig(Section):
    """Settings of vLLM and SGLang servers."""

    servers: Literal["launch"] | list[str] = "launch"
    """``launch`` to start servers on this machine, or addresses of running servers: ``[http://gpu-1.example.com:8000]``."""
    replicas: int = Field(1, ge=1, le=1024)
    """Number of servers to launch."""
    python: str | None = None
    """Interpreter of the virtual environment that launched servers run in; if not set, that of ``make engines`` if it
    exists, else this process's."""
    arguments: list[str] = Field(default_factory=list)
    """Additional command line arguments of launched servers."""
    tensor_parallel: int = Field(1, ge=1, le=1024)
    """GPUs per launched server."""
    gpus: list[int] | None = None
    """GPUs of the launched servers, ``tensor_parallel`` for each; all GPUs of this machine if not set."""
    cpus: list[int] | None = None
    """Cores of the launched servers, in equal parts; any if not set. See docs/asynchronous.md."""
    max_context: int | None = Field(None, ge=1)
    """Maximum number of tokens in a sequence; the model's limit if not set."""
    max_num_seqs: int = Field(64, ge=1)
    """Maximum number of sequences that a server decodes together."""
    api_key_variable: str | None = None
    """Environment variable that holds the servers' API key, if they require one."""
    start_timeout_s: float = Field(600.0, gt=0)
    """Seconds for the start of a server; also added to ``timeout_s`` while an episode waits for a restarted server. A
    server in ``servers`` that refuses connections is an error after 8 seconds."""
    health_timeout_s: float = Field(30.0, gt=0)
    """Seconds without an answer from its health route after which a server is considered lost."""
    lost_timeout_s: float = Field(300.0, gt=0)
    """Seconds to wait for a lost server of ``servers``; then the run continues without it, or ends with a
    checkpoint if it was the last one. Also added to ``timeout_s`` while an episode waits. Launched servers are
    restarted instead."""
    timeout_s: float = Field(600.0, gt=0)
    """Seconds before an answer, or a request that pauses the server or changes its weights, times out."""
    transport: Literal["shared_memory", "disk", "collective", "cuda_ipc", "tensor"] = "shared_memory"
    """Transport of the weights to the servers: ``shared_memory``, files in this machine's memory; ``disk``, files in
    ``run.directory``; ``collective``, a broadcast (NCCL between GPUs, otherwise gloo); ``cuda_ipc``, the trainer's GPU
    memory, for servers on the same GPU; ``tensor``, the body of requests, SGLang only."""
    bucket_mib: int = Field(128, ge=1)
    """Maximum MiB of weights that are sent together; a larger tensor is sent alone. Only for collective, cuda_ipc and
    tensor."""
    sleep: bool = False
    """True if servers release their GPU memory while the trainer trains, and wake up for the next weights; for servers
    on the trainer's GPUs, with ``rollout.max_staleness`` 0."""
    adapter_rank: int | None = Field(None, ge=1, le=512)
    """Maximum rank of adapters (``model.lora``) that vLLM servers receive instead of full weights; if not set, merged
    weights are sent."""
    max_adapters: int = Field(1, ge=1)
    """Maximum number of adapters that a server holds at once, for ``adapters``; needs ``adapter_rank``."""

    @field_validator("arguments", mode="before")
    @classmethod
    def _numbers_are_words(cls, arguments: object) -> object:
        """Convert numbers, such as the 0.5 of ``[--gpu-memory-utilization, 0.5]``, to words of the command line."""
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
                f"engine.transport is cuda_ipc with {self.replicas} engine.replicas: only one server can share the "
                "trainer's GPU; use collective or shared_memory"
            )
        if self.transport == "cuda_ipc" and self.tensor_parallel > 1:
            raise ValueError(
                f"engine.transport is cuda_ipc with engine.tensor_parallel {self.tensor_parallel}: a server that "
                "shares the trainer's GPU has only that one; use collective or shared_memory"
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
                "engine.adapter_rank is set with engine.sleep: a server that sleeps loses the base weights, which "
                "adapters do not restore; remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _launch_keys_are_used(self) -> Self:
        if self.servers == "launch":
            if self.lost_timeout_s != type(self).model_fields["lost_timeout_s"].default:
                raise ValueError(
                    "engine.lost_timeout_s is ignored with launched servers, which are restarted: remove it, or list "
                    "addresses in engine.servers"
                )
            return self
        if not self.servers:
            raise ValueError("engine.servers is empty: list addresses, or set it to launch")
        for name in ("replicas", "python", "arguments", "tensor_parallel", "gpus", "cpus"):
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
                "engine.transport tensor needs SGLang; vLLM servers accept collective, cuda_ipc, shared_memory or disk"
            )
        return self


class SGLangEngineConfig(ServerEngineConfig):
    type: Literal["sglang"] = "sglang"
    """SGLang servers."""

    @model_validator(mode="after")
    def _takes_merged_weights(self) -> Self:
        if self.adapter_rank is not None:
            raise ValueError(
                "engine.adapter_rank needs vLLM: SGLang replaces an adapter only when no request uses the old one, "
                "and requests stay open during a sync; remove it to send merged weights"
            )
        return self


EngineConfig = Annotated[
    LocalEngineConfig
    | ScriptedEngineConfig
    | OpenAIEngineConfig
    | TinkerEngineConfig
    | VLLMEngineConfig
    | SGLangEngineConfig,
    Field(discriminator="type"),
]
