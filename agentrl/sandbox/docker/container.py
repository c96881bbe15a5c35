"""Settings of a container in the words of the Docker API: how it is closed off, and whose it is.

Labels name the process that made a container, so that what it left behind can be told from the rest.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from agentrl.errors import UsageError
from agentrl.sandbox.isolation import all_filter_programs
from agentrl.sandbox.spec import ANY_NETWORK, MIB, NO_NETWORK, Limits, SandboxSpec
from agentrl.sandbox.supervised import BOOT

DEFAULT_IMAGE = "python:3.12-slim"
_LIST_NAMES = ("readable", "writable")


@dataclass(frozen=True, slots=True, kw_only=True)
class DockerOptions:
    """Options of docker sandboxes: a spec's `options`."""

    python: str = "python3"
    """The image's Python, from 3.10 on, which runs the supervisor: a name in the image's ``PATH``, or a path."""
    folder: str | None = None
    """Where commands start, with what the image holds there: its own working folder when left out, else ``/work``."""
    readable: tuple[str, ...] = ()
    """Folders of the daemon's machine that can be read inside, under the same names."""
    writable: tuple[str, ...] = ()
    """Further folders that can be written, empty at the start."""
    user: int | None = None
    """The number of the user that commands are; one for each sandbox when left out."""
    life_s: float = 7200.0
    """The time budget: seconds after which a container ends itself, whoever is left to end it."""
    warm: int = 0
    """Started containers that are kept ready, so that a start need not wait for the daemon."""
    starts_per_s: float = 20.0
    """Containers that this process starts per second, at most."""
    pull: str = "missing"
    """Whether an image that is not there is pulled: ``missing`` or ``never``."""
    runtime: str | None = None
    """The container runtime, like ``runsc``; the daemon's own when left out."""


def read_options(spec: SandboxSpec) -> DockerOptions:
    """The options of a spec.

    Raises:
        UsageError: one is not understood, or the spec asks for what this back end does not have.
    """
    if spec.network not in (NO_NETWORK, ANY_NETWORK):
        raise UsageError(
            "a docker sandbox cannot tell hosts apart: Docker's networks let all through or none",
            got=spec.network,
            expected=f"network {NO_NETWORK} or {ANY_NETWORK}",
            hint=f"take network {NO_NETWORK} and give the policy tools that reach those hosts, like fetch_page",
        )
    known = {field.name: field for field in fields(DockerOptions)}
    for name in spec.options:
        if name not in known:
            raise UsageError(f"docker sandboxes have no option {name!r}", expected=", ".join(known))
    values: dict[str, Any] = {
        name: _list(name, value) if name in _LIST_NAMES else value for name, value in spec.options.items()
    }
    options = DockerOptions(**values)
    _require("python", options.python, isinstance(options.python, str) and options.python != "", "a program")
    _require("pull", options.pull, options.pull in ("missing", "never"), "missing or never")
    _require("folder", options.folder, options.folder is None or _is_folder(options.folder), "an absolute path below /")
    _require("user", options.user, options.user is None or _is_number(options.user, int, 1), "a number above 0")
    _require("warm", options.warm, _is_number(options.warm, int, 0), "a number of containers")
    _require("runtime", options.runtime, isinstance(options.runtime, str | None), "a name")
    for name in ("life_s", "starts_per_s"):
        value = getattr(options, name)
        _require(name, value, _is_number(value, int | float, 0) and value > 0, "a number above 0")
    return options


def _list(name: str, value: Any) -> tuple[str, ...]:
    is_list = isinstance(value, list | tuple) and all(isinstance(path, str) and _is_folder(path) for path in value)
    _require(name, value, is_list, "a list of absolute paths below /")
    return tuple(value)


def _is_folder(path: Any) -> bool:
    """True if it can be put into the daemon's options, too, in which commas and colons have a meaning."""
    is_path = isinstance(path, str) and path.startswith("/") and path.rstrip("/") != ""
    return is_path and ".." not in path.split("/") and not set(path) & set(":,\0")


def _is_number(value: Any, kind: Any, least: float) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and least <= value < 2**31


def _require(name: str, value: Any, holds: bool, expected: str) -> None:
    if not holds:
        raise UsageError(f"option {name} of docker sandboxes is not understood", got=repr(value), expected=expected)


