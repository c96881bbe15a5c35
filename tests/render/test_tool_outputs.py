"""Every family's parser on the outputs that are compared with the servers' parsers."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tool_notations import NOTATIONS
from support.tool_outputs import TOOLS, tool_outputs

from agentrl.registry import Kind, lookup
from agentrl.render.answers import split_channels
from agentrl.render.tool_parsers import ParsedCalls

OFFERED = {tool["function"]["name"]: tool for tool in TOOLS}
PARSERS = {
    "hermes": "hermes",
    "llama3_json": "llama3_json",
    "qwen3_coder": "qwen3_coder",
    "mistral": "mistral",
    "mistral_v3": "mistral",
    "glm": "glm",
    "deepseek_v3": "deepseek_v3",
    "deepseek_v3.1": "deepseek_v31",
    "deepseek_v3.2": "deepseek_v32",
    "deepseek_v4": "deepseek_v4",
    "gemma4": "gemma4",
    "lfm2": "lfm2",
    "seed_oss": "seed_oss",
    "apertus": "apertus",
    "kimi_k2": "kimi_k2",
    "gpt_oss": "harmony",
    "minimax_m2": "minimax_m2",
    "llama4": "pythonic",
}
VALID = ("one call", "several calls", "nested arguments", "unicode", "odd strings", "strings like other types")
SAID = {"no arguments", "no call", "undeclared argument", *VALID}
"""Kinds that every family can say, and that are right in all of them."""
REPAIRED = {"no closing mark", "broken arguments", "a broken call after a good one", "cut in the arguments"}
"""Kinds that the servers' parsers accept in some families, such as a cut between two arguments."""
ALONE = {"llama3_json", "llama4"}
"""Families whose calls are the whole answer."""


def read(family: str, text: str) -> ParsedCalls:
    shown = split_channels(text).rest if family == "gpt_oss" else text
    return lookup(Kind.TOOL_PARSER, PARSERS[family])(shown, OFFERED)


def found(parsed: ParsedCalls) -> list[tuple[str, str]]:
    return [(call.name, json.dumps(dict(call.arguments))) for call in parsed.calls]


@pytest.mark.parametrize("family", sorted(NOTATIONS))
def test_all_notations_say_the_same(family: str) -> None:
    outputs, others = tool_outputs(family), tool_outputs("hermes")
    assert len(outputs) >= 300
    assert len({output.text for output in outputs}) > 200
    for output, other in zip(outputs, others, strict=True):
        mine, theirs = read(family, output.text), read("hermes", other.text)
        assert mine.problems == () or output.kind not in SAID, output.text
        if output.kind in SAID or (output.kind in ("text before", "text after") and family not in ALONE):
            assert (found(mine), mine.content) == (found(theirs), theirs.content), output.text


@pytest.mark.parametrize("family", sorted(NOTATIONS))
def test_what_is_malformed_is_a_problem_or_a_repair(family: str) -> None:
    malformed = [output for output in tool_outputs(family) if output.kind not in SAID | {"text before", "text after"}]
    # an answer that looks like other text, and one that ends at its closing mark, which is not part of its text
    lenient = {"llama4": {"no name"}, "apertus": {"no closing mark"}}.get(family, set())
    parsed = [(output.kind, read(family, output.text)) for output in malformed if output.kind not in lenient]
    assert [kind for kind, found in parsed if not found.problems and not found.repairs] == []
    assert {kind for kind, found in parsed if not found.problems} <= REPAIRED


PIECES = [
    *(
        "[TOOL_CALLS]",
        "[ARGS]",
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    ),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
    *("```json\n", "\n```", "look", "put", '{"count": 1}', "{}", "[", "]", "{", "}", '"', "(", ")", "=", ",", "\n"),
    *("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", '<｜DSML｜invoke name="put">', "</｜DSML｜invoke>"),
    *('<｜DSML｜parameter name="count" string="false">', "</｜DSML｜parameter>", "<minimax:tool_call>"),
    *("</minimax:tool_call>", '<invoke name="put">', "</invoke>", '<parameter name="count">', "</parameter>", "1"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    *("<|tool_call>call:put{", "<tool_call|>", '<|"|>', "count:", "what:", "null"),
    *("functions.look:0", "<|tool_call_argument_begin|>", "<|channel|>", "<|message|>", "<|call|>", "<|start|>"),
    *("commentary to=functions.put", "analysis", "final", "<|end|>", "[put(count=", "look()", "1e999", "9" * 5000),
]


@pytest.mark.parametrize("family", sorted(set(NOTATIONS) - {"hermes", "llama3_json", "qwen3_coder", "mistral_v3"}))
@settings(max_examples=60, deadline=None, derandomize=True)
@given(text=st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=14).map("".join))
def test_parsers_never_raise_and_give_usable_calls(family: str, text: str) -> None:
    parsed = read(family, text)
    assert all(call.name in OFFERED for call in parsed.calls)
    assert len({call.id for call in parsed.calls}) == len(parsed.calls)
    assert all(problem.endswith((".", "?")) for problem in parsed.problems)
    json.dumps([dict(call.arguments) for call in parsed.calls], allow_nan=False, ensure_ascii=False).encode()
