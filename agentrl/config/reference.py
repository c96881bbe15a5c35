"""Markdown reference of all config keys, generated from the docstrings of their fields."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from agentrl.config.config import Config
from agentrl.config.keys import key_words, models_of, own_fields


def config_reference() -> str:
    """Return one table per section, with the columns key, type, default and meaning."""
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    top = [_row("", name, field) for name, field in Config.model_fields.items() if not models_of(field.annotation)]
    sections = [line for name, field in Config.model_fields.items() for line in _sections("", name, field.annotation)]
    return "\n".join([*sections, "## Other keys", "", *lines, *top, ""])


def _sections(prefix: str, section: str, annotation: Any) -> Iterator[str]:
    variants, path = models_of(annotation), prefix + ".".join(key_words(section))
    if _has_names(annotation) and path == prefix + section:
        path += ".KEY" if section == "schedules" else ".NAME"
    for model in variants:
        title = path if len(variants) == 1 else f"{path} (type: {model.model_fields['type'].default})"
        yield from _table(title, path, model)
    for model in variants:
        for name, field in model.model_fields.items():
            yield from _sections(f"{path}.", name, field.annotation)


def _has_names(annotation: Any) -> bool:
    """Return True for sections under names that the user chooses, such as those of roles."""
    parts = get_args(annotation)
    return get_origin(annotation) is dict or any(map(_has_names, parts))


def _table(title: str, path: str, model: type[BaseModel]) -> Iterator[str]:
    yield f"## {title}"
    yield ""
    if "__doc__" in model.__dict__ and model.__doc__:
        yield from (model.__doc__.strip(), "")
    own = [(name, model.model_fields[name]) for name in own_fields(model)]
    rows = [_row(f"{path}.", name, field) for name, field in own if not models_of(field.annotation)]
    if rows:
        yield from ("| key | type | default | meaning |", "|---|---|---|---|", *rows, "")


def _row(prefix: str, name: str, field: FieldInfo) -> str:
    meaning = " ".join((field.description or "").split()).replace("``", "`").replace("|", "\\|")
    return f"| `{prefix}{name}` | {_type_in_words(field)} | {_default(field)} | {meaning} |"


def _type_in_words(field: FieldInfo) -> str:
    return f"`{_type_name(field.annotation)}`".replace("|", "\\|")


def _type_name(annotation: Any) -> str:
    """Return a type as in Python, without constraints and module names: ``list[str] | None``."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_name(parts[0])
    if origin in (Union, UnionType):
        return " | ".join(_type_name(part) for part in parts)
    if origin is Literal:
        return " | ".join(f'"{part}"' if isinstance(part, str) else str(part) for part in parts)
    if annotation is type(None):
        return "None"
    if annotation is Ellipsis:
        return "..."
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " | ".join(f'"{member.value}"' for member in annotation)
    name = getattr(origin or annotation, "__name__", str(annotation))
    return f"{name}[{', '.join(_type_name(part) for part in parts)}]" if parts else name


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    return "required" if value is PydanticUndefined else f"`{value}`"