FOLDER = "/work"
WARM_S = 600.0
"""How long a container waits for its sandbox, before it ends itself."""
_CAPABILITIES = ("SETUID", "SETGID", "KILL", "CHOWN")
"""What the supervisor needs to run commands as a user without any, and to kill them."""
_SHARED_MEMORY = 64 * MIB
_RESERVE = 32 * MIB
"""Of the memory, what files cannot fill, so that the supervisor can still start something."""
_SUPERVISORS = 64
"""Processes of the supervisor, besides those of commands: one for each running command."""
_ULIMITS = {"core": 0, "msgqueue": 0}
_PODMAN_ULIMITS = {"nofile": 1024, "nproc": 4096}
"""What Podman else raises as far as the kernel goes, which needs rights that it may lack."""
_FIRST_USER, _FIRST_MAPPED_USER = 1_000_000_000, 10_000
_ANSWERS = 1
"""The supervisor's file descriptor for answers: standard output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """Facts about an image that is there."""

    id: str
    env: Mapping[str, str]
    folder: str
    """Where commands start."""
    volumes: tuple[str, ...]
    """Folders that the daemon would make writable, on disk."""
    content: bytes = b""
    """What it holds in `folder`, as a tar file that begins with the folder's name; empty: nothing."""

    @classmethod
    def read(cls, told: Mapping[str, Any], folder: str | None) -> Image:
        """Read the daemon's description of it, without content.

        Args:
            told: The daemon's words.
            folder: Where commands are to start; the image's own working folder when ``None``.
        """
        config = told.get("Config") or {}
        variables = [line.partition("=") for line in config.get("Env") or ()]
        return cls(
            id=told["Id"],
            env={name: value for name, _, value in variables},
            folder=(folder or config.get("WorkingDir") or "").rstrip("/") or FOLDER,
            volumes=tuple(config.get("Volumes") or ()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Traits in which a daemon differs from others."""

    is_mapped: bool = False
    """It maps users, so that only some numbers exist."""
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
    """A container that is to be started."""

    config: Mapping[str, Any]
    """As the API wants it, without labels."""
    image: Image
    options: DockerOptions
    traits: Traits

    @property
    def key(self) -> str:
        """Equal for containers that can stand in for each other."""
        return json.dumps([self.config, self.image.folder, self.options.user], sort_keys=True)

    def new_user(self) -> int:
        """For the commands of one more container: numbers of processes are limited by user."""
        if self.options.user is not None:
            return self.options.user
        first = _FIRST_MAPPED_USER if self.traits.is_mapped else _FIRST_USER
        return first + secrets.randbelow(50_000 if self.traits.is_mapped else _FIRST_USER)

    def create(self, labels: Mapping[str, str]) -> dict[str, Any]:
        """Make the request to the daemon."""
        return {**self.config, "Labels": dict(labels)}

    def settings(self, user: int) -> dict[str, Any]:
        """Make the settings of the supervisor."""
        return {
            "user": user,
            "groups": [],
            "folder": self.image.folder,
            "owned": [path for path in self.config["HostConfig"]["Tmpfs"] if path != "/tmp"],
            "answers": _ANSWERS,
            "life": WARM_S,
            "filters": all_filter_programs(),
        }


def plan(spec: SandboxSpec, options: DockerOptions, image: Image, traits: Traits) -> Plan:
    """The container of a spec.

    Raises:
        UsageError: folders are in each other's way.
    """
    for path in options.readable:
        if any(_is_below(path, place) for place in (image.folder, *options.writable, "/tmp")):
            raise UsageError("a readable folder of a docker sandbox is one that can be written", got=path)
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
    """Memory file systems, which are empty at first; the supervisor gives all but ``/tmp`` to the commands' user."""
    empty = ",notmpcopyup" if traits.is_podman else ""
    room = f"rw,exec,nosuid,nodev,size={_room(limits)}{empty}"
    return {**dict.fromkeys(folders, f"{room},mode=0755"), "/tmp": f"{room},mode=1777"}


def _room(limits: Limits) -> int:
    """The size of each: all of the usual ones together fit into the memory."""
    memory, disk = limits.memory_bytes or 0, limits.disk_bytes or 0
    return max(min(disk, (memory - _RESERVE) // 3), MIB)


def _is_below(path: str, folder: str) -> bool:
    return f"{path.rstrip('/')}/".startswith(f"{folder}/")


OWNER, UNTIL = "agentrl.owner", "agentrl.until"
"""Labels: the process, and the time (seconds since 1970) at which the container has ended itself."""
SLACK_S = 60.0
"""How much clocks of machines may differ."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A process."""

    machine: str
    """This boot of this machine, and the namespace in which `pid` counts."""
    pid: int
    started: int
    """In the kernel's ticks: numbers of processes are used again."""

    @classmethod
    def this(cls) -> Owner:
        """This process."""
        return cls(_machine(), os.getpid(), _started(os.getpid()))

    @classmethod
    def read(cls, label: str) -> Owner | None:
        """Read a label; ``None`` when it is none of ours."""
        machine, _, rest = label.partition("/")
        pid, _, started = rest.partition("/")
        return cls(machine, int(pid), int(started)) if pid.isdigit() and started.lstrip("-").isdigit() else None

    def __str__(self) -> str:
        return f"{self.machine}/{self.pid}/{self.started}"


def labels(life_s: float, now: float) -> dict[str, str]:
    """Make the labels of a container that this process starts.

    Args:
        life_s: Seconds after which it has ended itself.
        now: Seconds since 1970.
    """
    return {OWNER: str(Owner.this()), UNTIL: f"{now + life_s:.0f}"}


def is_left_behind(told: Mapping[str, str], now: float) -> bool:
    """True if a container with these labels can be removed: its owner has ended, or its time is over.

    Whether the owner lives can only be told on its own machine.
    """
    owner, until = Owner.read(told.get(OWNER, "")), told.get(UNTIL, "")
    if owner is None:
        return False
    is_over = until.isdigit() and now > float(until) + SLACK_S
    return is_over or (owner.machine == _machine() and _started(owner.pid) != owner.started)


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.readlink('/proc/self/ns/pid').strip('pid:[]')}"


def _started(pid: int) -> int:
    """Return when a process started; -1 where there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return -1
