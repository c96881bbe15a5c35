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
class Plan:
    """A container that is to be started."""

    config: Mapping[str, Any]
    """As the API wants it, without labels and user."""
    image: Image
    options: DockerOptions
    is_mapped: bool
    """The daemon maps users, so that only some numbers exist."""

    @property
    def key(self) -> str:
        """Equal for containers that can stand in for each other."""
        return json.dumps([self.config, self.image.folder, self.options.user], sort_keys=True)

    def new_user(self) -> int:
        """For the commands of one more container: numbers of processes are limited by user."""
        if self.options.user is not None:
            return self.options.user
        first = _FIRST_MAPPED_USER if self.is_mapped else _FIRST_USER
        return first + secrets.randbelow(50_000 if self.is_mapped else _FIRST_USER)

    def create(self, user: int, labels: Mapping[str, str]) -> dict[str, Any]:
        """What the daemon is told."""
        host = dict(self.config["HostConfig"])
        host["Tmpfs"] = {path: options.format(user=user) for path, options in host["Tmpfs"].items()}
        return {**self.config, "HostConfig": host, "Labels": dict(labels)}

    def settings(self, user: int) -> dict[str, Any]:
        """What the supervisor is told."""
        return {
            "user": user,
            "groups": [],
            "folder": self.image.folder,
            "answers": _ANSWERS,
            "life": WARM_S,
            "filters": all_filter_programs(),
        }


def plan(spec: SandboxSpec, options: DockerOptions, image: Image, *, is_mapped: bool) -> Plan:
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
        "Healthcheck": {"Test": ["NONE"]},
        "HostConfig": _host(spec, options, image),
    }
    return Plan(config=config, image=image, options=options, is_mapped=is_mapped)


def _host(spec: SandboxSpec, options: DockerOptions, image: Image) -> dict[str, Any]:
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
        "Ulimits": [{"Name": "core", "Soft": 0, "Hard": 0}, {"Name": "msgqueue", "Soft": 0, "Hard": 0}],
        "LogConfig": {"Type": "none", "Config": {}},
        "Binds": [f"{path}:{path}:ro" for path in options.readable],
        "Tmpfs": _writable(spec.limits, image.folder, (*options.writable, *image.volumes)),
    }


def _writable(limits: Limits, folder: str, more: tuple[str, ...]) -> dict[str, str]:
    """Memory file systems; ``{user}`` stands for the commands' user."""
    room = f"rw,exec,nosuid,nodev,size={_room(limits)}"
    owned = f"{room},mode=0755,uid={{user}},gid={{user}}"
    return {**dict.fromkeys(more, owned), "/tmp": f"{room},mode=1777", folder: owned}


def _room(limits: Limits) -> int:
    """The size of each: all of the usual ones together fit into the memory."""
    memory, disk = limits.memory_bytes or 0, limits.disk_bytes or 0
    return max(min(disk, (memory - _RESERVE) // 3), MIB)


def _is_below(path: str, folder: str) -> bool:
    return f"{path.rstrip('/')}/".startswith(f"{folder}/")
