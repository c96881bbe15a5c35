"""Wordle: find a hidden word from the marks of guesses."""

from __future__ import annotations

import functools
import re
from collections import Counter
from random import Random

from agentrl.errors import UsageError
from agentrl.message import Content

from .environment import puzzle_spec
from .planner import read
from .rules import Illegal, Played, Puzzle, share_gained
from .words import words_of

LENGTH = 5
PLACED, MISPLACED, ABSENT = "G", "Y", "X"


WORDS = words_of("wordle_words")
"""Possible hidden words, sorted: common English words in American spelling."""


class Wordle(Puzzle):
    """The rules of Wordle. A guess may be any five letters; hidden words come from a list of common ones."""

    name = "wordle"
    fields = ("word", "guesses")
    action_hint = "a word of five letters, for example: stone"
    max_steps = 6

    word: str
    guesses: list[str]

    def start(self, rng: Random) -> None:
        """Think of a word."""
        self.word, self.guesses = rng.choice(WORDS), []

    def play(self, action: str) -> Played:
        """Mark a guess."""
        guess = action.replace(" ", "")
        if len(guess) != LENGTH or not (guess.isascii() and guess.isalpha()):
            raise Illegal("Answer with one word of five letters.")
        if guess in self.guesses:
            raise Illegal("You have guessed this word before.")
        self.guesses.append(guess)
        if guess == self.word:
            return Played(1.0, "Right, that is the word.", over=True, won=True)
        return Played(0.0, f"{' '.join(guess.upper())}\n{' '.join(mark(guess, self.word))}")

    def progress(self) -> float:
        """Return how much closer the last guess is than the first one, which was made without information."""
        return share_gained(*map(self._closeness, (self.guesses[0], self.guesses[-1]))) if self.guesses else 0.0

    def _closeness(self, guess: str) -> float:
        """Return the share of the letters that are in place; half for a letter in another place."""
        marks = mark(guess, self.word)
        return (marks.count(PLACED) + marks.count(MISPLACED) / 2) / LENGTH

    def introduction(self) -> str:
        """Return the first observation."""
        return f"I think of a word of five letters.\n{self.text()}"

    def text(self) -> str:
        """Return the number of guesses so far."""
        return f"Guesses so far: {len(self.guesses)}."

    def guess(self, rng: Random) -> str:
        """Return a word of the list that was not tried yet."""
        while (guess := rng.choice(WORDS)) in self.guesses:
            pass
        return guess

    def expert(self) -> WordleExpert:
        """Return a policy that makes the most informative guesses."""
        return WordleExpert()


class WordleExpert:
    """Expert that guesses the word, among those that agree with all marks, whose marks split them into most groups."""

    MAX_COMPARED = 60
    """Maximum number of words that are compared: enough to choose well, and fast."""

    def __init__(self) -> None:
        self._left = list(WORDS)

    def act(self, observation: Content) -> str:
        """Return a word that may be right.

        Raises:
            UsageError: no such word is left.
        """
        feedback = re.search(r"((?:[A-Z] ){4}[A-Z])\n((?:[GYX] ){4}[GYX])", read(observation))
        if feedback is None and len(self._left) == len(WORDS):
            return _first_guess()
        if feedback:
            guess, marks = feedback[1].replace(" ", "").lower(), feedback[2].replace(" ", "")
            self._left = [word for word in self._left if word != guess and mark(guess, word) == marks]
        if not self._left:
            raise UsageError("no word agrees with the marks", got=repr(observation))
        return _most_telling(self._left, self.MAX_COMPARED)


@functools.cache
def _first_guess() -> str:
    return _most_telling(list(WORDS), 100)


def _most_telling(left: list[str], most: int) -> str:
    few = left[:: max(1, len(left) // most)]
    return max(few, key=lambda guess: len(Counter(mark(guess, word) for word in few)))


def mark(guess: str, word: str) -> str:
    """Return a mark for each letter: G in place, Y in another place, X not in the word (or not that often).

    >>> mark("allow", "label")
    'YYYXX'
    """
    spare = Counter(letter for letter, other in zip(word, guess, strict=True) if letter != other)
    marks = []
    for letter, other in zip(guess, word, strict=True):
        if letter == other:
            marks.append(PLACED)
        elif spare[letter]:
            spare[letter] -= 1
            marks.append(MISPLACED)
        else:
            marks.append(ABSENT)
    return "".join(marks)


SPEC = puzzle_spec(
    Wordle,
    description="Wordle: find a common English word of five letters in six guesses.",
    instructions=(
        "You play Wordle. Find the secret word of five letters. Each turn, try one word. Below each of its"
        " letters you see a mark: G means that the letter is in the right place, Y means that the secret word has"
        " this letter in another place, and X means that the secret word does not have this letter (or not a"
        " second time)."
    ),
    reward_range=(0.0, 1.0),
    scores={"random": 0.01, "expert": 0.99},
)
make = SPEC.make
