"""Grading of solutions: the sandbox in which a solution runs never contains the expected values.

A solution's code is data until a fresh sandbox runs it. Its functions are called there with arguments from this
process, and their values come back as data and are compared here. Tests that are code run in a separate sandbox and
call the solution from there, through this process. A solution may end its process, replace ``assert``, print anything,
inspect all frames and leave daemons behind: it finds no right values, and cannot change its verdict.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from agentrl.errors import EnvironmentFailure
from agentrl.sandbox import Limits, Sandbox, SandboxSpec, open_sandbox
from agentrl.sandbox.spec import ANY_NETWORK, NO_NETWORK

from .acting import PROGRAM_CLOSE_S
from .inside.values import encode
from .pipes import Deadline, DeadlineExceeded, Pipe, ProgramFailure, begin, send_programs
from .sameness import is_same, show

MAX_SOURCE = 64 * 1024
"""Maximum characters of a solution."""
SECONDS = 6.0
"""Time limit of all tests of a solution together."""
MEMORY = 512 * 2**20

Fill: TypeAlias = Callable[[Sandbox], Any]
"""Coroutine function that copies further files of the solution into a fresh sandbox."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A call and its right value."""

    call: str
    arguments: tuple[Any, ...]
    value: Any
    module: str | None = None
    """Module of the function; ``None`` for the solution's own code."""

    def __str__(self) -> str:
        name = self.call if self.module is None else f"{self.module}.{self.call}"
        return f"{name}({', '.join(map(repr, self.arguments))})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Solution to judge."""

    source: str = ""
    """Python code that is executed first."""
    path: tuple[str, ...] = ()
    """Folders to import from, below the sandbox's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Results of the tests."""

    problems: tuple[str, ...]
    """Problem of each test; empty for a test that passed."""
    given: Mapping[str, float] | None = None
    """Rewards from a checking script, of which ``reward`` counts; ``None`` if the tests decide."""

    @property
    def reward(self) -> float:
        """The script's reward, or 1 if all tests passed, else 0."""
        return float(self.is_right) if self.given is None else self.given["reward"]

    @property
    def components(self) -> dict[str, float]:
        """Parts of the reward, by name."""
        given = {} if self.given is None else {name: one for name, one in self.given.items() if name != "reward"}
        return {**given, "checks": self.share if self.given is None else self.reward}

    @property
    def pass_count(self) -> int:
        """Number of tests that passed."""
        return sum(not problem for problem in self.problems)

    @property
    def is_right(self) -> bool:
        """True if there were tests and all of them passed."""
        return bool(self.problems) and not any(self.problems)

    @property
    def share(self) -> float:
        """Share of the tests that passed, 0 to 1."""
        return self.pass_count / len(self.problems) if self.problems else 0.0


@asynccontextmanager
async def fresh_sandbox(spec: SandboxSpec, *, keeps_network: bool = False) -> AsyncIterator[Sandbox]:
    """Open a new sandbox with the judging programs; close it at the end.

    Args:
        spec: Specification of the sandbox.
        keeps_network: Keep the spec's network; otherwise an isolated sandbox has no network.

    Raises:
        SandboxError: the sandbox does not start, or is lost.
    """
    if not keeps_network:
        spec = dataclasses.replace(spec, network=ANY_NETWORK if spec.options.get("unconfined") else NO_NETWORK)
    sandbox = open_sandbox(spec)
    try:
        await begin(sandbox, send_programs)
        yield sandbox
    finally:
        await asyncio.shield(asyncio.wait_for(sandbox.close(), PROGRAM_CLOSE_S))


async def judge(
    spec: SandboxSpec,
    solution: Solution,
    *,
    cases: Sequence[Case] = (),
    tests: Sequence[str] = (),
    setup: str = "",
    fill: Fill | None = None,
    seconds: float = SECONDS,
) -> Verdict:
    """Judge a solution in a fresh sandbox; tests that are code run in another one.

    Args:
        spec: Specification of the sandboxes.
        solution: The solution.
        cases: Calls whose values are compared here.
        tests: Python code that raises if the solution is wrong.
        setup: Code that runs before the tests.
        fill: Function that copies further files of the solution into its sandbox.
        seconds: Time limit of all calls together, and of all tests together.

    Raises:
        SandboxError: a sandbox does not start, or is lost; the solution is then not judged.
    """
    async with fresh_sandbox(spec) as sandbox:
        if fill is not None:
            await fill(sandbox)
        problems: tuple[str, ...] = ()
        if cases:
            problems += (await run_cases(sandbox, solution, cases, seconds=seconds)).problems
        if tests:
            async with fresh_sandbox(spec) as aside:
                tested = await run_tests(sandbox, aside, solution, tests, setup=setup, seconds=seconds)
            problems += tested.problems
    return Verdict(problems=problems)


