"""System prompt of a language model that plays a customer: its part, identity, requests and way of talking."""

from __future__ import annotations

import functools
import importlib.resources
from collections.abc import Iterator
from typing import Any

import orjson

from .phrases import STOP
from .requests import Fact, Persona, Request, RequestKind, Scenario

GREETING = "Customer service, good day. What can I do for you?"
"""First message to the customer's model. The agent does not say it; chats have to begin with a user message."""

_DATA = importlib.resources.files(__package__).joinpath("data")
_END = {
    RequestKind.QUESTION: "It is done when the agent has answered your whole question.",
    RequestKind.REFUSED: "If the agent says that this is not possible, do not insist: continue with the next request.",
    RequestKind.TRANSFER: "It is done when the agent says that another person will take over.",
}
_USUAL_END = "It is done when the agent says that it has been done. A promise to do it is not enough."


def brief(scenario: Scenario) -> str:
    """Return the system prompt of a customer, without anything that the agent has to find out or do."""
    requests = scenario.requests
    noted = [_notes(scenario, request, f"Request {n} of {len(requests)}") for n, request in enumerate(requests, 1)]
    return _template().format(
        identity=_identity(scenario), persona=_personas()[scenario.persona], requests="\n\n".join(noted), stop=STOP
    )


@functools.cache
def _template() -> str:
    return _DATA.joinpath("customer.md").read_text(encoding="utf-8").strip()


@functools.cache
def _personas() -> dict[str, Any]:
    words: dict[str, Any] = orjson.loads(_DATA.joinpath("personas.json").read_bytes())
    return words


def _identity(scenario: Scenario) -> str:
    if scenario.persona is Persona.FORGETFUL:
        return f"{scenario.by_name} You do not know your email address or user id."
    choice = (
        "Give the one that you are asked for; if you can choose, give the email address. You do not know a user id."
    )
    return f"{scenario.by_email} {scenario.by_name} {choice}"


def _notes(scenario: Scenario, request: Request, title: str) -> str:
    wavering = scenario.wavers_about(request)
    lines = [line for fact in request.facts for line in _fact_lines(fact, is_wavering=fact is wavering)]
    known = ["What you know about it:", *lines] if lines else ["You do not know anything more about it."]
    begin, end = f'You begin with: "{request.opening}"', _END.get(request.kind, _USUAL_END)
    return "\n".join([f"## {title}", begin, *known, end])


def _fact_lines(fact: Fact, *, is_wavering: bool) -> Iterator[str]:
    if not is_wavering:
        yield f'- "{fact.text}"'
        return
    yield f'- At first: "{fact.at_first}"'
    yield f'- Once the agent asks for your consent, say instead: "No, wait. {fact.text}" From then on only this counts.'
