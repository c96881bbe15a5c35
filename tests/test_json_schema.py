"""What a JSON schema says: references, types of a property, null, and words for people and models."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.tool.json_schema import accepts_null, declared_types, describe, follow_pointer, property_schema, resolve

ROOT = {
    "$defs": {
        "Size": {"type": "integer", "description": "In metres."},
        "Colour": {"enum": ["red", "blue"], "type": "string"},
        "Tree": {"type": "object", "properties": {"left": {"$ref": "#/$defs/Tree"}}},
        "a/b": {"type": "null"},
    },
    "properties": {"size": {"$ref": "#/$defs/Size", "title": "Size"}},
    "allOf": [{"properties": {"colour": {"$ref": "#/$defs/Colour"}}}],
    "patternProperties": {"^x-": {"type": "number"}},
}


def test_a_property_is_found_with_its_references_resolve() -> None:
    assert property_schema("size", ROOT) == {"type": "integer", "description": "In metres.", "title": "Size"}
    assert property_schema("colour", ROOT) == {"enum": ["red", "blue"], "type": "string"}
    assert property_schema("x-y", ROOT) == {"type": "number"}
    assert property_schema("unknown", ROOT) is True


@pytest.mark.parametrize(
    ("pointer", "found"),
    [
        ("", ROOT),
        ("/$defs/Size/type", "integer"),
        ("/$defs/a~1b", {"type": "null"}),
        ("/allOf/0/properties/colour", {"$ref": "#/$defs/Colour"}),
        ("/allOf/1", None),
        ("/allOf/first", None),
        ("/$defs/Size/type/more", None),
    ],
)
def test_pointer_resolves_to_a_part_of_the_root(pointer: str, found: Any) -> None:
    assert follow_pointer(pointer, ROOT) == found


def test_a_circle_of_references_ends() -> None:
    circle = {"$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}}}
    assert resolve({"$ref": "#/$defs/A"}, circle) is True


@pytest.mark.parametrize(
    ("schema", "accepts"),
    [
        ({}, True),
        (True, True),
        ({"description": "Anything."}, True),
        ({"type": "string"}, False),
        ({"type": "string", "nullable": True}, True),
        ({"type": ["string", "null"]}, True),
        ({"type": "a type of another program"}, False),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, True),
        ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, False),
        ({"$ref": "#/$defs/Size"}, False),
        ({"$ref": "#/$defs/a~1b"}, True),
        ({"enum": ["red", None]}, True),
        ({"enum": ["red"]}, False),
    ],
)
def test_null_is_accepted_where_the_types_allow_it_or_none_is_declared(schema: Any, accepts: bool) -> None:
    assert accepts_null(schema, ROOT) is accepts


def test_any_of_unites_types_and_all_of_intersects_them() -> None:
    assert declared_types({"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/Colour"}]}, ROOT) == {"integer", "string"}
    assert declared_types({"allOf": [{"type": ["integer", "string"]}, {"type": "number"}]}, ROOT) == {"integer"}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "integer"}, "a whole number"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "a whole number or null"),
        ({"$ref": "#/$defs/Colour"}, 'one of "red", "blue"'),
        ({"$ref": "#/$defs/Tree"}, "a JSON object"),
        ({"anyOf": [{"$ref": "#/$defs/Tree"}, {"type": "object"}]}, "a JSON object"),
        ({"$ref": "#/$defs/gone"}, "a JSON object"),
        ({}, "anything"),
        ({"enum": ["x" * 100]}, 'one of "' + "x" * 79 + "…"),
    ],
)
def test_a_schema_is_described_in_words(schema: dict[str, Any], words: str) -> None:
    assert describe(schema, ROOT) == words
