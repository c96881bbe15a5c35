"""Problems of data files in the format of MBPP or HumanEval."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Mapping
from typing import Any

from agentrl.errors import UsageError, described_error
from agentrl.message.data_file import Row, read_rows, texts_of

from .problem import Problem

_EXPECTED = (
    '"text" or "prompt", "code" and "test_list" (MBPP), or "prompt", "entry_point", "canonical_solution" and "test"'
    " (HumanEval)"
)


@functools.lru_cache(maxsize=16)
def read_problems(path: str, split: str, shown: int) -> Mapping[str, Problem]:
    """Read the problems of a file, by task id.

    Raises:
        UsageError: the file cannot be read, or a row is not a problem.
    """
    rows = list(read_rows(path, "file of problems"))
    if not rows:
        raise UsageError("the file of problems is empty", got=path)
    problems = (_problem(row, f"{split}-{number}", shown) for number, row in enumerate(rows))
    return {problem.id: problem for problem in problems}


def _problem(row: Row, task_id: str, shown: int) -> Problem:
    values = {name: value for name, value in row.values.items() if value is not None}
    try:
        if {"prompt", "entry_point", "test"} <= values.keys():
            return _of_human_eval(values, task_id)
        return _of_mbpp(values, task_id, shown)
    except (KeyError, TypeError, AttributeError, ValueError, SyntaxError, StopIteration, RecursionError) as error:
        raise UsageError(f"{row.location} is not a problem", got=described_error(error), expected=_EXPECTED) from error


def _of_human_eval(row: Mapping[str, Any], task_id: str) -> Problem:
    prompt, function, test = str(row["prompt"]), str(row["entry_point"]), str(row["test"])
    found = re.search(rf"\bdef\s+{re.escape(function)}\s*\(", prompt)
    if found is None:
        raise ValueError("the prompt does not define the entry point")
    if not any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in ast.parse(test).body):
        raise ValueError("the test defines no function check")
    return Problem(
        id=task_id,
        statement=f"Complete this function:\n\n{prompt.strip()}",
        function=function,
        header=prompt.rstrip(),
        preamble=prompt[: found.start()],
        hidden_tests=(f"{test}\ncheck({function})",),
        solution=prompt + str(row.get("canonical_solution", "")),
        type=str(row.get("type") or "function"),
    )


def _of_mbpp(row: Mapping[str, Any], task_id: str, shown: int) -> Problem:
    text, code = str(row.get("text") or row["prompt"]), str(row["code"])
    tests = list(texts_of(row["test_list"]))
    hidden = [*tests[shown:], *texts_of(row.get("challenge_test_list", []))]
    if not hidden:
        raise ValueError("no test is left to grade with")
    function = _tested_function(code, tests)
    arguments = next(n for n in ast.parse(code).body if isinstance(n, ast.FunctionDef) and n.name == function).args
    note = "\n".join(["Your code has to pass:", *tests[:shown]]) if shown else f"The function is called {function}."
    return Problem(
        id=task_id,
        statement=f"{text.strip()}\n{note}",
        function=function,
        header=f"def {function}({ast.unparse(arguments)}):",
        shown_tests=tuple(tests[:shown]),
        hidden_tests=tuple(hidden),
        setup="\n".join([str(row.get("test_setup_code") or ""), *texts_of(row.get("test_imports", []))]),
        solution=code.replace("\r\n", "\n"),
        type=str(row.get("type") or "function"),
    )


def _tested_function(code: str, tests: list[str]) -> str:
    """Return the name of the function that the tests call."""
    names = [node.name for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)]
    called = {node.id for test in tests for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Name)}
    found = [name for name in names if name in called]
    if not found:
        raise ValueError("the tests call no function of the code")
    return found[-1]
