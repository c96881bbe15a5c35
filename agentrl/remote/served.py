"""What a server tells about its environment: enough to make the spec that a local one would have."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.env import EnvironmentSpec
from agentrl.remote.wire import PROTOCOL, VERSION, to_json

_TOLD = ("name", "description", "instructions", "tool_instructions", "max_turns", "success_threshold")


class Part(enum.StrEnum):
    """What an environment may offer besides `reset` and `step`, by its name in the contract (`agentrl.env`)."""

    STATE_KEY = "state_key"
    SNAPSHOT = "snapshot"
    RESTORE = "restore"
    EXPERT = "expert"
    ADMISSIBLE_ACTIONS = "admissible_actions"
    TOOL_MESSAGE = "tool_message"
    TOOLS = "tools"
    WEB_PAGE = "web_page"
    ACTION_SPACE = "action_space"


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """An environment behind a server."""

    url: str
    spec: Mapping[str, Any]
    """The facts of its `EnvironmentSpec` that are plain data."""
    parts: frozenset[Part]
    action_hint: str
    fingerprint: str
    """Checksum of all this and the options: another one is another environment."""

    @property
    def name(self) -> str:
        """Its name on the server."""
        return str(self.spec["name"])

    @property
    def reward_range(self) -> tuple[float, float]:
        """Least and greatest return; JSON has no infinity, so that an open end is ``None`` there."""
        low, high = self.spec["reward_range"]
        return -math.inf if low is None else float(low), math.inf if high is None else float(high)


def write_served(
    spec: EnvironmentSpec, options: Mapping[str, Any], parts: frozenset[Part], action_hint: str
) -> dict[str, Any]:
    """The answer of the info route."""
    told: dict[str, Any] = {name: getattr(spec, name) for name in _TOLD}
    told["max_turns"] = spec.turns_under(options)
    told["splits"] = list(spec.splits)
    told["scores"] = dict(spec.scores)
    told["reward_range"] = [value if math.isfinite(value) else None for value in spec.reward_range]
    told["shows_images"] = spec.shows_images(options)
    told["options"] = {name: _shown(value) for name, value in options.items()}
    facts = {"spec": told, "parts": sorted(parts), "action_hint": action_hint}
    fingerprint = hashlib.sha256(to_json(facts)).hexdigest()[:16]
    return {"protocol": PROTOCOL, "version": VERSION, **facts, "fingerprint": fingerprint}


def read_served(url: str, info: Mapping[str, Any]) -> Served:
    """What `write_served` wrote; parts that this version does not know are left out."""
    known = {part.value for part in Part}
    return Served(
        url=url,
        spec=info["spec"],
        parts=frozenset(Part(part) for part in info["parts"] if part in known),
        action_hint=info["action_hint"],
        fingerprint=info["fingerprint"],
    )


def spec_facts(served: Served) -> dict[str, Any]:
    """Keyword arguments of the `EnvironmentSpec` of a served environment, besides its factories."""
    facts = {name: served.spec[name] for name in _TOLD if name != "name"}
    return {
        **facts,
        "splits": tuple(served.spec["splits"]),
        "scores": dict(served.spec["scores"]),
        "reward_range": served.reward_range,
        "images_of": _always if served.spec["shows_images"] else None,
    }


def _always(**options: Any) -> bool:
    return True


def _shown(value: Any) -> Any:
    if dataclasses.is_dataclass(value) or not isinstance(value, str | int | float | bool | list | dict | type(None)):
        return str(value)
    return value
