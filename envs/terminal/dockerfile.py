"""What a Dockerfile and a Compose file say that a sandbox can follow: working folder, variables, files to copy."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import yaml

from agentrl.errors import UsageError

from .dockerignore import IgnoreRule, is_ignored, read_ignore_rules

_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^}]*))?\}|\$(\w+)")
_CONTEXT_FILES = ("Dockerfile", ".dockerignore", "Dockerfile.dockerignore", "docker-compose.yaml", "docker-compose.yml")


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedFile:
    """A file, and where it goes in a sandbox."""

    source: Path | None = None
    """On this machine; ``None`` for a text of the Dockerfile."""
    target: str
    """Absolute path."""
    text: str = ""
    """The content of a file without a source."""
    is_executable_text: bool = False

    def read(self) -> bytes:
        """Return the content."""
        return self.text.encode() if self.source is None else self.source.read_bytes()

    @property
    def is_executable(self) -> bool:
        """The file's owner may run it."""
        return self.is_executable_text if self.source is None else bool(self.source.stat().st_mode & 0o100)


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
    rules = read_ignore_rules(path.parent, path.name)
    for instruction, rest, documents in _instructions(text):
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
            texts = {one.mark: _filled(one.text, known) if one.is_filled else one.text for one in documents}
            recipe.copies += _copies(_filled(rest, known), path, recipe.folder, texts, rules)
        elif instruction == "RUN":
            recipe.commands.append(rest)
    return recipe


class Document(NamedTuple):
    """A text in a Dockerfile between ``<<NAME`` and a line ``NAME``."""

    mark: str
    """How it is announced, without quotation marks: ``<<NAME``."""
    text: str
    is_filled: bool
    """Variables are filled in: the name has no quotation marks."""


_MARK = re.compile(r"""(?<![<\w])<<(-?)(["']?)([A-Za-z_][\w.-]*)\2(?=\s|$)""")


class Instruction(NamedTuple):
    """An instruction of a Dockerfile."""

    name: str
    rest: str
    documents: Sequence[Document]


def _instructions(text: str) -> Iterator[Instruction]:
    """Split into instructions: lines that end with a backslash go on, and comments are dropped."""
    pending, lines = "", text.replace("\r\n", "\n").split("\n")
    while lines:
        stripped = lines.pop(0).strip()
        if stripped.startswith("#") or (not stripped and pending):
            continue
        pending += stripped.removesuffix("\\") + (" " if stripped.endswith("\\") else "")
        if stripped.endswith("\\"):
            continue
        name, _, rest = pending.strip().partition(" ")
        pending = ""
        if name:
            documents = _documents(rest, lines) if name.upper() in ("COPY", "ADD", "RUN") else ()
            yield Instruction(name.upper(), rest.strip(), documents)


def _documents(rest: str, lines: list[str]) -> Sequence[Document]:
    """Take the texts that an instruction announces from the lines after it; none where an end is missing."""
    found = list[Document]()
    for mark in _MARK.finditer(rest):
        dash, quote, name = mark.groups()
        shown = [line.lstrip("\t") for line in lines] if dash else lines
        if name not in shown:
            return found
        end = shown.index(name)
        text = "".join(f"{line}\n" for line in shown[:end])
        del lines[: end + 1]
        found.append(Document(mark[0].replace(quote, "") if quote else mark[0], text, not quote))
    return found


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


def _copies(
    rest: str, path: Path, folder: str | None, texts: Mapping[str, str], rules: Sequence[IgnoreRule]
) -> Iterator[CopiedFile]:
    if rest.startswith("["):
        try:
            words = [str(word) for word in json.loads(rest)]
        except (ValueError, RecursionError, TypeError) as error:
            raise UsageError(f"{path} copies something that cannot be read", got=rest) from error
    else:
        words = _words(rest)
    if any(word.startswith("--from") for word in words):
        return
    options = [word for word in words if word.startswith("--")]
    words = [word for word in words if not word.startswith("--")]
    if len(words) < 2:
        raise UsageError(f"{path} copies something that cannot be read", got=rest, expected="a source and a target")
    *sources, target = words
    into = target.endswith(("/", ".")) or len(sources) > 1
    place = _joined(folder, target)
    for source in sources:
        if source in texts:
            file = f"{place.rstrip('/')}/{source.lstrip('<-')}" if into else place
            yield CopiedFile(target=file, text=texts[source], is_executable_text=_makes_executable(options))
        elif source.startswith("<<"):
            raise UsageError(f"{path} holds a text without an end", got=rest, expected=f"a line {source.lstrip('<-')}")
        elif "://" not in source:  # what ADD would download
            yield from _copied(source, place, path, rules, into=into)


def _makes_executable(options: Sequence[str]) -> bool:
    """Check ``--chmod``, in numbers or letters, for the owner's right to run the file."""
    mode = next((word.partition("=")[2] for word in options if word.startswith("--chmod=")), "")
    return bool(int(mode[-3:], 8) & 0o100) if re.fullmatch(r"[0-7]{3,4}", mode) else "x" in mode


def _copied(pattern: str, target: str, path: Path, rules: Sequence[IgnoreRule], *, into: bool) -> Iterator[CopiedFile]:
    context = path.parent.resolve()
    pattern = pattern.strip("/")
    found = [context] if pattern in ("", ".") else sorted(context.glob(pattern.removeprefix("./").rstrip("/")))
    if not found or not all(one.resolve().is_relative_to(context) for one in found):
        raise UsageError(f"{path} copies what is not there", got=pattern, expected=f"a file below {context}")
    kept = [one for one in found if one.is_dir() or not is_ignored(one.relative_to(context).as_posix(), rules)]
    if not kept:
        raise UsageError(f"{path} copies what is not there", got=f"{pattern}, which .dockerignore leaves out")
    for one in kept:
        if one.is_dir():
            yield from files_below(one, target, context, rules)
        else:
            yield CopiedFile(
                source=one, target=f"{target.rstrip('/')}/{one.name}" if into or len(found) > 1 else target
            )


def files_of_context(context: Path, target: str) -> list[CopiedFile]:
    """List all files of a context that go to a folder, without those that its ``.dockerignore`` leaves out.

    Raises:
        UsageError: the ``.dockerignore`` cannot be read.
    """
    return list(files_below(context, target, context, read_ignore_rules(context)))


def files_below(folder: Path, target: str, context: Path, rules: Sequence[IgnoreRule]) -> Iterator[CopiedFile]:
    """List the files of a folder of a context that goes to a path; what describes a container is left out."""
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if not path.is_file() or str(relative) in _CONTEXT_FILES:
            continue
        if not is_ignored(path.relative_to(context).as_posix(), rules):
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
