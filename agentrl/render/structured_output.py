"""Structured output (JSON of a schema, or forced tool calls): structural tags for engines, and checks of answers.

A structural tag of xgrammar constrains the text after the thinking. Without one, answers are sampled freely until one
passes the check, so that the accepted answer is a sample from the policy conditioned on the format.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from agentrl.agent_loop import ANY_OBJECT, Answer, AnswerForm, UnsupportedOption
from agentrl.registry import Extra
from agentrl.render.chat_template import ToolSchema
from agentrl.render.families import ThinkingMarks

CALLS = {
    "hermes": ('<tool_call>\n{{"name": {name}, "arguments": ', "}\n</tool_call>"),
    "llama3_json": ('{{"name": {name}, "parameters": ', "}"),
}
"""Texts before and after the arguments of a call, by the name of the parser."""
ATTEMPTS = 8
"""Maximum number of answers sampled until one has the format; 1 at temperature 0, because all would be equal."""
SCHEMAS = Extra(name="schemas", module="jsonschema")
StructureCheck: TypeAlias = Callable[[Answer], str | None]
"""Function that describes how an answer violates its format, or returns ``None``."""


def structure_of(
    form: AnswerForm, tools: Sequence[ToolSchema], *, parser: str | None, thinking: ThinkingMarks | None, header: str
) -> str:
    """Return the structural tag of an answer's required format, as JSON.

    `parser` is the registry name of the parser for the model's calls. `header`, the template's text before an answer,
    may open the thinking.

    Raises:
        UnsupportedOption: no structural tag is known for the model's notation of calls.
    """
    shape: dict[str, Any]
    if form.schema is not None:
        shape = {"type": "json_schema", "json_schema": form.schema}
    else:
        calls = [_call(tool["function"], parser) for tool in tools if tool["function"]["name"] in form.calls]
        shape = calls[0] if len(calls) == 1 else {"type": "or", "elements": calls}
    if thinking is not None:
        shape = {"type": "sequence", "elements": [_thought(thinking, header), shape]}
    return json.dumps({"type": "structural_tag", "format": shape})


def _call(function: Mapping[str, Any], parser: str | None) -> dict[str, Any]:
    if parser not in CALLS:
        raise UnsupportedOption(
            "a tool call cannot be enforced for this model",
            option="form",
            got=f"a model with calls in the notation {parser}",
            expected=f"the notation {' or '.join(CALLS)}",
        )
    begin, end = CALLS[parser]
    schema = {"type": "json_schema", "json_schema": function.get("parameters") or {"type": "object"}}
    return {"type": "tag", "begin": begin.format(name=json.dumps(function["name"])), "content": schema, "end": end}


def _thought(thinking: ThinkingMarks, header: str) -> dict[str, Any]:
    begin, _, rest = thinking.write("\0", header).partition("\0")
    return {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": rest.lstrip()}


def make_structure_check(form: AnswerForm) -> StructureCheck:
    """Return the check of an answer's required format.

    Raises:
        UnsupportedOption: its schema is not valid, or cannot be checked without the extra ``schemas``.
    """
    if form.schema is None:
        return lambda answer: _call_problem(answer, form)
    validate = _validator(form.schema)
    return lambda answer: None if form.or_calls and answer.tool_calls else _json_problem(answer, validate)


def _call_problem(answer: Answer, form: AnswerForm) -> str | None:
    names = [call.name for call in answer.tool_calls]
    if all(name in form.calls for name in names) and (names or form.or_text):
        return None
    if names and form.or_text:
        return f"a call of {' and '.join(names)}, expected text or calls of {' or '.join(form.calls)}"
    return f"no call of {' or '.join(form.calls)}"


def _json_problem(answer: Answer, validate: Callable[[Any], str | None]) -> str | None:
    try:
        value = json.loads(answer.text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        return f"it is not valid JSON: {error}"
    return validate(value)


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not a JSON number")


def _validator(schema: Mapping[str, Any]) -> Callable[[Any], str | None]:
    if schema == ANY_OBJECT:
        return lambda value: None if isinstance(value, dict) else "it is not a JSON object"
    if not SCHEMAS.is_installed:
        raise UnsupportedOption(
            "the engine cannot enforce a schema, and the package that checks answers is not installed",
            option="form",
            hint=f'install it: pip install "agentrl[{SCHEMAS.name}]", or set engine=vllm or engine=sglang',
        )
    jsonschema, referencing = SCHEMAS.load(), SCHEMAS.load("referencing")
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise UnsupportedOption("the schema is not valid", option="form", got=error.message[:200]) from error
    validator = kind(schema, registry=referencing.Registry())  # an empty registry: no downloads, no reads from disk

    def validate(value: Any) -> str | None:
        try:
            error = next(validator.iter_errors(value), None)
        except Exception as failure:  # an unresolved reference raises here
            raise UnsupportedOption("the schema cannot be checked", option="form", got=str(failure)[:200]) from failure
        return None if error is None else f"{error.json_path}: {error.message[:200]}"

    return validate
