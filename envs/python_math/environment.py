"""The environment: a problem, a Python interpreter in a sandbox, and one answer that is judged outside it."""

from __future__ import annotations

import hashlib
import re
import string
from collections.abc import Mapping
from random import Random
from typing import Any

from gymnasium.spaces import Text

from agentrl.env import AsyncEnv, EnvironmentSpec, Isolation
from agentrl.errors import UsageError
from agentrl.message import Content, Message, ToolCall
from agentrl.sandbox import Limits, read_spec
from agentrl.sandbox.interpreter import Interpreter
from agentrl.task import SeedTasks, TaskSource, seed_tasks
from agentrl.tool import Tool

from ..math_problems.answers import NoAnswer
from ..math_problems.dataset import FileTasks, Problem
from ..math_problems.judges import Judge, judge_named
from ..programs.acting import ActingSandbox, cut
from .kinds import CODED, TOLD, draw

NAME = "python_math"
MAX_STEPS = 8
MAX_CODE = 32 * 1024
MAX_ANSWER_CHARS = 2000
MAX_SHOWN_CHARS = 4000
"""Maximum characters of shown output."""
CELL_GRACE_S = 2.0
"""Seconds that interrupted code has to end."""
LIMITS = Limits(memory_bytes=512 * 2**20)
"""Resource limits of the interpreter."""
_BLOCK = re.compile(r"```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_TENTHS = (range(8), range(8, 9), range(9, 10))
"""Range of the last digit of questions' checksums, by split."""
RULE = (
    "Call the tool python, or write code in a block that begins with ```python, or give one answer in a box, for"
    " example: \\boxed{7/5}"
)
Step = tuple[str, float, bool, bool, dict[str, Any]]


class PythonMath(AsyncEnv):
    """Environment in which the policy solves a math problem with a Python interpreter that keeps its state.

    Code is in the action's text, or in a call of the tool ``python``. One answer, judged outside the sandbox, ends the
    episode. `reset` takes a seed for a generated problem, or the options ``question``, ``answer`` and ``kind``, which
    the tasks of a file set.

    Args:
        kinds: ``coded`` for problems that need a program, ``told`` for those of math_problems; all if left out.
        files: Split to JSONL file in the format of GSM8K or MATH, for the task source.
        judge: Method of comparing answers: exact, or math_verify.
        max_steps: Number of steps, with code or an answer, after which an episode is truncated.
        seconds: Time limit of the code of one step.
        sandbox: Sandbox back end: its name, or its settings.
    """

    action_hint = ""

    def __init__(
        self,
        *,
        kinds: str | None = None,
        files: Mapping[str, str] | None = None,
        judge: str = Judge.EXACT,
        max_steps: int = MAX_STEPS,
        seconds: float = 6.0,
        sandbox: Any = "local",
    ) -> None:
        if kinds not in (None, CODED, TOLD):
            raise UsageError("unknown kinds of python_math", got=repr(kinds), expected=f"{CODED} or {TOLD}")
        if max_steps < 1:
            raise UsageError("the option max_steps of python_math is too small", got=max_steps, expected="at least 1")
        if not 0 < seconds <= 20:
            raise UsageError(
                "the option seconds of python_math is out of range", got=seconds, expected="more than 0, up to 20"
            )
        self.kinds = kinds
        self.max_steps = max_steps
        self.action_space = Text(256, charset=string.printable)
        self.tools = (Tool(self.python, name="python"),)
        self._judge = judge_named(judge)
        self.seconds = seconds
        self._acting = ActingSandbox(read_spec(sandbox))
        self._interpreter: Interpreter | None = None
        self._problem: Problem | None = None
        self._program = ""
        self._done: list[str] = []
        self._over = False

    @property
    def problem(self) -> Problem:
        """The current problem.

        Raises:
            UsageError: `reset` was not called yet.
        """
        if self._problem is None:
            raise UsageError("the python_math environment has no episode yet", expected="reset before anything else")
        return self._problem

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Content, dict[str, Any]]:
        """Pose a problem.

        Raises:
            UsageError: the options are not those of a problem.
        """
        await self.close()
        if options and set(options) != set(Problem._fields):
            expected = ", ".join(Problem._fields)
            raise UsageError("python_math cannot reset with these options", got=", ".join(options), expected=expected)
        if options:
            self._problem, self._program = Problem(**options), ""
        else:
            self._problem, self._program = _generate(seed or 0, self.kinds)
        self._done, self._over = [], False
        return f"Problem: {self._problem.question}", self._info()

    async def step(self, action: str) -> Step:
        """Run code, or compare the answer.

        Raises:
            UsageError: the episode is over.
            SandboxError: the sandbox failed.
        """
        if self._over or self._problem is None:
            raise UsageError("the python_math episode is over", expected="reset before the next step")
        self._done.append(action)
        block, is_last = _BLOCK.search(action), len(self._done) >= self.max_steps
        observation = ""
        if block is None:
            try:
                return await self._answer(self._judge(action[-MAX_ANSWER_CHARS:], self.problem.answer))
            except NoAnswer as problem:
                observation = f"{problem} {RULE}"
        else:
            observation = await self._run(block[1])
        if is_last:
            await self._end()
        return observation, 0.0, False, is_last, {**self._info(), "valid": block is not None}

    async def _run(self, code: str) -> str:
        """Run code; return its output for the policy."""
        if len(code) > MAX_CODE:
            return f"Your code is longer than {MAX_CODE} characters."
        if self._interpreter is None:
            sandbox = await self._acting.get()
            self._interpreter = Interpreter(sandbox, seconds=self.seconds, grace_s=CELL_GRACE_S, limits=LIMITS)
        ran = await self._interpreter.run(code)
        if ran.lost:
            return f"{ran.lost} The interpreter starts again without your variables."
        return cut(ran.output.rstrip(), MAX_SHOWN_CHARS) or "[no output]"

    async def _answer(self, won: bool) -> Step:
        await self._end()
        info = {**self._info(), "success": won, "valid": True}
        return "Right." if won else "That is wrong.", float(won), True, False, info

    async def _end(self) -> None:
        await self.close()
        self._over = True

    async def python(self, code: str) -> str:
        """Runs Python code and returns what it prints. Variables and functions stay defined for the next call.

        Args:
            code: The code; the value of a last line that is an expression is printed.
        """
        return await self._run(code)

    def tool_message(self, action: str) -> Message:
        """Return the assistant message of a text action: code is a call of python, an answer is the content."""
        block = _BLOCK.search(action)
        if block is None:
            return Message(role="assistant", content=action)
        return Message(role="assistant", tool_calls=(ToolCall(name="python", arguments={"code": block[1]}),))

    def expert(self) -> MathCoder:
        """Return a policy that knows a program for every generated problem."""
        return MathCoder(self._program, self.problem.answer)

    def state_key(self) -> str:
        """Return a key of the problem and of the actions so far."""
        return hashlib.blake2b(repr([self.problem, self._done]).encode(), digest_size=16).hexdigest()

    async def close(self) -> None:
        """Close the sandbox."""
        self._interpreter = None
        await self._acting.close()

    def _info(self) -> dict[str, Any]:
        return {"success": False, "task_type": self.problem.kind}


