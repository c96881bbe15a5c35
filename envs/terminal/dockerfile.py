"""The parts of Dockerfiles and Compose files that a sandbox can follow: working folder, variables, files to copy."""

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
_MARK = re.compile(r"""(?<![<\w])<<(-?)(["']?)([A-Za-z_][\w.-]*)\2(?=\s|$)""")


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedFile:
    """A file and its target in a sandbox."""

    source: Path | None = None
    """Path on this machine; ``None`` for a text of the Dockerfile."""
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
        """True if the file's owner may execute it."""
        return self.is_executable_text if self.source is None else bool(self.source.stat().st_mode & 0o100)


@dataclass(slots=True, kw_only=True)
class Recipe:
    """The instructions of a Dockerfile that need no build."""

    folder: str | None = None
    """The last ``WORKDIR``."""
    variables: dict[str, str] = field(default_factory=dict)
    """Variables of ``ENV``."""
    copies: list[CopiedFile] = field(default_factory=list)
    """Files of ``COPY`` and ``ADD``."""
    has_copies: bool = False
    commands: list[str] = field(default_factory=list)
    """Commands of ``RUN``, which are not run."""


def read_dockerfile(path: Path) -> Recipe:
    """Read a Dockerfile whose context is its own folder.

    Raises:
        UsageError: it cannot be read, or copies files that do not exist.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read", got=error, expected="a Dockerfile in UTF-8") from error
    recipe, arguments = Recipe(), dict[str, str]()
    rules = read_ignore_rules(path.parent, path.name)
    for instruction, rest, documents in _instructions(text):
        known = {**arguments, **recipe.variables}
        if instruction == "FROM":  # a new build stage
            recipe = Recipe()
        elif instruction == "WORKDIR":
            recipe.folder = _join(recipe.folder, _fill_in(rest.strip("\"'"), known))
        elif instruction in ("ENV", "ARG"):
            found = _assignments(rest, known)
            (recipe.variables if instruction == "ENV" else arguments).update(found)
        elif instruction in ("COPY", "ADD"):
            recipe.has_copies = True
            texts = {one.mark: _fill_in(one.text, known) if one.is_filled else one.text for one in documents}
            recipe.copies += _copies(_fill_in(rest, known), path, recipe.folder, texts, rules)
        elif instruction == "RUN":
            recipe.commands.append(rest)
    return recipe


class Document(NamedTuple):
    """A text in a Dockerfile between ``<<NAME`` and a line ``NAME``."""

    mark: str
    """Marker in the instruction, without quotation marks: ``<<NAME``."""
    text: str
    is_filled: bool
    """True if variables are filled in, because the name has no quotation marks."""


class Instruction(NamedTuple):
    """An instruction of a Dockerfile."""

    name: str
    rest: str
    documents: Sequence[Document]


def _instructions(text: str) -> Iterator[Instruction]:
    """Split a text into instructions: lines that end with a backslash continue, and comments are dropped."""
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
    """Take the here-documents of an instruction from the lines after it, up to one without an end."""
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


def _fill_in(text: str, variables: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda found: variables.get(found[1] or found[3], found[2] or ""), text)


def _join(folder: str | None, path: str) -> str:
    """Resolve a path relative to a working folder, without dots."""
    parts: list[str] = []
    for part in PurePosixPath(folder or "/", path).parts[1:]:
        parts = parts[:-1] if part == ".." else [*parts, part]
    return "/" + "/".join(parts)


def _assignments(rest: str, known: Mapping[str, str]) -> dict[str, str]:
    """Read ``A=b C="d e"`` or the older form ``A b``."""
    words = _words(rest)
    if "=" not in (words[0] if words else ""):
        name, _, value = rest.partition(" ")
        return {name: _fill_in(value.strip(), known)} if value else {}
    pairs = (word.partition("=") for word in words)
    return {name: _fill_in(value, known) for name, _, value in pairs}


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
            raise UsageError(f"{path} has a copy instruction that cannot be read", got=rest) from error
    else:
        words = _words(rest)
    if any(word.startswith("--from") for word in words):
        return
    options = [word for word in words if word.startswith("--")]
    words = [word for word in words if not word.startswith("--")]
    if len(words) < 2:
        raise UsageError(
            f"{path} has a copy instruction that cannot be read", got=rest, expected="a source and a target"
        )
    *sources, target = words
    into = target.endswith(("/", ".")) or len(sources) > 1
    place = _join(folder, target)
    for source in sources:
        if source in texts:
            file = f"{place.rstrip('/')}/{source.lstrip('<-')}" if into else place
            yield CopiedFile(target=file, text=texts[source], is_executable_text=_makes_executable(options))
        elif source.startswith("<<"):
            raise UsageError(
                f"{path} has a here-document without an end", got=rest, expected=f"a line {source.lstrip('<-')}"
            )
        elif "://" not in source:  # ADD would download it
            yield from _copy_files(source, place, path, rules, into=into)


def _makes_executable(options: Sequence[str]) -> bool:
    """Check ``--chmod``, in numbers or letters, for the owner's right to run the file."""
    mode = next((word.partition("=")[2] for word in options if word.startswith("--chmod=")), "")
    return bool(int(mode[-3:], 8) & 0o100) if re.fullmatch(r"[0-7]{3,4}", mode) else "x" in mode


