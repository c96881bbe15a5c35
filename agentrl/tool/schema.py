"""Arguments of a tool: their JSON schema, and their validation for a policy or a config.

The description of an argument comes from the docstring (`read_docstring`) or from its type, as in
``Annotated[int, "Smallest candidate."]`` and ``Annotated[int, Field(description=...)]``.
"""

from __future__ import annotations

import difflib
import enum
import functools
import inspect
import json
import operator
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from agentrl.errors import UsageError
from agentrl.tool.json_schema import describe, shorten_json

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

DEEPEST = 64
"""Maximum nesting of lists and objects in arguments; Python's own limit is some hundreds."""
_EXPECTED = {
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "sequence_str": "a list",
    "is_instance_of": "a list",
    "tuple_type": "a list",
    "set_type": "a list",
    "dict_type": "a JSON object",
    "mapping_type": "a JSON object",
    "model_type": "a JSON object",
    "model_attributes_type": "a JSON object",
    "dataclass_type": "a JSON object",
    "none_required": "null",
}
_LOOSE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
_STARS: Mapping[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
_OF_PARAMETERS = {
    *("args", "arguments", "parameters", "params", "parameter"),
    *("keyword args", "keyword arguments", "kwargs", "other parameters"),
}
_OTHERS = {
    *("returns", "return", "raises", "raise", "yields", "yield", "receives", "warns", "warnings", "warning"),
    *("attributes", "methods", "examples", "example", "notes", "note", "see also", "references", "todo"),
}
_ENDING = _OF_PARAMETERS | {"returns", "return", "raises", "raise", "yields", "yield"}
"""Sections that end the description."""
_GOOGLE = re.compile(r"(?:[-*+]\s+)?[`*]{0,2}(\w+)[`*]{0,2}\s*(?:\(.*?\))?\s*:(?!:)\s*(.*)")
"""An entry in Google's style: ``name (type): what it is``, also as a Markdown list."""
_NUMPY = re.compile(r"(\*{0,2}\w+(?:\s*,\s*\*{0,2}\w+)*)\s*(?::.*)?")
"""An entry in NumPy's style, without its description: ``name : type``."""
_FIELD = re.compile(r"[:@](\w+)(?:\s+([^:]*?))?:(?:\s+(.*))?$")
"""A field in Sphinx's or Epydoc's style: ``:param name: what it is``."""
_PARAMETER_FIELDS = {"param", "parameter", "arg", "argument", "key", "keyword"}
Entry = tuple[str, list[str]]


class WrongArguments(Exception):
    """Invalid values of arguments; the message names each of them and the expected type."""


class Arguments:
    """Parameters of a function, except those that the runtime fills in.

    `owner` names the function in messages: ``tool midpoint``. ``self`` of a bound method and the arguments that a
    `functools.partial` sets are not included.

    Raises:
        UsageError: the function has variadic or positional-only parameters.
    """

    def __init__(self, owner: str, function: Callable[..., Any]) -> None:
        self.owner = owner
        self._function = function
        loose = [parameter for parameter in _parameters(function) if parameter.kind in _LOOSE]
        if loose:
            raise UsageError(
                f"{owner} has arguments that cannot be passed by name",
                got=", ".join(_STARS.get(one.kind, "") + one.name for one in loose),
                expected="arguments with names: no *args, **kwargs or /",
            )

    @functools.cached_property
    def hints(self) -> Mapping[str, Any]:
        """Types of the parameters that have one."""
        try:
            found = _annotations(self._function, of_result=False)
        except Exception as error:
            raise UsageError(
                f"{self.owner}: a type hint cannot be read",
                got=f"{type(error).__name__}: {error}",
                expected="types that are imported at run time, not only for type checkers",
            ) from error
        fields = {one.name: one.default for one in _parameters(self._function) if _is_field(one.default)}
        for name, field in fields.items():
            if name in found:
                found[name] = Annotated[(found[name], *field.metadata, field.description or "")]
        return found

    @property
    def result(self) -> Any:
        """Type of the function's result; ``None`` if it has none or it cannot be evaluated."""
        try:
            return _annotations(self._function, of_result=True).get("return")
        except Exception:  # a type hint only for type checkers: the result may be anything
            return None

    @functools.cached_property
    def provided_parameters(self) -> Mapping[str, str]:
        """Parameters that the runtime fills in, with the ``provided_as`` of their types."""
        found = {name: getattr(hint, "provided_as", None) for name, hint in self.hints.items()}
        return {name: what for name, what in found.items() if isinstance(what, str)}

    @functools.cached_property
    def _own(self) -> tuple[inspect.Parameter, ...]:
        own = [p for p in _parameters(self._function) if p.name not in self.provided_parameters]
        return tuple(p.replace(default=_field_default(p.default)) if _is_field(p.default) else p for p in own)

    @property
    def names(self) -> list[str]:
        """Names of the arguments."""
        return [parameter.name for parameter in self._own]

    @functools.cached_property
    def _model(self) -> type[BaseModel]:
        from pydantic import ConfigDict, Field, PydanticUserError, create_model

        fields: dict[str, Any] = {}
        for number, parameter in enumerate(self._own):
            default = ... if parameter.default is parameter.empty else parameter.default
            # a user's name could conflict with an attribute of the model, so it is only an alias
            fields[f"argument_{number}"] = (
                _supported_type(self.hints.get(parameter.name, Any)),
                Field(default, alias=parameter.name),
            )
        settings = ConfigDict(
            extra="forbid", coerce_numbers_to_str=True, arbitrary_types_allowed=True, allow_inf_nan=False
        )
        try:
            return create_model("Arguments", __config__=settings, **fields)
        except PydanticUserError as error:
            raise UsageError(
                f"{self.owner} has an argument of a type that cannot be checked",
                got=str(error).partition("\n")[0],
                expected="types that pydantic supports",
            ) from error

    def read(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments in their types, defaults included.

        Lists, objects and null may be given as JSON text, numbers as text and text as numbers; ``null`` stands for the
        default of an optional argument that does not accept null.

        Raises:
            WrongArguments: an argument is invalid or nested too deeply.
        """
        from pydantic import ValidationError

        refuse_depth(values)
        while True:
            try:
                return self._validate(values)
            except ValidationError as error:
                before, values = values, self._repair_values(values, error)
                if values != before:
                    continue
                found = [(_path_in(values, details), details) for details in error.errors()]
                raise WrongArguments("; ".join(self._problem(path, same) for path, same in _one_each(found))) from error

    def _validate(self, values: Mapping[str, Any]) -> dict[str, Any]:
        checked = self._model.model_validate(dict(values))
        return {parameter.name: getattr(checked, f"argument_{n}") for n, parameter in enumerate(self._own)}

    def _repair_values(self, values: Mapping[str, Any], error: Any) -> dict[str, Any]:
        wrong = {details["loc"][0] for details in error.errors() if details["loc"]}
        optional = {parameter.name for parameter in self._own if parameter.default is not parameter.empty}
        left_out = {name for name in wrong & optional if values.get(name) is None}
        kept = ((name, value) for name, value in values.items() if name not in left_out)
        mended = {name: _from_json(name, value) if name in wrong else value for name, value in kept}
        refuse_depth(mended)
        return mended

    def _problem(self, path: tuple[Any, ...], details: Sequence[ErrorDetails]) -> str:
        where, first = ".".join(str(part) for part in path) or "the arguments", details[0]
        if first["type"] == "missing":
            return f"{where} is missing"
        if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            near = difflib.get_close_matches(where, self.names, n=1)
            return f"unknown argument {where}" + (f" (did you mean {near[0]}?)" if near else "")
        expected = dict.fromkeys(map(_expected, details))
        return f"{where} is {shorten_json(first['input'])}, expected {' or '.join(expected)}"

    def describe(self) -> str:
        """Describe the arguments in words."""
        schema = self._model.model_json_schema(by_alias=True)
        properties = schema.get("properties", {})
        kinds = [
            describe(properties.get(p.name, {}), schema) + ", optional" * (p.default is not p.empty) for p in self._own
        ]
        parts = [f"{p.name} ({kind})" for p, kind in zip(self._own, kinds, strict=True)]
        return ", ".join(parts) or "no arguments"

    def schema(self, name: str) -> dict[str, Any]:
        """Return the function's schema, with `name`, for chat templates and OpenAI-style services.

        Raises:
            UsageError: a type hint or the description of an argument is missing.
        """
        from pydantic_core import SchemaError
        from transformers.utils import get_json_schema  # slow to import, and only needed once a tool is used

        try:
            self._check_types()
            described: dict[str, Any] = dict(get_json_schema(self._stand_in()))
            function = {**described["function"], "name": name, "description": self._docstring.description}
            function["parameters"] = self._with_rich_types(function.get("parameters", {"properties": {}}))
        except UsageError:
            raise
        except SchemaError as error:
            raise UsageError(f"a type of {self.owner} has wrong bounds", got=str(error).rpartition(": ")[2]) from error
        except Exception as error:
            raise UsageError(
                f"{self.owner} cannot be described to a policy",
                got=str(error).partition("\n")[0],
                expected="arguments of types that JSON supports, each described in the docstring",
                hint="add an Args: section (Google's style), a Parameters section (NumPy's) or :param lines (Sphinx's)",
            ) from error
        return {**described, "function": function}

    def _check_types(self) -> None:
        """Check that each argument has a type, and that JSON supports it.

        Raises:
            UsageError: one does not; the message names it.
        """
        for parameter in self._own:
            if parameter.name not in self.hints:
                is_method = parameter is self._own[0] and parameter.name == "self"
                raise UsageError(
                    f"{self.owner} has an argument without a type",
                    got=parameter.name,
                    expected="a type hint for each argument, such as x: int",
                    hint="pass the method of an object: MyClass().method, not MyClass.method" if is_method else None,
                )
            hint = self.hints[parameter.name]
            if not _is_plain(hint) and not _fits_json(hint):
                raise UsageError(
                    f"{self.owner} has an argument of a type that JSON does not support",
                    got=f"{parameter.name}: {getattr(hint, '__name__', hint)}",
                    expected="numbers, text, lists, dict, enums, dataclasses, TypedDict or pydantic models",
                )

    def _stand_in(self) -> Callable[..., Any]:
        """Return a function with the same arguments, in types that `get_json_schema` supports."""

        def stand_in() -> None: ...

        hints = {parameter.name: self.hints.get(parameter.name) for parameter in self._own}
        given = {name: hint for name, hint in hints.items() if hint is not None}
        stand_in.__annotations__ = {name: hint if _is_plain(hint) else Any for name, hint in given.items()}
        by_name = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in self._own]
        stand_in.__signature__ = inspect.Signature(by_name)  # type: ignore[attr-defined]
        stand_in.__name__ = self.owner.rpartition(" ")[2]
        described = {name: text for name in self.names if (text := self._description(name)) is not None}
        entries = "".join(f"\n    {name}: {text}" for name, text in described.items())
        stand_in.__doc__ = "A tool.\n\nArgs:" + entries if described else "A tool."
        return stand_in

    @functools.cached_property
    def _docstring(self) -> Docstring:
        return read_docstring(documentation(self._function) or "")

    def _description(self, name: str) -> str | None:
        """Return the description of an argument in the docstring, or else in its type."""
        hint = self.hints.get(name)
        for part in get_args(hint)[1:] if get_origin(hint) is Annotated else ():
            text = part if isinstance(part, str) else getattr(part, "description", getattr(part, "documentation", None))
            if isinstance(text, str) and text.strip() and name not in self._docstring.parameters:
                return " ".join(text.split())
        return self._docstring.parameters.get(name)

    def _with_rich_types(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """Replace the schemas of types that only pydantic supports: models, dataclasses, bounds."""
        rich = {name for name in self.names if not _is_plain(self.hints[name])}
        if not rich:
            return parameters
        known = self._model.model_json_schema(by_alias=True)
        full = {
            name: {k: v for k, v in known["properties"][name].items() if k not in ("title", "default")} for name in rich
        }
        properties = {name: {**full.get(name, {}), **schema} for name, schema in parameters["properties"].items()}
        definitions = {"$defs": known["$defs"]} if "$defs" in known else {}
        return {**parameters, "properties": properties, **definitions}


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    if getattr(function, "__func__", function) is object.__init__:  # its signature accepts any arguments
        return []
    given = function.keywords if isinstance(function, functools.partial) else ()
    return [one for name, one in inspect.signature(function).parameters.items() if name not in given]


def _annotations(function: Any, *, of_result: bool) -> dict[str, Any]:
    """Return the types of a function's parameters or of its result; either may fail to be evaluated."""

    def stand_in() -> None: ...

    inner = inner_function(function)
    found = inspect.get_annotations(inner)
    stand_in.__annotations__ = {name: hint for name, hint in found.items() if (name == "return") is of_result}
    return get_type_hints(stand_in, getattr(inspect.unwrap(inner), "__globals__", {}), include_extras=True)


def _is_field(default: Any) -> bool:
    """Return True if a parameter's default is pydantic's ``Field(...)``, which describes the parameter."""
    from pydantic.fields import FieldInfo

    return isinstance(default, FieldInfo)


def _field_default(field: FieldInfo) -> Any:
    return inspect.Parameter.empty if field.is_required() else field.get_default(call_default_factory=True)


def inner_function(function: Any) -> Any:
    """Return the function that a `functools.partial` or an object calls; a function unchanged."""
    while isinstance(function, functools.partial):
        function = function.func
    if inspect.isroutine(function) or inspect.isclass(function) or hasattr(function, "__wrapped__"):
        return function
    return function.__call__


def documentation(function: Any) -> str | None:
    """Return the docstring of a function; a `functools.partial` has its function's, unless it has its own."""
    if isinstance(function, functools.partial):
        return vars(function).get("__doc__") or documentation(function.func)
    return inspect.getdoc(inner_function(function)) or inspect.getdoc(function)


def _supported_type(hint: Any, inside: tuple[Any, ...] = ()) -> Any:
    """Return an equivalent type for pydantic, which does not support `typing.TypedDict` before Python 3.12."""
    if is_typeddict(hint) and sys.version_info < (3, 12):
        return dict[str, Any] if hint in inside else _typed_dict(hint, (*inside, hint))
    if hint is Iterable or get_origin(hint) is Iterable:  # pydantic would only check the items while a tool reads them
        return list[_supported_type((*get_args(hint), Any)[0], inside)]  # type: ignore[misc]
    parts = get_args(hint)
    changed = tuple(part if isinstance(part, str) else _supported_type(part, inside) for part in parts)
    if changed == parts:
        return hint
    origin = get_origin(hint)
    if origin is Annotated:
        return Annotated[(changed[0], *hint.__metadata__)]
    is_union = origin in (Union, types.UnionType)
    return functools.reduce(operator.or_, changed) if is_union else origin[changed]


def _typed_dict(hint: Any, inside: tuple[Any, ...]) -> Any:
    from typing_extensions import TypedDict  # comes with pydantic

    fields: dict[str, Any] = {}
    for name, kind in get_type_hints(hint, include_extras=True).items():
        is_marked = get_origin(kind) in (Required, NotRequired)
        is_required = get_origin(kind) is Required if is_marked else name in hint.__required_keys__
        inner = _supported_type(get_args(kind)[0] if is_marked else kind, inside)
        fields[name] = Required[inner] if is_required else NotRequired[inner]
    return TypedDict(hint.__name__, fields)  # type: ignore[operator]


def _is_plain(hint: Any) -> bool:
    """Return True if `get_json_schema` supports the type."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return False
    if origin is Literal:
        return True
    if origin in (Union, types.UnionType) or (origin in (list, dict, tuple) and inner):
        return all(_is_plain(part) for part in inner if part is not ...)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return True
    return hint in (int, float, str, bool, list, dict, tuple, Any, None, type(None))


def _fits_json(hint: Any) -> bool:
    """Return True if pydantic can describe the type as JSON schema, or does not support it, which `_model` reports."""
    from pydantic import ConfigDict, PydanticInvalidForJsonSchema, PydanticUserError, create_model

    settings = ConfigDict(arbitrary_types_allowed=True)
    try:
        model = create_model("Argument", __config__=settings, argument=(_supported_type(hint), ...))
        model.model_json_schema()
    except PydanticInvalidForJsonSchema:
        return False
    except PydanticUserError:
        pass
    return True


def _path_in(values: Any, details: ErrorDetails) -> tuple[Any, ...]:
    """Return the path of a problem in the values: its location without pydantic's names of a union's alternatives."""
    path: list[Any] = []
    for number, part in enumerate(details["loc"], start=1):
        is_key = isinstance(values, Mapping) and part in values
        if is_key or (isinstance(values, list | tuple) and isinstance(part, int) and part < len(values)):
            values = values[part]
            path.append(part)
        elif number == len(details["loc"]) and details["type"].startswith("missing"):
            path.append(part)
    return tuple(path)


def _one_each(
    found: Sequence[tuple[tuple[Any, ...], ErrorDetails]],
) -> Iterator[tuple[tuple[Any, ...], list[ErrorDetails]]]:
    """Yield the deepest problem of each argument, because a union reports one or more per alternative.

    Problems of several alternatives with the same value are one problem.
    """
    for argument in dict.fromkeys(path[:1] for path, _ in found):
        depth = max(len(path) for path, _ in found if path[:1] == argument)
        deepest = next(path for path, _ in found if path[:1] == argument and len(path) == depth)
        yield deepest, [details for path, details in found if path == deepest]


def refuse_depth(values: Mapping[str, Any]) -> None:
    """Check the nesting of lists and objects in values.

    Raises:
        WrongArguments: a value is nested deeper than `DEEPEST`.
    """
    for name, value in values.items():
        inside = [value]
        for _ in range(DEEPEST + 1):
            inside = [part for whole in inside for part in _parts(whole)]
            if not inside:
                break
        else:
            raise _too_deep(name)


def _parts(whole: Any) -> Iterable[Any]:
    if isinstance(whole, Mapping):
        return whole.values()
    return whole if isinstance(whole, list | tuple) else ()


def _too_deep(name: str) -> WrongArguments:
    return WrongArguments(f"{name} is nested too deeply, expected at most {DEEPEST} levels of lists and objects")


def _from_json(name: str, value: Any) -> Any:
    """Parse a list, an object or null that was given as text."""
    if not isinstance(value, str) or (value != "null" and value.lstrip()[:1] not in ("[", "{")):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value
    except RecursionError as error:
        raise _too_deep(name) from error


def _expected(details: ErrorDetails) -> str:
    if details["type"] == "union_tag_invalid":
        return "an object whose {discriminator} is one of {expected_tags}".format(**details["ctx"])
    return _EXPECTED.get(details["type"]) or re.sub("^(Input should be|Value error,) ", "", details["msg"])


@dataclass(frozen=True, slots=True)
class Docstring:
    """The parts of a docstring that describe a tool."""

    description: str
    """Description of the function: the text before the sections."""
    parameters: dict[str, str]
    """Description of each parameter, in one line."""


def read_docstring(text: str) -> Docstring:
    """Parse a docstring with sections in any of the styles, also mixed."""
    lines = inspect.cleandoc(text).expandtabs().splitlines()
    parameters: dict[str, list[str]] = {}
    end = len(lines)
    for number, line in enumerate(lines):
        section = _section(lines, number)
        if section is not None and (section in _ENDING or _is_underlined(lines, number)):
            end = min(end, number)
        if section in _OF_PARAMETERS:
            is_numpy = _is_underlined(lines, number)
            after = lines[number + 2 :] if is_numpy else lines[number + 1 :]
            _gather(parameters, _numpy_entries(after, _indent(line)) if is_numpy else _google_entries(after))
        if _FIELD.fullmatch(line.strip()) and _indent(line) == 0:
            end = min(end, number)
    _gather(parameters, _field_entries(lines))
    described = {name: " ".join(" ".join(parts).split()) for name, parts in parameters.items()}
    return Docstring("\n".join(lines[:end]).strip(), {name: text for name, text in described.items() if text})


def _gather(found: dict[str, list[str]], entries: Iterator[Entry]) -> None:
    for names, parts in entries:
        for name in names.split(","):
            found.setdefault(name.strip(" *"), parts)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _is_underlined(lines: Sequence[str], number: int) -> bool:
    after = lines[number + 1].strip() if number + 1 < len(lines) else ""
    return re.fullmatch("-{3,}|={3,}", after) is not None


def _section(lines: Sequence[str], number: int) -> str | None:
    """Return the name of the section that starts at a line, in lower case; ``None`` if none does."""
    title = lines[number].strip().lower()
    if title.endswith(":") and title[:-1] in _OF_PARAMETERS | _OTHERS:
        return title[:-1]
    return title if title in _OF_PARAMETERS | _OTHERS and _is_underlined(lines, number) else None


def _google_entries(lines: Sequence[str]) -> Iterator[Entry]:
    """Yield the entries after ``Args:``."""
    level = _indent(next((line for line in lines if line.strip()), ""))
    parts: list[str] = []
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        if _section(lines, number) is not None or _indent(line) < level:
            return
        entry = _GOOGLE.fullmatch(line.strip()) if _indent(line) == level else None
        if entry is not None:
            parts = [entry[2]]
            yield entry[1], parts
        elif _indent(line) == level:
            return
        else:
            parts.append(line.strip())


def _numpy_entries(lines: Sequence[str], header: int) -> Iterator[Entry]:
    """Yield the entries of an underlined section whose header is indented by `header` characters."""
    parts: list[str] = []
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        if _indent(line) > header:
            parts.append(line.strip())
            continue
        entry = _NUMPY.fullmatch(line.strip())
        if entry is None or _section(lines, number) is not None or _is_underlined(lines, number):
            return
        parts = []
        yield entry[1], parts


def _field_entries(lines: Sequence[str]) -> Iterator[Entry]:
    """Yield the parameters that are described by fields; a blank line ends a field."""
    parts: list[str] = []
    for line in lines:
        field = _FIELD.fullmatch(line.strip()) if _indent(line) == 0 else None
        if field is not None:
            parts = [field[3] or ""]
            if field[1] in _PARAMETER_FIELDS and field[2]:
                yield field[2].split()[-1], parts
        elif line.strip():
            parts.append(line.strip())
        else:
            parts = []
