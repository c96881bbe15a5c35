"""A story in many parts, with a question at the end that requires remembering an early part."""

from __future__ import annotations

import re
from random import Random

from agentrl.errors import UsageError
from agentrl.message import Content

from .bounds import within
from .environment import puzzle_spec
from .planner import read
from .rules import Illegal, Played, Puzzle

PEOPLE = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Greta", "Hugo")
PLACES = ("Berlin", "Cairo", "Dublin", "Lima", "Oslo", "Paris", "Rome", "Tokyo")
FILLERS = (
    "It rained all day.",
    "The train was late again.",
    "Somebody left an umbrella behind.",
    "The shops closed early.",
    "Nothing else happened that week.",
    "A letter came without a name.",
    "The summer was long and warm.",
    "There was music in the street.",
)
NEXT = "next"
FIRST, LAST = "first", "last"
_MOVE = re.compile(rf"({'|'.join(PEOPLE)}) moved to ({'|'.join(PLACES)})\.")
_QUESTION = re.compile(rf"Where does ({'|'.join(PEOPLE)}) live now\?")


class LongQA(Puzzle):
    """The rules of a long story: people move, and at the end the question is where one of them lives now.

    The move that counts is in the first half of the story, so that the last parts do not contain the answer.

    Args:
        parts: Number of parts of the story; each is an observation, and `next` shows the next one.
        sentences: Number of sentences in a part.
        people: Number of people.
        question: ``last``, or ``first`` to also ask before the story begins.
        whole: Show all parts and the question in one observation, for a loop that reads it in parts (`memory`).
    """

    name = "long_qa"
    fields = ("story", "asked", "answer", "part")
    action_hint = "next, or the name of a place once you are asked, for example: next"
    max_steps = 80

    story: list[str]
    asked: str
    part: int

    def __init__(
        self, *, parts: int = 8, sentences: int = 6, people: int = 3, question: str = LAST, whole: bool = False
    ) -> None:
        self.parts = within("parts of long_qa", parts, 2, 64)
        self.sentences = within("sentences of long_qa", sentences, 2, 40)
        self.people = within("people of long_qa", people, 2, len(PEOPLE))
        if question not in (FIRST, LAST):
            raise UsageError("question of long_qa is not valid", got=repr(question), expected="first or last")
        if not isinstance(whole, bool):
            raise UsageError("whole of long_qa is not a boolean", got=repr(whole), expected="true or false")
        self.asks_first, self.whole = question == FIRST, whole

    def start(self, rng: Random) -> None:
        """Write the story; the person in the question moves for the last time in its first half."""
        people = rng.sample(PEOPLE, self.people)
        self.asked = people[0]
        count, half = self.parts * self.sentences, self.parts * self.sentences // 2
        last_move = rng.randrange(half)
        lives: dict[str, str] = {}
        sentences = []
        for number in range(count):
            movers = people if number < last_move else people[1:]
            person = self.asked if number == last_move else rng.choice(movers)
            if number != last_move and rng.random() < 0.5:
                sentences.append(rng.choice(FILLERS))
                continue
            lives[person] = rng.choice([place for place in PLACES if place != lives.get(person)])
            sentences.append(f"{person} moved to {lives[person]}.")
        size = self.sentences
        self.story = [" ".join(sentences[at : at + size]) for at in range(0, count, size)]
        self.answer = lives[self.asked]
        self.part = self.parts if self.whole else 0

    def play(self, action: str) -> Played:
        """Read on, or answer."""
        if self.part < self.parts:
            if action != NEXT:
                raise Illegal("You cannot answer yet. Say next to read on.")
            self.part += 1
            return Played()
        if action not in map(str.lower, PLACES):
            raise Illegal("That is not a place. Answer with the name of a place.")
        won = action == self.answer.lower()
        return Played(float(won), "Right." if won else "Wrong.", over=True, won=won)

    @property
    def question(self) -> str:
        """The question at the end."""
        return f"Where does {self.asked} live now?"

    def introduction(self) -> str:
        """Return the question if it comes first, and the first part or all parts."""
        asked = f"You will be asked: {self.question}\n" if self.asks_first else ""
        story = "\n".join(self._part(number) for number in range(self.parts)) + "\n" if self.whole else ""
        return f"{asked}{story}{self.text()}"

    def goal_text(self) -> str:
        """Return the question if it comes first."""
        return self.question if self.asks_first else ""

    def text(self) -> str:
        """Return a part of the story, or the question."""
        if self.part < self.parts:
            return self._part(self.part)
        return f"The story is over. {self.question} Answer with the name of a place."

    def _part(self, number: int) -> str:
        return f"Part {number + 1} of {self.parts}: {self.story[number]}"

    def actions(self) -> list[str]:
        """Return the action that reads on, or all places."""
        return [NEXT] if self.part < self.parts else [place.lower() for place in PLACES]

    def expert(self) -> LongQAExpert:
        """Return a policy that remembers where each person lives."""
        return LongQAExpert()


class LongQAExpert:
    """Expert that remembers the last move of each person."""

    def __init__(self) -> None:
        self._lives: dict[str, str] = {}

    def act(self, observation: Content) -> str:
        """Read on, or answer.

        Raises:
            UsageError: no text mentioned the person in the question.
        """
        text = read(observation)
        self._lives |= dict(_MOVE.findall(text))
        if "The story is over." not in text:
            return NEXT
        asked = _QUESTION.findall(text)[-1:]
        if not asked or asked[0] not in self._lives:
            raise UsageError("no text contained the answer", got=repr(text[-200:]))
        return self._lives[asked[0]]


SPEC = puzzle_spec(
    LongQA,
    description=(
        "A generated story in many parts, with a question at the end about an early part: for loops whose policy writes"
        " its own memory (memory, or react_text with compact)."
    ),
    instructions=(
        "You read a story in parts. It says who moved to which place. A person may move several times; only the"
        " last place counts. After each part, answer with the word next. At the end you are asked where one person"
        " lives now. Answer that question with the name of the place. You have one try."
    ),
    reward_range=(0.0, 1.0),
    scores={"random": 0.125, "expert": 1.0},
)
make = SPEC.make
