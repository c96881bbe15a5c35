"""Digests of code, which show whether an object has changed.

An object from a file is identified by the file, by the modules that the file imports, directly or indirectly, and by
the data files, environment variables and commands that their sources name (``open("words.txt")``,
``os.environ["LEVEL"]``); see `source_names`. Only the user's own modules are followed; installed packages and the core
of agentrl are identified by their versions. An object without a file, for example from a notebook, is identified by its
compiled code and the objects that this code refers to.
"""

from __future__ import annotations

import ast
import fnmatch
import functools
import glob
import hashlib
import importlib.metadata
import importlib.util
import inspect
import logging
import os
import re
import sys
import sysconfig
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from importlib.machinery import ModuleSpec, PathFinder
from itertools import islice
from pathlib import Path, PurePath
from typing import Any
from uuid import UUID

from agentrl.observe.file_identity import MAX_FILES, file_digest, folder_digest
from agentrl.observe.source_names import ANY, NamedInSource, listed_words, names_in

_log = logging.getLogger(__name__)

CORE = Path(__file__).resolve().parents[1]
CATALOGUE = ("agentrl.envs", "agentrl.tools", "agentrl.agent_loops")
"""Packages of agentrl whose modules are followed like the user's."""
_LIBRARIES = tuple(
    {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_INSTALLED = ("site-packages", "dist-packages")
_LISTS = {".yaml", ".yml", ".json", ".toml", ".ini", ".cfg", ".conf", ".env", ".sh", ".bash", ".zsh"}
"""Suffixes of settings files and scripts, which may name further files."""
_MAX_LIST_BYTES = 2**18
"""Maximum size of such a file in bytes; larger ones are data."""
_ADDRESS_OF_FILE = re.compile(r"(?:file|sqlite)(?:\+\w+)?:(?://)?([^?]*)(?:\?.*)?", re.DOTALL)
_PATTERN = re.compile(r"[*?\[]")
_VALUES = (PurePath, Decimal, Fraction, date, time, timedelta, UUID, Enum, range, re.Pattern)
"""Types whose ``repr`` shows their value."""
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}")
_DEEPEST = 4
"""Maximum depth of nested values that are read."""
_loaded: dict[int, tuple[ModuleSpec, str]] = {}
"""Source digests of imported modules, as this process first read them; a reload adds an entry."""


def _stable_text(value: object) -> str:
    """Return the ``repr`` of a value, or the name of its type if the ``repr`` contains a memory address or fails."""
    try:
        text = repr(value)
    except Exception:  # a user's method
        return type(value).__qualname__
    return type(value).__qualname__ if _ADDRESS.search(text) else text


class CodeIdentity:
    """Identity of code: everything that determines its behaviour.

    Args:
        outputs: Folder of results; folders that contain it do not count as data.
    """

    def __init__(self, outputs: Path | None = None) -> None:
        self._outputs = None if outputs is None else outputs.resolve()
        self._parts: dict[str, str] = {}
        self._seen: dict[int, object] = {}
        self._modules: set[str] = set()
        self._roots: dict[Path, None] = {}
        """Folders of scripts, which import modules in them by name."""
        self._read: set[Path] = set()

    def digest(self) -> str:
        """Return one digest of all collected parts."""
        lines = "\n".join(f"{label} {part}" for label, part in sorted(self._parts.items()))
        return hashlib.blake2b(lines.encode(), digest_size=8).hexdigest()

    def add(self, target: object) -> None:
        """Add an object: a function, a class, an instance, a tool, the description of an environment."""
        if id(target) in self._seen:
            return
        self._seen[id(target)] = target  # keep a reference, so that the id is not reused
        if isinstance(target, functools.partial):
            self.add(target.func)
            self.add_value(f"arguments of {_name(target.func)}", [*target.args, target.keywords])
        elif inspect.isclass(target):
            self._note(f"class {_name(target)}", "")  # a file may define several
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
        """Record a part; several parts with one label are all recorded."""
        known = self._parts.get(label)
        self._parts[label] = part if known in (None, part) else f"{known} {part}"

    def add_value(self, label: str, value: object, depth: int = 0) -> None:
        """Add a value of an object: plain data by its value, code as in `add`."""
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
            if (file := self._find(here)) is None:
                continue
            if _is_followed(here, file):
                self.add_file(file, here)
            elif length == 1 and _is_installed(file):
                self._note(f"package {here}", _versions(here))

    def _find(self, name: str) -> Path | None:
        """Find a module as this process, or a script from its own folder, would import it."""
        found = _file_of(_spec(name))
        paths = (root / name.replace(".", "/") for root in self._roots) if found is None else ()
        files = (file for path in paths for file in (path.with_name(f"{path.name}.py"), path / "__init__.py"))
        return found or next((file.resolve() for file in files if file.is_file()), None)

    def add_program(self, name: str, folder: Path | None = None) -> None:
        """Add a module that ``python -m`` runs, which may be in the current folder."""
        self._roots |= dict.fromkeys([folder or Path.cwd(), Path.cwd()])
        self.add_module(name)
        self.add_module(f"{name}.__main__")

    def add_file(self, file: Path, module: str = "") -> None:
        """Add a source file, its imports, and the data files that it names.

        `module` is the dotted name under which it is imported; empty for a script.
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
        except (SyntaxError, ValueError, RecursionError, MemoryError):  # not this version of Python
            return
        package = module if file.name == "__init__.py" else module.rpartition(".")[0]
        named = names_in(tree, file, package)
        if not module:
            self._roots[file.parent] = None
        for name in sorted(named.modules):
            neighbour = None if module else _file_of(PathFinder.find_spec(name.partition(".")[0], [str(file.parent)]))
            if ANY in name:
                self._add_modules_like(name, file.parent)
            elif neighbour is not None:
                self.add_file(neighbour, name.partition(".")[0])
            elif name.partition(".")[0] not in sys.stdlib_module_names:
                self.add_module(name)
        if not module.startswith(CATALOGUE):
            self._add_named(named, file.parent)

    def _add_modules_like(self, pattern: str, folder: Path) -> None:
        """Add the modules that match a name with ``*``: next to the source, or below the folder of its path."""
        if not re.search(r"\w", pattern):
            return
        path = pattern.replace(".", "/")
        roots = (folder, Path.cwd(), *folder.parents[: pattern.count(".")], *self._roots)
        for root in dict.fromkeys(roots):
            for file in islice(sorted([*root.glob(f"{path}.py"), *root.glob(f"{path}/__init__.py")]), MAX_FILES):
                inner = (file.parent if file.name == "__init__.py" else file.with_suffix("")).relative_to(root)
                name = ".".join(inner.parts)
                self.add_file(file.resolve(), name if _file_of(_spec(name)) == file.resolve() else "")

    def _add_named(self, named: NamedInSource, folder: Path) -> None:
        for text in sorted(named.files):
            self.add_data(text, folder, without=named.written)
        for pattern in named.variables:
            for name in sorted(fnmatch.filter(os.environ, pattern)):
                self._note(f"variable {name}", hashlib.blake2b(os.environ[name].encode(), digest_size=8).hexdigest())
        for words in named.commands:
            self.add_command(words, folder)

    def add_command(self, words: Sequence[str], folder: Path | None = None) -> None:
        """Add the files in a command, also in ``--option=path``, and the module after ``-m``."""
        for before, word in zip(["", *words], words, strict=False):
            if before == "-m" and word.replace(".", "").isidentifier():
                self.add_program(word, folder)
            for text in {word, word.partition("=")[2]} if _may_be_file(word) else ():
                self.add_data(text, folder)

    def add_data(self, name: str, folder: Path | None = None, *, without: Collection[str] = ()) -> bool:
        """Add the content of a data file, of a folder, or of files that match a pattern; return True if any was found.

        A folder that contains the results, or this Python's packages, is not data.

        Args:
            name: The path or pattern as written; ``file:`` and ``sqlite:`` addresses stand for their path.
            folder: Folder to search before the current folder.
            without: Files that a pattern does not match.
        """
        if address := _ADDRESS_OF_FILE.fullmatch(name):
            name = address[1].removeprefix("/") if name.startswith("sqlite") else address[1]
        if not name.strip("./ "):
            return False
        found = False
        for root in dict.fromkeys((folder or Path.cwd(), Path.cwd())):
            try:
                path = root / Path(name).expanduser()
                if path.is_file():
                    self._add_read(f"data {root} {name}", path)
                    return True
                if path.is_dir() and not self._holds_outputs(path.resolve()):
                    self._note(f"data {root} {name}", folder_digest(path))
                    return True
                if _PATTERN.search(name):
                    found |= self._add_matches(path, without)
            except (OSError, ValueError, RuntimeError, NotImplementedError):  # not readable, or not a name
                continue
        return found

    def _add_matches(self, pattern: Path, without: Collection[str]) -> bool:
        written = {*without, *(Path(name).name for name in without)}
        found = False
        for text in islice(glob.iglob(str(pattern), recursive=True), MAX_FILES):
            path = Path(text)
            if not path.is_file() or text in written or path.name in written or "__pycache__" in path.parts:
                continue
            if self._outputs is None or not path.resolve().is_relative_to(self._outputs):
                self._note(f"data {path}", file_digest(path))
                found = True
        return found

    def _add_read(self, label: str, file: Path) -> None:
        """Add a data file; of a program, a script or a settings file, also the files that it names."""
        self._note(label, file_digest(file))
        if (resolved := file.resolve()) in self._read:
            return
        self._read.add(resolved)
        with file.open("rb") as opened:
            first = opened.readline(_MAX_LIST_BYTES)
        is_script = first.startswith(b"#!")
        if file.suffix == ".py" or (is_script and b"python" in first):
            self.add_file(resolved)
        elif (is_script or file.suffix in _LISTS) and file.stat().st_size <= _MAX_LIST_BYTES:
            for words in listed_words(file.read_text(encoding="utf-8", errors="replace")):
                self.add_command(words, file.parent)

    def _holds_outputs(self, folder: Path) -> bool:
        inside = [CORE, Path(sys.prefix).resolve(), *([] if self._outputs is None else [self._outputs])]
        return any(path.is_relative_to(folder) for path in inside)

    def _add_definition(self, target: Any) -> None:
        """Add the file that defines a class or function, or its compiled code if it has no file."""
        module = getattr(target, "__module__", None) or ""
        try:
            source = inspect.getsourcefile(target)
        except (TypeError, OSError):  # a class in a notebook, or one written in C
            source = None
        known = None if module == "__main__" else _file_of(_spec(module))
        if source is None or not Path(source).is_file():
            if hasattr(target, "__code__") or (known is None and module not in sys.stdlib_module_names):
                self._add_compiled(target)
            return
        file = Path(source).resolve()
        if module == "__main__" and inspect.isclass(target) and not _is_written_in(target, source):
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
        self._note(f"function {name}", "")
        self.add_value(f"defaults of {name}", [function.__defaults__, function.__kwdefaults__])
        for number, cell in enumerate(function.__closure__ or ()):
            try:
                self.add_value(f"variable {function.__code__.co_freevars[number]} of {name}", cell.cell_contents)
            except ValueError:  # not assigned yet
                continue
        if function.__module__ == "__main__":
            self._add_globals(function.__code__, function.__globals__)

    def _add_instance(self, target: object) -> None:
        wrapped = getattr(target, "target", None)  # the function of a tool
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
        """Add the functions, classes and constants of its module that code refers to."""
        used = {name for one in _codes(code) for name in one.co_names} & names.keys()
        for name in sorted(used):
            value = names[name]
            if isinstance(value, types.ModuleType):
                self.add_module(value.__name__)
            elif isinstance(value, types.FunctionType) or inspect.isclass(value):
                self.add(value)
            elif isinstance(value, bool | int | float | str | bytes | tuple | frozenset):
                self.add_value(f"global {name}", value)


def _loaded_digest(module: str, file: Path, digest: str) -> str:
    """Return the digest of the source that runs: a file's change after its import does not change the program."""
    spec = getattr(sys.modules.get(module), "__spec__", None)
    if spec is None:
        return digest
    _, first = _loaded.setdefault(id(spec), (spec, digest))
    if first != digest:
        _log.warning("%s has changed, but this process still runs the version that it imported: restart it", file)
    return first


def _may_be_file(word: str) -> bool:
    """Return True if a word of a command may name a file; a bare name must be that of an existing file."""
    last = word.partition("=")[2] or word
    return "/" in last or "." in last or Path(last).is_file()


def _name(target: object) -> str:
    return str(getattr(target, "__qualname__", type(target).__qualname__))


def _is_written_in(kind: type, file: str) -> bool:
    """Return True if a file defines the methods of a class; in a notebook, ``__main__`` may have another file."""
    codes = [value.__code__ for value in vars(kind).values() if isinstance(value, types.FunctionType)]
    return any(code.co_filename == file for code in codes)


def _is_installed(file: Path) -> bool:
    return any(part in _INSTALLED for part in file.parts) or any(file.is_relative_to(library) for library in _LIBRARIES)


def _is_followed(module: str, file: Path) -> bool:
    if module.startswith(CATALOGUE):
        return True
    return not file.is_relative_to(CORE) and not _is_installed(file)


def is_own_module(name: str) -> bool:
    """Return True if a dotted name is that of a user's module; imports nothing."""
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
        locations = getattr(above, "submodule_search_locations", None)
        return loaded or (None if locations is None else PathFinder.find_spec(name, list(locations)))
    except (ImportError, ValueError, AttributeError):
        return None


def _file_of(spec: ModuleSpec | None) -> Path | None:
    if spec is None or not spec.has_location or spec.origin is None:
        return None
    return Path(spec.origin).resolve()


@functools.cache
def _versions(package: str) -> str:
    """Return the distributions that contain a package, with their versions."""
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:  # the distribution has another name
        names = set(_distributions().get(package, []))
    return ", ".join(sorted(f"{name} {importlib.metadata.version(name)}" for name in names))


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    """Return the distributions of each package; finding them takes a second."""
    return importlib.metadata.packages_distributions()


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
