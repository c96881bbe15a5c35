"""Placeholder packages, in which every attribute and submodule exists and does nothing.

SGLang imports GPU packages wherever it may use one of their kernels. On the CPU it calls none of them, so names are
enough. A decorator of such a package returns the decorated object unchanged, with or without arguments.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, ClassVar


class PlaceholderClass(type):
    """Metaclass of placeholder classes: they can be subclassed and annotated, and unknown attributes are strings."""

    def __getattr__(cls, name: str) -> str:
        if _is_special(name):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class Placeholder(types.ModuleType):
    """Placeholder of a module, function or decorator."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        value = attribute_of(self.__name__, name)
        setattr(self, name, value)
        return value

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Return the decorated object, or a decorator."""
        if len(arguments) == 1 and not options and callable(arguments[0]):
            return arguments[0]
        return _identity


class PlaceholderFinder:
    """Import finder for every submodule of the packages in `packages`."""

    packages: ClassVar[set[str]] = set()

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a submodule; ``None`` for other packages."""
        package, _, submodule = name.partition(".")
        if package not in cls.packages or not submodule:
            return None
        return importlib.machinery.ModuleSpec(name, PlaceholderLoader(), is_package=True)


class PlaceholderLoader(importlib.abc.Loader):
    """Loader of placeholder modules."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Return an empty placeholder."""
        return Placeholder(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing."""


def attributes_of(package: str) -> Callable[[str], Any]:
    """Return a ``__getattr__`` that provides every attribute and submodule of a package."""
    PlaceholderFinder.packages.add(package)
    known: dict[str, Any] = {}

    def attribute(name: str) -> Any:
        if name not in known:
            known[name] = attribute_of(package, name)
        return known[name]

    return attribute


def attribute_of(module: str, name: str) -> Any:
    """Return a placeholder class for a capitalized name; otherwise the submodule or a new placeholder of it.

    Raises:
        AttributeError: the name is special, like ``__name__``.
    """
    if _is_special(name):
        raise AttributeError(name)
    full = f"{module}.{name}"
    if name[:1].isupper():
        return PlaceholderClass(name, (), {"__module__": module})
    return sys.modules.get(full) or Placeholder(full)


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _identity(decorated: Any) -> Any:
    return decorated


sys.meta_path.insert(0, PlaceholderFinder)
