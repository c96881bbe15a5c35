"""Settings of a container for the Docker API: options, isolation, and labels with the owner."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import UsageError
from agentrl.sandbox.control_groups import process_start
from agentrl.sandbox.isolation import all_filter_programs
from agentrl.sandbox.spec import ANY_NETWORK, MIB, Limits, SandboxSpec
from agentrl.sandbox.supervised import BOOT

DEFAULT_IMAGE = "python:3.12-slim"
FOLDER = "/work"
WARM_S = 600.0
"""Seconds that an unused container waits for a sandbox before it exits."""
_CAPABILITIES = ("SETUID", "SETGID", "KILL", "CHOWN")
"""Capabilities that the supervisor needs to run commands as a user without capabilities, and to kill them."""
_SHARED_MEMORY = 64 * MIB
_RESERVE = 32 * MIB
"""Memory reserved from tmpfs files, so that the supervisor can still start processes."""
_SUPERVISORS = 64
"""Maximum processes of the supervisor, in addition to those of commands: one for each running command."""
_ULIMITS = {"core": 0, "msgqueue": 0}
_PODMAN_ULIMITS = {"nofile": 1024, "nproc": 4096}
"""Limits that Podman would otherwise raise to the kernel's maximum, which it may not be permitted to do."""
_FIRST_USER, _FIRST_MAPPED_USER = 1_000_000_000, 10_000
_ANSWERS = 1
"""File descriptor for the supervisor's answers: standard output."""
OWNER, UNTIL = "agentrl.owner", "agentrl.until"
"""Labels for the owning process and for the Unix time in seconds by which the container has exited on its own."""
SLACK_S = 60.0
"""Maximum difference between the clocks of machines, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DockerOptions:
    """Options of docker sandboxes: a spec's `options`."""

    python: str = "python3"
    """The image's Python (3.10 or newer), which runs the supervisor: a name in the image's ``PATH``, or a path."""
    folder: str | None = None
    """Working folder of commands, with the image's content; by default the image's working folder, or ``/work``."""
    readable: tuple[str, ...] = ()
    """Folders of the daemon's machine that are readable inside, at the same paths."""
    writable: tuple[str, ...] = ()
    """Additional writable folders, initially empty."""
    user: int | None = None
    """User ID of commands; a different one for each sandbox by default."""
    life_s: float = 7200.0
    """Seconds after which a container exits on its own, even if its owner has ended."""
    warm: int = 0
    """Number of started containers that are kept ready, so that a start does not wait for the daemon."""
    starts_per_s: float = 20.0
    """Maximum number of containers that this process starts per second."""
    pull: str = "missing"
    """Pull policy for images: ``missing`` or ``never``."""
    runtime: str | None = None
    """Container runtime, such as ``runsc``; the daemon's default if not set."""


def _is_number(kind: Any, least: float) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind) and not isinstance(value, bool) and least <= value < 2**31


def _is_folder(path: Any) -> bool:
    """Return True for an absolute path that the daemon's options accept: commas and colons are separators there."""
    is_path = isinstance(path, str) and path.startswith("/") and path.rstrip("/") != ""
    return is_path and ".." not in path.split("/") and not set(path) & set(":,\0")


def _are_folders(paths: Any) -> bool:
    return isinstance(paths, list | tuple) and all(map(_is_folder, paths))


_OPTIONS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "python": (lambda value: isinstance(value, str) and value != "", "a program"),
    "folder": (lambda value: value is None or _is_folder(value), "an absolute path below /"),
    "readable": (_are_folders, "a list of absolute paths below /"),
    "writable": (_are_folders, "a list of absolute paths below /"),
    "user": (lambda value: value is None or _is_number(int, 1)(value), "a number above 0"),
    "life_s": (_is_number(int | float, 1e-9), "a number above 0"),
    "warm": (_is_number(int, 0), "a number of containers"),
    "starts_per_s": (_is_number(int | float, 1e-9), "a number above 0"),
    "pull": (lambda value: value in ("missing", "never"), "missing or never"),
    "runtime": (lambda value: isinstance(value, str | None), "a name"),
}
"""Check and description of the valid values of each option."""


