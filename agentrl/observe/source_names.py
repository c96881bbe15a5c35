"""Modules, files, file patterns, environment variables and commands that a Python source names.

Composed paths and names are computed as far as they are constant; each variable part becomes ``*``, so ``open(name +
".val")`` gives ``*.val``.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

ANY = "*"
"""Placeholder for a part of a text that is not constant."""
_MAX_NAME_CHARS = 240
"""Maximum length of a file name."""
_PATHS = ("join", "joinpath", "Path", "PurePath", "PosixPath", "PurePosixPath")
_SAME = ("str", "fspath", "abspath", "realpath", "normpath", "expanduser", "resolve", "absolute", "as_posix", "strip")
"""Calls whose result names the same file as their argument."""
_GLOBS = ("glob", "iglob", "rglob")
_LISTINGS = {"listdir": ANY, "iterdir": ANY, "scandir": ANY, "walk": f"**/{ANY}"}
"""Calls that list a folder, and the pattern of their results."""
_IMPORTS = ("import_module", "__import__", "run_module")
_COMMANDS = (
    *("run", "Popen", "popen", "call", "check_call", "check_output", "system", "getoutput", "getstatusoutput"),
    *("create_subprocess_shell", "create_subprocess_exec", "split"),
)
"""Calls whose argument is a command."""
_PLACEHOLDER = re.compile(r"%[-+# 0]*\d*(?:\.\d+)?[a-z]|\{[^{}]*\}")
"""Placeholders of ``%`` and ``str.format``."""
_SEPARATORS = re.compile(r"""[\s"'`,;:=()\[\]{}<>|&]+""")
_QUOTED = re.compile(r""""([^"\n]+)"|'([^'\n]+)'""")
_REFERENCE = re.compile(r"\$\w+|\$\{[^}]*\}|\$\([^()]*\)")
"""Variables and substitutions of a shell."""


@dataclass(slots=True)
class NamedInSource:
    """Names in a source."""

    modules: set[str] = field(default_factory=set)
    """Dotted names of imported modules; computed names may contain ``*``."""
    files: set[str] = field(default_factory=set)
    """Paths and patterns of files that the source may read."""
    written: set[str] = field(default_factory=set)
    """Paths and patterns of files that the source opens for writing."""
    variables: set[str] = field(default_factory=set)
    """Environment variables that the source reads."""
    commands: list[list[str]] = field(default_factory=list)


def names_in(tree: ast.AST, file: Path, package: str) -> NamedInSource:
    """Collect the names in a source."""
    source = _SourceFile(tree, file, package)
    try:
        source.visit(tree)
    except RecursionError:  # deeply nested expressions: only constants are collected
        source.found.files |= {text for node in ast.walk(tree) if (text := _constant(node))}
    found = source.found
    found.written.add(str(file))
    found.files = {text for text in found.files - found.written if _may_name_file(text) and not _holds(text, file)}
    found.variables -= source.assigned
    return found


def _may_name_file(text: str) -> bool:
    return bool(text.strip("./ ")) and len(text) <= _MAX_NAME_CHARS and "\n" not in text


def _holds(text: str, file: Path) -> bool:
    """Return True if a path is that of a folder that contains the source, which is not data."""
    return text.endswith("..") or (text.startswith("/") and file.is_relative_to(text))


def _constant(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _call_name(function: ast.expr) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))


def _is_environ(node: ast.expr) -> bool:
    return _call_name(node) == "environ"


