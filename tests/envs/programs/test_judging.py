"""Solutions are judged by what they return, whatever else they do."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from agentrl.envs.programs import pipes
from agentrl.envs.programs.judging import Case, Solution, Verdict, judge
from agentrl.envs.programs.sameness import is_same, show
from plain_sandbox import PlainSandbox
from support.waiting import PATIENCE_S

from agentrl.errors import EnvironmentFailure
from agentrl.sandbox import Command, ExecResult, SandboxSpec

SPEC = SandboxSpec(type="plain")
CASES = (
    Case(call="area", arguments=(2, 3), value=6),
    Case(call="area", arguments=(0, 9), value=0),
    Case(call="area", arguments=(-4, 5), value=-20),
)
RIGHT = "def area(a, b):\n    return a * b\n"
TESTS = ("assert area(2, 3) == 6", "import math\nassert math.isclose(area(0.3, 10), 3.0)", "assert area(7, 1) == 7")
FRAMES = """
import gc, inspect, sys
def area(a, b):
    told = set()
    for frame in inspect.stack():
        told |= {v for v in frame.frame.f_locals.values() if isinstance(v, int)}
        for value in frame.frame.f_locals.values():
            expected = getattr(value, "value", None)
            if expected is not None:
                return expected
    for thing in gc.get_objects():
        if isinstance(thing, dict) and "expected" in thing:
            return thing["expected"]
        if isinstance(thing, str) and "assert area" in thing:
            raise LookupError("found the tests")
    return None
