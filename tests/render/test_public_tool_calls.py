"""Answers from public bug reports of other projects, in short, with the right reading."""

from __future__ import annotations

import pytest

from agentrl.registry import Kind, lookup
from agentrl.render.tool_parsers import repair_of


def schema(name: str, **properties: dict) -> dict:
    parameters = {"type": "object", "properties": properties, "required": sorted(properties)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TEXT = {"type": "string"}
TOOLS = {
    "bash": schema("bash", command=TEXT),
    "weather": schema("weather", place=TEXT),
    "glob": schema("glob", pattern=TEXT),
    "connect": schema("connect", body={"type": "object"}),
    "write": schema("write", path=TEXT, content=TEXT),
    "now": schema("now"),
}
XML = "<parameter>\n  <hello></hello>\n</parameter>"
CODER = "<tool_call>\n<function=bash>\n<parameter=command>ls -la</parameter>\n</function>\n</tool_call>"
HERMES = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
GLM = "<tool_call>bash\n<arg_key>command</arg_key>\n<arg_value>ls</arg_value>\n</tool_call>"
WEATHER = '{"name": "weather", "arguments": {"place": "Paris"}}'


@pytest.mark.parametrize(
    ("parser", "text", "content", "calls"),
    [
        # vllm#32926, vllm#33083, ollama's qwen2.5-coder in hermes-agent#5867: JSON in the content
        ("hermes", WEATHER, "", [("weather", {"place": "Paris"})]),
        # kronk#950: JSON in a code fence, for long prompts
        ("hermes", f"```json\n{WEATHER}\n```", "", [("weather", {"place": "Paris"})]),
        # vllm#32931: the tag of the list of tools
        ("hermes", f"<tools>\n{WEATHER}\n</tools>", "", [("weather", {"place": "Paris"})]),
        # hermes-agent#742: thinking ends, and the opening tag is missing
        ("hermes", f"{WEATHER}\n</tool_call>", "", [("weather", {"place": "Paris"})]),
        # ollama#16686, ollama#18530: a sentence, and the opening tag is missing
        (
            "qwen3_coder",
            "I list them.\n\n<function=glob>\n<parameter=pattern>\n*.md\n</parameter>\n</function>\n</tool_call>",
            "I list them.",
            [("glob", {"pattern": "*.md"})],
        ),
        # vllm#57699: the last argument is not closed
        (
            "qwen3_coder",
            "<tool_call>\n<function=connect>\n<parameter=body>\n"
            '{"mode": "CLEAN", "on": true}\n</function>\n</tool_call>',
            "",
            [("connect", {"body": {"mode": "CLEAN", "on": True}})],
        ),
        # vllm#44060: a file that contains the closing tag
        (
            "minimax_m2",
            '<minimax:tool_call>\n<invoke name="write">\n<parameter name="path">a.xml</parameter>\n'
            f'<parameter name="content">{XML}</parameter>\n</invoke>\n</minimax:tool_call>',
            "",
            [("write", {"path": "a.xml", "content": XML})],
        ),
        (
            "qwen3_coder",
            f"<tool_call>\n<function=write>\n<parameter=content>\n{XML}\n</parameter>\n<parameter=path>\na.xml\n"
            "</parameter>\n</function>\n</tool_call>",
            "",
            [("write", {"path": "a.xml", "content": XML})],
        ),
        # vllm#45167: an argument that quotes the marks of calls
        *(
            (parser, before + "a </tool_call> b" + after, "", [("weather", {"place": "a </tool_call> b"})])
            for parser, before, after in (
                ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"place": "', '"}}\n</tool_call>'),
                (
                    "qwen3_coder",
                    "<tool_call>\n<function=weather>\n<parameter=place>\n",
                    "\n</parameter>\n</function>\n</tool_call>",
                ),
                ("glm", "<tool_call>weather\n<arg_key>place</arg_key>\n<arg_value>", "</arg_value>\n</tool_call>"),
            )
        ),
        (
            "qwen3_coder",
            "<tool_call>\n<function=bash>\n<parameter=command>\necho '</parameter>' '</function>'\n</parameter>\n"
            "</function>\n</tool_call>",
            "",
            [("bash", {"command": "echo '</parameter>' '</function>'"})],
        ),
        # vllm#49248: the opening tag of a value is missing
        (
            "glm",
            "<tool_call>weather<arg_key>place</arg_key>Paris</arg_value></tool_call>",
            "",
            [("weather", {"place": "Paris"})],
        ),
        # vllm#32436: no arguments, and no line after the name
        ("glm", "<tool_call>now</tool_call>", "", [("now", {})]),
        # vllm#47901: a call without arguments before another
        (
            "mistral",
            '[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]weather[ARGS]{"place": "Paris"}',
            "",
            [("now", {}), ("weather", {"place": "Paris"})],
        ),
        # vllm#55495: two lines of shell with a variable
        (
            "qwen3_coder",
            "<tool_call>\n<function=bash>\n<parameter=command>\ntimeout 7\necho A=$A\n</parameter>\n</function>\n"
            "</tool_call>",
            "",
            [("bash", {"command": "timeout 7\necho A=$A"})],
        ),
        # browser-ai#212: commas in the texts of several pythonic calls
        (
            "pythonic",
            '[weather(place="Doe, Jane"), bash(command="a, b")]',
            "",
            [("weather", {"place": "Doe, Jane"}), ("bash", {"command": "a, b"})],
        ),
    ],
)
def test_calls_are_read(parser: str, text: str, content: str, calls: list) -> None:
    parsed = repair_of(parser)(text, TOOLS, is_whole=True)
    assert [(call.name, dict(call.arguments)) for call in parsed.calls] == calls
    assert (parsed.content, parsed.problems) == (content, ())


