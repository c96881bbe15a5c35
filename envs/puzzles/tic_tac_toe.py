"""Tic-tac-toe for one player against an opponent, or for two players that both act."""

from __future__ import annotations

import functools
import re
from random import Random

from agentrl.errors import UsageError
from agentrl.message import Content

from .bounds import within
from .environment import puzzle_spec
from .planner import read
from .rules import ChancePuzzle, Illegal, Played

CROSS, NOUGHT = "X", "O"
EMPTY = "."
SIZE = 9
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
RANDOM, CAREFUL, EXPERT, SELF = OPPONENTS = "random", "careful", "expert", "self"
STRIKES = 2
"""Number of illegal moves in a row with which one of two players loses."""


class TicTacToe(ChancePuzzle):
    """The rules of tic-tac-toe: 1 for a win, -1 for a loss, 0 for a draw. A game begins with a few random moves.

    Args:
        opponent: ``careful`` (completes its own row, else blocks yours, else plays at random), ``random``, ``expert``,
            or ``self`` for a game in which both players act (`self_play`).
        opening: Maximum number of random moves before the game begins.
    """

    name = "tic_tac_toe"
    fields = ("board", "to_move", "mine", "strikes", "dice")
    action_hint = "the number of a free field, for example: 5"
    max_steps = 20
    loss_reward = -1.0

    board: str
    mine: str
    """Mark of the only player; empty if two players act."""
    strikes: int

    def __init__(self, *, opponent: str = CAREFUL, opening: int = 3) -> None:
        if opponent not in OPPONENTS:
            raise UsageError("unknown opponent of tic_tac_toe", got=repr(opponent), expected=", ".join(OPPONENTS))
        self.opponent = opponent
        self.opening = within("opening of tic_tac_toe", opening, 1, 4)
        self.players = (CROSS, NOUGHT) if opponent == SELF else ()

    def start(self, rng: Random) -> None:
        """Make a few random moves; then it is the player's turn."""
        self.board, self.to_move, self.strikes = EMPTY * SIZE, CROSS, 0
        for _ in range(rng.randint(0, self.opening)):
            self._put(rng.choice(free(self.board)))
        self.mine = "" if self.players else self.to_move
        self.dice = rng.getrandbits(48) if self.opponent in (RANDOM, CAREFUL) else 0

    def play(self, action: str) -> Played:
        """Take a field; if only one player acts, the opponent then takes one."""
        number = int(action) - 1 if re.fullmatch(r"[1-9]", action) else None
        if number is None or self.board[number] != EMPTY:
            return self._refuse("That is not the number of a field." if number is None else f"Field {action} is taken.")
        played = self._move(number)
        if self.players or played.over:
            return played
        answer = self._move(self._reply())
        return answer._replace(note=f"{played.note} {answer.note}")

    def _refuse(self, why: str) -> Played:
        """Refuse an illegal move. If two players act, a second one in a row loses, and the other player gets 0."""
        why = f"{why} Play one of the free fields: {', '.join(self.actions())}."
        if not self.players:
            raise Illegal(why)
        self.strikes += 1
        if self.strikes < STRIKES:
            return Played(note=why, legal=False)
        note = f"{self.to_move} loses after two illegal moves in a row."
        rewards = {self.to_move: self.loss_reward, other(self.to_move): 0.0}
        return Played(note=note, over=True, legal=False, rewards=rewards)

    def _move(self, field: int) -> Played:
        mark = self.to_move
        self._put(field)
        self.strikes = 0
        note = f"{mark} took field {field + 1}."
        if winner(self.board) is None and free(self.board):
            return Played(note=note)
        gain = 0.0 if winner(self.board) is None else 1.0
        note = f"{note} {mark} wins." if gain else f"{note} That is a draw."
        if self.players:
            return Played(note=note, over=True, won=bool(gain), rewards={mark: gain, other(mark): -gain})
        return Played(gain if mark == self.mine else -gain, note, over=True, won=gain > 0 and mark == self.mine)

    def _put(self, field: int) -> None:
        self.board = self.board[:field] + self.to_move + self.board[field + 1 :]
        self.to_move = other(self.to_move)

    def _reply(self) -> int:
        if self.opponent == EXPERT:
            return best_move(self.board, self.to_move)
        fields = self._urgent() if self.opponent == CAREFUL else []
        fields = fields or free(self.board)
        return fields[self.roll(len(fields))]

    def _urgent(self) -> list[int]:
        """Return the fields that complete a row of the mark to move, or else of the other mark."""
        for mark in (self.to_move, other(self.to_move)):
            if fields := [field for field in free(self.board) if winner(_after(self.board, field, mark)) == mark]:
                return fields
        return []

    def text(self) -> str:
        """Return the board with the numbers of its free fields, and the reader's mark."""
        shown = [str(i + 1) if mark == EMPTY else mark for i, mark in enumerate(self.board)]
        rows = "\n".join(" ".join(shown[start : start + 3]) for start in range(0, SIZE, 3))
        return f"{rows}\nYou are {self.mine or self.to_move}. Which free field do you take?"

    def actions(self) -> list[str]:
        """Return the free fields."""
        return [str(field + 1) for field in free(self.board)]

    def expert(self) -> TicTacToeExpert:
        """Return a perfect player."""
        return TicTacToeExpert()


