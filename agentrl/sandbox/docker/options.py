"""The options of docker sandboxes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from agentrl.errors import UsageError
from agentrl.sandbox.spec import ANY_NETWORK, NO_NETWORK, SandboxSpec

DEFAULT_IMAGE = "python:3.12-slim"
_LIST_NAMES = ("readable", "writable")


@dataclass(frozen=True, slots=True, kw_only=True)
class DockerOptions:
    """What a spec's `options` may hold."""

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
    """Whether it can be put into the daemon's options, too, which know commas and colons."""
    is_path = isinstance(path, str) and path.startswith("/") and path.rstrip("/") != ""
    return is_path and ".." not in path.split("/") and not set(path) & set(":,\0")


def _is_number(value: Any, kind: Any, least: float) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and least <= value < 2**31


def _require(name: str, value: Any, holds: bool, expected: str) -> None:
    if not holds:
        raise UsageError(f"option {name} of docker sandboxes is not understood", got=repr(value), expected=expected)
