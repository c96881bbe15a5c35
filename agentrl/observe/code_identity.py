"""Digests of code, which show whether an object has changed.

An object of a file is identified by the file, by the modules that the file imports, directly or through others, and by
the data files that these name in their sources (``open("words.txt")``). Only the user's own modules are followed; of an
installed package, its version counts, and the core of agentrl counts by its version, too. An object without a file,
such as one of a notebook, is identified by its compiled code and by what that refers to.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import importlib.util
import inspect
import logging
import re
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path, PurePath
from typing import Any
from uuid import UUID

from agentrl.observe.file_identity import file_digest, folder_digest

_log = logging.getLogger(__name__)

CORE = Path(__file__).resolve().parents[1]
CATALOGUE = ("agentrl.envs", "agentrl.tools", "agentrl.agent_loops")
"""Packages of agentrl whose modules are followed like the user's own."""
_LIBRARIES = tuple(
    {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_INSTALLED = ("site-packages", "dist-packages")
_LONGEST_NAME = 240
"""Maximum length of a text that is tried as the name of a file."""
_VALUES = (PurePath, Decimal, Fraction, date, time, timedelta, UUID, Enum, range, re.Pattern)
"""Types whose ``repr`` tells their value."""
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}")
_DEEPEST = 4
"""Maximum depth of nested values that are read."""


def _stable_text(value: object) -> str:
    """Return the ``repr`` of a value, or its type's name where the ``repr`` names an address in memory or fails."""
    try:
        text = repr(value)
    except Exception:  # a method of the user's
        return type(value).__qualname__
    return type(value).__qualname__ if _ADDRESS.search(text) else text


class CodeIdentity:
    """Identity of code: everything that decides how it behaves.

    Args:
        outputs: Folder in which results are written: a folder that contains it holds no data.
    """

    def __init__(self, outputs: Path | None = None) -> None:
        self._outputs = None if outputs is None else outputs.resolve()
        self._parts: dict[str, str] = {}
        self._seen: dict[int, object] = {}
        self._modules: set[str] = set()

    def digest(self) -> str:
        """Return one digest of all that was collected."""
        lines = "\n".join(f"{label} {part}" for label, part in sorted(self._parts.items()))
        return hashlib.blake2b(lines.encode(), digest_size=8).hexdigest()

    def add(self, target: object) -> None:
        """Add an object: a function, a class, an instance, a tool, the description of an environment."""
        if id(target) in self._seen:
            return
        self._seen[id(target)] = target  # kept alive, so that no other object gets its id
        if isinstance(target, functools.partial):
            self.add(target.func)
            self.add_value(f"arguments of {_name(target.func)}", [*target.args, target.keywords])
        elif inspect.isclass(target):
            for kind in target.__mro__:
                self._add_definition(kind)
        elif inspect.ismethod(target):
            self.add(target.__self__)
            self.add(target.__func__)
        elif isinstance(target, types.FunctionType):
            self._add_function(target)
        elif is_dataclass(target):
            self._add_definition(type(target))
            for field in fields(target):
                self.add_value(f"{type(target).__name__}.{field.name}", getattr(target, field.name))
        elif not isinstance(target, types.BuiltinFunctionType):
            self._add_instance(target)

    def _note(self, label: str, part: str) -> None:
        """Keep a part; several under one label are all kept."""
        known = self._parts.get(label)
        self._parts[label] = part if known in (None, part) else f"{known} {part}"

    def add_value(self, label: str, value: object, depth: int = 0) -> None:
        """Add a value of an object: plain data as it is, code as `add` does."""
        if depth > _DEEPEST:
            self._note(label, _stable_text(value))
        elif value is None or isinstance(value, bool | int | float | complex | str | bytes):
            self._note(label, repr(value))
        elif isinstance(value, Mapping):
            for key, inner in value.items():
                self.add_value(f"{label}[{key!r}]", inner, depth + 1)
        elif isinstance(value, list | tuple):
            for number, inner in enumerate(value):
                self.add_value(f"{label}[{number}]", inner, depth + 1)
        elif isinstance(value, set | frozenset):
            self._note(label, repr(sorted(map(_stable_text, value))))
        elif is_dataclass(value) and not isinstance(value, type):
            self._add_definition(type(value))
            for field in fields(value):
                self.add_value(f"{label}.{field.name}", getattr(value, field.name), depth + 1)
        elif callable(value):
            self.add(value)
        elif isinstance(value, _VALUES):
            self._note(label, repr(value))
        elif callable(to_bytes := getattr(value, "tobytes", None)):  # an array
            self._note(label, hashlib.sha256(to_bytes()).hexdigest())
        else:
            self.add(type(value))
            if is_own_module(type(value).__module__):
                for name, inner in getattr(value, "__dict__", {}).items():
                    self.add_value(f"{label}.{name}", inner, depth + 1)

    def add_module(self, name: str) -> None:
        """Add a module by its dotted name, with its packages; a missing one is ignored."""
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            here = ".".join(parts[:length])
            if here in self._modules:
                continue
            self._modules.add(here)
            if (file := _file_of(_spec(here))) is None:
                continue
            if _is_followed(here, file):
                self.add_file(file, here)
            elif length == 1 and _is_installed(file):
                self._note(f"package {here}", _versions(here))

    def add_file(self, file: Path, module: str = "") -> None:
        """Add a source file, what it imports, and the data files that it names.

        Args:
            file: The file.
            module: Dotted name under which it is imported; empty for a script.
        """
        label = f"file {module or file}"
        if label in self._parts:
            return
        try:
            content = file.read_bytes()
        except OSError:
            return
        self._parts[label] = _loaded_digest(module, file, hashlib.blake2b(content, digest_size=8).hexdigest())
        try:
            tree = ast.parse(content)
        except (SyntaxError, ValueError, RecursionError, MemoryError):  # another language than this Python's
            return
        package = module if file.name == "__init__.py" else module.rpartition(".")[0]
        for name in set(_imported(tree, package)):
            neighbour = None if module else _file_of(PathFinder.find_spec(name.partition(".")[0], [str(file.parent)]))
            if neighbour is not None:
                self.add_file(neighbour, name.partition(".")[0])
            elif name.partition(".")[0] not in sys.stdlib_module_names:
                self.add_module(name)
        if not module.startswith(CATALOGUE):
            for named in _named_files(tree):
                self.add_data(named, file.parent)

    def add_data(self, name: str, folder: Path | None = None) -> bool:
        """Add a data file or a folder of them by its content; return whether there is one.

        A folder that contains the results, or this Python's packages, is not data.

        Args:
            name: The path, as it is written.
            folder: Where it is looked for before the current folder.
        """
        for place in dict.fromkeys((folder or Path.cwd(), Path.cwd())):
            try:
                path = place / Path(name).expanduser()
                if path.is_file():
                    self._note(f"data {place} {name}", file_digest(path))
                    return True
                if path.is_dir() and not self._holds_outputs(path.resolve()):
                    self._note(f"data {place} {name}", folder_digest(path))
                    return True
            except (OSError, ValueError, RuntimeError):  # not readable, not a name, or no such user
                continue
        return False

    def _holds_outputs(self, folder: Path) -> bool:
        inside = [CORE, Path(sys.prefix).resolve(), *([] if self._outputs is None else [self._outputs])]
        return any(place.is_relative_to(folder) for place in inside)

    def _add_definition(self, target: Any) -> None:
        """Add the file in which a class or function is defined; its compiled code where there is no file."""
        module = getattr(target, "__module__", None) or ""
        try:
            place = inspect.getsourcefile(target)
        except (TypeError, OSError):  # a class of a notebook, or one written in C
            place = None
        known = None if module == "__main__" else _file_of(_spec(module))
        if place is None or not Path(place).is_file():
            if hasattr(target, "__code__") or (known is None and module not in sys.stdlib_module_names):
                self._add_compiled(target)
            return
        file = Path(place).resolve()
        if module == "__main__" and inspect.isclass(target) and not _is_written_in(target, place):
            self._add_compiled(target)
        if _is_followed(module, file):
            self.add_file(file, module if known == file else "")
            self.add_module(module.rpartition(".")[0])
        elif _is_installed(file):
            self._parts[f"package {module.partition('.')[0]}"] = _versions(module.partition(".")[0])
            self._note(f"file {module}", file_digest(file))

    def _add_function(self, function: types.FunctionType) -> None:
        self._add_definition(function)
        name = _name(function)
        self.add_value(f"defaults of {name}", [function.__defaults__, function.__kwdefaults__])
        for number, cell in enumerate(function.__closure__ or ()):
            try:
                self.add_value(f"variable {function.__code__.co_freevars[number]} of {name}", cell.cell_contents)
            except ValueError:  # not assigned yet
                continue
        if function.__module__ == "__main__":
            self._add_globals(function.__code__, function.__globals__)

    def _add_instance(self, target: object) -> None:
        wrapped = getattr(target, "target", None)  # of a tool, its function
        if callable(wrapped):
            self.add(wrapped)
            return
        self.add(type(target))
        for name, value in getattr(target, "__dict__", {}).items():
            self.add_value(f"{type(target).__name__}.{name}", value)

    def _add_compiled(self, target: Any) -> None:
        name = _name(target)
        if code := getattr(target, "__code__", None):
            self._note(f"code {name}", _code_digest(code))
            self._add_globals(code, target.__globals__)
        elif inspect.isclass(target):
            for attribute, value in vars(target).items():
                inner = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
                if isinstance(inner, types.FunctionType):
                    self._add_compiled(inner)
                elif not attribute.startswith("__"):
                    self.add_value(f"{name}.{attribute}", value)

    def _add_globals(self, code: types.CodeType, names: Mapping[str, object]) -> None:
        """Add what code refers to among the names of its module: functions, classes, constants."""
        used = {name for one in _codes(code) for name in one.co_names} & names.keys()
        for name in sorted(used):
            value = names[name]
            if isinstance(value, types.ModuleType):
                self.add_module(value.__name__)
            elif isinstance(value, types.FunctionType) or inspect.isclass(value):
                self.add(value)
            elif isinstance(value, bool | int | float | str | bytes | tuple | frozenset):
                self.add_value(f"global {name}", value)


_loaded: dict[int, tuple[ModuleSpec, str]] = {}
"""Digests of the sources of imported modules as they were when this process first read them; a reload counts anew."""


def _loaded_digest(module: str, file: Path, digest: str) -> str:
    """Return the digest of the source that runs: a file that changes after its import does not change the program."""
    spec = getattr(sys.modules.get(module), "__spec__", None)
    if spec is None:
        return digest
    _, first = _loaded.setdefault(id(spec), (spec, digest))
    if first != digest:
        _log.warning("%s has changed since this process imported it, and still runs as it was: restart it", file)
    return first


def _name(target: object) -> str:
    return str(getattr(target, "__qualname__", type(target).__qualname__))


def _is_written_in(kind: type, file: str) -> bool:
    """Return whether the methods of a class come from a file: a notebook's ``__main__`` may have another one."""
    codes = [value.__code__ for value in vars(kind).values() if isinstance(value, types.FunctionType)]
    return any(code.co_filename == file for code in codes)


def _is_installed(file: Path) -> bool:
    return any(part in _INSTALLED for part in file.parts) or any(file.is_relative_to(place) for place in _LIBRARIES)


def _is_followed(module: str, file: Path) -> bool:
    if module.startswith(CATALOGUE):
        return True
    return not file.is_relative_to(CORE) and not _is_installed(file)


def is_own_module(name: str) -> bool:
    """Return True if a dotted name stands for a module of the user's own; nothing is imported to find out."""
    file = _file_of(_spec(name))
    return file is not None and not name.startswith("agentrl.") and _is_followed(name, file)


def _spec(name: str) -> ModuleSpec | None:
    """Find a module without importing it or one of its packages."""
    parent, _, _ = name.rpartition(".")
    try:
        if not parent:
            return importlib.util.find_spec(name) if name else None
        loaded = getattr(sys.modules.get(name), "__spec__", None)
        above = None if loaded is not None else _spec(parent)
        places = getattr(above, "submodule_search_locations", None)
        return loaded or (None if places is None else PathFinder.find_spec(name, list(places)))
    except (ImportError, ValueError, AttributeError):
        return None


def _file_of(spec: ModuleSpec | None) -> Path | None:
    if spec is None or not spec.has_location or spec.origin is None:
        return None
    return Path(spec.origin).resolve()


@functools.cache
def _versions(package: str) -> str:
    """Return the distributions that hold a package, with their versions."""
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:  # its distribution has another name
        names = set(_distributions().get(package, []))
    return ", ".join(sorted(f"{name} {importlib.metadata.version(name)}" for name in names))


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    """Return the distributions of each package; finding them takes a second."""
    return importlib.metadata.packages_distributions()


def _imported(tree: ast.AST, package: str) -> Iterator[str]:
    """List the dotted names of the modules that a source imports, also inside its functions."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                above = package.split(".")[: len(package.split(".")) - level + 1] if level else []
                base = ".".join([*above, *([module] if module else [])])
                yield base
                yield from (f"{base}.{alias.name}" for alias in names)
            case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]) if _called(function) in (
                "import_module",
                "__import__",
            ):
                yield name


def _called(function: ast.expr) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))


def _named_files(tree: ast.AST) -> set[str]:
    """Collect the texts of a source that may name a file or folder which it reads."""
    found = set[str]()
    parts = set[int]()  # of paths that are put together
    for node in ast.walk(tree):
        match node:
            case ast.BinOp(op=ast.Div(), left=left, right=right):
                parts |= {id(left), id(right)}
                if id(node) not in parts:
                    found.add(_joined(node))
            case ast.Call(func=function, args=[_, _, *_] as arguments) if _called(function) in (
                "join",
                "joinpath",
                "Path",
            ):
                parts |= {id(one) for one in arguments}
                found.add("/".join(text for one in arguments if (text := _text(one))))
            case ast.Constant(value=str(text)) if id(node) not in parts:
                found.add(text)
    found -= {text for node in ast.walk(tree) for text in _written(node)}
    return {text for text in found if text.strip("./ ") and len(text) <= _LONGEST_NAME and "\n" not in text}


def _joined(node: ast.expr) -> str:
    """Return the texts at the end of a path that is put together with slashes."""
    parts: list[str] = []
    while isinstance(node, ast.BinOp) and (text := _text(node.right)):
        parts.insert(0, text)
        node = node.left
    match node:
        case ast.Call(args=[first]):
            node = first
    return "/".join([*filter(None, [_text(node)]), *parts])


def _text(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _written(node: ast.AST) -> Iterator[str]:
    """List the names of files that a call opens in order to write."""
    match node:
        case ast.Call(func=function, args=[ast.Constant(value=str(name)), ast.Constant(value=str(mode)), *_]) if (
            _called(function) == "open" and set(mode) & set("wax+")
        ):
            yield name
        case ast.Call(func=ast.Attribute(value=ast.Call(args=[ast.Constant(value=str(name))]), attr=attribute)) if (
            attribute.startswith("write_") or attribute in ("touch", "mkdir", "unlink")
        ):
            yield name


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _code_digest(code: types.CodeType) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for one in _codes(code):
        digest.update(one.co_code)
        digest.update(repr([one.co_name, one.co_names, one.co_varnames, one.co_freevars]).encode())
        for constant in one.co_consts:
            if isinstance(constant, frozenset):
                digest.update(repr(sorted(map(repr, constant))).encode())
            elif not isinstance(constant, types.CodeType):
                digest.update(repr(constant).encode())
    return digest.hexdigest()
