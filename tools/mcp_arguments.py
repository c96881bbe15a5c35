"""Input and output schemas of an MCP server: checks by the rules of JSON Schema, and the form that models read."""

from __future__ import annotations

import functools
import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from agentrl.registry import Extra
from agentrl.tool.json_schema import as_list, as_mapping, follow_pointer
from agentrl.tool.schema import WrongArguments, refuse_depth

EXTRA = Extra(name="mcp", module="mcp")
MAX_PROBLEM_LENGTH = 300
MAX_INLINED_LENGTH = 8_000
"""Maximum characters of a schema after its references are replaced."""
MAX_COMBINED = 8
"""Maximum levels of combined schemas in which arguments are looked for."""
_DIALECTS = ("Draft3", "Draft4", "Draft6", "Draft7", "Draft201909", "Draft202012")
MAP_KEYWORDS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value maps names to schemas."""
LIST_KEYWORDS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
"""Keywords whose value is a list of schemas; ``items`` is one in old dialects."""
SINGLE_KEYWORDS = ("items", "additionalProperties", "contains", "not", "if", "then", "else")
_COMBINING = (
    *("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "then", "else"),
    *("patternProperties", "propertyNames", "unevaluatedProperties", "minProperties"),
    *("dependentSchemas", "dependentRequired", "dependencies"),
)
"""Keywords by which a schema may accept names that it does not list itself."""
_NULLABLE = ("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref")
"""Keywords that reject null unless the schema is ``nullable``."""
_WORDS = {"true": True, "false": False, "none": None}
"""Values in Python's spelling."""
_DEFINITIONS = ("$defs", "definitions")
_OBJECT = frozenset({"type", "properties", "required", "title", "description"})

Path = tuple[str | int, ...]
"""Keys and indices that lead to a part of the arguments."""
MAX_MENDED = 1_000
"""Maximum number of values of one call that are converted."""

_log = logging.getLogger(__name__)


class Checker:
    """Check of values against a server's schema; it accepts everything if the schema itself is not valid.

    Args:
        what: Description of the schema for the warning: ``the input schema of MCP tool search``.
        schema: The schema as the server sent it.
    """

    def __init__(self, what: str, schema: Mapping[str, Any]) -> None:
        self._what = what
        self._schema = schema
        self.gives_up = False
        """True once the schema has proved invalid."""

    def errors(self, value: Any) -> list[Any]:
        """Return a `ValidationError` per violation; none if the schema cannot be checked, which is logged once."""
        if self.gives_up:
            return []
        try:
            return list(self._validator.iter_errors(value))
        except Exception as error:  # an invalid schema can fail anywhere: references, regular expressions, recursion
            self.gives_up = True
            reason = str(error).strip().partition("\n")[0][:MAX_PROBLEM_LENGTH]
            _log.warning(
                "%s cannot be checked (%s: %s): its values are passed on unchecked",
                self._what,
                type(error).__name__,
                reason,
            )
            return []

    @functools.cached_property
    def _validator(self) -> Any:
        jsonschema, referencing = EXTRA.load("jsonschema"), EXTRA.load("referencing")
        kind = self._dialect(jsonschema)
        kind.check_schema(self._schema)
        nullable = {name: _unless_null(kind.VALIDATORS[name]) for name in _NULLABLE if name in kind.VALIDATORS}
        tolerant = jsonschema.validators.extend(kind, {"multipleOf": _check_multiple, **nullable})
        return tolerant(self._schema, registry=referencing.Registry())  # the default registry downloads references

    def _dialect(self, jsonschema: Any) -> Any:
        """Return the validator class of the schema's ``$schema``; the newest if it has none.

        Raises:
            ValueError: the dialect is unknown.
        """
        kinds = [getattr(jsonschema, f"{name}Validator") for name in _DIALECTS]
        address = self._schema.get("$schema")
        if address is None:
            return kinds[-1]
        for kind in kinds:
            if _plain_address(kind.META_SCHEMA["$schema"]) == _plain_address(str(address)):
                return kind
        raise ValueError(f"unknown dialect {address!r}")


def _plain_address(address: str) -> str:
    return address.partition("://")[2].rstrip("#/")


