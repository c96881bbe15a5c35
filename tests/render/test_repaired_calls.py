"""Calls as small models write them: read where they are plain to see, and left alone where a text mentions JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tokenizers import build_tokenizer

from agentrl.engine import StopReason
from agentrl.registry import Kind, lookup
from agentrl.render.renderer import Renderer
from agentrl.render.tool_parsers import REPAIRS, repair_of
from agentrl.render.tool_parsers.json_calls import parse_hermes, repair_hermes


def schema(name: str, *required: str, **properties: dict) -> dict:
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = {
    "act": schema("act", "action", action={"type": "string"}),
    "look": schema("look"),
    "put": schema("put", "what", what={"type": "string"}, count={"type": "integer"}, place={"enum": ["desk", "bed"]}),
}
ACT = '{"name": "act", "arguments": {"action": "50"}}'
PUT = '{"name": "put", "arguments": {"what": "mug", "count": 2}}'
ACTED, PUT_IT = ("act", {"action": "50"}), ("put", {"what": "mug", "count": 2})


def read(text: str, *, is_whole: bool = True) -> tuple[str, list, tuple, tuple]:
    parsed = repair_hermes(text, TOOLS, is_whole=is_whole)
    return parsed.content, [(c.name, dict(c.arguments)) for c in parsed.calls], parsed.repairs, parsed.problems


@pytest.mark.parametrize(
    ("text", "calls", "repair"),
    [
        (ACT, [ACTED], "no tags"),
        (f"\n  {ACT}\n", [ACTED], "no tags"),
        (f"```json\n{ACT}\n```", [ACTED], "a code fence"),
        (f"```\n{ACT}\n```", [ACTED], "a code fence"),
        (f"```json\n{ACT}", [ACTED], "a code fence"),
        (f"<tools>\n{ACT}\n</tools>", [ACTED], "other tags"),
        (f"<tools>{ACT}", [ACTED], "other tags"),
        (f"<function_call>{ACT}</function_call>", [ACTED], "other tags"),
        (f"{ACT}\n</tool_call>", [ACTED], "no tags"),
        (f"<tool_call>\n{ACT}", [ACTED], "no closing tag"),
        (f"<tool_call>\n{ACT}\n</tool_", [ACTED], "no closing tag"),
        (ACT[:-1], [ACTED], "no tags, missing closing brackets"),
        (ACT[:-2], [ACTED], "no tags, missing closing brackets"),
        (f"<tool_call>\n{ACT[:-1]}\n</tool_call>", [ACTED], "missing closing brackets"),
        (f"<tool_call>\n{ACT[:-2]}", [ACTED], "no closing tag, missing closing brackets"),
        (f"<tool_call>\n{ACT}}}\n</tool_call>", [ACTED], "too many closing brackets"),
        (f"<tool_call>\n{ACT[:-2]}}}]}}\n</tool_call>", [ACTED], "a closing bracket that closes nothing"),
        (f"<tool_call>\n{ACT[:-2]})}}}}", [ACTED], "no closing tag, a closing bracket that closes nothing"),
        (f"{ACT[:-2]}]}}", [ACTED], "no tags, a closing bracket that closes nothing, missing closing brackets"),
        (ACT.replace("arguments", "parameters"), [ACTED], 'no tags, "parameters" for "arguments"'),
        ('{"name": "act", "arguments": {"action": "50",},}', [ACTED], "no tags, a trailing comma"),
        ('<tool_call>{"name": "act", "arguments": {"action": "50", }}</tool_call>', [ACTED], "a trailing comma"),
        (f"<tool_call>\n```json\n{ACT}\n```\n</tool_call>", [ACTED], "a code fence"),
        (f"[{ACT}, {PUT}]", [ACTED, PUT_IT], "no tags"),
        (f"{ACT}\n{PUT}", [ACTED, PUT_IT], "no tags"),
        (f"{ACT};{PUT}", [ACTED, PUT_IT], "no tags"),
        (f"```json\n{ACT}\n```\n```json\n{PUT}\n```", [ACTED, PUT_IT], "a code fence"),
        (f'{{"type": "function", "function": {ACT}}}', [ACTED], "no tags, an object around the call"),
        (
            '{"name": "act", "arguments": "{\\"action\\": \\"50\\"}"}',
            [ACTED],
            "no tags, arguments as text",
        ),
        ('{"name": "act", "arguments": {"action": "5\n0"}}', [("act", {"action": "5\n0"})], "no tags, a line break"),
    ],
)
def test_what_models_write_is_read(text: str, calls: list, repair: str) -> None:
    content, found, repairs, problems = read(text)
    assert (found, problems) == (calls, ())
    assert [note.startswith(repair) for note in repairs] == [True] * len(calls)
    assert content in ("", "</tool_")


@pytest.mark.parametrize("call", [ACT, f"```json\n{ACT}\n```", f"<tools>\n{ACT}\n</tools>"])
def test_text_with_many_lists_before_a_call_is_content(call: str) -> None:
    lists = "\n".join(["[1, 2]", "```", '{"a": 1}', "```"] * 100)
    assert read(f"{lists}\n\n{call}")[:2] == (lists, [ACTED])


@pytest.mark.parametrize("call", [ACT, f"```json\n{ACT}\n```", f"<tools>\n{ACT}\n</tools>"])
def test_text_before_a_call_is_content(call: str) -> None:
    assert read(f"I guess the middle.\n\n{call}")[:2] == ("I guess the middle.", [ACTED])


@pytest.mark.parametrize(
    "text",
    [
        f"To act, write {ACT}",
        f"The answer was {ACT}, which is wrong.",
        f"This is a call:\n{ACT}\nI did not make it.",
        f"This is a call:\n```json\n{ACT}\n```\nShall I make it?",
        f"`{ACT}`",
        f"<answer>{ACT}</answer>",
        f'The server said:\n{{"status": 200, "call": {ACT}}}',
        '{"name": "Ada", "arguments": {"action": "50"}}',
        '{"name": "act"}',
        '{"action": "50"}',
        '{"name": "look", "arguments": {}, "result": "dark"}',
        "[1, 2, 3]",
        '```python\nprint({"name": "look", "arguments": {}})\n```',
        '<tools>\n{"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}\n</tools>',
        '<tools>\n{"name": "look", "parameters": {"type": "object", "properties": {}}}\n</tools>',
        "{}",
        "",
    ],
)
def test_a_text_that_mentions_json_stays_a_text(text: str) -> None:
    assert read(text) == (text.strip(), [], (), ())


@pytest.mark.parametrize(
    "text",
    [
        f"```python\nprint(1)\n{ACT}\n```",
        f"Run this:\n```python\nprint(1)\n\n{ACT}\n\n{PUT}\n```",
        f"{ACT}\nor\n{ACT}",
        f"```json\n{ACT}\n```\nOr, alternatively:\n```json\n{PUT}\n```",
        f"For reference, a call looks like this:\n```json\n{ACT}\n```",
        f"A call looks like this:\n\n{ACT}",
        f"This would be the wrong form:\n```json\n{ACT}\n```",
        f"I look. For example:\n{ACT}",
        f"Here is an example of two calls:\n```json\n{ACT}\n```\n```json\n{PUT}\n```",
        f"Example: ```json\n{ACT}\n```",
        f"Don't write:\n```\n{ACT}\n```",
        f"A tool call would be <tools>{ACT}</tools>",
        '{"type": "function", "function": {"name": "look", "parameters": {}}}',
        '<tools>\n{"type": "function", "function": {"name": "look", "parameters": {}}}\n</tools>',
        '[{"type": "function", "function": {"name": "look", "parameters": {}}}]',
        '<tools>\n{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}\n</tools>',
    ],
)
def test_code_examples_alternatives_and_descriptions_stay_text(text: str) -> None:
    assert read(text) == (text, [], (), ())


@pytest.mark.parametrize(
    "before",
    [
        "I would be happy to look:",
        "For example, the mug may be in the drawer. I act:",
        "For instance, the mug may be on the desk.",
        "It looks like the drawer is locked:",
        "The door or the window? The door:",
        "Here is the call in the right form:",
        "```python\nprint(1)\n```\nNow I act.",
        "That was the wrong answer. I try again:",
        "The example is clear. I act:",
    ],
)
@pytest.mark.parametrize("call", [ACT, f"```json\n{ACT}\n```"])
def test_other_words_before_a_call_leave_it_a_call(before: str, call: str) -> None:
    assert read(f"{before}\n{call}")[:2] == (before, [ACTED])


@pytest.mark.parametrize("arguments", ["null", '""', '" "'])
@pytest.mark.parametrize("form", ["{}", "<tool_call>\n{}\n</tool_call>", "```json\n{}\n```", "<tool_call>\n{}"])
def test_arguments_that_are_nothing_are_none(form: str, arguments: str) -> None:
    call = f'{{"name": "look", "arguments": {arguments}}}'
    _, calls, repairs, problems = read(form.replace("{}", call))
    assert (calls, problems) == ([("look", {})], ())
    assert [note.endswith("no arguments") for note in repairs] == [True]


@pytest.mark.parametrize(
    ("parser", "text", "calls"),
    [
        ("hermes", f"\ufeff{ACT}", [ACTED]),
        ("llama3_json", '<function=act>{"action": "50"}</function>', [ACTED]),
        ("llama3_json", 'I act.\n<function=act>{"action": "50"}</function>\n<function=look>{}</function>', None),
        ("hermes", '<function=act>{"action": "50"}', [ACTED]),
        ("llama3_json", 'Write <function=act>{"action": "50"}</function> to act.', []),
        ("llama3_json", '<function=act>{"move": "50"}</function>', []),
    ],
)
def test_marks_of_other_writers_are_read(parser: str, text: str, calls: list | None) -> None:
    parsed = repair_of(parser)(text, TOOLS, is_whole=True)
    found = [(call.name, dict(call.arguments)) for call in parsed.calls]
    assert found == ([ACTED, ("look", {})] if calls is None else calls)


@pytest.mark.parametrize(
    "arguments",
    [
        '{"action": "50", "count": }',
        '{"move": "50"}',
        '{"action": ["50"]}',
        '{"action": "5',
        '["50"]',
    ],
)
def test_arguments_that_do_not_fit_are_not_carried_out(arguments: str) -> None:
    for text in (
        f'{{"name": "act", "arguments": {arguments}}}',
        f'<tool_call>{{"name": "act", "arguments": {arguments},',
    ):
        assert read(text)[1] == []


@pytest.mark.parametrize("value", ['"sofa"', "1", "[]"])
def test_values_outside_of_an_enum_are_refused(value: str) -> None:
    _, calls, _, problems = read(f'{{"name": "put", "arguments": {{"what": "mug", "place": {value}}}}}')
    assert (calls, len(problems)) == ([], 1)
    assert "do not fit put: place is not " in problems[0]
    assert "<tool_call>" in problems[0]


def test_numbers_and_text_are_taken_as_the_tools_take_them() -> None:
    text = '{"name": "put", "arguments": {"what": 7, "count": "2", "place": null}}'
    assert read(text)[1] == [("put", {"what": 7, "count": "2", "place": None})]


@pytest.mark.parametrize("text", [ACT[:-1], f"<tool_call>\n{ACT[:-2]}", ACT[: ACT.index("0")]])
def test_an_answer_that_was_cut_is_not_completed(text: str) -> None:
    assert read(text, is_whole=False)[1] == []


def test_good_and_mended_blocks_come_in_order() -> None:
    text = f"First.<tool_call>{PUT}</tool_call><tool_call>{ACT[:-1]}</tool_call>Then.<tool_call>{ACT}"
    content, calls, repairs, problems = read(text)
    assert (content, calls, problems) == ("First.Then.", [PUT_IT, ACTED, ACTED], ())
    assert repairs == ("missing closing brackets", "no closing tag")


def test_unknown_tools_among_offered_ones_are_problems() -> None:
    _, calls, repairs, problems = read(f'{ACT}\n{{"name": "akt", "arguments": {{"action": "1"}}}}')
    assert (calls, repairs) == ([ACTED], ("no tags",))
    assert problems == ("Tool call 2 names an unknown tool 'akt'. Did you mean 'act'?",)


def test_what_is_right_is_not_touched() -> None:
    text = f"I look.\n<tool_call>\n{ACT}\n</tool_call>\n<tool_call>\n{PUT}\n</tool_call>"
    assert repair_hermes(text, TOOLS, is_whole=True) == parse_hermes(text, TOOLS)
    assert read(text)[2] == ()


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("mistral", f"[TOOL_CALLS] [{ACT}"),
        ("mistral", ACT),
        ("llama3_json", f"```json\n{ACT[:-1]}\n```"),
        ("pythonic", f"[{ACT}]"),
        ("glm", f"I act.\n{ACT}"),
        ("qwen3_coder", f"<tools>\n{ACT}\n</tools>"),
        ("deepseek_v31", f"```json\n{ACT}\n```"),
        ("kimi_k2", ACT.replace("arguments", "parameters")),
        ("minimax_m2", ACT[:-2]),
    ],
)
def test_models_of_other_families_write_json_too(parser: str, text: str) -> None:
    parsed = repair_of(parser)(text, TOOLS, is_whole=True)
    assert ([(call.name, dict(call.arguments)) for call in parsed.calls], parsed.problems) == ([ACTED], ())
    assert len(parsed.repairs) == 1
    assert not lookup(Kind.TOOL_PARSER, parser)(text.removeprefix("```json\n"), TOOLS).calls or parser == "llama3_json"


@pytest.mark.parametrize("parser", sorted(REPAIRS))
def test_no_family_takes_mentioned_json_for_a_call(parser: str) -> None:
    text = f"One could write\n{ACT}\nto act."
    assert repair_of(parser)(text, TOOLS, is_whole=True).calls == ()


TAGGED = {
    "qwen3_coder": "I act.\n<tool_call>\n<function=act>\n<parameter=action>\nnorth",
    "glm": "I act.\n<tool_call>act\n<arg_key>action</arg_key>\n<arg_value>north",
    "minimax_m2": 'I act.\n<minimax:tool_call>\n<invoke name="act">\n<parameter name="action">north',
    "deepseek_v32": 'I act.\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="act">\n'
    '<｜DSML｜parameter name="action" string="true">north',
}


@pytest.mark.parametrize("parser", sorted(TAGGED))
@pytest.mark.parametrize("rest", ["", "\n", "</para", "<"])
def test_a_whole_answer_may_end_within_an_argument(parser: str, rest: str) -> None:
    parsed = repair_of(parser)(TAGGED[parser] + rest, TOOLS, is_whole=True)
    assert [(call.name, dict(call.arguments)) for call in parsed.calls] == [("act", {"action": "north"})]
    assert (parsed.content, parsed.problems, parsed.repairs) == ("I act.", (), ("no closing tag",))
    assert repair_of(parser)(TAGGED[parser] + rest, TOOLS, is_whole=False).calls == ()
    assert lookup(Kind.TOOL_PARSER, parser)(TAGGED[parser] + rest, TOOLS).calls == ()


@pytest.mark.parametrize("parser", sorted(TAGGED))
def test_an_argument_that_ends_with_the_answer_must_fit(parser: str) -> None:
    text = TAGGED[parser].replace("act", "put").replace("action", "count").replace("north", "7")
    assert repair_of(parser)(text, TOOLS, is_whole=True).calls == ()


@pytest.mark.parametrize(
    "text",
    [
        "x = data[look(direction='north')]",
        "found = [look(direction='north')]",
        "print([look(direction='north')])",
        "run(1, [look(direction='north')])",
        "For example: [look(direction='north')]",
        "A call looks like this:\n```python\n[look(direction='north')]\n```",
        "Never write [look(direction='north')]",
    ],
)
def test_pythonic_lists_in_code_and_examples_are_repaired_into_no_call(text: str) -> None:
    parsed = repair_of("pythonic")(text, TOOLS, is_whole=True)
    assert (parsed.content, parsed.calls, parsed.problems) == (text, (), ())
    served = lookup(Kind.TOOL_PARSER, "pythonic")(text, TOOLS)
    assert [call.name for call in served.calls] == ["look"], "SGLang reads them"


@pytest.mark.parametrize(
    "before", ["I look: ", "I look. ", "Now, ", "So I call\n", "Now (at last) I look:\n```python\n"]
)
def test_pythonic_lists_after_other_text_are_calls(before: str) -> None:
    (call,) = repair_of("pythonic")(f"{before}[look(direction='north')]", TOOLS, is_whole=True).calls
    assert (call.name, dict(call.arguments)) == ("look", {"direction": "north"})


PIECES = (
    *(
        "<tool_call>",
        "</tool_call>",
        "<tools>",
        "</tools>",
        "```json\n",
        "```",
        "\n",
        " ",
        ",",
        ";",
        "{",
        "}",
        "[",
        "]",
    ),
    *(
        ACT,
        PUT,
        ACT[:-1],
        ACT[:-2],
        '"',
        "\\",
        '{"name": "look", "arguments": {}}',
        '{"name":',
        "NaN",
        "9" * 5000,
        "text",
    ),
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(text=st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=12).map("".join), is_whole=st.booleans())
def test_repairs_never_raise_and_give_usable_calls(text: str, is_whole: bool) -> None:
    parsed = repair_hermes(text, TOOLS, is_whole=is_whole)
    assert all(call.name in TOOLS for call in parsed.calls)
    assert len({call.id for call in parsed.calls}) == len(parsed.calls) >= len(parsed.repairs)
    json.dumps([dict(call.arguments) for call in parsed.calls], allow_nan=False, ensure_ascii=False).encode()
    strict = parse_hermes(text, TOOLS)
    mine = iter([(call.name, call.arguments) for call in parsed.calls])
    assert all((call.name, call.arguments) in mine for call in strict.calls)


@contextmanager
def in_time() -> Iterator[None]:
    """Fail if this takes 20 seconds of a core, as it does where the time grows with the square of the length."""
    began = time.process_time()
    yield
    assert time.process_time() - began < 20


@pytest.mark.parametrize(
    "text", ["\n[" * 20_000, ("\n" + ACT) * 2_000 + " so", "```" * 20_000, '\n{"a": ' * 10_000, "}" * 50_000]
)
def test_long_answers_are_read_in_time(text: str) -> None:
    with in_time():
        assert read(text)[1] == []


@pytest.mark.parametrize("parser", sorted(REPAIRS))
@pytest.mark.parametrize("blanks", [" " * 30_000, "\n" * 30_000])
def test_long_blanks_are_read_in_time(parser: str, blanks: str) -> None:
    marks = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>a<tool_call>a<function=act><parameter=x>[act(a"
    with in_time():
        assert repair_of(parser)(f"{marks}{blanks}x{blanks})]</y>{blanks}x", TOOLS, is_whole=True).calls == ()


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(build_tokenizer("qwen2.5"))


@pytest.mark.parametrize(
    ("repairs_calls", "stop_reason", "calls"),
    [(True, StopReason.STOP, 1), (True, StopReason.LENGTH, 0), (False, StopReason.STOP, 0)],
)
def test_renderers_repair_whole_answers_if_asked(
    renderer: Renderer, repairs_calls: bool, stop_reason: StopReason, calls: int
) -> None:
    ids = renderer.encoder.encode(ACT[:-1])
    answer = renderer.read(ids, stop_reason=stop_reason, tools=list(TOOLS.values()), repairs_calls=repairs_calls)
    assert (len(answer.tool_calls), len(answer.repairs), answer.raw_text) == (calls, calls, ACT[:-1])
