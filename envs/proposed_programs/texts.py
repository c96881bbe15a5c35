"""Texts of the environment: instructions, requests to propose a puzzle, and puzzles to solve."""

from __future__ import annotations

from collections.abc import Sequence

from .options import Kind, ProposedOptions
from .puzzle import FUNCTION, MODULES, Puzzle

INSTRUCTIONS = """\
You either write puzzles about Python programs for others, or solve such puzzles. Each message says what to do, and in
which form to answer."""
_GOAL = {
    Kind.DEDUCTION: f"a Python function {FUNCTION} and an input. A solver reads both and has to find the return value",
    Kind.ABDUCTION: f"a Python function {FUNCTION} and an input. A solver reads the function and its return value for"
    " your input, and has to find an input with this return value",
}
_RULES = """\
- {name} takes at least one argument and returns numbers, strings, lists, tuples, sets, dictionaries, booleans or None.
- It is deterministic, ends within {seconds:g} seconds, and imports nothing but {modules}.
- The input consists of the arguments as Python literals, separated by commas.
- The best puzzle is new, and is solved in some attempts but not in all."""
_FORM = """\
Answer in this form:
```python
def {name}(text, times):
    return text * times
```
```input
'ab', 3
```"""
_INDUCTION = """\
Write {count} different inputs for this program, and a message. A solver reads your message and {shown} of the inputs
with their return values. Its program must also return the right values for the other inputs. The best puzzle is solved
in some attempts but not in all.
```python
{program}
```
Each input consists of the arguments as Python literals, separated by commas. The message must not contain a program.
Answer with {count} input blocks and one message block, in this form:
```input
'ab', 3
```
```message
Look at the lengths.
```"""


def request(kind: Kind, references: Sequence[Puzzle], options: ProposedOptions) -> str:
    """Return the text that asks for a new puzzle of a kind; the reference of an induction is its program."""
    if kind is Kind.INDUCTION:
        program, count = references[0].program, options.inputs
        return _INDUCTION.format(count=count, shown=count // 2, program=program)
    rules = _RULES.format(name=FUNCTION, seconds=options.seconds, modules=", ".join(sorted(MODULES)))
    parts = [f"Write a new puzzle: {_GOAL[kind]}.", rules, _FORM.format(name=FUNCTION)]
    if references:
        parts += ["Earlier puzzles:", *map(_example, references)]
    return "\n".join(parts)


def _example(puzzle: Puzzle) -> str:
    return "\n".join([block("python", puzzle.program), block("input", puzzle.inputs[0])])


def statement(puzzle: Puzzle) -> str:
    """Return the text that poses a puzzle to a solver."""
    program, form = block("python", puzzle.program), "Answer with a block in this form:"
    if puzzle.kind is Kind.DEDUCTION:
        given = block("input", puzzle.inputs[0])
        asked = f"What does {FUNCTION} return for this input? Write the value as a Python literal."
        return "\n".join([asked, program, given, form, block("output", "[1, 2]")])
    if puzzle.kind is Kind.ABDUCTION:
        wanted, example = block("output", puzzle.outputs[0]), block("input", "'ab', 3")
        asked = f"Find an input for which {FUNCTION} returns this output. Write the arguments as Python literals."
        return f"{asked}\n{program}\n{wanted}\n{form}\n{example}"
    pairs = zip(puzzle.inputs[: puzzle.shown], puzzle.outputs[: puzzle.shown], strict=True)
    shown = "\n".join(f"{block('input', given)}\n{block('output', output)}" for given, output in pairs)
    example = block("python", f"def {FUNCTION}(text, times):\n    return text * times")
    asked = f"Write a Python function {FUNCTION} that returns these outputs, and the right outputs for other inputs."
    return f"{asked}\n{shown}\n{block('message', puzzle.message)}\n{form}\n{example}"


def block(name: str, text: str) -> str:
    r"""Return a fenced block.

    >>> block("input", "3")
    '```input\n3\n```'
    """
    return f"```{name}\n{text}\n```"


def write_proposal(puzzle: Puzzle) -> str:
    """Return the answer that proposes a puzzle."""
    given = [block("input", text) for text in puzzle.inputs]
    if puzzle.kind is Kind.INDUCTION:
        return "\n".join([*given, block("message", puzzle.message)])
    return "\n".join([block("python", puzzle.program), *given])


def write_solution(puzzle: Puzzle) -> str:
    """Return the answer that solves a puzzle."""
    parts = {
        Kind.DEDUCTION: ("output", puzzle.outputs[0]),
        Kind.ABDUCTION: ("input", puzzle.inputs[0]),
        Kind.INDUCTION: ("python", puzzle.program),
    }
    return block(*parts[puzzle.kind])
