"""The protocol carries everything that the contracts define."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from served_worlds import STAIRS

import agentrl.env
from agentrl.env import EnvironmentSpec, StepResult
from agentrl.message import ImagePart, Message, TextPart, ToolCall
from agentrl.remote.client import RemoteActionSpace
from agentrl.remote.env_methods import (
    OPTIONAL_PARTS,
    RESET,
    SERVED_METHODS,
    STEP,
    RemoteTool,
    ResetResult,
    StepReply,
)
from agentrl.remote.link import Link, ProtocolMismatch, RequestTimeout
from agentrl.remote.wire import (
    from_json,
    read_message,
    read_served,
    read_task,
    read_tool_result,
    spec_facts,
    to_json,
    write_message,
    write_served,
    write_task,
    write_tool_result,
)
from agentrl.task import Task
from agentrl.tool import Tool, ToolResult, ToolRules

CLIENTS_OWN = {"name", "make", "tasks", "isolation", "isolation_of", "splits_of", "options", "extra"}
"""Facts of a spec that a client decides for itself: its name is the address, its steps wait for the network, and what
its server has installed is the server's."""
SENT_AS_OTHERS = {"instructions_of"}
"""Facts whose values for the server's options are sent."""


def vars_of(part: TextPart | ImagePart) -> dict[str, object]:
    """All fields, those that comparing leaves out among them."""
    return {name: getattr(part, name) for name in names(type(part))}


def names(record: type) -> set[str]:
    return {field.name for field in dataclasses.fields(record)}


def test_every_plain_field_of_a_spec_is_sent() -> None:
    told = from_json(to_json(write_served(STAIRS, {"height": 3}, OPTIONAL_PARTS, "up")))
    facts = spec_facts(read_served("http://127.0.0.1:1", told))
    assert set(facts) | CLIENTS_OWN | SENT_AS_OTHERS == names(EnvironmentSpec)
    assert facts == {name: getattr(STAIRS, name) for name in facts}


def test_every_optional_part_of_the_contract_can_be_served() -> None:
    rows = re.findall(r"^- ``(\w+)(?:\(\w*\))?``", agentrl.env.contract.__doc__ or "", re.MULTILINE)
    assert set(rows) <= {*OPTIONAL_PARTS, "action_hint"}
    assert len(rows) > 5


def test_every_served_method_is_documented_with_its_arguments() -> None:
    page = (Path(__file__).parents[2] / "docs" / "environments" / "remote.md").read_text()
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|", page.partition("| method |")[2].partition("\n\n")[0], re.MULTILINE)
    told = {name: arguments for names, arguments in rows for name in re.findall(r"`(\w+)`", names)}
    assert set(told) == set(SERVED_METHODS)
    for name, method in SERVED_METHODS.items():
        assert all(f"`{argument.name}`" in told[name] for argument in method.arguments)


def test_another_environment_has_another_fingerprint() -> None:
    def fingerprint(
        spec: EnvironmentSpec = STAIRS, hint: str = "up", parts: Any = OPTIONAL_PARTS, **options: Any
    ) -> str:
        return str(write_served(spec, {"height": 3, **options}, frozenset(parts), hint)["fingerprint"])

    changed = [
        fingerprint(height=4),
        fingerprint(other=1),
        fingerprint(hint="down"),
        fingerprint(parts=OPTIONAL_PARTS - {"tools"}),
        *(
            fingerprint(dataclasses.replace(STAIRS, **{name: value}))
            for name, value in {
                "name": "steps",
                "description": "Steps.",
                "version": 7,
                "instructions": "Go up.",
                "tool_instructions": "Go up with tools.",
                "answer_format": "plain",
                "max_turns": 8,
                "success_threshold": 0.5,
                "splits": ("train",),
                "scores": {"expert": 0.5},
                "reward_range": (0.0, 1.0),
                "images_of": lambda **_: True,
                "roles_of": lambda **_: ("user",),
            }.items()
        ),
    ]
    assert len({fingerprint(), *changed}) == 1 + len(changed)
    assert fingerprint() == fingerprint()


def test_option_changes_the_reported_step_limit() -> None:
    assert write_served(STAIRS, {}, OPTIONAL_PARTS, "up")["spec"]["max_turns"] == 7
    assert write_served(STAIRS, {"max_steps": 5}, OPTIONAL_PARTS, "up")["spec"]["max_turns"] == 5


def look(far: bool) -> str:
    """Look around.

    Args:
        far: Into the distance.
    """
    return str(far)


