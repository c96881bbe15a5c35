"""Problems of JSONL files in the form of MBPP or HumanEval."""

from __future__ import annotations

import ast
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.errors import UsageError

from .problem import Problem

_EXPECTED = (
    '"text" or "prompt", "code" and "test_list" (MBPP), or "prompt", "entry_point", "canonical_solution" and "test"'
    " (HumanEval)"
)


@functools.lru_cache(maxsize=16)
def read_problems(path: str, split: str, shown: int) -> Mapping[str, Problem]:
    """The problems of a file by task id.

    Raises:
        UsageError: there is no such file, or a line holds no problem.
    """
    file = Path(path)
    if not file.is_file():
        raise UsageError("there is no file of problems here", got=path, expected="a JSONL file")
    lines = file.read_text(encoding="utf-8").splitlines()
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise UsageError("the file of problems is empty", got=path)
    problems = (_problem(line, f"{split}-{n}", shown, f"{path}:{number}") for n, (number, line) in enumerate(numbered))
    return {problem.id: problem for problem in problems}


def _problem(line: str, task_id: str, shown: int, where: str) -> Problem:
    try:
        row = json.loads(line)
        if {"prompt", "entry_point", "test"} <= row.keys():
            return _of_human_eval(row, task_id)
        return _of_mbpp(row, task_id, shown)
    except json.JSONDecodeError as error:
        raise UsageError("a line of a file of problems is no JSON", got=f"{where}: {error}") from error
    except (KeyError, TypeError, AttributeError, ValueError, SyntaxError) as error:
        raise UsageError("a line of a file of problems is no problem", got=where, expected=_EXPECTED) from error


def _of_human_eval(row: Mapping[str, Any], task_id: str) -> Problem:
    prompt, function, test = str(row["prompt"]), str(row["entry_point"]), str(row["test"])
    preamble, found, _ = prompt.partition(f"def {function}")
    if not found:
        raise ValueError("the prompt does not define the entry point")
    ast.parse(test)
    return Problem(
        id=task_id,
        statement=f"Complete this function:\n\n{prompt.strip()}",
        function=function,
        header=prompt.rstrip(),
        preamble=preamble,
        hidden_tests=(f"{test}\ncheck({function})",),
        solution=prompt + str(row.get("canonical_solution", "")),
        type=str(row.get("type") or "function"),
    )


def _of_mbpp(row: Mapping[str, Any], task_id: str, shown: int) -> Problem:
    text, code = str(row.get("text") or row["prompt"]), str(row["code"])
    tests = [str(test) for test in row["test_list"]]
    hidden = [*tests[shown:], *map(str, row.get("challenge_test_list") or ())]
    if not hidden:
        raise ValueError("no test is left to grade with")
    function = _tested(code, tests)
    arguments = next(n for n in ast.parse(code).body if isinstance(n, ast.FunctionDef) and n.name == function).args
    told = "\n".join(["Your code has to pass:", *tests[:shown]]) if shown else f"The function is called {function}."
    return Problem(
        id=task_id,
        statement=f"{text.strip()}\n{told}",
        function=function,
        header=f"def {function}({ast.unparse(arguments)}):",
        shown_tests=tuple(tests[:shown]),
        hidden_tests=tuple(hidden),
        setup="\n".join([str(row.get("test_setup_code") or ""), *map(str, row.get("test_imports") or ())]),
        solution=code.replace("\r\n", "\n"),
        type=str(row.get("type") or "function"),
    )


def _tested(code: str, tests: list[str]) -> str:
    """The function of some code that the tests call."""
    names = [node.name for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)]
    called = {node.id for test in tests for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Name)}
    found = [name for name in names if name in called]
    if not found:
        raise ValueError("the tests call no function of the code")
    return found[-1]
