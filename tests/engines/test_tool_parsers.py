"""Our parsers of tool calls against the servers' own, on the same outputs of models.

Where they differ, ``tool_parser_differences.json`` says how, by family, server and kind of output; every difference is
listed there, and every listed one is there. docs/concepts/model-families.md explains them.
"""

import json
import os
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.damaged_calls import damaged_calls
from support.tokenizers import build_tokenizer
from support.tool_notations import NOTATIONS
from support.tool_outputs import TOOLS, Output, tool_outputs

from agentrl.registry import Kind, lookup
from agentrl.render.answers import split_channels
from agentrl.serving.launch import engine_python
from agentrl.serving.launch.resources import engines_folder
from agentrl.serving.sglang.server import CPU_MODULES
from agentrl.tool.json_schema import fits

SCRIPT = Path(__file__).with_name("server_parsers.py")
DAMAGED = json.loads(Path(__file__).with_name("damaged_call_differences.json").read_text(encoding="utf-8"))
"""How many damaged calls we do not read as a server does, by kind: there the server loses the end of an argument's tag,
or of the answer, and makes something else of the call; or it makes a call without arguments of one whose key for the
arguments is damaged."""
EACH = 40
"""Outputs of every kind of damage."""
DIFFERENCES = json.loads(Path(__file__).with_name("tool_parser_differences.json").read_text(encoding="utf-8"))
OFFERED = {tool["function"]["name"]: tool for tool in TOOLS}
SERVERS = ("vllm", "sglang")
TOO_LONG = "TooLong"
SLOW = {("sglang", "llama4")}
"""Parsers whose time grows exponentially for some outputs. The machine decides which of them end in time, so those that
do not are left out."""
UNTYPED = {("vllm", "gemma4")}
"""Parsers that read numbers and words as text where the tool's schema declares no type."""
VOCABULARY = "o200k_base.tiktoken"


@dataclass(frozen=True)
class Parsers:
    """The names of a family's parsers, and of a tokenizer with its tokens."""

    tokenizer: str
    ours: str
    vllm: str
    sglang: str | None
    """``None``: SGLang has no parser for the family."""


FAMILIES = {
    "hermes": Parsers("qwen2.5", "hermes", "hermes", "hermes"),
    "llama3_json": Parsers("llama3", "llama3_json", "llama3_json", "llama3"),
    "qwen3_coder": Parsers("qwen3_coder", "qwen3_coder", "qwen3_coder", "qwen3_coder"),
    "mistral": Parsers("mistral", "mistral", "mistral", "mistral"),
    "mistral_v3": Parsers("mistral_v3", "mistral", "mistral", "mistral"),
    "glm": Parsers("glm", "glm", "glm45", "glm45"),
    "deepseek_v3": Parsers("deepseek_v3", "deepseek_v3", "deepseek_v3", "deepseekv3"),
    "deepseek_v3.1": Parsers("deepseek_v3.1", "deepseek_v31", "deepseek_v31", "deepseekv31"),
    "deepseek_v3.2": Parsers("deepseek_v3.2", "deepseek_v32", "deepseek_v32", "deepseekv32"),
    "deepseek_v4": Parsers("deepseek_v3.2", "deepseek_v4", "deepseek_v4", "deepseekv4"),
    "gemma4": Parsers("gemma4", "gemma4", "gemma4", "gemma4"),
    "lfm2": Parsers("lfm2", "lfm2", "lfm2", "lfm2"),
    "seed_oss": Parsers("seed_oss", "seed_oss", "seed_oss", None),
    "apertus": Parsers("apertus", "apertus", "apertus", "apertus2509"),
    "kimi_k2": Parsers("kimi_k2", "kimi_k2", "kimi_k2", "kimi_k2"),
    "gpt_oss": Parsers("gpt_oss", "harmony", "openai", "gpt-oss"),
    "minimax_m2": Parsers("minimax_m2", "minimax_m2", "minimax_m2", "minimax-m2"),
    "llama4": Parsers("llama4", "pythonic", "llama4_pythonic", "pythonic"),
}
COMPARED = [(server, name) for server in SERVERS for name in sorted(FAMILIES) if getattr(FAMILIES[name], server)]


@dataclass(frozen=True)
class Reading:
    """What a parser made of an output."""

    calls: list[tuple[str, Any]]
    content: str
    raised: str = ""


Answers = Mapping[str, Sequence[Mapping[str, Any]]]


@pytest.fixture(scope="session")
def server_answers(tmp_path_factory) -> Callable[[str], Answers]:
    """What a server's parsers make of all outputs; each server is asked once, in its own environment."""
    known: dict[str, Answers] = {}

    def ask(server: str) -> Answers:
        if server not in known:
            known[server] = _ask(server, tmp_path_factory.mktemp(server))
        return known[server]

    return ask


