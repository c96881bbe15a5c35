"""How a container is closed off, in the words of the Docker API."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.errors import UsageError
from agentrl.sandbox.docker.options import DockerOptions
from agentrl.sandbox.limits import MIB, Limits
from agentrl.sandbox.opening import BOOT
from agentrl.sandbox.seccomp import all_filter_programs
from agentrl.sandbox.spec import ANY_NETWORK, SandboxSpec

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
    """What is needed of an image that is there."""

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
        """As the daemon describes it, without content.

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
    """How a daemon differs from others."""

    is_mapped: bool = False
    """It maps users, so that only some numbers exist."""
    is_podman: bool = False

    @classmethod
    def read(cls, version: Mapping[str, Any], info: Mapping[str, Any]) -> Traits:
        """As the daemon describes itself."""
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
        """What the daemon is told."""
        return {**self.config, "Labels": dict(labels)}

    def settings(self, user: int) -> dict[str, Any]:
        """What the supervisor is told."""
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
