"""Options of another type are named before an environment is made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from agentrl.envs.option_types import typed_options

from agentrl.env.lookup import resolve_environment
from agentrl.errors import UsageError


@typed_options("somewhere")
def somewhere(*, size: int = 3, names: Iterable[str] | None = None, share: float = 0.5) -> tuple[Any, ...]:
    """Some options."""
    return size, names, share


def test_what_fits_goes_through() -> None:
    assert somewhere() == (3, None, 0.5)
    assert somewhere(size=4, names=["a"], share=1) == (4, ["a"], 1)
    with pytest.raises(TypeError, match="colour"):
        somewhere(colour="red")  # type: ignore[call-arg]


@pytest.mark.parametrize("options", [{"size": "4"}, {"size": 1.5}, {"size": True}, {"names": 7}, {"share": "half"}])
def test_what_does_not_fit_is_named(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(UsageError, match=f"the option {name} of somewhere has the wrong type"):
        somewhere(**options)


@pytest.mark.parametrize("name", ["alfworld", "household", "retail", "search_qa", "webshop"])
def test_environments_say_which_option_it_is(name: str) -> None:
    spec = resolve_environment(name)
    with pytest.raises(UsageError, match=f"the option max_steps of {name} has the wrong type: got 'x', expected int"):
        spec.make(max_steps="x")
