"""Tasks: requests for new puzzles and puzzles to solve, in turn, from a buffer of the puzzles that episodes proposed.

Puzzles that are generated fill the place of the buffer while it is empty, and are the tasks of other splits than train.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from random import Random
from typing import Any

from agentrl.task import ProposedTasks, Task, TaskBuffer

from ..code.options import Size
from ..code.options import parse_options as code_options
from ..code.tasks import CodeTasks, problem_of
from ..code.tiny import HIGHEST, LOWEST, PARAMETERS
from ..task_ids import FIRST_SEED, TRAIN
from .options import Kind, ProposedOptions
from .puzzle import FUNCTION, Puzzle

ENVIRONMENT = "proposed_programs"
HELD_OUT = 240
"""Number of tasks of the other splits."""
_MESSAGES = {
    Size.TINY: "One or two operations.",
    Size.SMALL: "One to three changes of the list, and what remains.",
}


class ProposedProgramTasks(ProposedTasks):
    """The training tasks: requests for new puzzles and puzzles to solve, in turn."""

    def __init__(self, options: ProposedOptions) -> None:
        super().__init__(capacity=options.buffer, kinds=options.kinds)
        self._options = options

    def request(self, kind: str, rng: Random, buffer: TaskBuffer) -> Task:
        """Ask for a puzzle, with references from the buffer."""
        records = [puzzle.to_record() for puzzle in self._references(Kind(kind), rng, buffer)]
        return make_task(TRAIN, "propose", Kind(kind), {"propose": kind, "references": records}, rng.randrange(2**20))

    def pose(self, proposal: Mapping[str, Any], rng: Random) -> Task:
        """Pose a puzzle."""
        return pose(TRAIN, Puzzle.from_record(proposal), rng.randrange(2**20))

    def stand_in(self, kind: str, rng: Random) -> Mapping[str, Any]:
        """Return a generated puzzle."""
        return self._generate(Kind(kind), rng).to_record()

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


class HeldOutTasks:
    """The tasks of the splits valid and test: generated puzzles."""

    def __init__(self, split: str, options: ProposedOptions) -> None:
        self.split = split
        self._options = options

    def __len__(self) -> int:
        return HELD_OUT

    def __getitem__(self, index: int) -> Task:
        if not 0 <= index < len(self):
            raise IndexError(index)
        kinds = self._options.kinds
        puzzle = generated(self.split, index // len(kinds), kinds[index % len(kinds)], self._options)
        return pose(self.split, puzzle, index)


def pose(split: str, puzzle: Puzzle, seed: int) -> Task:
    """Return the task to solve a puzzle."""
    return make_task(split, "solve", puzzle.kind, {"puzzle": puzzle.to_record()}, seed)


def make_task(split: str, what: str, kind: Kind, options: dict[str, Any], seed: int) -> Task:
    """Return a task whose id depends on all that it contains."""
    digest = hashlib.blake2b(json.dumps([options, seed]).encode(), digest_size=6).hexdigest()
    return Task(
        id=f"{what}-{kind}-{digest}",
        environment=ENVIRONMENT,
        seed=FIRST_SEED[split] + seed,
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
