"""Proposed programs are validated by execution, and answers are judged by it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from agentrl.envs.proposed_programs.environment import ProposedPrograms
from agentrl.envs.proposed_programs.options import Kind, ProposedOptions, parse_options
from agentrl.envs.proposed_programs.puzzle import Puzzle, PuzzleError, blocks, read_arguments
from agentrl.envs.proposed_programs.running import is_solved, validate
from agentrl.envs.proposed_programs.spec import SPEC, tasks
from agentrl.envs.proposed_programs.texts import block, statement, write_proposal, write_solution

from agentrl.errors import UsageError
from agentrl.task import ProposedTasks

DOUBLE = "def f(a):\n    return a * 2"


def options(**given: Any) -> ProposedOptions:
    return parse_options(**{"sandbox": "plain", "seconds": 0.7, "inputs": 4, **given})


def proposal(program: str, given: str = "3") -> str:
    return f"My puzzle:\n{block('python', program)}\nand\n{block('input', given)}"


async def refusal(answer: str, kind: Kind = Kind.DEDUCTION, given: str = "") -> str:
    with pytest.raises(PuzzleError) as refused:
        await validate(kind, answer, options(), given)
    return str(refused.value)


async def test_a_valid_proposal_has_the_output_of_its_program() -> None:
    program = (
        "import math\nclass P:\n    def __init__(self, x):\n        self.x = x\ndef f(a, b):\n    a.append(P(b).x)\n"
    )
    puzzle = await validate(
        Kind.ABDUCTION, proposal(f"{program}    return a, {{'n': math.pi}}", "[1], 'x'"), options(), ""
    )
    assert puzzle.inputs == ("[1], 'x'",)
    assert puzzle.outputs == ("([1, 'x'], {'n': 3.141592653589793})",)
    assert Puzzle.from_record(json.loads(json.dumps(puzzle.to_record()))) == puzzle


STATIC = {
    "no block": ("def f(a): return a", "0 python blocks"),
    "two programs": (proposal(DOUBLE) + proposal(DOUBLE), "2 python blocks"),
    "no input": (block("python", DOUBLE), "0 input blocks"),
    "no syntax": (proposal("def f(a:"), "not valid Python"),
    "deep syntax": (proposal("-" * 7000 + "1"), "not valid Python"),
    "a long program": (proposal(f"{DOUBLE}\n#{'x' * 8000}"), "more than 8000 characters"),
    "no function": (proposal("def g(a):\n    return a"), "0 functions named f"),
    "two functions": (proposal(f"{DOUBLE}\n{DOUBLE}"), "2 functions named f"),
    "no argument": (proposal("def f():\n    return 1"), "has no arguments"),
    "random": (proposal(f"import random\n{DOUBLE}"), "imports random,"),
    "a part of os": (proposal(f"from os.path import join\n{DOUBLE}"), "imports os.path,"),
    "a module in a module": (proposal("import typing\ndef f(a):\n    return typing.sys.maxsize"), "the name sys"),
    "a hidden import": (proposal("def f(a):\n    return __import__('os').getpid()"), "the name __import__"),
    "a file": (proposal("def f(a):\n    return open('/etc/passwd').read()"), "the name open"),
    "a hash": (proposal("def f(a):\n    return hash('a')"), "the name hash"),
    "code as input": (proposal(DOUBLE, "__import__('os').getpid()"), "not a Python literal"),
    "a calculation as input": (proposal(DOUBLE, "9**9**9"), "not a Python literal"),
    "nothing as input": (proposal(DOUBLE, " "), "not a Python literal"),
    "an ellipsis as input": (proposal(DOUBLE, "..."), "not a Python literal"),
    "a deep input": (proposal(DOUBLE, "[" * 70 + "]" * 70), "not a Python literal"),
    "blanks without an end": (f"```python\n{' ' * 200_000}", "0 python blocks"),
}


@pytest.mark.parametrize("name", STATIC)
async def test_a_form_that_is_not_allowed_is_rejected_without_execution(name: str) -> None:
    answer, why = STATIC[name]
    assert why in await refusal(answer)


EXECUTED = {
    "counts its calls": ("calls = []\ndef f(a):\n    calls.append(a)\n    return len(calls)", "not deterministic"),
    "shows an address": ("def f(a):\n    return str(object())", "not deterministic"),
    "orders a set": ("def f(a):\n    return list({str(n) for n in range(9)})", "not deterministic"),
    "raises": ("def f(a):\n    return a / 0", "raises ZeroDivisionError"),
    "exits": ("def f(a):\n    raise SystemExit", "raises SystemExit"),
    "does not end": ("def f(a):\n    while True:\n        pass", "did not end within 0.7 seconds"),
    "returns an object": ("class A:\n    pass\ndef f(a):\n    return A()", "not plain data"),
    "returns a NaN": ("def f(a):\n    return [float('nan')]", "not a Python literal"),
    "returns much": ("def f(a):\n    return 'x' * 3000", "more than 2000 characters"),
    "returns a number of 5000 digits": ("def f(a):\n    return 10**5000", "cannot be written"),
    "takes other arguments": ("def f(a, b):\n    return a", "raises TypeError"),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in ("counts its calls", "does not end") else pytest.mark.slow) for n in EXECUTED],
)
async def test_a_program_that_fails_or_varies_is_rejected(name: str) -> None:
    program, why = EXECUTED[name]
    assert why in await refusal(proposal(program))


async def test_an_induction_needs_different_inputs_and_a_message_without_a_program() -> None:
    inputs = [block("input", str(n)) for n in range(4)]
    message = block("message", "Twice.")
    assert "3 different input blocks instead of 4" in await refusal("".join([*inputs[:3], message]), Kind.INDUCTION)
    assert "3 different" in await refusal("".join([*inputs[:3], inputs[0], message]), Kind.INDUCTION)
    assert "0 message blocks" in await refusal("".join(inputs), Kind.INDUCTION)
    shown = block("message", DOUBLE)
    assert "the message contains a program" in await refusal("".join([*inputs, shown]), Kind.INDUCTION)
    puzzle = await validate(Kind.INDUCTION, "".join([*inputs, message]), options(), DOUBLE)
    assert (puzzle.program, puzzle.outputs, puzzle.message) == (DOUBLE, ("0", "2", "4", "6"), "Twice.")
    text = statement(puzzle)
    assert "Twice." in text
    assert DOUBLE not in text
    assert blocks(text, "output") == ["0", "2"], "the others judge the solver"


FOUR = ("0", "1", "2", "3")
PUZZLES = {
    Kind.DEDUCTION: Puzzle(kind=Kind.DEDUCTION, program=DOUBLE, inputs=("'ab'",), outputs=("'abab'",)),
    Kind.ABDUCTION: Puzzle(kind=Kind.ABDUCTION, program="def f(a):\n    return a * a", inputs=("3",), outputs=("9",)),
    Kind.INDUCTION: Puzzle(kind=Kind.INDUCTION, program=DOUBLE, inputs=FOUR, outputs=("0", "2", "4", "6"), message="m"),
}
ANSWERS: list[tuple[Kind, str, bool | None]] = [
    (Kind.DEDUCTION, block("output", '"abab"'), True),
    (Kind.DEDUCTION, block("output", "'ab'") + block("output", "'abab'"), True),
    (Kind.DEDUCTION, block("output", "'ab' * 2"), None),
    (Kind.DEDUCTION, block("output", "abab"), None),
    (Kind.DEDUCTION, "'abab'", None),
    (Kind.DEDUCTION, block("output", "'ab'"), False),
    (Kind.ABDUCTION, block("input", "3"), True),
    (Kind.ABDUCTION, block("input", "-3"), True),
    (Kind.ABDUCTION, block("input", "4"), False),
    (Kind.ABDUCTION, block("input", "'x'"), False),
    (Kind.ABDUCTION, block("input", "f(3)"), None),
    (Kind.ABDUCTION, block("input", "..."), None),
    (Kind.ABDUCTION, block("input", "[" * 70 + "]" * 70), None),
    (Kind.INDUCTION, block("python", "def f(a):\n    return a + a"), True),
    (Kind.INDUCTION, block("python", "def f(a):\n    return {0: 0, 1: 2}[a]"), False),
    (Kind.INDUCTION, block("python", "import os\nos._exit(0)"), False),
    (Kind.INDUCTION, "a + a", None),
]
"""Answers, and whether they are right; ``None`` for one without the required format."""


@pytest.mark.parametrize(("kind", "answer", "expected"), ANSWERS)
async def test_answers_are_judged_by_execution(kind: Kind, answer: str, expected: bool | None) -> None:
    if expected is not None:
        assert await is_solved(PUZZLES[kind], answer, options()) is expected
        return
    with pytest.raises(PuzzleError):
        await is_solved(PUZZLES[kind], answer, options())


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("size", ["small", "tiny"])
async def test_generated_puzzles_are_right(kind: Kind, size: str) -> None:
    """Their outputs come from this process; execution in a sandbox gives the same."""
    settings = {"kinds": [kind], "size": size, "inputs": 4, "seconds": 5.0}
    puzzle = Puzzle.from_record(tasks("valid", **settings)[0].options["puzzle"])
    found = await validate(kind, write_proposal(puzzle), options(seconds=5.0), puzzle.program)
    assert [read_arguments(text) for text in found.outputs] == [read_arguments(text) for text in puzzle.outputs]
    assert await is_solved(puzzle, write_solution(puzzle), options())


async def test_an_episode_has_a_proposal_and_attempts_at_it() -> None:
    environment = ProposedPrograms(kinds=["deduction"], attempts=2, sandbox="plain")
    asked = tasks("train", kinds=["deduction"])[0]
    _, info = await environment.reset(seed=asked.seed, options=dict(asked.options))
    assert (info["player"], info["players"], info["task_type"]) == (
        "proposer",
        ["proposer", "solver#1", "solver#2"],
        "deduction",
    )
    text, reward, done, _, info = await environment.step(proposal(DOUBLE, "21"))
    assert (reward, done, info["player"], info["valid"]) == (0.0, False, "solver#1", True)
    assert info["proposals"] == [{"kind": "deduction", "program": DOUBLE, "inputs": ["21"], "outputs": ["42"]}]
    again, reward, done, _, info = await environment.step(block("output", "42"))
    assert (again, reward, done, info["success"], info["player"]) == (text, 0.0, False, True, "solver#2")
    _, _, done, _, info = await environment.step("42")
    assert (done, info["success"], info["valid"]) == (True, False, False)
    with pytest.raises(UsageError, match="episode is over"):
        await environment.step("42")
    await environment.reset(options={"puzzle": PUZZLES[Kind.DEDUCTION].to_record()})
    _, reward, done, _, info = await environment.step(block("output", "'abab'"))
    assert (reward, done, info["success"]) == (1.0, True, True)
    await environment.reset(options=dict(asked.options))
    text, _, done, _, info = await environment.step("no puzzle")
    assert (done, info["success"], info["valid"]) == (True, False, False)
    assert text == "Your puzzle was rejected: 0 python blocks instead of one."


async def test_a_copy_of_a_puzzle_that_the_proposer_reads_is_rejected() -> None:
    environment = ProposedPrograms(kinds=["deduction"], sandbox="plain")
    request = {"propose": "deduction", "references": [PUZZLES[Kind.DEDUCTION].to_record()]}
    for program, given, refused in ((f"# mine\n{DOUBLE}\n", '"ab"', True), (DOUBLE, "'abc'", False)):
        await environment.reset(seed=1, options=request)
        text, _, done, _, info = await environment.step(proposal(program, given))
        assert (done, info["valid"]) == (refused, not refused), text


def test_requests_and_puzzles_take_turns_and_the_newest_proposals_come_first() -> None:
    source = tasks("train", references=2)
    assert isinstance(source, ProposedTasks)
    drawn = [source.draw(n) for n in range(6)]
    assert [task.id.rpartition("-")[0] for task in drawn] == [
        f"{what}-{kind}" for kind in Kind for what in ("propose", "solve")
    ]
    records = [
        {**PUZZLES[Kind.DEDUCTION].to_record(), "inputs": [f"'{n}'"], "outputs": [f"'{n}{n}'"]} for n in range(3)
    ]
    assert source.propose([*records, records[0]]) == 3
    request, solve = source.draw(7), source.draw(8)
    assert solve.options["puzzle"] == records[2]
    assert [record in records for record in request.options["references"]] == [True, True]
    assert json.loads(json.dumps(request.options)) == request.options
    other = tasks("train", references=2)
    assert isinstance(other, ProposedTasks)
    other.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert [other.draw(n) for n in range(20)] == [source.draw(n) for n in range(20)]


def test_held_out_puzzles_are_never_training_puzzles() -> None:
    held_out = [tasks(split)[n] for split in ("valid", "test") for n in range(240)]
    programs = {task.options["puzzle"]["program"] for task in held_out}
    source = tasks("train", seeds=2400)
    assert programs.isdisjoint({record["program"] for n in range(200) for record in _records(source[n].options)})
    assert len({task.id for task in held_out}) == len(held_out)


def _records(given: Any) -> list[dict[str, Any]]:
    return [given["puzzle"]] if "puzzle" in given else list(given["references"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kinds": []}, "kinds of proposed_programs"),
        ({"kinds": "deduction"}, "kinds of proposed_programs"),
        ({"kinds": ["deduction", "induktion"]}, "kinds of proposed_programs"),
        ({"size": "big"}, "unknown size"),
        ({"attempts": 1}, "attempts of proposed_programs"),
        ({"buffer": 0}, "buffer of proposed_programs"),
        ({"inputs": 1}, "inputs of proposed_programs"),
        ({"inputs": 11}, "inputs of proposed_programs is too large"),
        ({"seconds": 60}, "seconds of proposed_programs"),
    ],
)
def test_options_that_are_not_valid_are_rejected(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SPEC.tasks("train", **given)


@pytest.mark.parametrize(
    "given", [{"puzzle": {}}, {"other": 1}, {"propose": "induction", "references": []}, {"propose": 1}]
)
async def test_options_of_other_tasks_are_rejected(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"cannot reset with these options|needs a program"):
        await ProposedPrograms().reset(options=given)
