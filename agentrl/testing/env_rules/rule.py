"""A rule of the environment check."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

from agentrl.testing.env_subject import Finding, Subject


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What is demanded, how it is looked for, and what to do where it is broken."""

    look: Callable[[Subject], Finding]
    """Says what it found, or raises `Broken`, `Suspect` or `Missing`. Its name is the rule's; its docstring says what
    is demanded."""
    mend: str
    """The next step for whoever broke it."""

    @property
    def name(self) -> str:
        """As reports show it."""
        return self.look.__name__.replace("_", " ")

    @property
    def demand(self) -> str:
        """What is demanded, in a sentence."""
        return " ".join((inspect.getdoc(self.look) or "").partition("\n\n")[0].split())