"""
TRICKS = {
    "exit": "import sys\nsys.exit(0)",
    "exit when called": "import sys\ndef area(a, b):\n    sys.exit(0)",
    "end the process": "import os\nos._exit(0)",
    "end it when called": "import os\ndef area(a, b):\n    os._exit(0)",
    "equal to everything": "class Any:\n    def __eq__(self, other): return True\ndef area(a, b):\n    return Any()",
    "a number equal to everything": "class All(int):\n    def __eq__(self, other): return True\n"
    "    def __hash__(self): return 0\ndef area(a, b):\n    return All(1)",
    "new builtins": "import builtins\nbuiltins.AssertionError = builtins.isinstance = lambda *a: True\n"
    "def area(a, b):\n    return 1",
    "patch unittest": "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\ndef area(a, b):\n    return 1",
    "print success": 'print("OK")\nprint("PASSED 3 of 3")\nprint(\'{"value": ["int", "0x6"], "id": 0}\')\n'
    "def area(a, b):\n    return 1",
    "write to every file": "import os\nfor fd in range(3, 20):\n    try:\n        os.write(fd,"
    ' b\'{"problems": ["", "", ""], "value": ["int", "0x6"], "id": 0}\\n\')\n    except OSError: pass\n'
    "def area(a, b):\n    return 1",
    "look through frames": FRAMES,
    "patch json": "import json\njson.dumps = lambda *a, **k: '{}'\ndef area(a, b):\n    return 1",
    "read files": "import glob\nfound = [p for p in glob.glob('/tmp/**/*', recursive=False) if 'test' in p]\n"
    "def area(a, b):\n    return 1",
    "no code": "",
    "no syntax": "def area(:",
    "deep value": "def area(a, b):\n    x = []\n    for _ in range(5000): x = [x]\n    return x",
    "value in itself": "def area(a, b):\n    x = []\n    x.append(x)\n    return x",
    "large value": "def area(a, b):\n    return 'x' * 10**7",
}


async def verdict(source: str, **options: object) -> Verdict:
    return await judge(SPEC, Solution(source=source), **options)  # type: ignore[arg-type]


async def test_a_right_solution_passes_all() -> None:
    assert (await verdict(RIGHT, cases=CASES, tests=TESTS)).problems == ("",) * 6


async def test_wrong_solution_gets_its_results() -> None:
    judged = await verdict("def area(a, b):\n    return a + b", cases=CASES)
    assert judged.problems[0] == "area(2, 3) returned 5, expected 6"
    assert (judged.pass_count, judged.share, judged.is_right) == (0, 0.0, False)


async def test_part_of_the_tests() -> None:
    judged = await verdict("def area(a, b):\n    return abs(a) * b", cases=CASES)
    assert judged.pass_count == 2


@pytest.mark.parametrize("trick", TRICKS)
async def test_tricks_pass_no_test(trick: str) -> None:
    judged = await verdict(TRICKS[trick], cases=CASES)
    assert judged.pass_count == 0, judged.problems
    assert len(judged.problems) == len(CASES)


@pytest.mark.parametrize("trick", TRICKS)
async def test_tricks_pass_no_test_that_is_code(trick: str) -> None:
    judged = await verdict(TRICKS[trick], tests=TESTS)
    assert judged.pass_count == 0, judged.problems
    assert len(judged.problems) == len(TESTS)


@pytest.mark.parametrize(
    "harm", ["import shutil; shutil.rmtree('.judge/inside')", "open('.judge/json.py', 'w').write('1 / 0')"]
)
async def test_a_solution_that_keeps_later_programs_from_starting_fails(harm: str) -> None:
    judged = await verdict(f"{harm}\nimport os\nos._exit(0)", cases=CASES, tests=TESTS)
    assert judged.pass_count == 0
    assert judged.problems[-1] == "an earlier program changed the folder of the tests"


async def test_an_endless_loop_is_the_solutions_own_fault() -> None:
    judged = await verdict(RIGHT.replace("return", "while b == 9: pass\n    return"), cases=CASES, seconds=0.7)
    assert [problem[:14] for problem in judged.problems] == ["", "it did not end", "it did not end"]


@pytest.mark.parametrize(("probe_s", "longest_s", "right"), [(0.0, 30.0, False), (0.8, 30.0, True), (0.8, 0.9, False)])
@pytest.mark.slow
async def test_a_right_solution_gets_more_time_while_the_machine_is_slow(
    probe_s: float, longest_s: float, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute = PlainSandbox.exec

    async def slow(self: PlainSandbox, command: Command, **options: Any) -> ExecResult:
        if command == ["true"]:
            await asyncio.sleep(probe_s)
        return await execute(self, command, **options)

    monkeypatch.setattr(PlainSandbox, "exec", slow)
    monkeypatch.setattr(pipes, "MAX_RUN_S", longest_s)
    waiting = RIGHT.replace("return", "b == 9 and __import__('time').sleep(1.7)\n    return")
    judged = await verdict(waiting, cases=CASES, seconds=0.6)
    assert judged.is_right is right, judged.problems


async def test_a_judgement_ends_if_the_sandbox_cannot_be_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    execute = PlainSandbox.exec

    async def broken(self: PlainSandbox, command: Command, **options: Any) -> ExecResult:
        if command == ["true"]:
            raise ConnectionError("the sandbox is gone")
        return await execute(self, command, **options)

    monkeypatch.setattr(PlainSandbox, "exec", broken)
    waiting = RIGHT.replace("return", "__import__('time').sleep(60)\n    return")
    async with asyncio.timeout(20):
        with pytest.raises(ConnectionError, match="the sandbox is gone"):
            await verdict(waiting, cases=CASES, seconds=0.3)


@pytest.mark.slow
async def test_a_blocked_event_loop_is_not_the_solutions_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipes, "TICK_S", 0.02)
    monkeypatch.setattr(pipes, "MAX_RUN_S", 0.0)  # no more time for a slow machine
    judging = asyncio.create_task(verdict(RIGHT, cases=CASES * 6, seconds=0.8))
    until = time.monotonic() + PATIENCE_S
    while not judging.done():
        assert time.monotonic() < until, "the judging does not end"
        time.sleep(0.1)  # noqa: ASYNC251 - as a step of the local engine blocks
        for _ in range(5):
            await asyncio.sleep(0)
    assert judging.result().is_right, judging.result().problems


async def test_what_a_solution_prints_is_nobodys_answer() -> None:
    assert (await verdict('print("hello")\n' + RIGHT.replace("return", "print(a); return"), cases=CASES)).is_right


async def test_objects_stay_with_the_solution() -> None:
    source = "class Pair:\n    def __init__(self, a, b): self.a, self.b = a, b\ndef swap(p): return Pair(p.b, p.a)"
    judged = await verdict(
        source, tests=("p = swap(Pair(1, 2))\nassert (p.a, p.b) == (2, 1)", "assert swap(Pair(1, 2)).a == 1")
    )
    assert judged.problems == ("", "AssertionError: ")


async def test_errors_of_the_solution_reach_the_tests() -> None:
    source = "def root(n):\n    if n < 0: raise ValueError('negative')\n    return n ** 0.5"
    test = (
        "try:\n    root(-1)\nexcept ValueError as error:\n    assert 'negative' in str(error)\nelse:\n    assert False"
    )
    assert (await verdict(source, tests=(test, "assert root(4) == 2"))).is_right


async def test_a_solution_cannot_raise_a_passed_test() -> None:
    judged = await verdict("def area(a, b):\n    raise SystemExit(0)", tests=TESTS)
    assert judged.pass_count == 0


async def test_tests_that_cannot_run_are_not_the_solutions_fault() -> None:
    with pytest.raises(EnvironmentFailure, match="the tests of a task cannot run"):
        await verdict(RIGHT, tests=("assert area(1, 2) ==",))


@pytest.mark.parametrize(
    ("told", "expected", "same"),
    [
        (["int", "0x1"], True, True),
        (["float", "0x1.0p+0"], 1, True),
        (["float", "nan"], float("nan"), True),
        (["float", "inf"], float("inf"), True),
        (["list", [["int", "0x1"]]], (1,), False),
        (["set", [["int", "0x2"], ["int", "0x1"]]], {1, 2}, True),
        (["dict", [[["str", "a"], ["set", [["int", "0x1"]]]]]], {"a": {1}}, True),
        (["str", "1"], 1, False),
        (["str", "1"], b"1", False),
        (["int", "nonsense"], 1, False),
        (["int"], 1, False),
        (None, None, False),
        (["none"], None, True),
        (["complex", "0x1.0p+0", "-0x1.0p+0"], 1 - 1j, True),
        ({"value": 1}, 1, False),
        (["list", 7], [7], False),
    ],
)
def test_sameness(told: object, expected: object, same: bool) -> None:
    assert is_same(told, expected) is same


def test_what_is_shown_is_short() -> None:
    assert show(["list", [["int", "0x7"]]]) == "[7]"
    assert show(["str", "x" * 300]).endswith("…")
    assert show(["str", "x" * 9000]) == "a long value"
    assert show(["what"]) == "a value that cannot be shown"
