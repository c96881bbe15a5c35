"""Specification of a sandbox, as in a config or an environment's options; limits, and results of commands."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl.errors import UsageError, did_you_mean

MIB = 2**20
MAX_SIZE = 2**60
"""Maximum of any limit; the kernel's integers can hold it."""
_SECONDS = frozenset({"seconds", "cpu_seconds"})
NO_NETWORK = "none"
ANY_NETWORK = "all"
GATEWAY = "gateway"
NETWORKS = (NO_NETWORK, GATEWAY, ANY_NETWORK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on the resources of a sandbox, or of one command in it; ``None`` means the sandbox's limit.

    The lower of a command's and its sandbox's limits applies. With cgroups, memory and processes are counted over the
    whole sandbox; a command's own memory limit applies to each of its processes.
    """

    seconds: float | None = None
    """Maximum wall-clock time of a command, after which it is killed with all processes that it started."""
    cpu_seconds: float | None = None
    """Maximum processor time of each process."""
    memory_bytes: int | None = None
    processes: int | None = None
    """Maximum number of processes and threads."""
    file_bytes: int | None = None
    """Maximum size of a written file."""
    disk_bytes: int | None = None
    """Size of each writable folder; a limit of sandboxes only, not of commands."""
    output_bytes: int | None = None
    """Maximum bytes kept of standard output and of standard error: half from the beginning, half from the end."""

    def __post_init__(self) -> None:
        for name, value in self.non_null.items():
            kinds, expected = (int | float, "a number") if name in _SECONDS else (int, "a whole number")
            if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value <= MAX_SIZE:
                raise UsageError(
                    f"limit {name} is invalid", got=f"{value!r:.80}", expected=f"{expected} above 0, at most 2**60"
                )

    @property
    def non_null(self) -> dict[str, Any]:
        """Limits that are not ``None``, by name."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def narrow(self, other: Limits | None) -> Limits:
        """Return the element-wise minimum of two sets of limits.

        >>> Limits(seconds=9.0, processes=4).narrow(Limits(seconds=20.0, output_bytes=5)).non_null
        {'seconds': 9.0, 'processes': 4, 'output_bytes': 5}
        """
        if other is None:
            return self
        others = other.non_null
        both = {**others, **self.non_null}
        return dataclasses.replace(self, **{name: min(both[name], others.get(name, both[name])) for name in both})


DEFAULT_LIMITS = Limits(
    seconds=60.0,
    cpu_seconds=60.0,
    memory_bytes=1024 * MIB,
    processes=128,
    file_bytes=256 * MIB,
    disk_bytes=256 * MIB,
    output_bytes=MIB,
)
"""Default limits of a sandbox."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """Result of a command."""

    exit_code: int
    """Exit code as in a shell: 127 if the program was not found, 126 if it cannot be run (`stderr` says why), 128 + N
    after signal N."""
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    """True if the command was killed at its deadline; its output until then is kept."""
    truncated: bool = False
    """True if the middle of standard output or standard error was dropped, because it was longer than the limit."""
    out_of_memory: bool = False
    """True if the kernel killed one of its processes for using too much memory."""
    seconds: float = 0.0
    """Seconds from start to end."""

    @property
    def is_success(self) -> bool:
        """True if the command ended on its own with exit code 0."""
        return self.exit_code == 0 and not self.timed_out


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """Specification of a sandbox. Settings that a back end does not support are errors, and never ignored."""

    type: str = "local"
    """Registry name of the back end: ``local``, ``docker``, ``http``, or a plugin's."""
    image: str | None = None
    """Container image (``docker``)."""
    url: str | None = None
    """Address of the server (``http``)."""
    network: str | tuple[str, ...] = NO_NETWORK
    """Network access: ``none``; ``gateway`` for the policy's gateway, for the program of the `external` loop; a list of
    reachable hosts, such as ``[example.org, "*.example.com:8443", gateway]``; or ``all``."""
    limits: Limits = DEFAULT_LIMITS
    """Limits of the whole sandbox; the defaults are `DEFAULT_LIMITS`."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of all commands."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Files to write at the start, by path."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the back end."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "limits", dataclasses.replace(DEFAULT_LIMITS, **self.limits.non_null))
        words = (self.network,) if isinstance(self.network, str) else self.network
        known = isinstance(self.network, str) and self.network in NETWORKS
        if not known and (isinstance(self.network, str) or not words or {NO_NETWORK, ANY_NETWORK, "*"} & set(words)):
            raise UsageError(
                "sandbox.network is invalid",
                got=repr(self.network),
                expected=f"{', '.join(NETWORKS)}, or a list of hosts",
                hint=did_you_mean(words[0], NETWORKS) if words else None,
            )

    @property
    def uses_gateway(self) -> bool:
        """True if programs can reach the policy's gateway."""
        return self.network == GATEWAY or (not isinstance(self.network, str) and GATEWAY in self.network)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts that programs can reach through a proxy, as entries of an `AllowList`."""
        return () if isinstance(self.network, str) else tuple(name for name in self.network if name != GATEWAY)


def read_spec(given: SandboxSpec | Mapping[str, Any] | str) -> SandboxSpec:
    """Read a spec from the name of a back end, or from a mapping as in a config.

    >>> read_spec({"type": "local", "limits": {"seconds": 5}, "files": {"a.txt": "some text"}}).limits.seconds
    5

    Raises:
        UsageError: a key is unknown, or a value has the wrong type.
    """
    if isinstance(given, SandboxSpec):
        return given
    if isinstance(given, str):
        return SandboxSpec(type=given)
    values = dict(_check_keys(given, SandboxSpec, "sandbox"))
    if "limits" in values and not isinstance(values["limits"], Limits):
        values["limits"] = Limits(**_check_keys(values["limits"], Limits, "sandbox.limits"))
    for name in ("env", "files", "options"):
        if not isinstance(values.get(name, {}), Mapping):
            raise UsageError(f"sandbox.{name} is invalid", got=repr(values[name]), expected="keys and values")
    for name in ("type", "image", "url"):
        if not isinstance(values.get(name, ""), str | None):
            raise UsageError(f"sandbox.{name} is invalid", got=repr(values[name]), expected="text")
    network = values.get("network", "")
    if not isinstance(network, str | list | tuple) or not all(isinstance(host, str) for host in network):
        raise UsageError("sandbox.network is invalid", got=repr(network), expected="none, all, or a list of hosts")
    if not isinstance(network, str):
        values["network"] = tuple(network)
    values["env"] = {str(name): str(value) for name, value in values.get("env", {}).items()}
    values["files"] = {
        path: content.encode() if isinstance(content, str) else content
        for path, content in values.get("files", {}).items()
    }
    return SandboxSpec(**values)


def _check_keys(given: Any, kind: type, what: str) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise UsageError(f"{what} is invalid", got=repr(given), expected="keys and values")
    known = [one.name for one in dataclasses.fields(kind)]
    for key in given:
        if key not in known:
            hint = did_you_mean(key, known)
            raise UsageError(f"{what} has no key {key!r}", expected=", ".join(known), hint=hint)
    return given
