"""Prompts of the environments: an example is an action, and reads like plain words rather than like a function."""

from __future__ import annotations

import json
import re

import pytest
from agentrl.envs.household.spec import INSTRUCTIONS, TOOL_INSTRUCTIONS

from agentrl.env.lookup import resolve_environment
from agentrl.registry import Kind, names

NOT_ENGLISH = re.compile(
    r"\bis no [a-z]+\.|\bwhoever\b|\bsomebody\b|\bbeside\b|\bof which\b|\bof whom\b|\bwhat is told\b"
)
HOUSEHOLD_WORDS = {
    "go to": "go to fridge 1",
    "open": "open fridge 1",
    "close": "close fridge 1",
    "take": "take apple 1 from fridge 1",
    "move": "move apple 1 to countertop 1",
    "heat": "heat apple 1 with microwave 1",
    "cool": "cool apple 1 with fridge 1",
    "clean": "clean apple 1 with sinkbasin 1",
    "slice": "slice apple 1 with knife 1",
    "use": "use desklamp 1",
    "examine": "examine apple 1",
}


@pytest.mark.parametrize("name", names(Kind.ENVIRONMENT))
def test_instructions_are_plain_english(name: str) -> None:
    spec = resolve_environment(name)
    for text in (spec.instructions, spec.tool_instructions):
        assert not NOT_ENGLISH.findall(text)


def test_every_household_command_is_shown_as_the_line_that_is_written() -> None:
    lines = INSTRUCTIONS.splitlines()
    assert [line for line in lines if line in HOUSEHOLD_WORDS.values()] == list(HOUSEHOLD_WORDS.values())
    assert {"look", "inventory", "help"} <= set(lines)
    assert "(" not in INSTRUCTIONS
    assert "are not tools" in TOOL_INSTRUCTIONS


def test_the_retail_desk_is_short_before_the_first_word() -> None:
    spec = resolve_environment("retail")
    schemas = json.dumps([tool.schema for tool in spec.make().tools])  # type: ignore[union-attr]
    assert len(schemas) + len(spec.tool_instructions) < 9000
    assert len(spec.instructions) < 4200
