"""What a sandbox is like, as a config or an environment's options say it."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl.errors import UsageError
from agentrl.sandbox.limits import DEFAULT_LIMITS, Limits

NO_NETWORK = "none"
ANY_NETWORK = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """What a sandbox is like. What a back end cannot give is refused, never ignored."""

    type: str = "local"
    """The back end's registry name: ``local``, ``docker``, ``http``, or one that a plugin brings."""
    image: str | None = None
    """The container image (``docker``)."""
    url: str | None = None
    """The server's address (``http``)."""
    network: str | tuple[str, ...] = NO_NETWORK
    """``none``; ``all``; or the host names that can be reached."""
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
    if not isinstance(values.get("network", ""), str):
        values["network"] = tuple(map(str, values["network"]))
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
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else None
            raise UsageError(f"{what} has no key {key!r}", expected=", ".join(known), hint=hint)
    return given
