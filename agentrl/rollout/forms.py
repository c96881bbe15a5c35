"""Checks of answer forms that the engine cannot enforce: the policy samples freely until an answer has the form.

The accepted answer is a sample from the policy's distribution, conditioned on the form.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from agentrl.agent_loop import ANY_OBJECT, Answer, AnswerForm, UnsupportedOption
from agentrl.registry import Extra

ATTEMPTS = 8
"""Maximum number of answers sampled for a form; at temperature 0 only one, because all would be equal."""
SCHEMAS = Extra(name="schemas", module="jsonschema")
FormCheck: TypeAlias = Callable[[Answer], str | None]
"""Function that describes how an answer misses its form, or returns ``None`` if it has the form."""


def make_form_check(form: AnswerForm) -> FormCheck:
    """Return the check of a form.

    Raises:
        UnsupportedOption: its schema is not valid, or cannot be checked without the extra ``schemas``.
    """
    if form.schema is None:
        return lambda answer: _call_problem(answer, form)
    validate = _validator(form.schema)
    return lambda answer: None if form.or_calls and answer.tool_calls else _json_problem(answer, validate)


def _call_problem(answer: Answer, form: AnswerForm) -> str | None:
    names = [call.name for call in answer.tool_calls]
    if names and all(name in form.calls for name in names):
        return None
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