def _copy_files(
    pattern: str, target: str, path: Path, rules: Sequence[IgnoreRule], *, into: bool
) -> Iterator[CopiedFile]:
    context = path.parent.resolve()
    pattern = pattern.strip("/")
    found = [context] if pattern in ("", ".") else sorted(context.glob(pattern.removeprefix("./").rstrip("/")))
    if not found or not all(one.resolve().is_relative_to(context) for one in found):
        raise UsageError(f"{path} copies a file that does not exist", got=pattern, expected=f"a file below {context}")
    kept = [one for one in found if one.is_dir() or not is_ignored(one.relative_to(context).as_posix(), rules)]
    if not kept:
        raise UsageError(f"{path} copies a file that does not exist", got=f"{pattern}, excluded by .dockerignore")
    for one in kept:
        if one.is_dir():
            yield from files_below(one, target, context, rules)
        else:
            yield CopiedFile(
                source=one, target=f"{target.rstrip('/')}/{one.name}" if into or len(found) > 1 else target
            )


def files_of_context(context: Path, target: str) -> list[CopiedFile]:
    """List all files of a context to copy to a folder, without those that its ``.dockerignore`` excludes.

    Raises:
        UsageError: the ``.dockerignore`` cannot be read.
    """
    return list(files_below(context, target, context, read_ignore_rules(context)))


def files_below(folder: Path, target: str, context: Path, rules: Sequence[IgnoreRule]) -> Iterator[CopiedFile]:
    """Yield the files of a context's folder to copy to a path, without Dockerfiles and Compose files."""
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if not path.is_file() or str(relative) in _CONTEXT_FILES:
            continue
        if not is_ignored(path.relative_to(context).as_posix(), rules):
            yield CopiedFile(source=path, target=f"{target.rstrip('/')}/{relative.as_posix()}")


def compose_variables(path: Path) -> dict[str, str]:
    """Read the environment variables of the agent's service; those with references are left out.

    Raises:
        UsageError: the file cannot be read.
    """
    services = _services(path)
    chosen = services.get(_own(services))
    given = chosen.get("environment") if isinstance(chosen, Mapping) else None
    found = {name: value for name, value in _pairs(given) if value is not None}
    return {name: str(value) for name, value in found.items() if "$" not in str(value)}


def other_services(path: Path) -> list[str]:
    """Return the names of the services other than the agent's.

    Raises:
        UsageError: the file cannot be read.
    """
    services = _services(path)
    return [str(name) for name in services if name != _own(services)]


def _own(services: Mapping[Any, Any]) -> Any:
    return next((name for name in ("main", "client") if name in services), next(iter(services), None))


def _services(path: Path) -> Mapping[Any, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError, ValueError) as error:
        raise UsageError(f"{path} cannot be read", got=error, expected="a Compose file") from error
    found = content.get("services") if isinstance(content, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _pairs(given: Any) -> Sequence[tuple[str, Any]]:
    if isinstance(given, Mapping):
        return [(str(name), value) for name, value in given.items()]
    if isinstance(given, list):
        return [(name, value) for name, equals, value in (str(line).partition("=") for line in given) if equals]
    return []


def filled_variables(given: Any, known: Mapping[str, str], place: str) -> dict[str, str]:
    """Fill in ``${NAME}`` and ``${NAME:-default}`` in the variables of a task.

    Args:
        given: Values with references, by name.
        known: Values of the references, by name.
        place: Description of the variables, for messages.

    Raises:
        UsageError: `given` is not a table, or refers to an unknown name.
    """
    if not isinstance(given, Mapping):
        raise UsageError(f"{place} is not a table", got=repr(given)[:80], expected='{NAME = "value"}')

    def value_of(found: re.Match[str]) -> str:
        name = found[1] or found[3]
        if name not in known and found[2] is None:
            raise UsageError(
                f"{place} needs the variable {name}",
                got="no such variable",
                expected="a value in the sandbox's settings; variables of this machine are not used",
                hint=f"environment.options.sandbox.env.{name}=…",
            )
        return known.get(name, found[2] or "")

    return {str(name): _VARIABLE.sub(value_of, str(value)) for name, value in given.items()}