def read_options(spec: SandboxSpec) -> DockerOptions:
    """Read the options of a spec.

    Raises:
        UsageError: an option is unknown or invalid.
    """
    for name, value in spec.options.items():
        if name not in _OPTIONS:
            raise UsageError(f"docker sandboxes have no option {name!r}", expected=", ".join(_OPTIONS))
        accepts, expected = _OPTIONS[name]
        if not accepts(value):
            raise UsageError(f"option {name} of docker sandboxes is invalid", got=repr(value), expected=expected)
    lists = {name: tuple(value) for name, value in spec.options.items() if isinstance(value, list)}
    return DockerOptions(**{**spec.options, **lists})


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """Description of an image on the daemon's machine."""

    id: str
    env: Mapping[str, str]
    folder: str
    """Working folder of commands."""
    volumes: tuple[str, ...]
    """Volumes of the image, which the daemon would make writable on disk."""
    content: bytes = b""
    """Content of `folder` as a tar file whose paths begin with the folder's name; empty if there is none."""

    @classmethod
    def read(cls, described: Mapping[str, Any], folder: str | None) -> Image:
        """Read the daemon's description of an image, without content; `folder` replaces the image's working folder."""
        config = described.get("Config") or {}
        variables = [line.partition("=") for line in config.get("Env") or ()]
        return cls(
            id=described["Id"],
            env={name: value for name, _, value in variables},
            folder=(folder or config.get("WorkingDir") or "").rstrip("/") or FOLDER,
            volumes=tuple(config.get("Volumes") or ()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Properties that differ between daemons."""

    is_mapped: bool = False
    """True if the daemon maps user IDs, so that only some exist."""
    is_podman: bool = False

    @classmethod
    def read(cls, version: Mapping[str, Any], info: Mapping[str, Any]) -> Traits:
        """Read the daemon's description of itself."""
        security, parts = str(info.get("SecurityOptions")), version.get("Components") or ()
        return cls(
            is_mapped="name=userns" in security or "name=rootless" in security,
            is_podman=any("Podman" in str(part.get("Name")) for part in parts),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Plan of a container to start."""

    config: Mapping[str, Any]
    """Container configuration for the API, without labels."""
    image: Image
    options: DockerOptions
    traits: Traits

    @property
    def key(self) -> str:
        """Key that is equal for interchangeable containers."""
        return json.dumps([self.config, self.image.folder, self.options.user], sort_keys=True)

    def settings(self) -> dict[str, Any]:
        """Return the settings of a new supervisor, with a new user, because processes are counted per user."""
        first, count = (_FIRST_MAPPED_USER, 50_000) if self.traits.is_mapped else (_FIRST_USER, _FIRST_USER)
        return {
            "user": self.options.user or first + secrets.randbelow(count),
            "groups": [],
            "folder": self.image.folder,
            "owned": [path for path in self.config["HostConfig"]["Tmpfs"] if path != "/tmp"],
            "answers": _ANSWERS,
            "life": WARM_S,
            "filters": all_filter_programs(),
        }


def plan(spec: SandboxSpec, options: DockerOptions, image: Image, traits: Traits) -> Plan:
    """Plan the container of a spec.

    Raises:
        UsageError: a readable folder is inside a writable one.
    """
    for path in options.readable:
        if any(_is_below(path, folder) for folder in (image.folder, *options.writable, "/tmp")):
            raise UsageError("a readable folder of a docker sandbox is inside a writable one", got=path)
    config = {
        "Image": image.id,
        "Entrypoint": [],
        "Cmd": [options.python, *BOOT],
        "User": "0:0",
        "WorkingDir": "/",
        "Hostname": "sandbox",
        "OpenStdin": True,
        "StdinOnce": True,
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": True,
        "Tty": False,
        **({} if traits.is_podman else {"Healthcheck": {"Test": ["NONE"]}}),
        "HostConfig": _host(spec, options, image, traits),
    }
    return Plan(config=config, image=image, options=options, traits=traits)


def _host(spec: SandboxSpec, options: DockerOptions, image: Image, traits: Traits) -> dict[str, Any]:
    memory = spec.limits.memory_bytes or 0
    runtime = {"Runtime": options.runtime} if options.runtime is not None else {}
    return {
        **runtime,
        "AutoRemove": True,
        "NetworkMode": "default" if spec.network == ANY_NETWORK else "none",
        "IpcMode": "private",
        "ReadonlyRootfs": True,
        "CapDrop": ["ALL"],
        "CapAdd": list(_CAPABILITIES),
        "SecurityOpt": ["no-new-privileges"],
        "Memory": memory,
        "MemorySwap": memory,
        "PidsLimit": (spec.limits.processes or 0) + _SUPERVISORS,
        "ShmSize": min(_SHARED_MEMORY, _room(spec.limits)),
        "Ulimits": [
            {"Name": name, "Soft": most, "Hard": most}
            for name, most in (_ULIMITS | _PODMAN_ULIMITS if traits.is_podman else _ULIMITS).items()
        ],
        "LogConfig": {"Type": "none", "Config": {}},
        "Binds": [f"{path}:{path}:ro" for path in options.readable],
        "Tmpfs": _writable(spec.limits, (*options.writable, *image.volumes, image.folder), traits),
    }


def _writable(limits: Limits, folders: tuple[str, ...], traits: Traits) -> dict[str, str]:
    """Return tmpfs mounts, initially empty; the supervisor gives all but ``/tmp`` to the commands' user."""
    empty = ",notmpcopyup" if traits.is_podman else ""
    room = f"rw,exec,nosuid,nodev,size={_room(limits)}{empty}"
    return {**dict.fromkeys(folders, f"{room},mode=0755"), "/tmp": f"{room},mode=1777"}


def _room(limits: Limits) -> int:
    """Return the size of each tmpfs mount, small enough that the default mounts together fit into memory."""
    memory, disk = limits.memory_bytes or 0, limits.disk_bytes or 0
    return max(min(disk, (memory - _RESERVE) // 3), MIB)


def _is_below(path: str, folder: str) -> bool:
    return f"{path.rstrip('/')}/".startswith(f"{folder}/")


def this_owner() -> str:
    """Return a unique name of this process: boot and PID namespace, PID, and start time, as PIDs are reused."""
    return f"{_machine()}/{os.getpid()}/{process_start(os.getpid())}"


def labels(life_s: float, now: float) -> dict[str, str]:
    """Return the labels of a container that this process starts now, and that exits within `life_s` seconds."""
    return {OWNER: this_owner(), UNTIL: f"{now + life_s:.0f}"}


def is_left_behind(labels: Mapping[str, str], now: float) -> bool:
    """Return True if a container with these labels can be removed: its lifetime is over, or its owner has ended.

    The end of the owner is detected on the owner's machine only.
    """
    owner = re.fullmatch(r"(.*)/(\d+)/(-?\d+)", labels.get(OWNER, ""))
    if owner is None:
        return False
    machine, pid, started = owner.groups()
    until = labels.get(UNTIL, "")
    is_over = until.isdigit() and now > float(until) + SLACK_S
    return is_over or (machine == _machine() and process_start(int(pid)) != int(started))


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.readlink('/proc/self/ns/pid').strip('pid:[]')}"
