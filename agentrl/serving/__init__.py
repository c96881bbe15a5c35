"""Policy engines, and the kinds of servers that a run launches or attaches to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from agentrl.config.engines import ServerEngineConfig, SGLangEngineConfig, VLLMEngineConfig
from agentrl.engine import InferenceServer
from agentrl.errors import UsageError
from agentrl.serving import sglang, vllm
from agentrl.serving.launch import LaunchCommand


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerKind:
    """One engine of servers; the signatures are those of `agentrl.serving.vllm`."""

    name: str
    """Name of its package."""
    command: Callable[..., LaunchCommand]
    client: Callable[..., InferenceServer]


KINDS: Mapping[type[ServerEngineConfig], ServerKind] = {
    VLLMEngineConfig: ServerKind(name="vllm", command=vllm.launch_command, client=vllm.VLLMServer),
    SGLangEngineConfig: ServerKind(name="sglang", command=sglang.launch_command, client=sglang.SGLangServer),
}
"""By the section of a config that asks for them."""


def server_kind(section: ServerEngineConfig) -> ServerKind:
    """Return the engine of a config, or raise `UsageError` if it has no servers."""
    if type(section) not in KINDS:
        known = " or ".join(kind.__name__ for kind in KINDS)
        raise UsageError("there are no servers of this engine", got=type(section).__name__, expected=known)
    return KINDS[type(section)]