def _ask(server: str, folder: Path) -> Answers:
    jobs = {}
    for family, parsers in FAMILIES.items():
        if getattr(parsers, server) is None:
            continue
        build_tokenizer(parsers.tokenizer).save_pretrained(folder / parsers.tokenizer)
        outputs = [output.text for output in (*tool_outputs(family), *damaged_calls(family, EACH))]
        name, tokenizer = getattr(parsers, server), str(folder / parsers.tokenizer)
        jobs[family] = {"parser": name, "tokenizer": tokenizer, "outputs": outputs}
    asked = {"server": server, "tools": TOOLS, "jobs": jobs}
    (folder / "jobs.json").write_text(json.dumps(asked), encoding="utf-8")
    variables = {"TIKTOKEN_ENCODINGS_BASE": str(_harmony_folder()), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    if server == "sglang":
        variables |= {"PYTHONPATH": str(CPU_MODULES), "SGLANG_USE_CPU_ENGINE": "1"}
    done = subprocess.run(
        [engine_python(server, None), SCRIPT, folder], env={**os.environ, **variables}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads((folder / f"{server}.json").read_text(encoding="utf-8"))


def _harmony_folder() -> Path:
    """Where ``make engines`` has put the vocabulary without which OpenAI's library does not parse."""
    folders = [path.parent for path in engines_folder(os.environ).glob(f"harmony-*/{VOCABULARY}")]
    assert folders, f"no harmony-*/{VOCABULARY} in {engines_folder(os.environ)}: run make engines"
    return folders[0]


def read_theirs(answer: Mapping[str, Any]) -> Reading:
    if "raised" in answer:
        return Reading([], "", raised=answer["raised"])
    calls = [(name, _loaded(arguments)) for name, arguments in answer["calls"]]
    return Reading(calls, answer["content"].strip())


def _loaded(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except json.JSONDecodeError:
        return f"not JSON: {arguments}"


def read_ours(family: str, output: Output) -> Reading:
    text = split_channels(output.text).rest if family == "gpt_oss" else output.text
    parsed = lookup(Kind.TOOL_PARSER, FAMILIES[family].ours)(text, OFFERED)
    return Reading([(call.name, dict(call.arguments)) for call in parsed.calls], parsed.content)


def difference(ours: Reading, theirs: Reading, text: str) -> str:
    """In words, how `theirs` differs from `ours`; empty when it does not."""
    if theirs.raised:
        return "it raises"
    found = (_calls_difference(ours.calls, theirs.calls), _content_difference(ours, theirs, text))
    return ", ".join(part for part in found if part)


def _calls_difference(ours: list[tuple[str, Any]], theirs: list[tuple[str, Any]]) -> str:
    if theirs == ours:
        return ""
    if [call for call in theirs if call[0] in OFFERED] == ours:
        return "it calls tools that are not offered"
    if not theirs:
        return "it drops good calls"
    if _holds(theirs, ours):
        return "it calls with arguments that we refuse"
    return "it drops some good calls" if _holds(ours, theirs) else "it reads other arguments"


def _holds(longer: list[tuple[str, Any]], shorter: list[tuple[str, Any]]) -> bool:
    rest = iter(longer)
    return all(any(call == other for other in rest) for call in shorter)


def _content_difference(ours: Reading, theirs: Reading, text: str) -> str:
    if theirs.content == ours.content:
        return ""
    if theirs.content == text.strip():
        return "the output is its content"
    if not theirs.content:
        return "it leaves text out"
    return "its content holds parts of calls" if theirs.content in text else "its content is another"


@pytest.mark.parametrize(("server", "family"), COMPARED)
@pytest.mark.timeout(900)
@pytest.mark.capability("{server}", "tool parsers")
def test_the_servers_parsers_agree_with_ours_but_for_what_is_listed(server: str, family: str, server_answers) -> None:
    outputs, answers = tool_outputs(family), server_answers(server)[family]
    assert 300 <= len(outputs) < len(answers)
    found: dict[str, set[str]] = {}
    unread: Counter[str] = Counter()
    for output, answer in zip(outputs, answers[: len(outputs)], strict=True):
        theirs = read_theirs(answer)
        if theirs.raised == TOO_LONG:
            unread[output.kind] += 1
            continue
        found.setdefault(output.kind, set()).add(difference(read_ours(family, output), theirs, output.text))
    differing = {kind: sorted(ways) for kind, ways in found.items() if ways != {""}}
    assert differing == DIFFERENCES[family][server]
    assert bool(unread) == ((server, family) in SLOW), unread
    assert unread.total() < len(outputs) / 5


def usable(theirs: Reading) -> list[tuple[str, Any]]:
    """The calls of offered tools whose arguments are declared and fit."""
    schemas = {
        name: {**tool["function"]["parameters"], "additionalProperties": False} for name, tool in OFFERED.items()
    }
    return [(name, given) for name, given in theirs.calls if name in schemas and fits(given, schemas[name], {})]


def as_text(value: Any) -> Any:
    """A value whose numbers and words are text."""
    if isinstance(value, dict):
        return {key: as_text(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_text(item) for item in value]
    return value if isinstance(value, str) else json.dumps(value)


def accepts(ours: list[tuple[str, Any]], theirs: list[tuple[str, Any]]) -> bool:
    """Whether all of their calls are among ours, in order; an argument that they lost may be there."""
    rest = iter(ours)
    return all(any(call[0] == name and given.items() <= call[1].items() for call in rest) for name, given in theirs)


@pytest.mark.parametrize(("server", "family"), COMPARED)
@pytest.mark.timeout(900)
def test_damaged_calls_that_a_server_reads_are_read(server: str, family: str, server_answers) -> None:
    outputs = damaged_calls(family, EACH)
    answers = server_answers(server)[family][-len(outputs) :]
    read = [(output, usable(read_theirs(answer))) for output, answer in zip(outputs, answers, strict=True)]
    assert sum(bool(calls) for _, calls in read) > len(outputs) / 3
    missed = Counter()
    for output, calls in read:
        ours = read_ours(family, output).calls
        if (server, family) in UNTYPED:
            ours, calls = ([(name, as_text(given)) for name, given in both] for both in (ours, calls))
        missed[output.kind] += not accepts(ours, calls)
    assert +missed == DAMAGED[family][server]


def test_every_notation_is_compared() -> None:
    assert set(FAMILIES) == set(NOTATIONS) == set(DIFFERENCES)
