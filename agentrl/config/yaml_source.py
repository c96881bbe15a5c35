"""YAML text as plain data, with the line of every key, so that an error can point at it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import yaml

from agentrl.errors import ConfigError

KeyPath: TypeAlias = tuple[str, ...]


class _Loader(yaml.SafeLoader):
    """Safe YAML in which only ``true`` and ``false`` are booleans (``off`` is a word) and ``1e-3`` is a number."""


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern) for tag, pattern in rules if tag not in ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:float")
    ]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|false|False)$"), list("tTfF"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:(?:\d+\.\d*|\.\d+)(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.(?:inf|Inf|INF|nan|NaN))$"),
    list("-+.0123456789"),
)


@dataclass(frozen=True, slots=True)
class Source:
    """What a YAML text says, and where each key stands."""

    data: dict[str, Any]
    lines: dict[KeyPath, int] = field(default_factory=dict)


def parse_value(text: str) -> Any:
    """One YAML value, as on the right of ``key=value``."""
    return yaml.load(text, Loader=_Loader)


def parse_source(text: str, name: str) -> Source:
    """Parse a config file's text.

    Args:
        text: YAML with a mapping at the top.
        name: The file's name, for messages.

    Raises:
        ConfigError: not YAML, not a mapping, or a key given twice.
    """
    try:
        root = yaml.compose(text, Loader=_Loader)
        data = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} is not YAML", got=" ".join(str(error).split())) from error
    if root is None:
        return Source({})
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(
            f"{name} is not a config",
            got=f"a YAML {type(root).__name__.removesuffix('Node').lower()}",
            expected="sections such as 'environment:'",
        )
    lines: dict[KeyPath, int] = {}
    _collect_lines(root, (), lines, name)
    return Source(data, lines)


def _collect_lines(node: yaml.MappingNode, path: KeyPath, lines: dict[KeyPath, int], name: str) -> None:
    for key, value in node.value:
        here = (*path, str(key.value))
        line = key.start_mark.line + 1
        if here in lines:
            raise ConfigError(f"{name} line {line}: {'.'.join(here)} is given twice", expected="one value")
        lines[here] = line
        if isinstance(value, yaml.MappingNode):
            _collect_lines(value, here, lines, name)