async def run_cases(
    sandbox: Sandbox, solution: Solution, cases: Sequence[Case], *, seconds: float = SECONDS
) -> Verdict:
    """Call a solution in a sandbox and compare its values here."""
    answers: list[Mapping[str, Any]] = []
    problem = ""
    try:
        await _make_calls(sandbox, solution, cases, seconds, answers)
    except (ProgramFailure, DeadlineExceeded) as error:
        problem = str(error)
    problems = [_problem(answer, case) for answer, case in zip(answers, cases, strict=False)]
    return Verdict(problems=(*problems, *[problem] * (len(cases) - len(problems))))


async def call_solution(
    sandbox: Sandbox, solution: Solution, calls: Sequence[Case], *, seconds: float = SECONDS
) -> list[Mapping[str, Any]]:
    """Make calls in a new process, without comparing values; return the encoded value or error of each.

    Raises:
        ProgramFailure: the code does not load, or ended its process.
        DeadlineExceeded: the calls did not end within `seconds`.
    """
    answers: list[Mapping[str, Any]] = []
    await _make_calls(sandbox, solution, calls, seconds, answers)
    return answers


async def _make_calls(
    sandbox: Sandbox, solution: Solution, calls: Sequence[Case], seconds: float, answers: list[Mapping[str, Any]]
) -> None:
    """Make calls in a new process; append each answer, so that answers before a failure are kept."""
    async with _process(sandbox, "solution", seconds) as pipe, Deadline(sandbox, seconds):
        await _load(pipe, solution)
        for number, call in enumerate(calls):
            answers.append(await _call(pipe, number, call))


async def run_tests(
    sandbox: Sandbox, aside: Sandbox, solution: Solution, tests: Sequence[str], *, setup: str, seconds: float = SECONDS
) -> Verdict:
    """Run tests that are code in the sandbox `aside`; the solution runs in the other sandbox."""
    try:
        async with _process(sandbox, "solution", seconds) as pipe, Deadline(sandbox, seconds):
            await _load(pipe, solution)
            async with _process(aside, "checks", seconds) as checks:
                return await _relay(checks, pipe, setup, tests)
    except (ProgramFailure, DeadlineExceeded) as error:
        return Verdict(problems=(str(error),) * len(tests))


def _process(sandbox: Sandbox, program: str, seconds: float) -> Pipe:
    return Pipe(sandbox, program, Limits(cpu_seconds=max(seconds, 1.0), memory_bytes=MEMORY))


async def _load(pipe: Pipe, solution: Solution) -> None:
    request = {"source": solution.source, "folder": "..", "path": [*solution.path], "id": "load"}
    answer = await _ask(pipe, request)
    if "value" not in answer:
        raise ProgramFailure(f"the code does not load: {describe_error(answer)}")


async def _call(pipe: Pipe, number: int, case: Case) -> Mapping[str, Any]:
    request = {"id": number, "call": case.call, "module": case.module, "arguments": encode(case.arguments)}
    return await _ask(pipe, request)


async def _ask(pipe: Pipe, request: dict[str, Any]) -> Mapping[str, Any]:
    await pipe.tell(request)
    answer = await pipe.hear()
    if answer.get("id") != request["id"]:
        raise ProgramFailure("the program's answer belongs to another request")
    return answer


def _problem(answer: Mapping[str, Any], case: Case) -> str:
    if "value" not in answer:
        return f"{case} raised {describe_error(answer)}"
    if is_same(answer["value"], case.value):
        return ""
    return f"{case} returned {show(answer['value'])}, expected {case.value!r}"


def describe_error(answer: Mapping[str, Any]) -> str:
    """Return the type and the text of the exception in an answer."""
    return f"{str(answer.get('raised'))[:80]}: {str(answer.get('said'))[:400]}"


async def _relay(checks: Pipe, pipe: Pipe, setup: str, tests: Sequence[str]) -> Verdict:
    """Pass the tests' requests to the solution and its answers back, until the tests end."""
    await checks.tell({"setup": setup, "tests": list(tests)})
    number = 0
    while True:
        message = await checks.hear()
        if "broken" in message:
            raise EnvironmentFailure("the tests of a task cannot run", got=message["broken"])
        if "problems" in message:
            problems = [str(problem) for problem in message["problems"]]
            return Verdict(problems=tuple(problems))
        number += 1
        answer = await _ask(pipe, {"id": number, **message["ask"]})
        await checks.tell({key: answer[key] for key in ("value", "raised", "said") if key in answer})