def other(mark: str) -> str:
    """Return the other player's mark."""
    return NOUGHT if mark == CROSS else CROSS


def free(board: str) -> list[int]:
    """Return the indices of the free fields."""
    return [field for field, mark in enumerate(board) if mark == EMPTY]


def winner(board: str) -> str | None:
    """Return the mark of three in a row, if there is one.

    >>> winner("XXXOO...."), winner("XOXOXOOXO")
    ('X', None)
    """
    return next((board[a] for a, b, c in LINES if board[a] == board[b] == board[c] != EMPTY), None)


@functools.cache
def value(board: str, mark: str) -> int:
    """Return the value of a position for the player to move, `mark`; earlier wins have higher values."""
    if winner(board) is not None:
        return -1 - len(free(board))
    return max((-value(_after(board, field, mark), other(mark)) for field in free(board)), default=0)


def best_move(board: str, mark: str) -> int:
    """Return the best move; the first one if several are equal."""
    return max(free(board), key=lambda field: -value(_after(board, field, mark), other(mark)))


def _after(board: str, field: int, mark: str) -> str:
    return board[:field] + mark + board[field + 1 :]


class TicTacToeExpert:
    """Expert that searches the whole game tree."""

    def act(self, observation: Content) -> str:
        """Return the best move.

        Raises:
            UsageError: the text shows no board.
        """
        text = read(observation)
        shown = re.search(r"((?:[XO1-9] [XO1-9] [XO1-9]\n){3})You are ([XO])\.", text)
        if shown is None:
            raise UsageError("the text shows no board", got=repr(text))
        board = "".join(mark if mark in (CROSS, NOUGHT) else EMPTY for mark in shown[1].split())
        return str(best_move(board, shown[2]) + 1)


SPEC = puzzle_spec(
    TicTacToe,
    description=(
        "Tic-tac-toe from random openings, against an opponent that completes its own rows and blocks yours (the best"
        " fixed order of fields that a search found wins 28 % of the training games), a random or a perfect one, or for"
        " two players that both act (opponent=self, with the agent loop self_play). Option: opponent (careful, random,"
        " expert or self)."
    ),
    instructions=(
        "You play tic-tac-toe against another player. The board has nine fields. X and O are fields that are"
        " taken, and a number is a free field. Each turn, take one free field by writing its number. You win with"
        " three of your marks in a row, a column or a diagonal. Never choose a field that is already taken: it"
        " costs you a turn, or the game."
    ),
    reward_range=(-1.0, 1.0),
    scores={"random": 0.04, "blind": 0.28, "expert": 0.61},
    version=1,
)
make = SPEC.make
