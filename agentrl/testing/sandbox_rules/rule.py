"""A rule of the sandbox check."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from agentrl.testing.env_subject import Finding
from agentrl.testing.sandbox_subject import SandboxSubject


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxRule:
    """What is demanded, and how it is looked for."""

    look: Callable[[SandboxSubject], Awaitable[Finding]]
    """Says what it found, or raises `Broken`, `Suspect` or `Missing`. Its name is the rule's; its docstring says what
    is demanded."""

    @property
    def name(self) -> str:
        """As reports show it."""
        return self.look.__name__.replace("_", " ")

    @property
    def demand(self) -> str:
        """What is demanded, in a sentence."""
        return " ".join((inspect.getdoc(self.look) or "").partition("\n\n")[0].split())
