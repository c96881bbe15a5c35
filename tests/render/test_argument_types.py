"""Arguments in notations that write them as text get the types that the tool's schema declares, however it does so."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.registry import Kind, lookup, names
from agentrl.render.tool_parsers import REPAIRS, repair_of
from agentrl.tool.json_schema import fits

DEFINITIONS = {
    "Filter": {"type": "object", "properties": {"field": {"type": "string"}, "min": {"type": "integer"}}},
    "Colour": {"enum": ["red", "blue"], "type": "string"},
    "Level": {"enum": [1, 2]},
    "Node": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/Node"}]},
    "a/b~c d": {"type": "array"},
    "Absolute": {"$id": "https://example.com/filter", "type": "object"},
    "Relative": {"$id": "filter.json", "type": "object"},
    "Anchored": {"$dynamicAnchor": "count", "$anchor": "count", "type": "integer"},
}
FILTER = {"$ref": "#/$defs/Filter"}
GIVEN = '{"field": "x", "min": 1}'
PARSED = {"field": "x", "min": 1}


def tools(schema: Any, **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "$id": "https://example.com/tool", "$defs": DEFINITIONS}
    parameters |= {"properties": {"x": schema}, **more}
    return {"f": {"type": "function", "function": {"name": "f", "parameters": parameters}}}


def coder(value: str) -> str:
    return f"<tool_call>\n<function=f>\n<parameter=x>\n{value}\n</parameter>\n</function>\n</tool_call>"


def glm(value: str) -> str:
    return f"<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"


def minimax(value: str) -> str:
    return (
        f'<minimax:tool_call>\n<invoke name="f">\n<parameter name="x">{value}</parameter>\n</invoke>\n'
        "</minimax:tool_call>"
    )


WRITERS: dict[str, Callable[[str], str]] = {"qwen3_coder": coder, "glm": glm, "minimax_m2": minimax}


def read(parser: str, value: str, offered: dict[str, Any]) -> Any:
    parsed = lookup(Kind.TOOL_PARSER, parser)(WRITERS[parser](value), offered)
    if parsed.problems:
        return parsed.problems[0]
    return parsed.calls[0].arguments["x"]


@pytest.mark.parametrize("parser", sorted(WRITERS))
@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        (FILTER, GIVEN, PARSED),
        ({"allOf": [FILTER]}, GIVEN, PARSED),
        ({"allOf": [FILTER, {"description": "What to keep."}]}, GIVEN, PARSED),
        ({"anyOf": [FILTER, {"type": "null"}]}, GIVEN, PARSED),
        ({"anyOf": [FILTER, {"type": "null"}]}, "null", None),
        ({"oneOf": [FILTER, {"type": "integer"}]}, "7", 7),
        ({"anyOf": [FILTER, {"type": "string"}]}, GIVEN, PARSED),
        ({"anyOf": [FILTER, {"type": "string"}]}, "[1, 2]", "[1, 2]"),
        ({"$ref": "#/$defs/Node"}, "3", 3),
        ({"$ref": "#/$defs/a~1b~0c%20d"}, "[1]", [1]),
        ({"$ref": "#/$defs/Missing"}, GIVEN, GIVEN),
        ({"$ref": "https://example.com/schema.json"}, GIVEN, GIVEN),
        ({"$ref": "https://example.com/tool"}, GIVEN, PARSED),
        ({"$ref": "https://example.com/tool#/$defs/Level"}, "2", 2),
        ({"$ref": "https://example.com/filter"}, GIVEN, PARSED),
        ({"$ref": "filter.json"}, GIVEN, PARSED),
        ({"$ref": "#count"}, "7", 7),
        ({"$dynamicRef": "#count"}, "7", 7),
        ({"$dynamicRef": "#/$defs/Level"}, "2", 2),
        ({"$dynamicRef": "#missing"}, "7", "7"),
        ({"patternProperties": {"^a": {"type": "integer"}}}, '{"a": 1}', {"a": 1}),
        ({"$ref": "#/$defs/Colour"}, "red", "red"),
        ({"$ref": "#/$defs/Level"}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"enum": [1, 2, "auto"]}, "2", 2),
        ({"enum": [1, 2, "auto"]}, "auto", "auto"),
        ({"enum": [True, None]}, "True", True),
        ({"const": 5}, "5", 5),
        ({"const": "5"}, "5", "5"),
        ({"properties": {"a": {"type": "integer"}}}, '{"a": 1}', {"a": 1}),
        ({"items": {"type": "integer"}}, "[1, 2]", [1, 2]),
        (True, GIVEN, GIVEN),
        ({}, "7", "7"),
        (None, "7", "7"),
        ({"type": "string"}, GIVEN, GIVEN),
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, "123", "123"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "None", "None"),
        ({"type": ["string", "null"]}, "none", "none"),
        ({"type": ["string", "integer"]}, '"7"', '"7"'),
        ({"type": ["string", "integer"]}, "7", 7),
        ({"type": ["string", "integer"]}, "7.5", "7.5"),
        ({"type": ["string", "boolean"]}, "none", "none"),
        ({"type": "number"}, "3", 3),
        ({"type": "integer"}, "3.0", 3.0),
        ({"type": "boolean"}, "False", False),
    ],
)
def test_types_are_found_however_they_are_declared(parser: str, schema: Any, value: str, expected: Any) -> None:
    found = read(parser, value, tools(schema))
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize("parser", sorted(WRITERS))
@pytest.mark.parametrize(
    ("spelling", "value", "expected"),
    [
        *((spelling, "7", 7) for spelling in ("int", "INTEGER", "Int", "int32", "uint8", "long", "unsigned int")),
        *((spelling, "2.5", 2.5) for spelling in ("float", "NUMBER", "double", "float64", "Decimal")),
        *((spelling, "true", True) for spelling in ("bool", "BOOLEAN", "Bool")),
        *((spelling, '["a", 1]', ["a", 1]) for spelling in ("list", "ARRAY", "List[str]", "list[int]", "tuple", "set")),
        *((spelling, GIVEN, PARSED) for spelling in ("dict", "OBJECT", "Dict[str, Any]", "typing.Dict", "map")),
        *((spelling, "7", "7") for spelling in ("str", "STRING", "Text", "varchar", "date", "uuid", "enum")),
        *((spelling, "7", "7") for spelling in ("any", "Any", "file", "", "internal", "Listing", "int | str")),
        (["int", "None"], "null", None),
        (["int", "str"], "7", 7),
        (["int", "str"], "7 apples", "7 apples"),
        (["int", "whatever"], "7 apples", "7 apples"),
    ],
)
def test_usual_spellings_of_types_are_understood_and_unknown_ones_declare_no_type(
    parser: str, spelling: Any, value: str, expected: Any
) -> None:
    found = read(parser, value, tools({"type": spelling}))
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize("parser", sorted(WRITERS))
@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": ["integer", "null"]}, "None"),
        ({"type": ["integer", "null"]}, "NULL"),
        ({"type": "integer"}, "[1]"),
        ({"type": "integer"}, "true"),
        ({"type": "integer"}, "1.5"),
        ({"type": "INT"}, "north"),
        ({"type": "array"}, '"a"'),
        (FILTER, "x"),
    ],
)
def test_other_values_are_problems(parser: str, schema: Any, value: str) -> None:
    problem = read(parser, value, tools(schema))
    assert isinstance(problem, str)
    assert "'x' of f (tool call 1)" in problem
    assert "It must be of type " in problem


@pytest.mark.parametrize("parser", sorted(WRITERS))
@pytest.mark.parametrize(
    "function",
    [
        {"name": "f", "parameters": None},
        {"name": "f"},
        {"name": "f", "parameters": {"type": "object", "properties": None}},
        {"name": "f", "parameters": {"type": "object", "properties": []}},
        {"name": "f", "parameters": True},
        None,
    ],
)
def test_tools_without_declared_arguments_get_text(parser: str, function: Any) -> None:
    assert read(parser, "7", {"f": {"type": "function", "function": function}}) == "7"


def test_further_properties_have_the_type_that_is_declared_for_them() -> None:
    offered = {"f": {"function": {"parameters": {"additionalProperties": {"type": "integer"}}}}}
    assert read("glm", "7", offered) == 7


@pytest.mark.parametrize(
    ("pattern", "value"),
    [
        ("^x$", 7),
        ("x", 7),
        ("^y", "7"),
        ("(", "7"),
        ("[", "7"),
        ("(x+)+$", "7"),
        ("((x|x))*$", "7"),
        ("^(?:x|y)$", 7),
        (".*", 7),
    ],
)
def test_properties_that_match_a_pattern_have_its_type(pattern: str, value: Any) -> None:
    parameters = {"type": "object", "patternProperties": {pattern: {"type": "integer"}}}
    assert read("glm", "7", {"f": {"function": {"parameters": parameters}}}) == value


def test_values_must_fit_what_is_declared_for_their_pattern() -> None:
    root = {
        "properties": {"note": {}},
        "patternProperties": {"^n_": {"type": "integer"}},
        "additionalProperties": False,
    }
    assert fits({"note": "a", "n_a": 1}, root, root)
    assert not fits({"n_a": "one"}, root, root)
    assert not fits({"other": 1}, root, root)


def test_arguments_of_a_root_reference_are_found() -> None:
    root = {"$ref": "#/$defs/Arguments", "$defs": {"Arguments": {"properties": {"x": FILTER}}, **DEFINITIONS}}
    assert read("glm", GIVEN, {"f": {"function": {"parameters": root}}}) == PARSED


def pythonic(text: str, *offered: str) -> Any:
    return lookup(Kind.TOOL_PARSER, "pythonic")(text, {name: tools({"type": "string"})["f"] for name in offered})


@pytest.mark.parametrize(
    "name",
    ["get-user", "files.read", "resolve-library-id", "v1.get-2d", "import", "a-b.c-d", "_x", "2fa-check", "-v", "3"],
)
def test_pythonic_calls_of_any_name_are_read(name: str) -> None:
    parsed = pythonic(f"[{name}(x='1'), {name}(x=\"[{name}(x='2')]\", from=[{name!r}, '{name}(y=1)'])]", name)
    assert parsed.problems == ()
    assert [(call.name, dict(call.arguments)) for call in parsed.calls] == [
        (name, {"x": "1"}),
        (name, {"x": f"[{name}(x='2')]", "from": [name, f"{name}(y=1)"]}),
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[get-user(x=1)]", "names an unknown tool 'get-user'. Did you mean 'get-users'?"),
        ("[get-users(x=1, x=2)]", "Tool call 1 gives 'x' of get-users twice."),
        ("[get-users(x=1+1)]", "'x' of get-users (tool call 1) must be a literal value, not '1 + 1'."),
        ("[get-users(1)]", "gives get-users an argument without its name"),
        ("[get-users(x=" + "1+" * 2000 + "1)]", "must be a literal value, not a deeply nested expression"),
    ],
)
def test_pythonic_problems_name_the_tool(text: str, problem: str) -> None:
    parsed = pythonic(text, "get-users")
    assert parsed.calls == ()
    assert [problem in found for found in parsed.problems] == [True]


PIECES = (
    *(
        "<tool_call>",
        "</tool_call>",
        "<function=f>",
        "</function>",
        "<parameter=x>",
        "</parameter>",
        "<tools>",
        "```json\n",
    ),
    *("<arg_key>x</arg_key>", "<arg_value>", "</arg_value>", "<minimax:tool_call>", "</minimax:tool_call>", "```\n"),
    *(
        '<invoke name="f">',
        "</invoke>",
        '<parameter name="x">',
        "<｜DSML｜function_calls>",
        "</｜DSML｜function_calls>",
    ),
    *(
        '<｜DSML｜invoke name="f">',
        "</｜DSML｜invoke>",
        '<｜DSML｜parameter name="x" string="false">',
        "</｜DSML｜parameter>",
    ),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "f",
    ),
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.f:0", "<|tool_call_argument_begin|>"),
    *("<|tool_call_end|>", "<|tool_calls_section_end|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", ";"),
    *("<|channel|>commentary to=functions.f", "<|message|>", "<|call|>", "<|start|>", "[f(x=", ")]", ", f(", "f.g-h("),
    *(
        '{"name": "f", "arguments": {"x": 1}}',
        '{"name": "f", "parameters": ',
        '{"x": ',
        "}",
        "{",
        "[",
        "]",
        '"',
        "'",
        "\\",
    ),
    *(
        "null",
        "None",
        "true",
        "1e999",
        "NaN",
        "-",
        "\ud800",
        "9" * 5000,
        "0x" + "f" * 5000,
        "[" * 300,
        "\n",
        " ",
        "\x00",
    ),
)
texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=14).map("".join)
values = (
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "x", "string", "object", "#", "#/$defs/A"])
)
keywords = st.sampled_from(
    [
        *(
            "type",
            "enum",
            "const",
            "anyOf",
            "oneOf",
            "allOf",
            "$ref",
            "$defs",
            "properties",
            "required",
            "items",
            "A",
            "x",
        ),
        *("patternProperties", "$dynamicRef", "$id", "$anchor"),
        "additionalProperties",
        "nullable",
        "not",
    ]
)
schemas = st.recursive(
    values, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keywords, inner, max_size=4), max_leaves=12
)


@pytest.mark.parametrize("parser", sorted(names(Kind.TOOL_PARSER)))
@settings(max_examples=80, deadline=None, derandomize=True)
@given(text=texts, schema=schemas, whole=st.booleans())
def test_no_parser_raises_whatever_the_answer_and_the_schema(parser: str, text: str, schema: Any, whole: bool) -> None:
    for function in ({"name": "f", "parameters": schema}, {"name": "f", "parameters": {"properties": {"x": schema}}}):
        offered = {"f": {"type": "function", "function": function}}
        found = [lookup(Kind.TOOL_PARSER, parser)(text, offered)]
        found += [repair_of(parser)(text, offered, is_whole=whole)] if parser in REPAIRS else []
        for parsed in found:
            assert {call.name for call in parsed.calls} <= {"f"}
            assert len({call.id for call in parsed.calls}) == len(parsed.calls)
            json.dumps([dict(call.arguments) for call in parsed.calls], allow_nan=False, ensure_ascii=False).encode()
