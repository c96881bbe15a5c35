"""What a Dockerfile and a Compose file say that a sandbox can follow: working folder, variables, files to copy."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from agentrl.errors import UsageError

_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^}]*))?\}|\$(\w+)")
_CONTEXT_FILES = ("Dockerfile", ".dockerignore", "docker-compose.yaml", "docker-compose.yml")


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedFile:
    """A file of this machine, and where it goes in a sandbox."""

    source: Path
    target: str
    """Absolute path."""


@dataclass(slots=True, kw_only=True)
class Recipe:
    """The instructions of a Dockerfile that need no build."""

    folder: str | None = None
    """The last ``WORKDIR``."""
    variables: dict[str, str] = field(default_factory=dict)
    """Of ``ENV``."""
    copies: list[CopiedFile] = field(default_factory=list)
    """Of ``COPY`` and ``ADD``."""
    has_copies: bool = False
    commands: list[str] = field(default_factory=list)
    """Of ``RUN``, which are not run."""


def read_dockerfile(path: Path) -> Recipe:
    """Read a Dockerfile whose context is its own folder.

    Raises:
        UsageError: it cannot be read, or copies what is not there.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read", got=error, expected="a Dockerfile in UTF-8") from error
    recipe, arguments = Recipe(), dict[str, str]()
    for instruction, rest in _instructions(text):
        known = {**arguments, **recipe.variables}
        if instruction == "FROM":  # a later stage begins anew
            recipe = Recipe()
        elif instruction == "WORKDIR":
            recipe.folder = _joined(recipe.folder, _filled(rest.strip("\"'"), known))
        elif instruction in ("ENV", "ARG"):
            found = _assignments(rest, known)
            (recipe.variables if instruction == "ENV" else arguments).update(found)
        elif instruction in ("COPY", "ADD"):
            recipe.has_copies = True
            recipe.copies += _copies(_filled(rest, known), path, recipe.folder)
        elif instruction == "RUN":
            recipe.commands.append(rest)
    return recipe


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    """Split into instructions: lines that end with a backslash go on, and comments are dropped."""
    pending = ""
    for line in text.split("\n"):
        stripped = line.strip()
        if stripped.startswith("#") or (not stripped and pending):
            continue
        pending += stripped.removesuffix("\\") + (" " if stripped.endswith("\\") else "")
        if stripped.endswith("\\"):
            continue
        instruction, _, rest = pending.strip().partition(" ")
        pending = ""
        if instruction:
            yield instruction.upper(), rest.strip()


def _filled(text: str, variables: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda found: variables.get(found[1] or found[3], found[2] or ""), text)


def _joined(folder: str | None, path: str) -> str:
    """Return a path that starts at a working folder, without dots."""
    parts: list[str] = []
    for part in PurePosixPath(folder or "/", path).parts[1:]:
        parts = parts[:-1] if part == ".." else [*parts, part]
    return "/" + "/".join(parts)


def _assignments(rest: str, known: Mapping[str, str]) -> dict[str, str]:
    """Read ``A=b C="d e"``, or the older ``A b``."""
    words = _words(rest)
    if "=" not in (words[0] if words else ""):
        name, _, value = rest.partition(" ")
        return {name: _filled(value.strip(), known)} if value else {}
    pairs = (word.partition("=") for word in words)
    return {name: _filled(value, known) for name, _, value in pairs}


def _words(rest: str) -> list[str]:
    try:
        return shlex.split(rest)
    except ValueError:  # an open quotation mark
        return rest.split()


def _copies(rest: str, path: Path, folder: str | None) -> Iterator[CopiedFile]:
    if rest.startswith("["):
        try:
            words = [str(word) for word in json.loads(rest)]
        except ValueError as error:
            raise UsageError(f"{path} copies something that cannot be read", got=rest) from error
    else:
        words = _words(rest)
    if any(word.startswith("--from") for word in words):
        return
    words = [word for word in words if not word.startswith("--")]
    if len(words) < 2:
        raise UsageError(f"{path} copies something that cannot be read", got=rest, expected="a source and a target")
    *sources, target = words
    into = target.endswith(("/", ".")) or len(sources) > 1
    for source in sources:
        if "://" not in source:  # what ADD would download
            yield from _copied(source, _joined(folder, target), path, into=into)


def _copied(pattern: str, target: str, path: Path, *, into: bool) -> Iterator[CopiedFile]:
    context = path.parent.resolve()
    pattern = pattern.strip("/")
    found = [context] if pattern in ("", ".") else sorted(context.glob(pattern.removeprefix("./").rstrip("/")))
    if not found or not all(one.resolve().is_relative_to(context) for one in found):
        raise UsageError(f"{path} copies what is not there", got=pattern, expected=f"a file below {context}")
    for one in found:
        if one.is_dir():
            yield from files_below(one, target)
        else:
            yield CopiedFile(
                source=one, target=f"{target.rstrip('/')}/{one.name}" if into or len(found) > 1 else target
            )


def files_below(folder: Path, target: str) -> Iterator[CopiedFile]:
    """List the files of a folder that goes to a path; what describes a container is left out."""
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if path.is_file() and str(relative) not in _CONTEXT_FILES:
            yield CopiedFile(source=path, target=f"{target.rstrip('/')}/{relative.as_posix()}")


def compose_variables(path: Path) -> dict[str, str]:
    """Read the environment variables of the service in which the agent works; those with references are left out.

    Raises:
        UsageError: the file cannot be read.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError, ValueError) as error:
        raise UsageError(f"{path} cannot be read", got=error, expected="a Compose file") from error
    services = content.get("services") if isinstance(content, Mapping) else None
    if not isinstance(services, Mapping) or not services:
        return {}
    chosen = next((services[name] for name in ("main", "client") if name in services), next(iter(services.values())))
    given = chosen.get("environment") if isinstance(chosen, Mapping) else None
    found = {name: value for name, value in _pairs(given) if value is not None}
    return {name: str(value) for name, value in found.items() if "$" not in str(value)}


def _pairs(given: Any) -> Sequence[tuple[str, Any]]:
    if isinstance(given, Mapping):
        return [(str(name), value) for name, value in given.items()]
    if isinstance(given, list):
        return [(name, value) for name, equals, value in (str(line).partition("=") for line in given) if equals]
    return []


def filled_variables(given: Any, known: Mapping[str, str], place: str) -> dict[str, str]:
    """Fill in ``${NAME}`` and ``${NAME:-default}`` in the variables of a task.

    Args:
        given: By name.
        known: Values of names.
        place: For messages.

    Raises:
        UsageError: they are not variables, or refer to a name that is not known.
    """
    if not isinstance(given, Mapping):
        raise UsageError(f"{place} is not a table", got=repr(given)[:80], expected='{NAME = "value"}')

    def value_of(found: re.Match[str]) -> str:
        name = found[1] or found[3]
        if name not in known and found[2] is None:
            raise UsageError(
                f"{place} needs the variable {name}",
                got="no such variable",
                expected="a value in the sandbox's settings: this machine's own variables stay outside",
                hint=f"environment.options.sandbox.env.{name}=…",
            )
        return known.get(name, found[2] or "")

    return {str(name): _VARIABLE.sub(value_of, str(value)) for name, value in given.items()}