def _check_multiple(validator: Any, factor: Any, value: Any, schema: Any) -> Iterator[Any]:
    """Check ``multipleOf`` up to rounding: 0.07 is a multiple of 0.01."""
    if not validator.is_type(value, "number"):
        return
    quotient = value / factor
    if not math.isfinite(quotient) or not math.isclose(quotient, round(quotient), rel_tol=1e-9, abs_tol=1e-9):
        yield EXTRA.load("jsonschema").ValidationError(f"{value!r} is not a multiple of {factor!r}")


def _unless_null(check: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
    """Return a check that accepts null where the schema is ``nullable``, a keyword of OpenAPI that servers use."""

    def check_or_null(validator: Any, expected: Any, value: Any, schema: Any) -> Iterator[Any]:
        if value is not None or schema.get("nullable") is not True:
            yield from check(validator, expected, value, schema) or ()

    return check_or_null


class InputSchema:
    """The arguments of a server's tool.

    Args:
        tool: Name of the tool.
        schema: Its ``inputSchema`` as the server sent it.
    """

    def __init__(self, tool: str, schema: Mapping[str, Any]) -> None:
        self._schema = schema
        self._checker = Checker(f"the input schema of MCP tool {tool}", schema)
        self.shown = for_policy(schema)
        """The schema that the policy reads."""

    @property
    def names(self) -> list[str]:
        """Names of the arguments that the schema lists."""
        return list(self.shown["properties"])

    def read(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments in the form that the schema accepts.

        As for Python tools, a text that holds a number, a list or an object is converted, and so is a number where
        text is expected; ``null`` for an optional argument leaves it out. The same holds within lists and objects. If
        the schema lists its arguments and does not mention others, an unknown one is refused, because most servers
        would ignore it silently.

        Raises:
            WrongArguments: some arguments do not fit, or are nested too deeply.
        """
        refuse_depth(arguments)  # the client cannot send deep arguments: it would lose its session
        arguments, errors = self._mend(dict(arguments))
        problems = [f"unknown argument {name}" for name in arguments if not self._may_take(name)]
        problems += [_describe(error) for error in errors if not _is_about_names(error)]
        if problems:
            raise WrongArguments("; ".join(problems))
        return arguments

    def _may_take(self, name: str) -> bool:
        known, others = self._schema.get("properties"), self._schema.get("additionalProperties")
        if self._checker.gives_up or not (isinstance(known, Mapping) or others is False) or name in as_mapping(known):
            return True
        if any(re.search(pattern, name) for pattern in self._schema.get("patternProperties", ())):
            return True
        others = self._schema.get("additionalProperties", any(key in self._schema for key in _COMBINING))
        return others is not False

    def _mend(self, arguments: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
        """Convert each wrong value once; return the arguments and the remaining errors."""
        required, tried = self.shown.get("required", ()), set[Path]()
        errors = self._checker.errors(arguments)
        while errors:
            wrong = [path for path in _paths(errors) if path not in tried] or [
                path for path in _paths(_causes(errors)) if path not in tried
            ]
            wrong = wrong[: MAX_MENDED - len(tried)]
            if not wrong:
                break
            tried.update(wrong)
            for path in wrong:
                is_required = len(path) == 1 and path[0] in required
                arguments = _with_other_form(arguments, path, may_leave_out=not is_required)
            refuse_depth(arguments)
            errors = self._checker.errors(arguments)
        return arguments, errors


def _paths(errors: Iterable[Any]) -> list[Path]:
    return list(dict.fromkeys(tuple(error.absolute_path) for error in errors if error.absolute_path))


def _causes(errors: Iterable[Any]) -> Iterator[Any]:
    """Yield the errors of the alternatives of combined schemas."""
    for error in errors:
        yield from error.context
        yield from _causes(error.context)


def _with_other_form(whole: Any, path: Path, *, may_leave_out: bool) -> Any:
    """Copy a value with the part at a path converted; leave out a key whose value is null."""
    if not path:
        return _other_form(whole)
    key = path[0]
    if isinstance(whole, dict) and key in whole:
        if len(path) == 1 and whole[key] is None and may_leave_out:
            return {name: value for name, value in whole.items() if name != key}
        return {**whole, key: _with_other_form(whole[key], path[1:], may_leave_out=may_leave_out)}
    if isinstance(whole, list) and isinstance(key, int) and key < len(whole):
        part = _with_other_form(whole[key], path[1:], may_leave_out=may_leave_out)
        return [*whole[:key], part, *whole[key + 1 :]]
    return whole  # a part of the path has been converted before


def _other_form(value: Any) -> Any:
    """Return the JSON value of a text, or the text of a number."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return json.dumps(value)
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return _WORDS.get(value.strip().lower(), value)


def _is_about_names(error: Any) -> bool:
    return error.validator == "additionalProperties" and not error.absolute_path and error.validator_value is False


def _describe(error: Any) -> str:
    """Describe a violation by its most specific cause."""
    best = EXTRA.load("jsonschema").exceptions.best_match([error])
    where = ".".join(map(str, best.absolute_path))
    message = str(best.message)
    if len(message) > MAX_PROBLEM_LENGTH:
        message = f"{message[:MAX_PROBLEM_LENGTH]}…"
    return f"{where}: {message}" if where else message


def for_policy(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Rewrite an input schema in the form that chat templates, tool-call parsers and models expect.

    The result is an object whose ``properties`` contain every argument that the schema names at its root (directly,
    behind a reference, or in one of several combined schemas). References within the schema are replaced by their
    targets, except recursive ones, and each schema is an object: ``true`` becomes ``{}``.
    """
    root = _inline(schema, schema, frozenset())
    if len(json.dumps(root)) > max(MAX_INLINED_LENGTH, 3 * len(json.dumps(schema))):
        root = _inline(schema, {}, frozenset())
    if '"$ref"' not in json.dumps({key: value for key, value in root.items() if key not in _DEFINITIONS}):
        root = {key: value for key, value in root.items() if key not in _DEFINITIONS}
    root.pop("$schema", None)
    required = [*as_list(root.get("required"))]
    properties: dict[str, Any] = {}
    for name, part_schema in _named_arguments(root, 0):
        properties.setdefault(name, part_schema)
    parts = as_list(root.get("allOf"))
    required += [name for part in parts for name in as_list(part.get("required")) if name not in required]
    if parts and all(part.keys() <= _OBJECT for part in parts):
        del root["allOf"]
    shown = {"type": "object", "properties": properties, **({"required": required} if required else {})}
    return {**shown, **{key: value for key, value in root.items() if key not in shown}}


def _named_arguments(schema: Mapping[str, Any], depth: int) -> Iterator[tuple[str, Any]]:
    """Yield the arguments that a schema names, and then those of its combined schemas."""
    yield from as_mapping(schema.get("properties")).items()
    parts = [part for keyword in ("allOf", "anyOf", "oneOf") for part in as_list(schema.get(keyword))]
    for part in (*parts, *(schema.get(keyword) for keyword in ("then", "else"))):
        if depth < MAX_COMBINED:
            yield from _named_arguments(as_mapping(part), depth + 1)


def _inline(schema: Any, root: Mapping[str, Any], inside: frozenset[str]) -> dict[str, Any]:
    """Copy a schema with its references replaced; `inside` holds those that are being replaced."""
    if isinstance(schema, bool):
        return {} if schema else {"not": {}}
    if not isinstance(schema, Mapping):
        return {}
    address = schema.get("$ref")
    if isinstance(address, str) and address not in inside and (target := _find(address, root)) is not None:
        others = {key: value for key, value in schema.items() if key != "$ref"}
        return _inline(target, root, inside | {address}) | _inline(others, root, inside)
    copied = dict(schema)
    for key, value in schema.items():
        if key in _DEFINITIONS and inside:
            continue
        if key in MAP_KEYWORDS and isinstance(value, Mapping):
            copied[key] = {name: _inline(part, root, inside) for name, part in value.items()}
        elif key in LIST_KEYWORDS and isinstance(value, list):
            copied[key] = [_inline(part, root, inside) for part in value]
        elif key in SINGLE_KEYWORDS and isinstance(value, Mapping):
            copied[key] = _inline(value, root, inside)
    return copied


def _find(address: str, root: Mapping[str, Any]) -> Mapping[str, Any] | bool | None:
    """Return the schema at an address within the root, such as ``#/$defs/Item``; ``None`` if there is none."""
    if not address.startswith("#"):
        return None
    found = follow_pointer(unquote(address[1:]), root)
    return found if isinstance(found, Mapping | bool) and found is not root else None
