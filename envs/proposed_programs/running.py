"""Real execution: a proposed program is validated by its own results, and answers are judged by them.

Programs run in fresh sandboxes. The right values never enter them; values come out as data and are compared here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..programs.inside.values import NotPlainData, decode
from ..programs.judging import MAX_SOURCE, Case, Solution, call_solution, describe_error, fresh_sandbox, run_cases
from ..programs.pipes import DeadlineExceeded, ProgramFailure
from ..programs.sameness import is_same
from .options import Kind, ProposedOptions
from .puzzle import (
    FUNCTION,
    MAX_MESSAGE_CHARS,
    Puzzle,
    PuzzleError,
    blocks,
    check_program,
    last_block,
    only_block,
    read_arguments,
    read_literal,
    write_literal,
)

PROCESSES = 3
"""Number of processes in which a proposed program must return the same; their hash seeds differ."""


async def validate(kind: Kind, answer: str, options: ProposedOptions, given: str) -> Puzzle:
    """Return the puzzle that an answer proposes, with the outputs that its program has.

    Args:
        kind: Kind of the puzzle.
        answer: Text of the proposer.
        options: Options of the environment.
        given: Program of an induction, which the proposer was given.

    Raises:
        PuzzleError: the answer lacks a part, the program is not allowed, fails, does not end in time, or is not
            deterministic.
        SandboxError: a sandbox failed.
    """
    if kind is Kind.INDUCTION:
        program, inputs = given, [text.strip() for text in blocks(answer, "input")]
        if len(inputs) != options.inputs or len(set(inputs)) < len(inputs):
            raise PuzzleError(f"{len(set(inputs))} different input blocks instead of {options.inputs}")
        message = only_block(answer, "message").strip()
        if len(message) > MAX_MESSAGE_CHARS or not message:
            raise PuzzleError(f"the message has {len(message)} characters instead of 1 to {MAX_MESSAGE_CHARS}")
        if f"def {FUNCTION}" in message:
            raise PuzzleError("the message contains a program")
    else:
        program, inputs, message = only_block(answer, "python"), [only_block(answer, "input").strip()], ""
    program = check_program(program)
    outputs = await run_program(program, inputs, options)
    return Puzzle(kind=kind, program=program, inputs=tuple(inputs), outputs=tuple(outputs), message=message)


async def run_program(program: str, inputs: Sequence[str], options: ProposedOptions) -> list[str]:
    """Return the outputs of a program as literals.

    It runs in `PROCESSES` processes, in the first of which each call is made twice.

    Raises:
        PuzzleError: it fails, does not end in time, is not deterministic, or returns other than plain data.
        SandboxError: the sandbox failed.
    """
    calls = [Case(call=FUNCTION, arguments=read_arguments(text), value=None) for text in inputs]
    solution, values = Solution(source=program), list[Any]()
    async with fresh_sandbox(options.sandbox) as sandbox:
        try:
            for process in range(PROCESSES):
                asked = calls * 2 if process == 0 else calls
                answers = await call_solution(sandbox, solution, asked, seconds=options.seconds)
                values = values or [_value(answer) for answer in answers[: len(calls)]]
                for number, answer in enumerate(answers):
                    if not is_same(answer.get("value"), values[number % len(calls)]):
                        raise PuzzleError("the program is not deterministic")
        except (ProgramFailure, DeadlineExceeded) as error:
            raise PuzzleError(f"the program fails: {error}") from error
    return [write_literal(value) for value in values]


def _value(answer: Mapping[str, Any]) -> Any:
    if "value" not in answer:
        raise PuzzleError(f"the program raises {describe_error(answer)}")
    try:
        return decode(answer["value"])
    except (NotPlainData, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise PuzzleError("the program returns a value that is not plain data") from error


async def is_solved(puzzle: Puzzle, answer: str, options: ProposedOptions) -> bool:
    """Return True if an answer solves a puzzle. The proposer's own answer does, without another execution.

    Raises:
        PuzzleError: the answer does not have the required format.
        SandboxError: a sandbox failed.
    """
    if puzzle.kind is Kind.DEDUCTION:
        return bool(read_literal(last_block(answer, "output")) == read_literal(puzzle.outputs[0]))
    if puzzle.kind is Kind.ABDUCTION:
        text = last_block(answer, "input")
        found = read_arguments(text)
        if text.strip() == puzzle.inputs[0]:
            return True
        program, calls = puzzle.program, [(found, puzzle.outputs[0])]
    else:
        program = last_block(answer, "python")
        if len(program) > MAX_SOURCE:
            raise PuzzleError(f"the program has more than {MAX_SOURCE} characters")
        if program.strip() == puzzle.program.strip():
            return True
        hidden = zip(puzzle.inputs[puzzle.shown :], puzzle.outputs[puzzle.shown :], strict=True)
        calls = [(read_arguments(given), output) for given, output in hidden]
    cases = [Case(call=FUNCTION, arguments=given, value=read_literal(output)) for given, output in calls]
    async with fresh_sandbox(options.sandbox) as sandbox:
        return (await run_cases(sandbox, Solution(source=program), cases, seconds=options.seconds)).is_right
