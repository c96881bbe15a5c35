"""Policy engines and inference servers that a run launches or connects to."""

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
    """Launch command and client of one inference server; signatures as in `agentrl.serving.vllm`."""

    name: str
    """Name of its package."""
    command: Callable[..., LaunchCommand]
    client: Callable[..., InferenceServer]


KINDS: Mapping[type[ServerEngineConfig], ServerKind] = {
    VLLMEngineConfig: ServerKind(name="vllm", command=vllm.launch_command, client=vllm.VLLMServer),
    SGLangEngineConfig: ServerKind(name="sglang", command=sglang.launch_command, client=sglang.SGLangServer),
}
"""Server kinds by the class of their config section."""


def server_kind(section: ServerEngineConfig) -> ServerKind:
    """Return the server kind of an engine section; raises `UsageError` if the engine runs without servers."""
    if type(section) not in KINDS:
        known = " or ".join(kind.__name__ for kind in KINDS)
        raise UsageError("this engine does not run on servers", got=type(section).__name__, expected=known)
    return KINDS[type(section)]
