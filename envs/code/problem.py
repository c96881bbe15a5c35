"""A problem: what to write, and how it is judged."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass

from ..programs.judging import Case

_BLOCK = re.compile(r"```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_BARE = re.compile(r"\s*(?:def |return\b|import |from |class |@|async def )")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A function to write."""

    id: str
    statement: str
    """What the policy reads."""
    function: str
    header: str
    """What stands before a solution that is only the function's body: imports and the ``def`` line."""
    preamble: str = ""
    """What stands before a solution that is a whole function."""
    examples: tuple[Case, ...] = ()
    """Shown, and tried before a solution is graded."""
    hidden: tuple[Case, ...] = ()
    shown_tests: tuple[str, ...] = ()
    """As `examples`, as code."""
    hidden_tests: tuple[str, ...] = ()
    setup: str = ""
    """Runs before the tests that are code."""
    solution: str = ""
    type: str = ""

    @property
    def has_examples(self) -> bool:
        """True if there is something to try a solution on."""
        return bool(self.examples or self.shown_tests)

    def complete(self, code: str) -> str:
        """The program that some code stands for: whole functions, or this function's body."""
        if re.search(rf"^(?:async )?(?:def|class) +{self.function}\b|^{self.function} *[=:]", code, re.MULTILINE):
            return f"{self.preamble}\n{code}"
        if re.search(r"^(?:async )?(?:def|class) ", code, re.MULTILINE):
            return f"{self.preamble}\n{code}"
        return f"{self.header}\n{textwrap.indent(textwrap.dedent(code), '    ')}\n"


def read_code(action: str) -> str | None:
    r"""The code of an action: its last block, or all of it where that begins like code.

    >>> read_code("I add them.\n```python\nreturn a + b\n```")
    'return a + b\n'
    >>> read_code("return a")
    'return a'
    """
    blocks: list[str] = _BLOCK.findall(action)
    if blocks:
        return blocks[-1] if blocks[-1].strip() else None
    return action if _BARE.match(action) else None


def write_code(code: str) -> str:
    """The action that hands in some code."""
    return f"```python\n{code.rstrip()}\n```"
