"""The environment: code is tried on the examples, then graded in a fresh sandbox."""

from __future__ import annotations

import hashlib
import string
from collections.abc import Mapping
from typing import Any

from gymnasium.spaces import Text

from agentrl.env import AsyncEnv
from agentrl.errors import UsageError
from agentrl.message import Content, Message
from agentrl.tool import Tool

from ..programs.acting import ActingSandbox, cut, run_command, show_result, visible
from ..programs.judging import MAX_SOURCE, Solution, Verdict, judge, run_cases, run_tests
from ..programs.pipes import JUDGE, send_programs
from ..task_ids import TRAIN, asked_task
from .options import RewardKind, parse_options
from .problem import Problem, read_code, write_code
from .tasks import ENVIRONMENT, CodeTasks, problem_of

Step = tuple[str, float, bool, bool, dict[str, Any]]
MAX_SHOWN_CHARS = 1500
"""Maximum characters of a description of wrong results."""
PROBLEMS_SHOWN = 3
NO_CODE = (
    "Your answer has no code block, so nothing was run. Answer again with the whole function in one code block, like"
    " this:\n\n```python\ndef add(a, b):\n    return a + b\n```"
)


class CodeEnv(AsyncEnv):
    """Environment in which the policy writes a function.

    An action's code is tried on the examples. Once all pass, or at the last attempt, it is graded by hidden tests in a
    fresh sandbox. `reset` takes the option ``task_id``; without it the seed draws a training task.

    Args:
        size: Size of generated functions: ``small``, or ``tiny`` for one line.
        level: Number of steps of generated functions: 1 to 3, or 0 for all.
        files: Split to JSONL file, in the format of MBPP or HumanEval; problems are generated if left out.
        shown: Number of a file's tests that the policy sees, if the file lists tests.
        max_steps: Maximum number of attempts; the last one is always graded. 4, or 1 for tiny functions.
        reward: ``all``, or ``share`` for the share of hidden tests that pass.
        seconds: Time limit of all tests of an attempt.
        sandbox: Sandbox back end: its name, or its settings.
    """

    action_hint = ""

    def __init__(
        self,
        *,
        size: str = "small",
        level: int = 0,
        files: Mapping[str, str] | None = None,
        shown: int = 1,
        max_steps: int | None = None,
        reward: str = "all",
        seconds: float = 6.0,
        sandbox: Any = "local",
    ) -> None:
        self.options = parse_options(
            size=size,
            level=level,
            files=files,
            shown=shown,
            max_steps=max_steps,
            reward=reward,
            seconds=seconds,
            sandbox=sandbox,
        )
        self.action_space = Text(256, charset=string.printable)
        self.tools = (Tool(self.run_python, name="run_python"), Tool(self.run_tests, name="run_tests"))
        self._acting = ActingSandbox(self.options.sandbox, send_programs)
        self._problem: Problem | None = None
        self._tried: list[str] = []
        self._over = False

    @property
    def problem(self) -> Problem:
        """The current problem.

        Raises:
            UsageError: `reset` was not called yet.
        """
        if self._problem is None:
            raise UsageError("the code environment has no episode yet", expected="reset before anything else")
        return self._problem

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Content, dict[str, Any]]:
        """Pose a problem.

        Raises:
            UsageError: an option is unknown, or the task does not exist.
        """
        task_id = asked_task(options, ENVIRONMENT) or CodeTasks(TRAIN, self.options).draw(seed or 0)
        await self._acting.close()
        self._problem = problem_of(task_id, self.options)
        self._tried, self._over = [], False
        return self._problem.statement, self._info()

    async def step(self, action: str) -> Step:
        """Try the code of an action on the examples, or grade it.

        Raises:
            UsageError: the episode is over.
            SandboxError: a sandbox failed.
        """
        problem = self.problem
        if self._over:
            raise UsageError("the code episode is over", expected="reset before the next step")
        code = read_code(action)
        self._tried.append(code or "")
        is_last = len(self._tried) >= self.options.max_steps
        if code is None or len(code) > MAX_SOURCE:
            self._over = is_last
            text = NO_CODE if code is None else f"Your code is longer than {MAX_SOURCE} characters."
            return text, 0.0, False, await self._close_if(is_last), {**self._info(), "valid": False}
        if problem.has_examples and not is_last:
            tried = await self._try(code)
            if not tried.is_right:
                return _feedback(tried), 0.0, False, False, {**self._info(), "valid": True}
        return await self._grade(code)

    async def _close_if(self, is_over: bool) -> bool:
        if is_over:
            await self._acting.close()
        return is_over

    async def _try(self, code: str) -> Verdict:
        """Try code on the examples in the policy's own sandbox, which contains nothing that the policy may not read."""
        problem, sandbox, seconds = self.problem, await self._acting.get(), self.options.seconds
        solution = Solution(source=problem.complete(code))
        if problem.examples:
            return await run_cases(sandbox, solution, problem.examples, seconds=seconds)
        tests, setup = problem.shown_tests, problem.setup
        return await run_tests(sandbox, sandbox, solution, tests, setup=setup, seconds=seconds)

    async def _grade(self, code: str) -> Step:
        problem = self.problem
        verdict = await judge(
            self.options.sandbox,
            Solution(source=problem.complete(code)),
            cases=problem.hidden,
            tests=problem.hidden_tests,
            setup=problem.setup,
            seconds=self.options.seconds,
        )
        self._over = await self._close_if(True)
        reward = verdict.share if self.options.reward is RewardKind.SHARE else float(verdict.is_right)
        text = "Your code is right." if verdict.is_right else "Your code is not right."
        components = {"hidden_tests": verdict.share}
        info = {**self._info(), "success": verdict.is_right, "valid": True, "reward_components": components}
        return text, reward, True, False, info

    async def run_python(self, code: str) -> str:
        """Runs a Python program and returns its output.

        Args:
            code: The program.
        """
        sandbox, seconds = await self._acting.get(), self.options.seconds
        await sandbox.write(f"{JUDGE}/program.py", code.encode(errors="replace"))
        result = await run_command(sandbox, ["python3", "-B", f"{JUDGE}/program.py"], seconds=seconds)
        return show_result(result, seconds=seconds)

    async def run_tests(self, code: str) -> str:
        """Tries a solution on the examples without submitting it.

        Args:
            code: The whole function.
        """
        if not self.problem.has_examples:
            return "There are no examples to try it on."
        verdict = await self._try(code[:MAX_SOURCE])
        return "All examples pass." if verdict.is_right else _feedback(verdict)

    def tool_message(self, action: str) -> Message:
        """Return the assistant message of a text action: code is submitted as text, not by a tool."""
        return Message(role="assistant", content=action)

    def expert(self) -> CodeExpert:
        """Return a policy that knows the solution."""
        return CodeExpert(self.problem.solution, is_bare=self.problem.function == "f" and self.options.files is None)

    def state_key(self) -> str:
        """Return a key of the problem and of the attempts."""
        return hashlib.blake2b(repr([self.problem.id, self._tried]).encode(), digest_size=16).hexdigest()

    async def visible(self) -> dict[str, str]:
        """Return the readable contents of the policy's own sandbox, for reports on the reward's integrity."""
        return await visible(await self._acting.get(), seconds=self.options.seconds)

    def secrets(self) -> list[str]:
        """Return texts that must not be readable there: the hidden tests and the solution."""
        problem = self.problem
        return [*map(str, problem.hidden), *problem.hidden_tests, problem.solution]

    async def close(self) -> None:
        """Close the sandbox."""
        await self._acting.close()

    def _info(self) -> dict[str, Any]:
        return {"success": False, "task_type": self.problem.type}


class CodeExpert:
    """Expert that submits the reference solution.

    Args:
        solution: The code.
        is_bare: Submit the code without a block around it.
    """

    def __init__(self, solution: str, *, is_bare: bool) -> None:
        self._answer = solution if is_bare else write_code(solution)

    def act(self, observation: Content) -> str:
        """Return the solution."""
        return self._answer


def _feedback(verdict: Verdict) -> str:
    wrong = [problem for problem in verdict.problems if problem]
    head = f"{verdict.pass_count} of {len(verdict.problems)} examples pass. These fail:"
    return cut("\n".join([head, *wrong[:PROBLEMS_SHOWN]]), MAX_SHOWN_CHARS)
