r"""Descriptions of a function and its parameters in a docstring, in Google's, NumPy's or Sphinx's style.

>>> read_docstring("Add.\n\nArgs:\n    a (int): The first.\n\nReturns:\n    The sum.")
Docstring(description='Add.', parameters={'a': 'The first.'})
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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


Entry = tuple[str, list[str]]


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
