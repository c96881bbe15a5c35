"""Checks of an answer against the JSON schema that a client sends."""

import json

import pytest

from agentrl.agent_loop import Answer, AnswerForm, UnsupportedOption
from agentrl.message import Message
from agentrl.render.structured_output import make_structure_check


def answer(text: str) -> Answer:
    return Answer(message=Message(role="assistant", content=text), raw_text=text)


def test_schema_references_do_not_read_local_files(tmp_path):
    (tmp_path / "secret.json").write_text(json.dumps({"const": "the secret"}))
    check = make_structure_check(AnswerForm(schema={"$ref": (tmp_path / "secret.json").as_uri()}))
    with pytest.raises(UnsupportedOption, match="the schema cannot be checked") as refused:
        check(answer('"a guess"'))
    assert "the secret" not in str(refused.value)


def test_references_inside_a_schema_are_followed():
    check = make_structure_check(
        AnswerForm(schema={"$ref": "#/$defs/age", "$defs": {"age": {"type": "integer", "minimum": 0}}})
    )
    assert check(answer("3")) is None
    assert "minimum" in str(check(answer("-3")))
    assert "not valid JSON" in str(check(answer("three")))
