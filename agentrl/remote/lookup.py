"""How a server's address becomes the spec of its environment."""

from __future__ import annotations

import functools
from typing import Any

from agentrl.env import EnvironmentSpec, Isolation
from agentrl.errors import UsageError
from agentrl.remote.client import PATIENCE_S, MakeRemote, remote_tasks
from agentrl.remote.link import NoProtocol, Unanswered, ask_now
from agentrl.remote.wire import HEALTH, INFO, PROTOCOL, VERSION, read_served, spec_facts

OPTIONS = {"patience_s": PATIENCE_S}
"""The options of every remote environment; those of the served one belong to its server."""


def remote_spec(url: str) -> EnvironmentSpec:
    """The spec of the environment that is served at `url`; its name is the address.

    Raises:
        UsageError: nobody answers there, who answers is no environment server or one of another version, or the token
            is wrong.
    """
    _check_version(url, _ask(url, HEALTH))
    served = read_served(url, _ask(url, INFO))
    return EnvironmentSpec(
        name=url,
        make=MakeRemote(served),
        tasks=functools.partial(remote_tasks, url),
        isolation=Isolation.INLINE,
        options=OPTIONS,
        **spec_facts(served),
    )


def _ask(url: str, route: str) -> Any:
    try:
        return ask_now(url, route, patience_s=0.0)
    except Unanswered as error:
        hint = "start one: agentrl env serve NAME --port PORT"
        raise UsageError(f"no environment server answers at {url}", got=error.got, hint=hint) from error
    except NoProtocol as error:
        raise _no_server(url, error.got) from error


def _check_version(url: str, health: Any) -> None:
    if not isinstance(health, dict) or health.get("protocol") != PROTOCOL:
        raise _no_server(url, repr(health)[:200])
    if VERSION not in health.get("versions", ()):
        raise UsageError(
            f"the environment server {url} speaks another version of the protocol",
            got=", ".join(map(str, health.get("versions", ()))) or "none",
            expected=VERSION,
            hint="install the same version of agentrl on both sides",
        )


def _no_server(url: str, got: object) -> UsageError:
    return UsageError(
        f"{url} is no environment server",
        got=got,
        expected="the address that agentrl env serve prints, /split may follow",
    )