NOTHING = {
    "hermes": '<tool_call>\n{{"name": "{}", "arguments": null}}\n</tool_call>',
    "mistral": "[TOOL_CALLS]{}[ARGS]",
    "harmony": "<|channel|>commentary to=functions.{} <|constrain|>json<|message|><|call|>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.{}:0<|tool_call_argument_begin|>"
    "<|tool_call_end|><|tool_calls_section_end|>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁sep｜> null"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
}


@pytest.mark.parametrize("parser", NOTHING)
def test_a_call_without_arguments_may_have_nothing_or_null_in_their_place(parser: str) -> None:
    # vllm#43851, langchain#34242, vllm#28806: models write nothing or null for tools without parameters
    parse = lookup(Kind.TOOL_PARSER, parser)
    parsed = parse(NOTHING[parser].format("now"), TOOLS)
    assert [(call.name, dict(call.arguments)) for call in parsed.calls] == [("now", {})]
    assert (parsed.content, parsed.problems, parsed.repairs) == ("", (), ("no arguments",))
    refused = parse(NOTHING[parser].format("bash"), TOOLS)
    assert parser == "hermes" or (refused.calls, bool(refused.problems)) == ((), True)


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "note", "text": "ls"}\n</tool_call>'),
        ("llama3_json", '{"name": "note", "text": "ls"}'),
        ("mistral", '[TOOL_CALLS][{"name": "note", "text": "ls"}]'),
    ],
)
def test_arguments_beside_the_name_are_not_lost(parser: str, text: str) -> None:
    # a tool whose arguments are all optional would be called without them
    note = {"name": "note", "parameters": {"type": "object", "properties": {"text": TEXT}}}
    tools = {"note": {"type": "function", "function": note}}
    for parsed in (lookup(Kind.TOOL_PARSER, parser)(text, tools), repair_of(parser)(text, tools, is_whole=True)):
        assert parsed.calls == ()
        assert "has no \"arguments\", but 'text' next to its name" in parsed.problems[0]


@pytest.mark.parametrize(("parser", "call"), [("qwen3_coder", CODER), ("hermes", HERMES), ("glm", GLM)])
def test_an_explained_notation_is_no_call(parser: str, call: str) -> None:
    # vllm#57541: an answer that documents the notation in a code block
    text = f"Here is what a tool call looks like:\n\n```xml\n{call}\n```\n\nThat is the format."
    for parsed in (lookup(Kind.TOOL_PARSER, parser)(text, TOOLS), repair_of(parser)(text, TOOLS, is_whole=True)):
        assert (parsed.content, parsed.calls, parsed.problems) == (text, (), ())
    (found,) = repair_of(parser)(f"{text}\n{call}", TOOLS, is_whole=True).calls[-1:]
    assert found.name == "bash"


