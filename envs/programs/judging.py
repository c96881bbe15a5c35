"""Judging a solution: only it enters the sandbox in which it runs, and what is right never does.

A solution's code is data until a fresh sandbox runs it. Its functions are called there with arguments that come from
here, and what they return goes out as data and is compared here. Tests that are code run in a sandbox of their own and
call the solution from there, through here. So a solution may end its process, replace ``assert``, print what it likes,
look through all frames and leave daemons behind: there is nothing to find, and nothing that it could turn.
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

from .inside.values import encode
from .pipes import Deadline, Late, Pipe, ProcessResult, begin, send_programs
from .sameness import is_same, show

MOST_SOURCE = 64 * 1024
"""Characters of a solution."""
SECONDS = 6.0
"""For all tests of a solution together."""
MEMORY = 512 * 2**20
CLOSE_S = 20.0

Fill: TypeAlias = Callable[[Sandbox], Any]
"""A coroutine function that puts what is to be judged into a fresh sandbox."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A call, and what it has to return."""

    call: str
    arguments: tuple[Any, ...]
    value: Any
    module: str | None = None
    """Where the function is; in the solution's own text when left out."""

    def __str__(self) -> str:
        name = self.call if self.module is None else f"{self.module}.{self.call}"
        return f"{name}({', '.join(map(repr, self.arguments))})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """What is judged."""

    source: str = ""
    """Python code, executed first."""
    path: tuple[str, ...] = ()
    """Folders in which it may import, below the sandbox's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How each test went."""

    problems: tuple[str, ...]
    """What was wrong, by test; empty where nothing was."""
    given: Mapping[str, float] | None = None
    """Rewards that a checking script gave, of which ``reward`` counts; ``None``: all tests count."""

    @property
    def reward(self) -> float:
        """The reward: what the script gave, or 1 where all tests passed."""
        return float(self.is_right) if self.given is None else self.given["reward"]

    @property
    def components(self) -> dict[str, float]:
        """Parts of the reward, by name."""
        given = {} if self.given is None else {name: one for name, one in self.given.items() if name != "reward"}
        return {**given, "checks": self.share if self.given is None else self.reward}

    @property
    def passed(self) -> int:
        """How many tests passed."""
        return sum(not problem for problem in self.problems)

    @property
    def is_right(self) -> bool:
        """All passed, and there were some."""
        return bool(self.problems) and not any(self.problems)

    @property
    def share(self) -> float:
        """Of the tests, how many passed."""
        return self.passed / len(self.problems) if self.problems else 0.0


@asynccontextmanager
async def fresh_sandbox(spec: SandboxSpec, *, keeps_network: bool = False) -> AsyncIterator[Sandbox]:
    """Open a sandbox that nothing has run in, holding the judging programs; it is closed at the end.

    Args:
        spec: What it is like.
        keeps_network: Keep the spec's network; otherwise an isolated sandbox has no network.

    Raises:
        SandboxError: it does not start, or is lost.
    """
    if not keeps_network:
        spec = dataclasses.replace(spec, network=ANY_NETWORK if spec.options.get("unconfined") else NO_NETWORK)
    sandbox = open_sandbox(spec)
    try:
        await begin(sandbox, send_programs)
        yield sandbox
    finally:
        await asyncio.shield(asyncio.wait_for(sandbox.close(), CLOSE_S))


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
    """Judge a solution in a fresh sandbox, and tests that are code in another one.

    Args:
        spec: What the sandboxes are like.
        solution: What is judged.
        cases: Calls whose values are compared here.
        tests: Python code that raises where the solution is wrong.
        setup: Code that runs before them.
        fill: Puts further files of the solution into its sandbox.
        seconds: For all calls together, and for all tests together.

    Raises:
        SandboxError: a sandbox does not start, or is lost; nothing is said about the solution.
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
    """Call a solution in a sandbox, and compare what it returns here."""
    problems: list[str] = []
    try:
        async with _process(sandbox, "solution", seconds) as pipe, Deadline(sandbox, seconds):
            await _load(pipe, solution)
            for number, case in enumerate(cases):
                problems.append(_problem(await _call(pipe, number, case), case))
    except (ProcessResult, Late) as error:
        problems += [str(error)] * (len(cases) - len(problems))
    return Verdict(problems=tuple(problems))


async def run_tests(
    sandbox: Sandbox, aside: Sandbox, solution: Solution, tests: Sequence[str], *, setup: str, seconds: float = SECONDS
) -> Verdict:
    """Run tests that are code in the sandbox `aside`, on a solution in another sandbox."""
    try:
        async with _process(sandbox, "solution", seconds) as pipe, Deadline(sandbox, seconds):
            await _load(pipe, solution)
            async with _process(aside, "checks", seconds) as checks:
                return await _relay(checks, pipe, setup, tests)
    except (ProcessResult, Late) as error:
        return Verdict(problems=(str(error),) * len(tests))


def _process(sandbox: Sandbox, program: str, seconds: float) -> Pipe:
    return Pipe(sandbox, program, Limits(cpu_seconds=max(seconds, 1.0), memory_bytes=MEMORY))


async def _load(pipe: Pipe, solution: Solution) -> None:
    request = {"source": solution.source, "folder": "..", "path": [*solution.path], "id": "load"}
    answer = await _ask(pipe, request)
    if "value" not in answer:
        raise ProcessResult(f"the code does not load: {_raised(answer)}")


async def _call(pipe: Pipe, number: int, case: Case) -> Mapping[str, Any]:
    request = {"id": number, "call": case.call, "module": case.module, "arguments": encode(case.arguments)}
    return await _ask(pipe, request)


async def _ask(pipe: Pipe, request: dict[str, Any]) -> Mapping[str, Any]:
    await pipe.tell(request)
    answer = await pipe.hear()
    if answer.get("id") != request["id"]:
        raise ProcessResult("the program's answer is to another question")
    return answer


def _problem(answer: Mapping[str, Any], case: Case) -> str:
    if "value" not in answer:
        return f"{case} raised {_raised(answer)}"
    if is_same(answer["value"], case.value):
        return ""
    return f"{case} returned {show(answer['value'])}, expected {case.value!r}"


def _raised(answer: Mapping[str, Any]) -> str:
    return f"{str(answer.get('raised'))[:80]}: {str(answer.get('said'))[:400]}"


async def _relay(checks: Pipe, pipe: Pipe, setup: str, tests: Sequence[str]) -> Verdict:
    """Carry what the tests ask to the solution, and its answers back, until the tests are through."""
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
