"""The tower of Hanoi: move disks, one at a time and never onto a smaller one."""

from __future__ import annotations

import re
from random import Random

from agentrl.errors import UsageError

from .bounds import within
from .environment import puzzle_spec
from .planner import Planner
from .rules import Illegal, Played, Puzzle

PEGS = "abc"
_ACTION = re.compile(r"(?:move )?([abc])(?: to)? ([abc])")


class Hanoi(Puzzle):
    """The rules of the tower of Hanoi, from any start to any peg.

    Args:
        disks: Number of disks.
        min_moves: Minimum number of moves of the shortest solution.
    """

    name = "hanoi"
    fields = ("pegs", "target")
    action_hint = "the peg to move from and the peg to move to, for example: A C"
    max_steps = 100
    actions_per_turn = 5

    pegs: list[list[int]]
    """Disks of each peg, largest first."""
    target: int

    def __init__(self, *, disks: int = 5, min_moves: int = 4) -> None:
        self.disks = within("disks of hanoi", disks, 2, 6)
        self.min_moves = within("min_moves of hanoi", min_moves, 1, 2 ** (disks - 1))

    @property
    def task_type(self) -> str:
        """Number of disks, in words."""
        return f"{self.disks} disks"

    def start(self, rng: Random) -> None:
        """Put every disk on any peg."""
        while True:
            self.pegs, self.target = [[], [], []], rng.randrange(len(PEGS))
            places = [rng.randrange(len(PEGS)) for _ in range(self.disks)]
            for disk in range(self.disks, 0, -1):
                self.pegs[places[disk - 1]].append(disk)
            if len(solve(self.pegs, self.target)) >= self.min_moves:
                break

    def play(self, action: str) -> Played:
        """Move the top disk of a peg to another."""
        match = _ACTION.fullmatch(action)
        if match is None:
            raise Illegal("Answer with two pegs, for example: A C")
        source, goal = self.pegs[PEGS.index(match[1])], self.pegs[PEGS.index(match[2])]
        if not source:
            raise Illegal(f"There is no disk on peg {match[1].upper()}.")
        if goal and goal[-1] <= source[-1]:
            raise Illegal(f"Disk {source[-1]} cannot be put on disk {goal[-1]}.")
        goal.append(source.pop())
        if len(self.pegs[self.target]) == self.disks:
            return Played(1.0, "All disks are where they belong.", over=True, won=True)
        return Played()

    def text(self) -> str:
        """Return the disks of each peg, and the target peg."""
        lines = [f"{name.upper()}: {' '.join(map(str, disks))}" for name, disks in zip(PEGS, self.pegs, strict=True)]
        return "\n".join([*lines, f"All disks belong on {PEGS[self.target].upper()}."])

    def actions(self) -> list[str]:
        """Return the legal moves."""
        tops = [disks[-1] if disks else self.disks + 1 for disks in self.pegs]
        numbers = range(len(PEGS))
        return [f"{PEGS[one]} {PEGS[other]}" for one in numbers for other in numbers if tops[one] < tops[other]]

    def expert(self) -> HanoiExpert:
        """Return a policy that plays a shortest solution."""
        return HanoiExpert()


class HanoiExpert(Planner):
    """Expert that plays a shortest solution."""

    def plan(self, text: str) -> list[str]:
        """Return all moves.

        Raises:
            UsageError: the text shows no pegs.
        """
        shown = re.search(r"A:([ \d]*)\nB:([ \d]*)\nC:([ \d]*)\nAll disks belong on ([ABC])", text)
        if shown is None:
            raise UsageError("the text shows no tower of Hanoi", got=repr(text))
        pegs = [[int(disk) for disk in disks.split()] for disks in shown.groups()[:3]]
        return solve(pegs, PEGS.index(shown[4].lower()))


def solve(pegs: list[list[int]], target: int) -> list[str]:
    """Return the shortest solution: each misplaced disk moves once all smaller ones are on the third peg.

    >>> solve([[2, 1], [], []], 2)
    ['a b', 'a c', 'b c']
    """
    places = {disk: peg for peg, disks in enumerate(pegs) for disk in disks}
    moves: list[str] = []

    def gather(disk: int, goal: int) -> None:
        if not disk:
            return
        here = places[disk]
        if here != goal:
            gather(disk - 1, 3 - here - goal)
            moves.append(f"{PEGS[here]} {PEGS[goal]}")
            places[disk] = goal
        gather(disk - 1, goal)

    gather(len(places), target)
    return moves


SPEC = puzzle_spec(
    Hanoi,
    description=(
        "The tower of Hanoi from any start to any peg, with five disks: 702 starts, half of them for training. The best"
        " of the expert's solutions, repeated without looking, solves 23 % of other starts. Options: disks (2 to 6;"
        " 2,160 starts with 6, 216 with 4), min_moves."
    ),
    instructions=(
        "You play the tower of Hanoi. There are three pegs: A, B and C. Each line lists the disks on a peg from"
        " bottom to top; a larger number is a larger disk. Move one disk at a time. You can only take the top disk"
        " of a peg, and you cannot put it on a smaller disk. You win when all disks are on the peg that the last"
        " line names. A move is the peg to take from and the peg to put on: A C moves the top disk of peg A to peg"
        " C."
    ),
    reward_range=(0.0, 1.0),
    scores={"random": 0.04, "blind": 0.23, "expert": 1.0},
    version=1,
)
make = SPEC.make