RULES = {
    "stop": True,
    "parallel": True,
    "pure": True,
    "timeout_s": 2.5,
    "max_tokens": 7,
    "max_concurrent": 3,
    "max_per_second": 1.5,
}


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_of_a_tool_arrives(rule: str) -> None:
    assert {*RULES, "inline"} == names(ToolRules), "of the tool's own process"
    own = Tool(look, **{rule: RULES[rule]})  # type: ignore[arg-type]
    told = RemoteTool(**from_json(to_json(RemoteTool.describe(own).to_plain())))
    assert (told.name, told.schema, told.rules) == (own.name, own.schema, ToolRules(**{rule: RULES[rule]}))  # type: ignore[arg-type]
    assert (told.stop, told.rules.is_parallel) == (own.stop, own.rules.is_parallel)
    newer = RemoteTool(own.name, own.schema, rules={rule: RULES[rule], "of_tomorrow": 1})
    assert getattr(newer.rules, rule) == (RULES[rule] if rule != "stop" else False)


@pytest.mark.parametrize(
    "more", [{}, {"reward": -0.25}, {"metrics": {"rows": 3.0, "columns": 0.0}}, {"stop": True}], ids=str
)
def test_each_part_of_a_tools_result_arrives(more: dict[str, Any]) -> None:
    result = ToolResult("3 rows", **more)
    assert read_tool_result(from_json(to_json(write_tool_result(result)))) == result


def test_each_part_of_a_step_and_of_a_reset_arrives() -> None:
    for ended in ((True, False), (False, True), (False, False)):
        result = StepResult(
            observation="here", reward=0.25, terminated=ended[0], truncated=ended[1], info={"success": True}
        )
        stepped = StepReply(result=result, state_key="k")
        assert STEP.result.read(from_json(to_json(STEP.result.write(stepped)))) == stepped
    tools = (RemoteTool("look", {"a": 1}), RemoteTool("end", {"b": 2}, stop=True))
    begun = ResetResult(observation="there", info={"a": 1}, state_key="k", action_hint="up", tools=tools)
    arrived = RESET.result.read(from_json(to_json(RESET.result.write(begun))))
    assert [tool.to_plain() for tool in arrived.tools] == [tool.to_plain() for tool in tools]  # type: ignore[attr-defined]
    assert dataclasses.replace(arrived, tools=()) == dataclasses.replace(begun, tools=())


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (502, RequestTimeout),
        (503, RequestTimeout),
        (504, RequestTimeout),
        (500, ProtocolMismatch),
        (404, ProtocolMismatch),
    ],
)
def test_a_proxys_page_is_tried_again_if_its_server_may_come_back(status: int, kind: type[Exception]) -> None:
    assert type(Link("http://127.0.0.1:1")._read("/v1/info", status, b"<html>Bad gateway</html>")) is kind


async def test_seed_applies_to_one_sample() -> None:
    sent = []

    async def call(method: Any, *arguments: Any) -> str:
        sent.append((method.name, *arguments))
        return "up"

    space = RemoteActionSpace(call)  # type: ignore[arg-type]
    space.seed(5)
    assert [await space.sample() for _ in range(3)] == ["up"] * 3
    assert sent == [("sample", 5), ("sample", None), ("sample", None)]


def test_tasks_and_messages_round_trip() -> None:
    task = Task(
        id="a",
        environment="here",
        seed=2**70,
        options={"x": [1]},
        prompt="p",
        ground_truth={"y": 1},
        type="t",
        columns={"z": [2]},
        messages=(Message(role="system", content="s"), Message(role="user", content="p")),
    )
    assert set(write_task(task)) | {"environment"} == names(Task)
    assert read_task(from_json(to_json(write_task(task))), "there") == dataclasses.replace(task, environment="there")
    message = Message(
        role="assistant",
        content=(TextPart(text="\ud800"), ImagePart(data=b"\x00\xff", media_type="image/jpeg", alternative="a")),
        tool_calls=(ToolCall(name="look", arguments={"far": True}, id="1"),),
        tool_call_id="2",
        name="n",
        reasoning="because",
    )
    assert set(write_message(message)) == names(Message)
    arrived = read_message(from_json(to_json(write_message(message))))
    assert arrived == message
    assert [vars_of(part) for part in arrived.content] == [vars_of(part) for part in message.content]


def test_numbers_of_numpy_arrive_as_numbers() -> None:
    info = {"reward": np.float32(0.5), "count": np.int64(3), "done": np.bool_(True), "row": np.arange(3)}
    assert from_json(to_json(info)) == {"reward": 0.5, "count": 3, "done": True, "row": [0, 1, 2]}