class MathCoder:
    """Expert that runs a program and answers with its output; without a program, with the known answer.

    Args:
        program: Code that prints the answer.
        answer: The answer of a problem without a program.
    """

    def __init__(self, program: str, answer: str) -> None:
        self._program, self._answer = program, answer

    def act(self, observation: Content) -> str:
        """Return the program, then the answer."""
        if self._program:
            program, self._program, self._answer = self._program, "", ""
            return f"```python\n{program}\n```"
        return f"\\boxed{{{self._answer or str(observation).strip()}}}"


def _generate(seed: int, kinds: str | None) -> tuple[Problem, str]:
    """Draw a problem and its program; the problem belongs to the seed's split."""
    split = min(seed // SeedTasks.SPLIT_SIZE, len(_TENTHS) - 1)
    random = Random(f"python_math {seed} {kinds}")
    while True:
        drawn = draw(random, kinds)
        if hashlib.blake2b(drawn.question.encode(), digest_size=8).digest()[0] % 10 in _TENTHS[split]:
            return Problem(question=drawn.question, answer=drawn.answer, kind=drawn.kind), drawn.program


def tasks(split: str, *, files: Mapping[str, str] | None = None, **options: Any) -> TaskSource:
    """Return the task source of a split: generated problems, or the split's file.

    Raises:
        UsageError: the split has no file.
    """
    if not files:
        return seed_tasks(NAME, split, **options)
    if split not in files:
        raise UsageError(f"python_math has no file for split {split}", got=", ".join(files), expected=split)
    return FileTasks(NAME, split, files[split])


SPEC = EnvironmentSpec(
    name=NAME,
    make=PythonMath,
    tasks=tasks,
    description=(
        "Math problems with a Python interpreter in a sandbox that keeps its variables: generated problems of seventeen"
        " kinds, or problems of JSONL files in the format of GSM8K or MATH."
    ),
    instructions=(
        "You solve a math problem with Python. Each turn, either write code in a block, and you then read what it"
        " prints:\n\n```python\nprint(2 ** 10)\n```\n\nor write your answer in a box:\n\n\\boxed{1024}\n\nYou have only"
        " one answer, and it ends the episode. Variables and functions of earlier code stay defined. Write fractions as"
        " 7/5."
    ),
    answer_format="free",
    tool_instructions=(
        "You solve a math problem with the tool python, which runs code and returns what it prints. Variables and"
        " functions of earlier code stay defined. Once you know the answer, do not call a tool: write the answer in a"
        " box, for example: \\boxed{1024}. You have only one answer. Write fractions as 7/5."
    ),
    max_turns=MAX_STEPS,
    reward_range=(0.0, 1.0),
    isolation=Isolation.INLINE,
    scores={"random": 0.0, "expert": 1.0},
)
