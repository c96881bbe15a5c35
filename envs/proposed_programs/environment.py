"""The environment: a proposed puzzle is validated by execution, and answers are judged by execution."""

from __future__ import annotations

import hashlib
import string
from collections.abc import Sequence
from random import Random
from typing import Any

from gymnasium.spaces import Text

from agentrl.env import AsyncEnv
from agentrl.errors import UsageError
from agentrl.message import Content

from ..task_ids import TRAIN
from .options import ATTEMPTS, BUFFER, INPUTS, REFERENCES, SECONDS, SEEDS, Kind, ProposedOptions, parse_options
from .puzzle import Puzzle, PuzzleError, is_copy
from .running import is_solved, validate
from .tasks import ENVIRONMENT, ProposedProgramTasks, generated
from .texts import request, statement, write_proposal, write_solution

Step = tuple[str, float, bool, bool, dict[str, Any]]
PROPOSER, SOLVER = "proposer", "solver"


class ProposedPrograms(AsyncEnv):
    """Puzzles about Python programs, which the player ``proposer`` writes and ``solver`` solves.

    A task requests a new puzzle, or poses one. A proposal is executed: if it is rejected, the episode ends; otherwise
    the players ``solver#1``, ``solver#2``, … attempt the new puzzle, and ``info["proposals"]`` holds it for later
    tasks. The reward is 1 for solving a posed puzzle. It is 0 for proposals and for attempts at them: the agent loop
    (``propose_solve``) rewards these by ``success`` and ``valid``.

    Args:
        kinds: Kinds of puzzles: ``deduction`` (find the output), ``abduction`` (find an input), ``induction`` (find
            the program).
        size: Size of the generated programs (the first puzzles, and the splits valid and test): ``small``, or ``tiny``
            for one line.
        attempts: Number of attempts at each new puzzle.
        references: Number of earlier puzzles that a proposer reads; for induction, it always reads one program.
        inputs: Number of inputs of an induction; the solver sees half of them.
        buffer: Maximum number of proposed puzzles of each kind that are kept for later tasks; the oldest are dropped.
        seeds: Number of generated puzzles of each kind, which are used while the buffer has too few.
        seconds: Time limit of a program in each of its processes.
        sandbox: Sandbox back end: its name, or its settings.
    """

    action_hint = ""

    def __init__(
        self,
        *,
        kinds: Sequence[str] = tuple(Kind),
        size: str = "small",
        attempts: int = ATTEMPTS,
        references: int = REFERENCES,
        inputs: int = INPUTS,
        buffer: int = BUFFER,
        seeds: int = SEEDS,
        seconds: float = SECONDS,
        sandbox: Any = "local",
    ) -> None:
        self.options: ProposedOptions = parse_options(
            kinds=kinds,
            size=size,
            attempts=attempts,
            references=references,
            inputs=inputs,
            buffer=buffer,
            seeds=seeds,
            seconds=seconds,
            sandbox=sandbox,
        )
        self.action_space = Text(256, charset=string.printable)
        self._asked: Kind | None = None
        self._references: list[Puzzle] = []
        self._puzzle: Puzzle | None = None
        self._answers: list[str] = []
        self._seed = 0
        self._over = True

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Content, dict[str, Any]]:
        """Request a puzzle or pose one, according to the options; without options, the seed selects a training task.

        Raises:
            UsageError: the options are not those of a task.
        """
        if not options:
            tasks = ProposedProgramTasks(self.options)
            options = dict(tasks[(seed or 0) % len(tasks)].options)
        self._asked, self._references, self._puzzle, self._answers = None, [], None, []
        self._seed, self._over = seed or 0, False
        try:
            if "puzzle" in options:
                self._puzzle = Puzzle.from_record(options["puzzle"])
            else:
                self._asked = Kind(options["propose"])
                self._references = [Puzzle.from_record(record) for record in options["references"]]
        except (KeyError, ValueError, TypeError) as error:
            raise UsageError(
                f"{ENVIRONMENT} cannot reset with these options",
                got=", ".join(options),
                expected="puzzle, or propose and references, as in a task of this environment",
            ) from error
        if self._asked is Kind.INDUCTION and not self._references:
            raise UsageError("an induction needs a program", got="no references", expected="one puzzle in references")
        return self._observation(), self._info()

    async def step(self, action: str) -> Step:
        """Validate a proposal, or judge an attempt.

        Raises:
            UsageError: the episode is over.
            SandboxError: a sandbox failed.
        """
        if self._over:
            raise UsageError(f"the {ENVIRONMENT} episode is over", expected="reset before the next step")
        return await (self._propose(action) if self._puzzle is None else self._attempt(self._puzzle, action))

    async def _propose(self, action: str) -> Step:
        assert self._asked is not None
        given, known = self._references[0].program if self._references else "", self._generated()
        try:
            if known.kind is self._asked and action == write_proposal(
                known
            ):  # by the expert, whose puzzles need no sandbox
                self._puzzle = known
            else:
                proposed = await validate(self._asked, action, self.options, given)
                if any(is_copy(proposed, shown) for shown in self._references):
                    raise PuzzleError("a copy of an earlier puzzle")
                self._puzzle = proposed
        except PuzzleError as why:
            self._over = True
            parts = {"reward_components": {"proposal_valid": 0.0}, "success": False, "valid": False}
            return f"Your puzzle was rejected: {why}.", 0.0, True, False, {**self._info(), **parts}
        parts = {"reward_components": {"proposal_valid": 1.0}, "proposals": [self._puzzle.to_record()], "valid": True}
        return self._observation(), 0.0, False, False, {**self._info(), **parts}

    async def _attempt(self, puzzle: Puzzle, action: str) -> Step:
        valid, solved = True, False
        try:
            solved = await is_solved(puzzle, action, self.options)
        except PuzzleError:
            valid = False
        self._answers.append(action)
        self._over = self._asked is None or len(self._answers) >= self.options.attempts
        reward = float(solved and self._asked is None)
        share = 1.0 if self._asked is None else 1.0 / self.options.attempts
        parts = {"success": solved, "valid": valid, "reward_components": {"solved": share * solved}}
        text = self._observation() if not self._over else "That is right." if solved else "That is not right."
        return text, reward, self._over, False, {**self._info(), **parts}

    def expert(self) -> ProposedProgramsExpert:
        """Return a policy that proposes generated puzzles and knows all solutions."""
        return ProposedProgramsExpert(self)

    def expert_action(self) -> str:
        """Return the solution of the puzzle, or a generated puzzle.

        The expert cannot run the program of an induction: it proposes the inputs that its puzzle already has. They are
        refused if there are too few, as in a puzzle of another kind.
        """
        return write_proposal(self._generated()) if self._puzzle is None else write_solution(self._puzzle)

    def _generated(self) -> Puzzle:
        assert self._asked is not None
        if self._asked is Kind.INDUCTION:
            return self._references[0]
        number = Random(f"proposal {self._seed}").randrange(self.options.seeds)
        return generated(TRAIN, number, self._asked, self.options)

    def state_key(self) -> str:
        """Return a key of the task and of what was answered."""
        state = [self._asked, self._references, self._puzzle, self._answers]
        return hashlib.blake2b(repr(state).encode(), digest_size=16).hexdigest()

    def _observation(self) -> str:
        if self._puzzle is not None:
            return statement(self._puzzle)
        assert self._asked is not None
        return request(self._asked, self._references, self.options)

    def _info(self) -> dict[str, Any]:
        players = [SOLVER]
        player = SOLVER
        if self._asked is not None:
            players = [PROPOSER, *(f"{SOLVER}#{number + 1}" for number in range(self.options.attempts))]
            player = players[0 if self._puzzle is None else min(len(self._answers) + 1, self.options.attempts)]
        kind = self._asked or (self._puzzle.kind if self._puzzle else None)
        return {"task_type": None if kind is None else kind.value, "players": players, "player": player}


class ProposedProgramsExpert:
    """Expert that proposes generated puzzles and solves all puzzles.

    Args:
        environment: The environment that it plays.
    """

    def __init__(self, environment: ProposedPrograms) -> None:
        self._environment = environment

    def act(self, observation: Content) -> str:
        """Return a proposal or a solution."""
        return self._environment.expert_action()
