"""Sokoban: push every box onto a target."""

from __future__ import annotations

from random import Random

from ..pictures import Colour, Field, Fields, Shape
from .bounds import within
from .environment import puzzle_spec
from .rules import Illegal, Played, Puzzle
from .sokoban_solver import SokobanExpert

WALL, FLOOR, TARGET, STORED, BOX, PLAYER, PLAYER_ON_TARGET = "#", "_", "O", "√", "X", "P", "S"
LEFT_BEHIND = {PLAYER: FLOOR, PLAYER_ON_TARGET: TARGET}
ENTERED = {FLOOR: PLAYER, TARGET: PLAYER_ON_TARGET, BOX: PLAYER, STORED: PLAYER_ON_TARGET}
PUSHED_ONTO = {FLOOR: BOX, TARGET: STORED}
_TARGET, _PLAYER = (Shape.RING, Colour.RED), (Shape.DISC, Colour.BLUE)
LOOKS: Fields = {
    WALL: Field(legend="a wall is dark grey", ground=Colour.DARK_GREY),
    FLOOR: Field(legend="floor is white", ground=Colour.WHITE),
    TARGET: Field(legend="a target is a red ring", ground=Colour.WHITE, shapes=(_TARGET,)),
    BOX: Field(legend="a box is a brown square", ground=Colour.WHITE, shapes=((Shape.SQUARE, Colour.BROWN),)),
    STORED: Field(
        legend="a box on a target is a green square", ground=Colour.WHITE, shapes=((Shape.SQUARE, Colour.GREEN),)
    ),
    PLAYER: Field(legend="you are a blue disc", ground=Colour.WHITE, shapes=(_PLAYER,)),
    PLAYER_ON_TARGET: Field(
        legend="with a red ring around you, you are on a target", ground=Colour.WHITE, shapes=(_TARGET, _PLAYER)
    ),
}
STEP_REWARD, BOX_REWARD, SOLVED_REWARD = -0.1, 1.0, 10.0
"""Rewards of each action, of a box that reaches a target (negative if it leaves), and of all boxes: see gym-sokoban."""
WALL_SHARE = 0.15
WALK = 100


