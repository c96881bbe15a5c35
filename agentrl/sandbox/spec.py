"""Specification of a sandbox, as a config or an environment's options give it, with its limits and results."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl.errors import UsageError, did_you_mean

MIB = 2**20
LARGEST = 2**60
"""Of any limit: beyond it the kernel's own numbers end."""
_SECONDS = frozenset({"seconds", "cpu_seconds"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Resources that a sandbox, or one command in it, may use; ``None`` leaves the sandbox's own limit.

    A command gets the lower of its own and its sandbox's limits. Where the machine has cgroups, the memory and the
    processes of a sandbox are counted together; a command's own memory limit counts for each of its processes.
    """

    seconds: float | None = None
    """Wall-clock time of a command, after which it is killed with all that it started."""
    cpu_seconds: float | None = None
    """Processor time of each process."""
    memory_bytes: int | None = None
    processes: int | None = None
    """Processes and threads."""
    file_bytes: int | None = None
    """The largest file that can be written."""
    disk_bytes: int | None = None
    """What fits into each writable folder; a sandbox's limit, and not a command's."""
    output_bytes: int | None = None
    """Output that is kept, of standard output and standard error each; the rest is dropped."""

    def __post_init__(self) -> None:
        for name, value in self.given.items():
            kinds, expected = (int | float, "a number") if name in _SECONDS else (int, "a whole number")
            if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value <= LARGEST:
                raise UsageError(
                    f"limit {name} is not understood",
                    got=f"{value!r:.80}",
                    expected=f"{expected} above 0, at most 2**60",
                )

    @property
    def given(self) -> dict[str, Any]:
        """The limits that are not ``None``, by name."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def narrowed(self, other: Limits | None) -> Limits:
        """The lower of each of two limits.

        >>> Limits(seconds=9.0, processes=4).narrowed(Limits(seconds=20.0, output_bytes=5)).given
        {'seconds': 9.0, 'processes': 4, 'output_bytes': 5}
        """
        if other is None:
            return self
        both = {**other.given, **self.given}
        return dataclasses.replace(self, **{name: min(both[name], other.given.get(name, both[name])) for name in both})


DEFAULT_LIMITS = Limits(
    seconds=60.0,
    cpu_seconds=60.0,
    memory_bytes=1024 * MIB,
    processes=128,
    file_bytes=256 * MIB,
    disk_bytes=256 * MIB,
    output_bytes=MIB,
)
"""Of a sandbox whose spec says nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """Result of a command."""

    exit_code: int
    """As a shell counts: 127 no such program, 126 it cannot be run, 128 + n killed by signal n."""
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    """It was killed at its deadline; output until then is kept."""
    truncated: bool = False
    """Output beyond the limit was dropped."""
    out_of_memory: bool = False
    """The kernel killed one of its processes for using too much memory."""
    seconds: float = 0.0
    """From start to end."""

    @property
    def succeeded(self) -> bool:
        """It ended by itself with exit code 0."""
        return self.exit_code == 0 and not self.timed_out


NO_NETWORK = "none"
ANY_NETWORK = "all"
GATEWAY = "gateway"
NETWORKS = (NO_NETWORK, GATEWAY, ANY_NETWORK)


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """Specification of a sandbox. What a back end cannot give is refused, never ignored."""

    type: str = "local"
    """The back end's registry name: ``local``, ``docker``, ``http``, or one that a plugin brings."""
    image: str | None = None
    """The container image (``docker``)."""
    url: str | None = None
    """The server's address (``http``)."""
    network: str | tuple[str, ...] = NO_NETWORK
    """``none``; ``gateway``: the policy's gateway, for the program of the `external` loop; a list of the hosts that can
    be reached, like ``[example.org, "*.example.com:8443", gateway]``; or ``all``."""
    limits: Limits = DEFAULT_LIMITS
    """Of the whole sandbox; those that are left out are `DEFAULT_LIMITS`."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of all commands."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Written at the start, by path."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The back end's own options."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "limits", dataclasses.replace(DEFAULT_LIMITS, **self.limits.given))
        words = (self.network,) if isinstance(self.network, str) else self.network
        known = isinstance(self.network, str) and self.network in NETWORKS
        if not known and (isinstance(self.network, str) or not words or {NO_NETWORK, ANY_NETWORK, "*"} & set(words)):
            raise UsageError(
                "sandbox.network is not understood",
                got=repr(self.network),
                expected=f"{', '.join(NETWORKS)}, or a list of hosts",
                hint=did_you_mean(words[0], NETWORKS) if words else None,
            )

    @property
    def uses_gateway(self) -> bool:
        """Whether its programs reach the policy's gateway."""
        return self.network == GATEWAY or (not isinstance(self.network, str) and GATEWAY in self.network)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts that its programs reach through a proxy, as entries of an `AllowList`."""
        return () if isinstance(self.network, str) else tuple(name for name in self.network if name != GATEWAY)


def read_spec(given: SandboxSpec | Mapping[str, Any] | str) -> SandboxSpec:
    """A spec from a back end's name, or from plain data as configs hold it.

    >>> read_spec({"type": "local", "limits": {"seconds": 5}, "files": {"a.txt": "some text"}}).limits.seconds
    5

    Raises:
        UsageError: an unknown key, or a value of another type.
    """
    if isinstance(given, SandboxSpec):
        return given
    if isinstance(given, str):
        return SandboxSpec(type=given)
    values = dict(_known(given, SandboxSpec, "sandbox"))
    if "limits" in values and not isinstance(values["limits"], Limits):
        values["limits"] = Limits(**_known(values["limits"], Limits, "sandbox.limits"))
    for name in ("env", "files", "options"):
        if not isinstance(values.get(name, {}), Mapping):
            raise UsageError(f"sandbox.{name} is not understood", got=repr(values[name]), expected="keys and values")
    for name in ("type", "image", "url"):
        if not isinstance(values.get(name, ""), str | None):
            raise UsageError(f"sandbox.{name} is not understood", got=repr(values[name]), expected="text")
    network = values.get("network", "")
    if not isinstance(network, str | list | tuple) or not all(isinstance(host, str) for host in network):
        raise UsageError("sandbox.network is not understood", got=repr(network), expected="a word, or a list of hosts")
    if not isinstance(network, str):
        values["network"] = tuple(network)
    values["env"] = {str(name): str(value) for name, value in values.get("env", {}).items()}
    values["files"] = {
        path: content.encode() if isinstance(content, str) else content
        for path, content in values.get("files", {}).items()
    }
    return SandboxSpec(**values)


def _known(given: Any, kind: type, what: str) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise UsageError(f"{what} is not understood", got=repr(given), expected="keys and values")
    known = [one.name for one in dataclasses.fields(kind)]
    for key in given:
        if key not in known:
            hint = did_you_mean(key, known)
            raise UsageError(f"{what} has no key {key!r}", expected=", ".join(known), hint=hint)
    return given
