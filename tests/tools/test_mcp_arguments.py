"""Valid calls by the schemas of real MCP servers are passed on, and wrong ones are explained."""

from __future__ import annotations

import json
import logging

import pytest

pytest.importorskip("mcp")

from agentrl.tools.mcp_arguments import InputSchema

from agentrl.tool.schema import WrongArguments

DRAFT_7 = "http://json-schema.org/draft-07/schema#"
TEXT = {"type": "string"}
BASE = {"type": "object", "properties": {"owner": TEXT, "repo": TEXT}, "required": ["owner", "repo"]}
NODE = {"type": "object", "properties": {"name": TEXT, "children": {"type": "array", "items": {"$ref": "#/$defs/N"}}}}

VALID = {
    "a map of anything": ({"type": "object", "additionalProperties": {}}, {"any": 1, "name": "x"}),
    "listed and any other": (
        {"type": "object", "properties": {"q": TEXT}, "additionalProperties": {}},
        {"q": "x", "limit": 5},
    ),
    "listed and other numbers": (
        {"type": "object", "properties": {"q": TEXT}, "additionalProperties": {"type": "number"}},
        {"q": "x", "limit": 5},
    ),
    "any object": ({"type": "object"}, {"sql": "select 1", "params": [1]}),
    "nothing said at all": ({}, {"x": 1}),
    "a reference at the root": (
        {"$ref": "#/definitions/In", "definitions": {"In": BASE}, "$schema": DRAFT_7},
        {"owner": "a", "repo": "b"},
    ),
    "one of several objects": (
        {
            "type": "object",
            "oneOf": [
                {"properties": {"page_id": TEXT}, "required": ["page_id"], "additionalProperties": False},
                {"properties": {"database_id": TEXT}, "required": ["database_id"], "additionalProperties": False},
            ],
        },
        {"database_id": "d"},
    ),
    "all of a base and more": (
        {
            "type": "object",
            "allOf": [{"$ref": "#/$defs/Base"}, {"properties": {"title": TEXT}, "required": ["title"]}],
            "$defs": {"Base": BASE},
        },
        {"owner": "a", "repo": "b", "title": "c"},
    ),
    "any of two sets next to properties": (
        {
            "type": "object",
            "properties": {"project": TEXT},
            "required": ["project"],
            "anyOf": [{"required": ["paths"]}, {"required": ["scopes"]}],
        },
        {"project": "p", "scopes": ["s"]},
    ),
    "a condition": (
        {
            "type": "object",
            "properties": {"mode": {"enum": ["fast", "full"]}},
            "if": {"properties": {"mode": {"const": "full"}}},
            "then": {"properties": {"size": {"type": "integer", "maximum": 9}}},
        },
        {"mode": "full", "size": 9},
    ),
    "names by a pattern": (
        {
            "type": "object",
            "properties": {"q": TEXT},
            "patternProperties": {"^x-": TEXT},
            "additionalProperties": False,
        },
        {"q": "x", "x-trace": "1"},
    ),
    "names of one form": (
        {"type": "object", "properties": {}, "propertyNames": {"pattern": "^[a-z]+$"}, "minProperties": 1},
        {"env": "x", "region": "y"},
    ),
    "what no part lists": (
        {"type": "object", "properties": {"q": TEXT}, "unevaluatedProperties": {"type": "integer"}},
        {"q": "x", "limit": 5},
    ),
    "an argument of any type": (
        {"type": "object", "properties": {"key": TEXT, "value": True}, "required": ["key", "value"]},
        {"key": "k", "value": [1, {"a": None}]},
    ),
    "a list of draft 7 tuples": (
        {
            "$schema": DRAFT_7,
            "type": "object",
            "properties": {"range": {"type": "array", "items": [{"type": "integer"}, {"type": "string"}]}},
        },
        {"range": [1, "b"]},
    ),
    "bounds of draft 4": (
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "type": "object",
            "properties": {"n": {"type": "number", "minimum": 0, "exclusiveMinimum": True}},
        },
        {"n": 0.5},
    ),
    "draft 7 under https": (
        {"$schema": "https://json-schema.org/draft-07/schema", "type": "object", "properties": {"q": TEXT}},
        {"q": "x"},
    ),
    "a recursive argument": (
        {"type": "object", "properties": {"root": {"$ref": "#/$defs/N"}}, "$defs": {"N": NODE}},
        {"root": {"name": "a", "children": [{"name": "b", "children": []}]}},
    ),
    "cents": (
        {"type": "object", "properties": {"amount": {"type": "number", "multipleOf": 0.01}}},
        {"amount": 0.07},
    ),
    "a whole number with a decimal point": ({"type": "object", "properties": {"n": {"type": "integer"}}}, {"n": 3.0}),
    "null where it is allowed": ({"type": "object", "properties": {"q": {"type": ["string", "null"]}}}, {"q": None}),
    "an argument called properties": (
        {"type": "object", "properties": {"properties": {"type": "object", "additionalProperties": {}}}},
        {"properties": {"title": {"x": 1}}},
    ),
}
"""Shapes of input schemas that servers publish, and a call that each accepts."""


