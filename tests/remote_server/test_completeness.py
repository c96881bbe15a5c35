"""Nothing of an environment is forgotten on the way: what the contracts hold, the protocol carries."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
from served_worlds import STAIRS

import agentrl.env
from agentrl.env import EnvironmentSpec
from agentrl.message import ImagePart, Message, TextPart, ToolCall
from agentrl.remote.env_methods import OPTIONAL_PARTS, SERVED_METHODS
from agentrl.remote.wire import (
    from_json,
    read_message,
    read_served,
    read_task,
    spec_facts,
    to_json,
    write_message,
    write_served,
    write_task,
)
from agentrl.task import Task

CLIENTS_OWN = {"name", "make", "tasks", "isolation", "isolation_of", "options", "extra"}
"""Facts of a spec that a client decides for itself: its name is the address, its steps wait for the network, and what
its server has installed is the server's."""


def vars_of(part: TextPart | ImagePart) -> dict[str, object]:
    """All fields, those that comparing leaves out among them."""
    return {name: getattr(part, name) for name in names(type(part))}


def names(record: type) -> set[str]:
    return {field.name for field in dataclasses.fields(record)}


def test_every_fact_of_a_spec_is_told() -> None:
    told = from_json(to_json(write_served(STAIRS, {"height": 3}, OPTIONAL_PARTS, "up")))
    facts = spec_facts(read_served("http://127.0.0.1:1", told))
    assert set(facts) | CLIENTS_OWN == names(EnvironmentSpec)
    assert facts == {name: getattr(STAIRS, name) for name in facts}


def test_every_optional_part_of_the_contract_can_be_served() -> None:
    rows = re.findall(r"^``(\w+)(?:\(\w*\))?``", agentrl.env.contract.__doc__ or "", re.MULTILINE)
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
    def fingerprint(**options: int) -> str:
        return str(write_served(STAIRS, options, OPTIONAL_PARTS, "up")["fingerprint"])

    assert fingerprint(height=3) == fingerprint(height=3) != fingerprint(height=4)


def test_tasks_and_messages_arrive_whole() -> None:
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