def test_a_truncated_call_is_not_made() -> None:
    # hermes-agent#7680: JSON that ends with the token limit
    assert repair_of("hermes")(WEATHER[:-2], TOOLS, is_whole=False).calls == ()
    assert repair_of("hermes")(WEATHER[:-4], TOOLS, is_whole=True).calls == ()


LFM2_TOOL = {
    "run": {
        "type": "function",
        "function": {
            "name": "run",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}, "from": {}, "n": {}}},
        },
    }
}


@pytest.mark.parametrize(
    ("written", "arguments"),
    [  # vllm#48171, sglang#34237, llama.cpp#26658, mlx-lm#1785
        ("command='grep -F \"]\" log.txt'", {"command": 'grep -F "]" log.txt'}),
        ("command='cat > f.py << EOF\nx = 1\nEOF'", {"command": "cat > f.py << EOF\nx = 1\nEOF"}),
        ("command='pattern \\\\'", {"command": "pattern \\"}),
        ("command='sed -n '1,9p' f.py'", {"command": "sed -n '1,9p' f.py"}),
        ("command='sed -n '1,9p' f.py', n=2", {"command": "sed -n '1,9p' f.py", "n": 2}),
        ("command='plot(x, \\'red\\', label='sin')'", {"command": "plot(x, 'red', label='sin')"}),
        ("command='# Hello, world!'", {"command": "# Hello, world!"}),
        ("n=-74.0046539", {"n": -74.0046539}),
        ("n=+7", {"n": 7}),
        ("n=07", {"n": 7}),
        ("n=0.07", {"n": 0.07}),
        ("n=(800, 600)", {"n": [800, 600]}),
        ("n=null, from=true", {"n": None, "from": True}),
        ("from=1", {"from": 1}),
    ],
)
def test_calls_of_lfm2(written: str, arguments: dict[str, object]) -> None:
    parse = lookup(Kind.TOOL_PARSER, "lfm2")
    parsed = parse(f"Hm.\n<|tool_call_start|> [run({written})]<|tool_call_end|>So.", LFM2_TOOL)
    assert [dict(call.arguments) for call in parsed.calls] == [arguments]
    assert (parsed.content, parsed.problems) == ("Hm.\nSo.", ())


@pytest.mark.parametrize(
    "written", ["n=1e999", "'ls'", "**{'n': 1}", "n=f(1)", "command='a 'b' c, n=2", "command='ls", "n=1, n=2"]
)
def test_calls_of_lfm2_that_cannot_be_read(written: str) -> None:
    text = f"<|tool_call_start|>[run({written})]<|tool_call_end|>"
    for parsed in (
        lookup(Kind.TOOL_PARSER, "lfm2")(text, LFM2_TOOL),
        repair_of("lfm2")(text, LFM2_TOOL, is_whole=True),
    ):
        assert (parsed.calls, len(parsed.problems)) == ((), 1)
        assert (
            "<|tool_call_start|>" in parsed.problems[0] or "twice" in parsed.problems[0] or "JSON" in parsed.problems[0]
        )


def test_calls_of_lfm2_in_other_forms() -> None:
    parse = lookup(Kind.TOOL_PARSER, "lfm2")
    listed = '<|tool_call_start|>[{"name": "run", "arguments": {"n": 1}}]<|tool_call_end|>'
    for text, number in (
        (listed, 1),
        ("<|tool_call_start|>run(n=1)<|tool_call_end|>", 1),
        ("<|tool_call_start|>[run(n=1)]", 1),
        ("<|tool_call_start|>[run(n=1)]<|tool_call_end|>[run(n=1)]<|tool_call_end|>", 1),
        ("<|tool_call_start|>[run(n=1), run(n=1)]<|tool_call_end|>", 2),
        ("<|tool_call_start|>[run(n=1)]<|tool_call_end|><|tool_call_start|>[run(n=1)]<|tool_call_end|>", 2),
    ):
        parsed = parse(text, LFM2_TOOL)
        assert [dict(call.arguments) for call in parsed.calls] == [{"n": 1}] * number, text
        assert (parsed.content, parsed.problems) == ("", ())
    assert parse("<|tool_call_start|>[]<|tool_call_end|>", LFM2_TOOL).problems
    assert parse("[run(n=1)]", LFM2_TOOL).calls == ()
