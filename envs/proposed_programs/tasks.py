"""Tasks: requests for new puzzles and puzzles to solve, in turn, from a buffer of the puzzles that episodes proposed.

Puzzles that are generated fill the place of the buffer while it is empty, and are the tasks of other splits than train.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from agentrl.task import Task, TaskBuffer

from ..code.options import Size
from ..code.options import parse_options as code_options
from ..code.tasks import CodeTasks, problem_of
from ..code.tiny import HIGHEST, LOWEST, PARAMETERS
from ..task_ids import FIRST_SEED, TRAIN, check_split
from .options import Kind, ProposedOptions
from .puzzle import FUNCTION, Puzzle

ENVIRONMENT = "proposed_programs"
PLACES = 100_000
"""Length of the order of training tasks."""
HELD_OUT = 240
"""Number of tasks of the other splits."""
_MESSAGES = {
    Size.TINY: "One or two operations.",
    Size.SMALL: "One to three changes of the list, and what remains.",
}


class ProposedProgramTasks:
    """Tasks of a split: a `agentrl.task.ProposedTaskSource`.

    In the split ``train``, every second task asks for a new puzzle, and the kinds take turns. The others are puzzles to
    solve: the newest of the buffer that was not a task yet, or else a random one. Other splits have generated puzzles.
    """

    def __init__(self, split: str, options: ProposedOptions) -> None:
        self.split = check_split(split, ENVIRONMENT)
        self._options = options
        self._buffer = TaskBuffer(options.buffer)
        self._draws = 0

    def __len__(self) -> int:
        return PLACES if self.split == TRAIN else HELD_OUT

    def __getitem__(self, index: int) -> Task:
        """Return the task that would be drawn if nothing was proposed yet."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        if self.split == TRAIN:
            return self._make(index, Random(f"task {index}"), TaskBuffer(1))
        kinds = self._options.kinds
        return self._pose(generated(self.split, index // len(kinds), kinds[index % len(kinds)], self._options), index)

    def draw(self, index: int) -> Task:
        """Draw the next task; the index only varies the random choices."""
        if self.split != TRAIN:
            return self[index]
        self._draws += 1
        return self._make(self._draws - 1, Random(f"draw {self._draws} {index}"), self._buffer)

    def propose(self, proposals: Sequence[Mapping[str, Any]]) -> int:
        """Add proposed puzzles to the buffer; return how many are new."""
        return sum([self._buffer.add(str(proposal["kind"]), proposal) for proposal in proposals])

    def state_dict(self) -> dict[str, Any]:
        """Return the buffer, and the number of draws."""
        return {"draws": self._draws, "buffer": self._buffer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self._draws = state["draws"]
        self._buffer.load_state_dict(state["buffer"])

    def _make(self, number: int, rng: Random, buffer: TaskBuffer) -> Task:
        kind = self._options.kinds[number // 2 % len(self._options.kinds)]
        if number % 2 == 0:
            return self._ask(kind, self._references(kind, rng, buffer), rng)
        found = buffer.next(kind, rng)
        return self._pose(self._generate(kind, rng) if found is None else Puzzle.from_record(found), number)

    def _generate(self, kind: Kind, rng: Random) -> Puzzle:
        return generated(TRAIN, rng.randrange(self._options.seeds), kind, self._options)

    def _references(self, kind: Kind, rng: Random, buffer: TaskBuffer) -> list[Puzzle]:
        """Return the puzzles that a proposer reads: the program of an induction, or earlier puzzles of the kind."""
        if kind is Kind.INDUCTION:
            sources = [other for other in Kind if other is not kind]
            found = [record for other in sources for record in buffer.sample(other, 1, rng)]
            return [Puzzle.from_record(rng.choice(found)) if found else self._generate(kind, rng)]
        count = self._options.references
        found = buffer.sample(kind, count, rng)
        return [
            *(Puzzle.from_record(record) for record in found),
            *(self._generate(kind, rng) for _ in range(count - len(found))),
        ]

    def _ask(self, kind: Kind, references: Sequence[Puzzle], rng: Random) -> Task:
        records = [puzzle.to_record() for puzzle in references]
        return self._task("propose", kind, {"propose": kind.value, "references": records}, rng.randrange(1_000_000))

    def _pose(self, puzzle: Puzzle, seed: int) -> Task:
        return self._task("solve", puzzle.kind, {"puzzle": puzzle.to_record()}, seed)

    def _task(self, what: str, kind: Kind, options: dict[str, Any], seed: int) -> Task:
        digest = hashlib.blake2b(json.dumps([options, seed]).encode(), digest_size=6).hexdigest()
        return Task(
            id=f"{what}-{kind}-{digest}",
            environment=ENVIRONMENT,
            seed=FIRST_SEED[self.split] + seed,
            options=options,
            type=kind.value,
        )


@functools.lru_cache(maxsize=4096)
def generated(split: str, number: int, kind: Kind, options: ProposedOptions) -> Puzzle:
    """Return a puzzle about a generated function of the environment ``code``; those of different splits differ."""
    settings = code_options(size=options.size)
    count = len(CodeTasks(split, settings))
    problem = problem_of(f"{split}-{number % count}", settings)
    program = problem.complete(problem.solution).strip().replace(f"def {problem.function}(", f"def {FUNCTION}(", 1)
    rng = Random(f"inputs {split} {number} {kind}")
    given = [case.arguments for case in (*problem.examples, *problem.hidden)]
    if options.size is Size.TINY:
        given = [tuple(rng.randint(LOWEST, HIGHEST) for _ in PARAMETERS) for _ in range(2 * options.inputs)]
    space: dict[str, Any] = {}
    exec(program, space)
    cases = {repr(arguments)[1:-1].rstrip(","): repr(space[FUNCTION](*arguments)) for arguments in given}
    inputs = rng.sample([*cases], options.inputs if kind is Kind.INDUCTION else 1)
    return Puzzle(
        kind=kind,
        program=program,
        inputs=tuple(inputs),
        outputs=tuple(cases[text] for text in inputs),
        message=_MESSAGES[options.size] if kind is Kind.INDUCTION else "",
    )
