"""Checks of ``agent.tools`` and ``agent.sandbox`` before a run starts."""

from __future__ import annotations

import json
import sqlite3

import pytest

import agentrl
from agentrl.builders.tools import build_tools, check_tools, find_tool, sandbox_maker
from agentrl.config import load_config
from agentrl.errors import ConfigError, UsageError
from agentrl.registry import Kind, register, unregister
from agentrl.runs.api import tool_overrides


def config_of(*overrides):
    return load_config(None, ["environment=guess_number", "agent.loop=tool_calling", *overrides])


def built(*overrides):
    config = config_of(*overrides)
    check_tools(config)
    return build_tools(config.agent)


def test_names_and_options_stand_side_by_side(tmp_path):
    path = tmp_path / "a.db"
    sqlite3.connect(path).close()
    tools = built(f"agent.tools=[calculator, {{name: sql, database: {path}, max_rows: 5, max_concurrent: 3}}, submit]")
    assert [tool.name for tool in tools] == ["calculator", "sql", "submit"]
    assert (tools[1].options["max_rows"], tools[1].rules.max_concurrent) == (5, 3)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["agent.tools=[5]"], "agent.tools: 5 does not name a tool"),
        (["agent.tools=[{database: a.db}]"], r"agent.tools: {'database': 'a.db'} does not name a tool"),
        (["agent.tools=[submit, submit]"], "names submit more than once"),
        (["agent.tools=[submit, {name: submit}]"], "two tools with the same name: got submit"),
        (["agent.tools=[calcuator]"], "Did you mean 'calculator'"),
        (["agent.tools=[sql]"], "options of tool sql do not fit: database is missing"),
        (["agent.tools=[{name: submit, answer: 3}]"], "tool submit has no options: got answer"),
        (["agent.tools=[{name: calculator, timeout_s: -1}]"], "timeout_s is too small"),
        (["agent.tools=[{name: mcp, command: [a], urll: b}]"], r"unknown argument urll \(did you mean url"),
        (["agent.tools=[python, calculator, bash]"], "the tools python, bash need a sandbox"),
        (["agent.tools=[read_file]"], r"tool read_file needs a sandbox.*agent.sandbox=.type: local"),
        (["agent.tools=[calculator]", "agent.sandbox={type: local}"], "agent.sandbox is ignored"),
        (["agent.tools=[bash]", "agent.sandbox={typ: local}"], "sandbox has no key 'typ'"),
        (["agent.tools=[bash]", "agent.sandbox={type: local, limit: {seconds: 3}}"], "Did you mean 'limits'"),
        (["agent.tools=[bash]", "agent.sandbox={type: local, limits: {second: 3}}"], "agent.sandbox: .*'seconds'"),
    ],
)
def test_what_cannot_work_is_refused(overrides, words):
    with pytest.raises(UsageError, match=words):
        built(*overrides)


def test_one_environment_of_several_may_use_the_sandbox():
    config = load_config(
        None,
        [
            "environments={a: {name: guess_number, agent: {tools: [bash]}}, b: {name: guess_number}}",
            "agent={loop: tool_calling, sandbox: {type: local, limits: {seconds: 5}}}",
        ],
    )
    check_tools(config)
    make = sandbox_maker(config.agent)
    assert make is not None
    assert make().spec.limits.seconds == 5


def test_programs_give_tools_as_objects_names_or_options():
    class Shelf:
        def __init__(self, size: int = 1) -> None:
            if size < 1:
                raise UsageError("a shelf has a size")
            self.size = size

        def __call__(self) -> int:
            """Tell the size."""
            return self.size

    shelf = agentrl.tool(Shelf).with_options({"size": 4})
    (override,) = tool_overrides([shelf, "submit", {"name": "calculator", "max_tokens": 5}])
    assert json.loads(override.partition("=")[2])[0] == "python:shelf"
    tools = built(override)
    assert (tools[0].options, tools[2].rules.max_tokens) == ({"size": 4}, 5)
    with pytest.raises(UsageError, match="a shelf has a size"):
        find_tool({"name": "python:shelf", "size": 0})


def test_a_target_that_is_no_tool_is_refused():
    register(Kind.TOOL, "number", 5)
    try:
        with pytest.raises(ConfigError, match="number is not a tool: got int"):
            find_tool("number")
    finally:
        unregister(Kind.TOOL, "number")