@pytest.mark.parametrize("name", VALID)
def test_a_valid_call_passes_unchanged(name, caplog):
    schema, arguments = VALID[name]
    assert InputSchema("put", schema).read(arguments) == arguments
    assert not caplog.records


LETTERS = r"^\p{L}+$"
UNCHECKED = {
    "no JSON Schema type": {"type": "object", "properties": {"q": {"type": "any"}}},
    "required as a flag": {"type": "object", "properties": {"q": {"type": "string", "required": True}}},
    "a reference to nothing": {"type": "object", "properties": {"q": {"$ref": "#/definitions/Nowhere"}}},
    "a reference elsewhere": {"type": "object", "properties": {"q": {"$ref": "https://schemas.example.com/q.json"}}},
    "a regular expression of JavaScript": {
        "type": "object",
        "properties": {"q": {"type": "string", "pattern": r"^\p{L}+$"}},
    },
    "a root that is itself": {"$ref": "#"},
    "an unknown dialect": {"$schema": "https://example.com/dialect", "type": "object", "properties": {"q": {}}},
    "properties as a list": {"type": "object", "properties": []},
}


@pytest.mark.parametrize("name", UNCHECKED)
def test_a_schema_that_cannot_be_checked_leaves_the_call_to_the_server(name, caplog):
    schema = InputSchema("put", UNCHECKED[name])
    for arguments in ({"q": "x"}, {"q": 7, "more": None}):
        assert schema.read(arguments) == arguments
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert caplog.text.count("the input schema of MCP tool put cannot be checked") == 1
    assert schema.shown["type"] == "object"


CLOSED = {"type": "object", "properties": {"q": TEXT, "n": {"type": "integer"}}, "required": ["q"]}


@pytest.mark.parametrize(
    ("schema", "arguments", "words"),
    [
        (CLOSED, {"q": "x", "limit": 3}, "unknown argument limit"),
        ({**CLOSED, "additionalProperties": False}, {"q": "x", "limit": 3}, "unknown argument limit"),
        ({"type": "object", "additionalProperties": False}, {"limit": 3}, "unknown argument limit"),
        (
            {"type": "object", "properties": {"q": True}},
            {"q": json.loads("[" * 90 + "]" * 90)},
            "q is nested too deeply",
        ),
        (CLOSED, {"n": 1}, "'q' is a required property"),
        (CLOSED, {"q": "x", "n": "many"}, "n: 'many' is not of type 'integer'"),
        ({"$ref": "#/$defs/In", "$defs": {"In": BASE}}, {"owner": "a"}, "'repo' is a required property"),
        ({"properties": {"q": TEXT}, "unevaluatedProperties": False}, {"q": "x", "limit": 3}, "limit"),
        ({"properties": {}, "propertyNames": {"pattern": "^[a-z]+$"}}, {"A1": 3}, "'A1' does not match"),
        ({"allOf": [BASE, {"required": ["n"]}]}, {"owner": "a", "repo": "b"}, "'n' is a required property"),
        ({"type": "object", "properties": {"q": {"enum": ["x" * 900]}}}, {"q": "y"}, "…"),
        (
            {"type": "object", "properties": {"s": {"anyOf": [{"type": "integer"}, {"enum": ["all"]}]}}},
            {"s": "every"},
            "s: 'every'",
        ),
    ],
)
def test_a_wrong_call_is_explained_once(schema, arguments, words):
    with pytest.raises(WrongArguments) as raised:
        InputSchema("find", schema).read(arguments)
    assert str(raised.value).count(words) == 1
    assert ";" not in str(raised.value)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize(
    ("described", "written", "read"),
    [
        ({"type": "integer"}, "3", 3),
        ({"type": "number"}, "2.5", 2.5),
        ({"type": "boolean"}, "true", True),
        ({"type": "array", "items": TEXT}, '["a", "b"]', ["a", "b"]),
        ({"type": "object"}, '{"a": 1}', {"a": 1}),
        (TEXT, 7, "7"),
        (TEXT, "7", "7"),
        (TEXT, '{"a": 1}', '{"a": 1}'),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "4", 4),
    ],
)
def test_arguments_are_read_in_their_declared_types(described, written, read):
    schema = InputSchema("put", {"type": "object", "properties": {"x": described}, "required": ["x"]})
    assert schema.read({"x": written}) == {"x": read}


INTEGER = {"type": "integer"}
COUNT = {"type": "object", "properties": {"n": INTEGER, "m": INTEGER}, "required": ["n"]}


