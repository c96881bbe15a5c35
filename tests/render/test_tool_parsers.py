"""Tool calls as models write them: right ones are read, wrong ones become advice."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.message import ToolCall
from agentrl.registry import Kind, lookup, names
from agentrl.render.tool_parsers import repair_of
from agentrl.render.tool_parsers.json_calls import parse_hermes, parse_llama3_json
from agentrl.render.tool_parsers.xml_calls import parse_qwen3_coder

PARSERS = {name: lookup(Kind.TOOL_PARSER, name) for name in ("hermes", "llama3_json", "qwen3_coder")}


def schema(name: str, **properties: dict) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TOOLS = {
    "look": schema("look"),
    "put": schema(
        "put",
        what={"type": "string"},
        count={"type": "integer"},
        gently={"type": "boolean"},
        places={"type": "array"},
        note={"type": "string", "nullable": True},
        size={"anyOf": [{"type": "number"}, {"type": "null"}]},
        mixed={"type": ["integer", "string"]},
    ),
}


def found(calls: tuple[ToolCall, ...]) -> list[tuple[str, dict]]:
    return [(call.name, dict(call.arguments)) for call in calls]


def test_the_parsers_are_registered() -> None:
    assert set(PARSERS) <= set(names(Kind.TOOL_PARSER))


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("no call", "no call", []),
        ('<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>', "", [("look", {})]),
        ('<tool_call>{"name": "look"}</tool_call>', "", [("look", {})]),
        (
            'I look.\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>\n'
            '<tool_call>\n{"name": "put", "arguments": {"what": "mug", "count": 2}}\n</tool_call>',
            "I look.",
            [("look", {}), ("put", {"what": "mug", "count": 2})],
        ),
        (
            '<tool_call>{"name": "put", "arguments": {"what": "</tool_call> <tool_call>"}}</tool_call> done',
            "done",
            [("put", {"what": "</tool_call> <tool_call>"})],
        ),
    ],
)
def test_hermes_calls(text: str, content: str, calls: list) -> None:
    parsed = parse_hermes(text, TOOLS)
    assert (parsed.content, found(parsed.calls), parsed.problems) == (content, calls, ())


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('<tool_call>{"name": "look", }</tool_call>', "Tool call 1 is not valid JSON: "),
        ('<tool_call>{"name": "look"} and', "Tool call 1 continues after its JSON object. Write <tool_call>"),
        ("<tool_call>[]</tool_call>", "The list of tool calls is empty"),
        ('<tool_call>{"name": "look"} now</tool_call>', "Tool call 1 continues after its JSON object"),
        ('<tool_call>["look"]</tool_call>', "Tool call 1 must be a JSON object, not str"),
        ('<tool_call>{"arguments": {}}</tool_call>', 'Tool call 1 has no "name". Offered tools: look, put.'),
        ('<tool_call>{"name": 3}</tool_call>', 'The "name" of tool call 1 must be a string, not int.'),
        ('<tool_call>{"name": "loook"}</tool_call>', "unknown tool 'loook'. Did you mean 'look'?"),
        ('<tool_call>{"name": "xyz"}</tool_call>', "unknown tool 'xyz'. Offered tools: look, put."),
        (
            '<tool_call>{"name": "look", "arguments": "{}"}</tool_call>',
            "The arguments of look (tool call 1) must be a JSON object, not str.",
        ),
        ('{"name": "look"}</tool_call>', "</tool_call> appears without <tool_call> before it"),
        ('<tool_call>{"name": "put", "arguments": {"count": NaN}}</tool_call>', "NaN is not a JSON number"),
        ('<tool_call>{"name": "put", "arguments": {"what": "\\ud800"}}</tool_call>', "surrogates not allowed"),
        ('<tool_call>{"name": "put", "arguments": {"count": 1e999}}</tool_call>', "Out of range float values"),
        ("<tool_call>" + "[" * 100_000, "nested too deeply"),
    ],
)
def test_hermes_problems(text: str, problem: str) -> None:
    parsed = parse_hermes(text, TOOLS)
    assert parsed.calls == ()
    assert len(parsed.problems) == 1
    assert problem in parsed.problems[0]


def test_a_good_call_survives_a_bad_one() -> None:
    parsed = parse_hermes('<tool_call>{"name": }</tool_call><tool_call>{"name": "look"}</tool_call>', TOOLS)
    assert found(parsed.calls) == [("look", {})]
    assert parsed.calls[0].id == "call_2"
    assert len(parsed.problems) == 1


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("no call", "no call", []),
        ('{"name": "look", "parameters": {}}', "", [("look", {})]),
        ('<|python_tag|>{"name": "look", "parameters": {}}', "", [("look", {})]),
        (
            '{"name": "look"}; {"name": "put", "parameters": {"what": "mug; {cup}"}}',
            "",
            [("look", {}), ("put", {"what": "mug; {cup}"})],
        ),
    ],
)
def test_llama3_calls(text: str, content: str, calls: list) -> None:
    parsed = parse_llama3_json(text, TOOLS)
    assert (parsed.content, found(parsed.calls), parsed.problems) == (content, calls, ())


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"name": "look"', "Tool call 1 is not valid JSON"),
        ('{"parameters": {}}', 'Tool call 1 has no "name"'),
        ('{"name": "look", "parameters": [1]}', "must be a JSON object, not list"),
        ('I look: {"name": "look"}', "A tool call is next to other text"),
        ('{"name": "lok"}', "Did you mean 'look'?"),
    ],
)
def test_llama3_problems(text: str, problem: str) -> None:
    parsed = parse_llama3_json(text, TOOLS)
    assert parsed.calls == ()
    assert len(parsed.problems) == 1
    assert problem in parsed.problems[0]


def coder(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def parameters(**values: str) -> str:
    return "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())


def test_qwen3_coder_calls_take_the_types_of_the_schema() -> None:
    body = parameters(
        what="a\nb", count=" 3 ", gently="True", places='["x"]', note="null", size="1.5", mixed="7 up", other="[1"
    )
    parsed = parse_qwen3_coder(f"I put.{coder(f'<function=put>{body}</function>')}", TOOLS)
    assert (parsed.content, parsed.problems) == ("I put.", ())
    assert found(parsed.calls) == [
        (
            "put",
            {
                "what": "a\nb",
                "count": 3,
                "gently": True,
                "places": ["x"],
                "note": None,
                "size": 1.5,
                "mixed": "7 up",
                "other": "[1",
            },
        )
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (coder("look"), "Tool call 1 is not one function tag"),
        ("<tool_call><function=put><parameter=what>mug", "Tool call 1 was not closed"),
        (coder("<function=></function>"), 'Tool call 1 has no "name"'),
        (coder("<function=lok></function>"), "Did you mean 'look'?"),
        (coder("<function=put mug"), "Tool call 1 is not one function tag"),
        (
            coder(f"<function=put>{parameters(count='many')}</function>"),
            "'count' of put (tool call 1) is not valid JSON: Expecting value at character 1. It must be of type",
        ),
        (
            coder(f"<function=put>{parameters(count='3 4')}</function>"),
            "'count' of put (tool call 1) continues after its value. It must be of type integer.",
        ),
        (coder(f"<function=put>{parameters(what='a') * 2}</function>"), "gives 'what' of put twice"),
        ("<function=look", "are outside <tool_call> and </tool_call>"),
    ],
)
def test_qwen3_coder_problems(text: str, problem: str) -> None:
    parsed = parse_qwen3_coder(text, TOOLS)
    assert parsed.calls == ()
    assert len(parsed.problems) == 1
    assert problem in parsed.problems[0]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("I look. <function=look></function>", "I look.", [("look", {})]),
        ("<tool_call><function=look></function>", "", [("look", {})]),
        (coder("<function=put>mug</function>"), "", [("put", {})]),
        (
            coder("<function=put><parameter=what>a<parameter=count>3</function>"),
            "",
            [("put", {"what": "a", "count": 3})],
        ),
        (coder("<function=put><parameter=what><parameter=what>a</parameter></function>"), "", [("put", {"what": "a"})]),
        (coder("<function=put><parameter=what>a</paramter></function>"), "", [("put", {"what": "a"})]),
    ],
)
def test_damaged_tags_are_read_as_servers_read_them(text: str, content: str, calls: list) -> None:
    parsed = parse_qwen3_coder(text, TOOLS)
    assert (parsed.content, found(parsed.calls), parsed.problems) == (content, calls, ())
    assert parsed.repairs == ("damaged tags",) * len(calls)


PIECES = (
    "<tool_call>",
    "</tool_call>",
    "<function=look>",
    "<function=",
    "</function>",
    "<parameter=count>",
    "</parameter>",
    '{"name": "look", "arguments": {}}',
    '{"name": "put", "parameters": {"count": 1}}',
    '{"name"',
    "{",
    "}",
    "[",
    '"',
    "\\",
    ";",
    "\n",
    "NaN",
    "1e999",
    "9" * 5000,
    "text",
)
wild_texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=12).map("".join)


@pytest.mark.parametrize("name", sorted(PARSERS))
@settings(max_examples=100, deadline=None, derandomize=True)
@given(text=wild_texts)
def test_parsers_never_raise_and_give_usable_calls(name: str, text: str) -> None:
    parsed = PARSERS[name](text, TOOLS)
    assert all(call.name in TOOLS for call in parsed.calls)
    assert len({call.id for call in parsed.calls}) == len(parsed.calls)
    assert all(problem.endswith((".", "?")) for problem in parsed.problems)
    json.dumps([dict(call.arguments) for call in parsed.calls], allow_nan=False, ensure_ascii=False).encode()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(calls=st.lists(st.dictionaries(st.text(max_size=4), json_values, max_size=3), min_size=1, max_size=3))
def test_written_calls_are_read_back(calls: list[dict]) -> None:
    rows = [{"name": "look", "arguments": arguments} for arguments in calls]
    as_hermes = "\n".join(f"<tool_call>\n{json.dumps(row)}\n</tool_call>" for row in rows)
    as_llama = "; ".join(json.dumps(row) for row in rows)
    for parsed in (parse_hermes(as_hermes, TOOLS), parse_llama3_json(as_llama, TOOLS)):
        assert parsed.problems == ()
        assert [dict(call.arguments) for call in parsed.calls] == calls


@pytest.mark.parametrize(
    ("parser", "text", "content", "calls"),
    [
        ("glm", "a<tool_call>look</tool_call>b<tool_call>look</tool_call>c", "abc", 2),
        ("mistral", "a[TOOL_CALLS]nothing here", "a", 0),
        ("mistral", "a[TOOL_CALLS][{nothing", "a", 0),
    ],
)
def test_text_around_calls_stays_and_text_of_broken_calls_goes(
    parser: str, text: str, content: str, calls: int
) -> None:
    parsed = lookup(Kind.TOOL_PARSER, parser)(text, TOOLS)
    assert (parsed.content, len(parsed.calls), len(parsed.problems)) == (content, calls, int(not calls))


@pytest.mark.parametrize("written", ["1e999", r"'\ud800'"])
def test_values_that_are_no_json_are_refused(written: str) -> None:
    (problem,) = lookup(Kind.TOOL_PARSER, "pythonic")(f"[put(what={written})]", TOOLS).problems
    assert problem.startswith("The arguments of put (tool call 1) cannot be written as JSON")


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('text:<|"|>say <|"|>hi<|"|>, then go<|"|>,count:1', {"text": 'say "hi", then go', "count": 1}),  # vllm#48678
        ('text:<|"|>f(<|"|><|"|><|"|>x<|"|><|"|><|"|>)<|"|>,count:1', {"text": 'f("""x""")', "count": 1}),
        ('text:<|"|>She said "hello" loudly<|"|>', {"text": 'She said "hello" loudly'}),  # vllm#39069
        ('refs:["a", \'b\'],opts:{"mode": "fast"}', {"refs": ["a", "b"], "opts": {"mode": "fast"}}),  # vllm#51284
        ('refs:[<|"|>a<|"|>,<|"|>b}<|"|>],on:true,no:null', {"refs": ["a", "b}"], "on": True, "no": None}),
    ],
)
def test_texts_in_calls_of_gemma(written: str, arguments: dict[str, object]) -> None:
    parse = lookup(Kind.TOOL_PARSER, "gemma4")
    parsed = parse(f"Hm.<|tool_call>call:look{{{written}}}<tool_call|>", {"look": {}})
    assert (parsed.content, [dict(call.arguments) for call in parsed.calls]) == ("Hm.", [arguments])


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('call:look{where:<|"|>a<|"|>,}<tool_call|>', {"where": "a"}),
        ("call:look{at:{x:1,,y:[2,3,],}}<tool_call|>", {"at": {"x": 1, "y": [2, 3]}}),
        ('call:look{where:<|"|>a<|"|><tool_call|>', {"where": "a"}),
        ("call:look{at:{x:[1<tool_call|>", {"at": {"x": [1]}}),
        ("call:look{n:1}}]}<tool_call|>", {"n": 1}),
        ('call:look{where:<|"|>a<|"|>}<tool_c', {"where": "a"}),
        ('call:look{where:<|"|>a<|"|>}<toolcall|>', {"where": "a"}),
        (':look{where:<|"|>a<|"|>}<tool_call|>', {"where": "a"}),
        ('call:look(where:<|"|>a<|"|>)<tool_call|>', {"where": "a"}),
        ("call:look{where:the old tower,n:1}<tool_call|>", {"where": "the old tower", "n": 1}),
        ('call:look{n:1,where="a"}<tool_call|>', {"n": 1, "where": "a"}),  # ollama#17882
        ("call:look{where:':\\\\s*'<|\"|>,n:1}<tool_call|>", {"where": ":\\s*", "n": 1}),  # ollama#15315
    ],
)
def test_damaged_calls_of_gemma_as_servers_read_them(body: str, arguments: dict[str, object]) -> None:
    parse = lookup(Kind.TOOL_PARSER, "gemma4")
    properties = {"where": {"type": "string"}, "n": {"type": "integer"}, "at": {"type": "object"}}
    tools = {"look": {"function": {"name": "look", "parameters": {"type": "object", "properties": properties}}}}
    parsed = parse(f"Hm.<|tool_call>{body}", tools)
    assert [dict(call.arguments) for call in parsed.calls] == [arguments]
    assert (parsed.content, parsed.problems, parsed.repairs) == ("Hm.", (), ("damaged tags",))


def test_damaged_calls_of_gemma_that_do_not_fit_are_problems() -> None:
    parse = lookup(Kind.TOOL_PARSER, "gemma4")
    tools = {"look": {"function": {"name": "look", "parameters": {"properties": {"n": {"type": "integer"}}}}}}
    parsed = parse("<|tool_call>call:look{n:the old tower,}<tool_call|>", tools)
    assert (parsed.calls, len(parsed.problems)) == ((), 1)


@pytest.mark.parametrize(
    ("text", "is_whole"),
    [
        ('<|tool_call>{"name": "look", "arguments": {"where": "a"}}<tool_call|>', False),
        ('{"name": "look", "arguments": {"where": "a"}}', False),
        ('<|tool_call>call:look{where:<|"|>a<|"|>', True),
    ],
)
def test_repaired_calls_of_gemma(text: str, is_whole: bool) -> None:
    repair = repair_of("gemma4")
    parsed = repair(text, {"look": {}}, is_whole=is_whole)
    assert [dict(call.arguments) for call in parsed.calls] == [{"where": "a"}]
    assert parsed.problems == ()
    assert len(parsed.repairs) == 1
    assert repair('<|tool_call>call:look{where:<|"|>a', {"look": {}}, is_whole=True).calls == ()
    assert repair('<|tool_call>call:look{where:<|"|>a<|"|>', {"look": {}}, is_whole=False).calls == ()


@pytest.mark.parametrize(
    "body", ["look(where 1)", "look", "look{text", "look{text:}", 'look{text:<|"|>a}', "look{a:1,a:2}"]
)
def test_calls_of_gemma_that_cannot_be_read_do_not_swallow_the_next(body: str) -> None:  # vllm#53642
    parse = lookup(Kind.TOOL_PARSER, "gemma4")
    parsed = parse(f"<|tool_call>call:{body}<tool_call|><|tool_call>call:look{{}}<tool_call|>", {"look": {}})
    assert [dict(call.arguments) for call in parsed.calls] == [{}]
    assert len(parsed.problems) == 1


@pytest.mark.parametrize(
    ("body", "arguments", "is_repaired"),
    [
        ('[{"look": {"n": 1}}]<|tools_suffix|>', [{"n": 1}], False),
        ('[{"look": {"n": 1}}]', [{"n": 1}], False),
        ('[{"look": {"n": 1}}, {"look": {}}]<|tools_suffix|>', [{"n": 1}, {}], False),
        ('[{"look": {"n": 1}}<|tools_suffix|>', [{"n": 1}], True),
        ('[{"look": {"n": 1,}}]<|tools_suf', [{"n": 1}], True),
        ('[{"look": {"n": "a}<|tools_suffix|>', [], False),
        ('[{"look": {"n": 1}, "again": {}}]<|tools_suffix|>', [], False),
        ('{"look": {}}<|tools_suffix|>', [], False),
        ("[]<|tools_suffix|>", [], False),
        ('[{"look": {"n": 1}}', [], False),
    ],
)
def test_calls_of_apertus(body: str, arguments: list[dict[str, object]], is_repaired: bool) -> None:
    parsed = lookup(Kind.TOOL_PARSER, "apertus")(f"Hm.<|tools_prefix|>{body}", {"look": {}})
    assert [dict(call.arguments) for call in parsed.calls] == arguments
    assert (parsed.content, bool(parsed.problems), bool(parsed.repairs)) == ("Hm.", not arguments, is_repaired)
    if body.endswith("}}"):
        assert repair_of("apertus")(f"<|tools_prefix|>{body}", {"look": {}}, is_whole=True).calls


def test_calls_of_seed_oss_are_in_its_own_marks() -> None:
    call = "<function=look>\n<parameter=n>1</parameter>\n</function>"
    parse = lookup(Kind.TOOL_PARSER, "seed_oss")
    parsed = parse(f"Hm.\n<seed:tool_call>\n{call}\n</seed:tool_call>", {"look": {}})
    assert [dict(found.arguments) for found in parsed.calls] == [{"n": "1"}]
    assert (parsed.content, parsed.problems, parsed.repairs) == ("Hm.", (), ())
    (problem,) = parse("<seed:tool_call>\n<function=lok>\n</function>\n", {"look": {}}).problems
    assert "</seed:tool_call>" in problem or "lok" in problem
    assert parse(f"<tool_call>\n{call}\n</tool_call>", {"look": {}}).repairs == ("damaged tags",)
