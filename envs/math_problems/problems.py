"""The environment: a problem, a calculator, and one answer."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from agentrl.env import EnvironmentSpec, Isolation
from agentrl.errors import UsageError
from agentrl.message import Content
from agentrl.task import SeedTasks, TaskSource, seed_tasks

from ..puzzles.arithmetic import NotArithmetic, compute
from ..puzzles.bounds import within
from ..puzzles.environment import PuzzleEnv
from ..puzzles.planner import read
from ..puzzles.rules import Illegal, Played, Puzzle
from ..split_files import file_of, files_by_split
from .answers import NoAnswer
from .dataset import FileTasks, Problem
from .judges import Judge, judge_named
from .kinds import KINDS

CALCULATE = "calculate "
MAX_LEVEL = 3
FORMS = "Write a calculation, for example: calculate (3 + 4) / 5, or the answer as one number, for example: answer 7/5"


class MathProblems(Puzzle):
    """A problem, any number of calculations, one answer: 1 if it is right.

    Args:
        level: Difficulty of generated problems: 1 to 3, or 0 for all.
        judge: Method of comparing answers: exact, or math_verify.
    """

    name = "math_problems"
    fields = ("question", "answer", "kind")
    action_hint = "calculate and an expression, or answer and a number, for example: calculate (3 + 4) / 5"
    max_steps = 10

    question: str
    answer: str
    kind: str

    def __init__(self, *, level: int = 0, judge: str = Judge.EXACT) -> None:
        within("level of math_problems", level, 0, MAX_LEVEL)
        self.kinds = [kind for kind in KINDS if level in (0, kind.level)]
        self.judge = judge_named(judge)

    @property
    def task_type(self) -> str:
        """The kind of problem."""
        return self.kind

    def start(self, rng: Random) -> None:
        """Generate a problem."""
        kind = rng.choice(self.kinds)
        drawn = kind.draw(rng)
        self.question, self.answer, self.kind = kind.text.format(**drawn), str(kind.answer(drawn)), kind.name

    def play(self, action: str) -> Played:
        """Calculate, or check the answer."""
        if action.startswith(CALCULATE):
            return Played(note=_calculate(action.removeprefix(CALCULATE)))
        try:
            won = self.judge(action, self.answer)
        except NoAnswer as problem:
            raise Illegal(f"{problem} {FORMS}") from problem
        note = "Right." if won else "That is wrong."
        return Played(float(won), note, over=True, won=won)

    def text(self) -> str:
        """Return the problem."""
        return f"Problem: {self.question}"

    def guess(self, rng: Random) -> str:
        """Return a random answer."""
        return f"answer {rng.randint(0, 100)}"

    def expert(self) -> MathExpert:
        """Return a policy that solves generated problems."""
        return MathExpert()


def _calculate(expression: str) -> str:
    try:
        return f"{expression.strip()} = {compute(expression).value}"
    except NotArithmetic as error:
        raise Illegal(str(error)) from error


class MathEnv(PuzzleEnv):
    """Math problems with an exact calculator. An action is a calculation or the answer.

    `reset` takes a seed for a generated problem, or the options ``question``, ``answer`` and ``kind``, which the tasks
    of a file set.

    Args:
        files: JSONL files, by split or as one name with ``{split}`` in it, for the task source; problems are generated
            if left out.
        options: Options of `MathProblems` and `PuzzleEnv`.
    """

    game: MathProblems

    def __init__(self, *, files: str | Mapping[str, str] | None = None, **options: Any) -> None:
        super().__init__(MathProblems, **options)
        self._is_from_file = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Content, dict[str, Any]]:
        """Pose a problem.

        Raises:
            UsageError: the options are not those of a problem.
        """
        begun = super().reset(seed=seed)
        self._is_from_file = bool(options)
        if not options:
            return begun
        if set(options) != set(Problem._fields):
            raise UsageError(
                "math_problems cannot reset with these options",
                got=", ".join(options),
                expected=", ".join(Problem._fields),
            )
        self.game.load(options)
        return self.game.introduction(), self._opening_info()

    def expert(self) -> MathExpert:
        """Return a policy that solves generated problems, and knows the answers of those of files."""
        return MathExpert(self.game.answer if self._is_from_file else None)


class MathExpert:
    """Expert for generated problems: it calculates the expression of the kind and answers with the result.

    Args:
        answer: Answer to give at once, for problems of files.
    """

    def __init__(self, answer: str | None = None) -> None:
        self._answer = answer

    def act(self, observation: Content) -> str:
        """Return a calculation, or the answer.

        Raises:
            UsageError: the kind of the problem is unknown.
        """
        if self._answer is not None:
            return f"answer {self._answer}"
        before, _, question = read(observation).rpartition("Problem: ")
        if " = " in before:
            return f"answer {before.rpartition(' = ')[2].strip()}"
        for kind in KINDS:
            drawn = kind.read(question)
            if drawn is not None:
                return f"calculate {kind.working.format(**drawn)}"
        raise UsageError("the expert knows generated problems only", got=repr(question))


def tasks(split: str, *, files: str | Mapping[str, str] | None = None, **options: Any) -> TaskSource:
    """Return the task source of a split: generated problems, or the split's file.

    Raises:
        UsageError: the split has no file, or two splits share one.
    """
    if not files:
        return seed_tasks(MathProblems.name, split, **options)
    what = "problems of math_problems"
    chosen = files_by_split(files, SeedTasks.SPLITS, what)
    return FileTasks(MathProblems.name, split, file_of(chosen, split, what))


def isolation_of(*, judge: str = Judge.EXACT, **_options: Any) -> Isolation:
    """Return where the environment runs: math_verify waits for another process, up to seconds."""
    return Isolation.INLINE if judge == Judge.EXACT else Isolation.PROCESS


SPEC = EnvironmentSpec(
    name=MathProblems.name,
    make=MathEnv,
    tasks=tasks,
    description=(
        "Math problems with an exact calculator: generated problems of eleven kinds, or problems of JSONL files in the"
        " format of GSM8K or MATH. Options: level (1 to 3, 0 for all), files (split to path), judge (exact or"
        " math_verify)."
    ),
    instructions=(
        "You solve a math problem. Each turn, write one action. There are two kinds of actions.\n"
        "To calculate, write the word calculate and an expression, for example: calculate (3 + 4) / 5\n"
        "To give your answer, write the word answer and a number, for example: answer 7/5\n"
        "A calculation is exact, and you read its result. You have only one answer, and it ends the episode: give"
        " it once you know the number. Write numbers with digits, as 7, 7/5 or 1.4."
    ),
    max_turns=MathProblems.max_steps,
    reward_range=(0.0, 1.0),
    isolation=Isolation.INLINE,
    isolation_of=isolation_of,
    scores={"random": 0.01, "expert": 1.0},
)