class Sokoban(Puzzle):
    """The rules of Sokoban. Levels are made by pulling the boxes off their targets, so that each can be solved.

    Args:
        size: Number of rows and columns of the room, including its walls.
        boxes: Number of boxes, and of targets.
        min_pushes: Minimum number of pushes of a level, estimated by the distances of the boxes to their nearest
            targets; 3 by default, or as many as a small room allows.
    """

    name = "sokoban"
    fields = ("board", "player")
    action_hint = "up, down, left or right, for example: left"
    max_steps = 100
    actions_per_turn = 5
    illegal_reward = STEP_REWARD
    looks = LOOKS

    board: list[str]
    player: int

    def __init__(self, *, size: int = 6, boxes: int = 1, min_pushes: int | None = None) -> None:
        self.size = within("size of sokoban", size, 5, 10)
        self.boxes = within("boxes of sokoban", boxes, 1, min(4, (size - 2) ** 2 // 3 - 1))
        most = min(2 * size - 9, 6)
        self.min_pushes = within("min_pushes of sokoban", min(3, most) if min_pushes is None else min_pushes, 1, most)
        self.moves = {"up": -size, "down": size, "left": -1, "right": 1}

    @property
    def task_type(self) -> str:
        """Number of boxes, in words."""
        return f"{self.boxes} box" + "es" * (self.boxes > 1)

    def start(self, rng: Random) -> None:
        """Draw levels until one is hard enough."""
        while not self._draw(rng):
            pass

    def play(self, action: str) -> Played:
        """Step, or push a box; a step against a wall changes nothing."""
        offset = self.moves.get(action)
        if offset is None:
            raise Illegal("That is not a move. Moves are up, down, left and right.")
        board, place = self.board, self.player + offset
        cell, reward = board[place], STEP_REWARD
        if cell == WALL:
            return Played(reward, "A wall is in the way.")
        if cell in (BOX, STORED):
            behind = board[place + offset]
            if behind not in PUSHED_ONTO:
                return Played(reward, "The box cannot be pushed there.")
            board[place + offset] = PUSHED_ONTO[behind]
            reward += BOX_REWARD * ((behind == TARGET) - (cell == STORED))
        board[place] = ENTERED[cell]
        board[self.player] = LEFT_BEHIND[board[self.player]]
        self.player = place
        if BOX in board:
            return Played(reward)
        return Played(reward + SOLVED_REWARD, "All boxes are on targets.", over=True, won=True)

    def text(self) -> str:
        """Return the room, row by row."""
        board, size = self.board, self.size
        return "\n".join([" ".join(board[row : row + size]) for row in range(0, size * size, size)])

    def actions(self) -> list[str]:
        """Return the moves that change something."""
        return [name for name, offset in self.moves.items() if self._is_open(self.player + offset, offset)]

    def expert(self) -> SokobanExpert:
        """Return a policy that searches for a short solution."""
        return SokobanExpert()

    def _is_open(self, place: int, offset: int) -> bool:
        cell = self.board[place]
        return cell in PUSHED_ONTO or (cell in (BOX, STORED) and self.board[place + offset] in PUSHED_ONTO)

    def _draw(self, rng: Random) -> bool:
        """Pull boxes off their targets in a random room; return True if the result is a level."""
        self.board = self._room(rng)
        floor = [place for place, cell in enumerate(self.board) if cell == FLOOR]
        if len(floor) < 3 * self.boxes + 3 or not self._is_connected(floor):
            return False
        targets = rng.sample(floor, self.boxes)
        boxes, self.player = self._pull(rng, set(floor), targets)
        for place in (*targets, *boxes):
            self.board[place] = BOX if place in boxes else TARGET
        self.board[self.player] = ENTERED[self.board[self.player]]
        return self._is_hard(boxes, targets)

    def _room(self, rng: Random) -> list[str]:
        inner, size = range(1, self.size - 1), self.size
        return [
            FLOOR if row in inner and column in inner and rng.random() >= WALL_SHARE else WALL
            for row in range(size)
            for column in range(size)
        ]

    def _is_connected(self, floor: list[int]) -> bool:
        seen, queue, everywhere = {floor[0]}, [floor[0]], set(floor)
        while queue:
            place = queue.pop()
            new = {place + offset for offset in self.moves.values()} & everywhere - seen
            seen |= new
            queue += new
        return len(seen) == len(floor)

    def _pull(self, rng: Random, floor: set[int], targets: list[int]) -> tuple[set[int], int]:
        """Return the boxes and the player after a random walk that pulls boxes: a game played backwards."""
        boxes, offsets = set(targets), list(self.moves.values())
        player = rng.choice([place for place in sorted(floor) if place not in boxes])
        for step in range(WALK * self.boxes):
            offset = offsets[int(rng.random() * 4)]
            place = player + offset
            if place not in floor or place in boxes:
                continue
            if player - offset in boxes:
                boxes.remove(player - offset)
                boxes.add(player)
            player = place
            if step % 8 == 0 and self._is_hard(boxes, targets):
                break
        return boxes, player

    def _is_hard(self, boxes: set[int], targets: list[int]) -> bool:
        """Return True if no box is on a target, and enough pushes are needed."""
        size, pushes = self.size, 0
        for box in boxes:
            if box in targets:
                return False
            pushes += min(abs(box // size - place // size) + abs(box % size - place % size) for place in targets)
        return pushes >= self.min_pushes


SPEC = puzzle_spec(
    Sokoban,
    description=(
        "Sokoban in a new, solvable room in each episode, with the rewards of gym-sokoban. Options: size (5 to 10),"
        " boxes (1 to 4), min_pushes (1 to 6), observation (text or image)."
    ),
    instructions=(
        "You play Sokoban. Push every box onto a target. On the map, # is a wall, _ is floor, X is a box, O is a"
        " target, √ is a box on a target, P is you, and S is you on a target. Each move takes you one step up,"
        " down, left or right. To push a box, walk against it; the cell behind it must be free. You cannot pull a"
        " box, and you cannot push two boxes at once."
    ),
    reward_range=(-14.0, 14.0),
    scores={"random": 0.2, "expert": 1.0},
)
make = SPEC.make
