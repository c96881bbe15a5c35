"""Optional extras: packages that are imported only where they are used."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from types import ModuleType

from agentrl.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """One of agentrl's extras."""

    name: str
    """As in ``pip install "agentrl[NAME]"``."""
    module: str
    """What cannot be imported where the extra is not installed: a top-level module."""

    @property
    def is_installed(self) -> bool:
        """Whether its module is there; nothing is imported to find out."""
        return importlib.util.find_spec(self.module) is not None

    def load(self, module: str | None = None) -> ModuleType:
        """Import a module of the extra.

        Args:
            module: Its dotted name; the extra's own when left out.

        Raises:
            UsageError: it is not installed, or lacks something itself.
        """
        try:
            return importlib.import_module(module or self.module)
        except ImportError as error:
            raise UsageError(
                f"the extra {self.name} is not installed",
                got=error,
                expected=f"the package {self.module}",
                hint=f'install it: pip install "agentrl[{self.name}]"',
            ) from error
