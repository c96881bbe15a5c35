"""A problem: the task text, and the tests that judge a solution."""

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
    """Text that the policy reads."""
    function: str
    header: str
    """Code before a solution that is only the function's body: imports and the ``def`` line."""
    preamble: str = ""
    """Code before a solution that is a whole function."""
    examples: tuple[Case, ...] = ()
    """Cases that the policy sees, and that are tried before a solution is graded."""
    hidden: tuple[Case, ...] = ()
    shown_tests: tuple[str, ...] = ()
    """Examples in the form of code."""
    hidden_tests: tuple[str, ...] = ()
    setup: str = ""
    """Code that runs before the tests that are code."""
    solution: str = ""
    type: str = ""

    @property
    def has_examples(self) -> bool:
        """True if the problem has examples of either form."""
        return bool(self.examples or self.shown_tests)

    def complete(self, code: str) -> str:
        """Complete code to a program; the code is either whole functions or only this function's body."""
        if re.search(rf"^(?:async )?(?:def|class) +{self.function}\b|^{self.function} *[=:]", code, re.MULTILINE):
            return f"{self.preamble}\n{code}"
        if re.search(r"^(?:async )?(?:def|class) ", code, re.MULTILINE):
            return f"{self.preamble}\n{code}"
        return f"{self.header}\n{textwrap.indent(textwrap.dedent(code), '    ')}\n"


def read_code(action: str) -> str | None:
    r"""Return the code of an action: its last block, or the whole action if it starts like code.

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
    """Return the action that submits code."""
    return f"```python\n{code.rstrip()}\n```"