@pytest.mark.parametrize(
    ("described", "written", "read"),
    [
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, " FALSE", False),
        ({"type": ["boolean", "null"]}, "None", None),
        (TEXT, "True", "True"),
        (COUNT, {"n": "5"}, {"n": 5}),
        (COUNT, {"n": 5, "m": None}, {"n": 5}),
        (COUNT, '{"n": "5"}', {"n": 5}),
        ({"type": "array", "items": COUNT}, [{"n": 1}, {"n": "2"}], [{"n": 1}, {"n": 2}]),
        ({"type": "array", "items": {"type": "boolean"}}, ["True", False], [True, False]),
        ({"type": "object", "additionalProperties": TEXT}, {"a": 7}, {"a": "7"}),
        ({"anyOf": [{"type": "null"}, COUNT]}, {"n": "5"}, {"n": 5}),
        ({"anyOf": [{"type": "null"}, {"type": "array", "items": {"anyOf": [INTEGER, COUNT]}}]}, ["4", {"n": "5"}],
         [4, {"n": 5}]),
        ({"type": "string", "nullable": True}, None, None),
        ({"type": "string", "nullable": True, "enum": ["a"]}, None, None),
        ({"allOf": [{"type": "integer"}], "nullable": True}, None, None),
        ({"type": "array", "items": {"type": "integer", "nullable": True}}, [1, None], [1, None]),
    ],
)  # fmt: skip
def test_parts_of_arguments_are_read_in_their_declared_types(described, written, read):
    schema = InputSchema("put", {"type": "object", "properties": {"x": described}, "required": ["x"]})
    before = repr(written)
    assert repr(schema.read({"x": written})) == repr({"x": read})
    assert repr(written) == before


@pytest.mark.parametrize(
    ("described", "written", "words"),
    [
        ({"type": "string", "nullable": False}, None, "x: None is not of type 'string'"),
        ({"type": "boolean"}, "yes, please", "x: 'yes, please' is not of type 'boolean'"),
        (COUNT, {"n": "five"}, "x.n: 'five' is not of type 'integer'"),
        (COUNT, {"n": None}, "x: 'n' is a required property"),
        ({"type": "array", "items": INTEGER}, ["1", "b"], "x.1: 'b' is not of type 'integer'"),
    ],
)
def test_parts_of_arguments_that_do_not_fit_are_explained(described, written, words):
    schema = InputSchema("put", {"type": "object", "properties": {"x": described}, "required": ["x"]})
    with pytest.raises(WrongArguments, match=words):
        schema.read({"x": written})


def test_null_leaves_out_an_optional_argument_only():
    schema = InputSchema("find", CLOSED)
    assert schema.read({"q": "x", "n": None}) == {"q": "x"}
    with pytest.raises(WrongArguments, match="q: None is not of type 'string'"):
        schema.read({"q": None, "n": None})


def test_the_policy_reads_every_argument_and_no_reference():
    schema = {
        "$schema": DRAFT_7,
        "allOf": [{"$ref": "#/definitions/Base"}, {"properties": {"title": True}, "required": ["title"]}],
        "definitions": {"Base": BASE},
    }
    assert InputSchema("put", schema).shown == {
        "type": "object",
        "properties": {"owner": TEXT, "repo": TEXT, "title": {}},
        "required": ["owner", "repo", "title"],
    }
    described = {"$ref": "#/$defs/Size", "description": "Of the box."}
    schema = {"type": "object", "properties": {"size": described}, "$defs": {"Size": {"enum": ["s", "l"]}}}
    assert InputSchema("put", schema).shown == {
        "type": "object",
        "properties": {"size": {"enum": ["s", "l"], "description": "Of the box."}},
    }


def test_alternatives_at_the_root_stay_and_are_listed():
    schema, _ = VALID["one of several objects"]
    shown = InputSchema("move", schema).shown
    assert list(shown["properties"]) == ["page_id", "database_id"]
    assert "required" not in shown
    assert shown["oneOf"] == schema["oneOf"]


def test_arguments_of_schemas_combined_within_each_other_are_listed():
    a, b, c = ({"properties": {name: {"type": "integer"}}} for name in "abc")
    schema = {"type": "object", "oneOf": [{"allOf": [a, {"anyOf": [b]}]}], "if": True, "then": c}
    assert InputSchema("search", schema).names == ["a", "b", "c"]


def test_a_recursive_schema_keeps_its_definitions():
    schema, _ = VALID["a recursive argument"]
    shown = InputSchema("put", schema).shown
    assert shown["properties"]["root"]["properties"]["children"]["items"] == {"$ref": "#/$defs/N"}
    assert "N" in shown["$defs"]


def test_a_schema_that_would_grow_too_long_keeps_its_references():
    parts = {f"p{number}": {"type": "string", "description": f"Part {number}. " + "x" * 80} for number in range(40)}
    names = {f"a{number}": {"$ref": "#/$defs/Part"} for number in range(40)}
    schema = {"type": "object", "properties": names, "$defs": {"Part": {"type": "object", "properties": parts}}}
    shown = InputSchema("put", schema).shown
    assert shown["properties"]["a7"] == {"$ref": "#/$defs/Part"}
    assert shown["$defs"] == schema["$defs"]
