"""What a language model is told that plays a customer: its part, who it is, what it wants, and how it talks."""

from __future__ import annotations

import functools
import importlib.resources
from collections.abc import Iterator
from typing import Any

import orjson

from .phrases import STOP
from .requests import Fact, Persona, Request, RequestKind, Scenario

GREETING = "Customer service, good day. What can I do for you?"
"""What the customer hears first. The agent does not say it: chats begin with a user."""

_DATA = importlib.resources.files(__package__).joinpath("data")
_END = {
    RequestKind.QUESTION: "It is done when the agent has told you all that you ask here.",
    RequestKind.REFUSED: "If the agent says that this is not possible, do not insist: go on to the next request.",
    RequestKind.TRANSFER: "It is done when the agent says that somebody else takes over.",
}
_USUAL_END = "It is done when the agent says that it has been done; agreeing that it will be is not enough."


def brief(scenario: Scenario) -> str:
    """Return the system prompt of a customer. What the agent has to find out or to do does not stand in it."""
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
        return f"{scenario.by_name} You do not know your email address, nor a user id."
    choice = "Give the one that you are asked for; if it is all the same, the email address. You do not know a user id."
    return f"{scenario.by_email} {scenario.by_name} {choice}"


def _notes(scenario: Scenario, request: Request, title: str) -> str:
    told = [line for fact in request.facts for line in _told(fact, is_wavering=fact is scenario.wavers_about(request))]
    known = ["What you know about it:", *told] if told else ["There is nothing more to know about it."]
    begin, end = f'You begin with: "{request.opening}"', _END.get(request.kind, _USUAL_END)
    return "\n".join([f"## {title}", begin, *known, end])


def _told(fact: Fact, *, is_wavering: bool) -> Iterator[str]:
    if not is_wavering:
        yield f'- "{fact.text}"'
        return
    yield f'- At first: "{fact.at_first}"'
    yield f'- Once the agent asks for your consent, instead: "No, wait. {fact.text}" From then on only this holds.'