class _SourceFile:
    def __init__(self, tree: ast.AST, file: Path, package: str) -> None:
        self.found = NamedInSource()
        self.assigned = set[str]()
        """Environment variables that the source sets."""
        self._package = package
        self._values: dict[str, ast.expr | None] = {}
        """Expressions of variables; ``None`` for variables with several values."""
        self._texts: dict[str, str] = {"__file__": str(file)}
        for node in ast.walk(tree):
            match node:
                case (
                    ast.Assign(targets=[ast.Name(id=name)], value=value)
                    | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
                ):
                    self._values[name] = None if name in self._values else value

    def visit(self, node: ast.AST, *, is_part: bool = False) -> None:
        """Collect the names in a node and its children; parts of a longer path are not paths themselves."""
        self._note(node)
        parts = self._parts(node)
        if not is_part and (parts or _constant(node)):
            self._note_file(self.text(node))
        inner = {id(part) for part in parts}
        for child in ast.iter_child_nodes(node):
            in_part = is_part if isinstance(node, ast.Attribute) else isinstance(child, ast.Attribute) and bool(parts)
            self.visit(child, is_part=in_part or id(child) in inner)

    def _note_file(self, text: str) -> None:
        if ANY in text and not (re.search(r"\w", text) and re.search(r"[./]", text)):
            return  # matches any file
        self.found.files.add(text)

    def _note(self, node: ast.AST) -> None:
        match node:
            case ast.Import(names=names):
                self.found.modules |= {alias.name for alias in names}
            case ast.ImportFrom(module=module, names=names, level=level):
                base = self._absolute("." * level + (module or ""))
                self.found.modules |= {base, *(f"{base}.{alias.name}" for alias in names)}
            case ast.Subscript(value=value, slice=key, ctx=context) if _is_environ(value):
                (self.found.variables if isinstance(context, ast.Load) else self.assigned).add(self.text(key))
            case ast.Compare(left=key, ops=[ast.In() | ast.NotIn()], comparators=[value]) if _is_environ(value):
                self.found.variables.add(self.text(key))
            case ast.List(elts=words) | ast.Tuple(elts=words) if any(_constant(word) == "-m" for word in words):
                self._note_command(words)
            case ast.Call():
                self._note_call(node)

    def _note_call(self, call: ast.Call) -> None:
        name, arguments = _call_name(call.func), call.args
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        first = self.text(arguments[0]) if arguments else ""
        if name in _IMPORTS and first:
            self.found.modules.add(self._absolute(first) if first.startswith(".") else first)
        elif name == "getenv" or (owner is not None and _is_environ(owner) and name in ("get", "pop")):
            self.found.variables.add(first)
        elif name in _LISTINGS:
            listed = first or (self.text(owner) if owner is not None and not arguments else "")
            if listed not in ("", ANY):
                self.found.files.add(f"{listed}/{_LISTINGS[name]}")
        elif any(_constant(word) == "-m" for word in arguments):
            self._note_command(arguments)
        elif name in _COMMANDS and arguments:
            if isinstance(arguments[0], ast.List | ast.Tuple):
                self._note_command(arguments[0].elts)
            else:
                self.found.commands.append(split_command(first))
        self.found.written |= set(self._written_files(call))

    def _note_command(self, words: Sequence[ast.expr]) -> None:
        self.found.commands.append([self.text(word) for word in words])

    def _absolute(self, name: str) -> str:
        """Return the absolute dotted name for a relative one."""
        level = len(name) - len(name.lstrip("."))
        above = self._package.split(".")[: len(self._package.split(".")) - level + 1] if level else []
        return ".".join([*filter(None, above), *filter(None, [name.lstrip(".")])])

    def _written_files(self, call: ast.Call) -> Iterator[str]:
        name = _call_name(call.func)
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        modes = [word.value for word in call.keywords if word.arg == "mode"]
        if name == "open" and owner is not None and not (isinstance(owner, ast.Name) and owner.id in ("io", "gzip")):
            target, modes = owner, [*call.args[:1], *modes]
        elif name == "open" and call.args:
            target, modes = call.args[0], [*call.args[1:2], *modes]
        elif owner is not None and (name.startswith("write_") or name in ("touch", "mkdir", "unlink")):
            yield self.text(owner)
            return
        else:
            return
        if any(set(_constant(mode)) & set("wax+") for mode in modes):
            yield self.text(target)

    def _parts(self, node: ast.AST) -> Sequence[ast.expr]:
        """Return the parts of an expression that composes a text; none for other expressions."""
        match node:
            case ast.BinOp(op=ast.Add() | ast.Div(), left=left, right=right):
                return [left, right]
            case ast.BinOp(op=ast.Mod(), left=left) if _constant(left):
                return [left]
            case ast.JoinedStr(values=values):
                return values
            case ast.Call(func=function, args=arguments) if _call_name(function) in (
                *_PATHS,
                *_GLOBS,
                "with_suffix",
                "with_name",
                "format",
            ):
                return [*arguments, *([function.value] if isinstance(function, ast.Attribute) else [])]
        return []

    def text(self, node: ast.expr | ast.AST) -> str:
        """Return the text of an expression, with ``*`` for parts that are not constant."""
        match node:
            case ast.Constant(value=str(text)):
                return text
            case ast.Name(id=name):
                return self._variable(name)
            case ast.JoinedStr(values=values):
                return "".join(map(self.text, values))
            case ast.FormattedValue(value=value):
                return self.text(value)
            case ast.BinOp(op=ast.Add(), left=left, right=right):
                return self.text(left) + self.text(right)
            case ast.BinOp(op=ast.Div(), left=left, right=right):
                return _path([self.text(left), self.text(right)])
            case ast.BinOp(op=ast.Mod(), left=left):
                return _PLACEHOLDER.sub(ANY, self.text(left))
            case ast.Attribute(value=value, attr="parent"):
                return _parent(self.text(value))
            case ast.Subscript(value=ast.Attribute(value=value, attr="parents"), slice=ast.Constant(value=int(count))):
                text = self.text(value)
                for _ in range(min(count, _MAX_NAME_CHARS) + 1):
                    text = _parent(text)
                return text
            case ast.Call():
                return self._result(node)
        return ANY

    def _variable(self, name: str) -> str:
        if name not in self._texts:
            self._texts[name] = ANY  # for a variable that refers to itself
            value = self._values.get(name)
            self._texts[name] = ANY if value is None else self.text(value)
        return self._texts[name]

    def _result(self, call: ast.Call) -> str:
        """Return the text of a call's result."""
        name = _call_name(call.func)
        owner = "" if not isinstance(call.func, ast.Attribute) else self.text(call.func.value)
        arguments = list(map(self.text, call.args))
        if name == "home":
            return "~"
        if not arguments:
            return owner if name in _SAME else ANY
        if name in _GLOBS:
            root = next((self.text(word.value) for word in call.keywords if word.arg == "root_dir"), owner)
            return _path([root, *(["**"] if name == "rglob" else []), arguments[0]])
        if name in _PATHS and not (name == "join" and len(arguments) == 1):
            return _path([owner, *arguments] if name == "joinpath" else arguments)
        if name == "with_suffix":
            return re.sub(r"(?<=[^/])\.[^./]*$", "", owner) + arguments[0]
        if name == "with_name":
            return _path([_parent(owner), arguments[0]])
        if name == "format":
            return _PLACEHOLDER.sub(ANY, owner)
        if name == "dirname":
            return _parent(arguments[0])
        if name == "files":  # importlib.resources.files
            return arguments[0].replace(".", "/")
        return arguments[0] if name in _SAME else ANY


def _path(parts: Sequence[str]) -> str:
    """Join the parts of a path; an unknown folder at its start is dropped."""
    known = list(parts)
    while len(known) > 1 and known[0] in ("", ANY):
        known.pop(0)
    return str(PurePosixPath(*known)) if any(known) else ANY


def _parent(text: str) -> str:
    return ANY if text == ANY else str(PurePosixPath(text).parent)


def split_command(text: str) -> list[str]:
    """Split a command into words like a shell; none for a text with an unclosed quotation mark."""
    try:
        return shlex.split(text)
    except ValueError:
        return []


def listed_words(text: str) -> Iterator[list[str]]:
    """Yield the words of each line of a script or settings file that may name files."""
    for line in text.splitlines():
        plain = _REFERENCE.sub("", line)
        words = [word for word in _SEPARATORS.split(plain) if word]
        words += [word for pair in _QUOTED.findall(plain) for word in pair if word]
        yield [f".{word}" if word.startswith("/") and f"{word}" not in line.split() else word for word in words]
