"""Scripted policy that solves every task from the text only, like a model.

It searches the receptacle with the highest probability per step (a closed receptacle costs two steps), remembers what
it has seen, and infers that two receptacles share a pose if going from one to the other does nothing.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Generator, Iterable

from agentrl.errors import UsageError
from agentrl.message import Content

from .goals import Goal, TaskType, parse_goal
from .syntax import PutSyntax
from .texts import NOTHING_HAPPENS
from .vocabulary import CONTENTS, LAMP, LAMP_STANDS, OPENABLE

_Steps = Generator[str, str, None]
_NAME = re.compile(r"\ba (\w+ \d+)")
_GOAL = re.compile(r"Your task is to: (.*)\.")

_WRONG_TAKES = 0.7
"""Share of mistakes that take an absent thing; the others go to the current place."""


def kind_of(name: str) -> str:
    """Return the type of a named thing.

    >>> kind_of("cabinet 8")
    'cabinet'
    """
    return name.partition(" ")[0]


class HouseholdExpert:
    """Expert for one episode. The first observation is the introduction; each later one answers the last action.

    Args:
        put_syntax: Form of the command that puts an object down.
    """

    def __init__(self, put_syntax: PutSyntax = PutSyntax.MOVE) -> None:
        self._put_syntax = put_syntax
        self._plan: _Plan | None = None
        self._steps: _Steps | None = None

    def act(self, observation: Content) -> str:
        """Return the next action.

        Raises:
            UsageError: the first observation states no goal, or nothing is left to do.
        """
        if not isinstance(observation, str):
            raise UsageError("the household expert reads text only", got=type(observation).__name__)
        try:
            if self._steps is None:
                self._plan = _Plan(observation, self._put_syntax)
                self._steps = self._plan.steps()
                return next(self._steps)
            return self._steps.send(observation)
        except StopIteration as stop:
            raise UsageError("the household expert has nothing left to do", got=repr(observation)) from stop

    def mistake(self, rng: random.Random) -> str | None:
        """Return a mistake: take the goal's object where it is absent, or go to the current place."""
        return None if self._plan is None else self._plan.mistake(rng)


def _one_of(kind: str | None, names: Iterable[str]) -> str:
    """Return the first name of a kind.

    Raises:
        UsageError: none of the names has this kind.
    """
    for name in names:
        if kind_of(name) == kind:
            return name
    raise UsageError("the household expert does not find what the goal needs", expected=f"a {kind}")


class _Plan:
    """The expert's knowledge and its plan: a generator of actions that receives the answer to each of them."""

    def __init__(self, introduction: str, put_syntax: PutSyntax) -> None:
        stated = _GOAL.search(introduction)
        goal = parse_goal(stated[1]) if stated else None
        if goal is None:
            raise UsageError("the observation states no household goal", got=repr(introduction[-80:]))
        self.goal: Goal = goal
        self.put_syntax = put_syntax
        self.receptacles: list[str] = _NAME.findall(introduction)
        self.numbers = Counter(map(kind_of, self.receptacles))
        self.contents: dict[str, list[str]] = {}
        """Things seen in each receptacle that was searched."""
        self.together = {place: {place} for place in self.receptacles}
        """Receptacles known to share a pose with each one."""
        self.here: str | None = None
        """Receptacle to which the agent went last."""

    def steps(self) -> _Steps:
        """Yield the actions: look at the object in light, or bring as many objects as the goal needs."""
        if self.goal.task_type is TaskType.LOOK:
            yield from self._look_in_light()
            return
        target = self._target()
        for _ in range(self.goal.object_count):
            name = yield from self._fetch(outside=target if self.goal.object_count > 1 else None)
            if treatment := self.goal.task_type.treatment:
                appliance = _one_of(treatment.appliance, self.receptacles)
                yield from self._go(appliance)
                yield f"{treatment.verb} {name} with {appliance}"
            yield from self._look_into(target)
            yield f"{self.put_syntax} {name}{self.put_syntax.separator}{target}"
            self.contents[target].append(name)

    def mistake(self, rng: random.Random) -> str | None:
        """Return an action that is inadmissible at the current place; ``None`` if the place is unknown."""
        if self.here is None:
            return None
        names = [f"{self.goal.object_type} {number}" for number in (1, 2, 3)]
        absent = [name for name in names if name not in self.contents.get(self.here, ())]
        if absent and rng.random() < _WRONG_TAKES:
            return f"take {rng.choice(absent)} from {self.here}"
        return f"go to {self.here}"

    def _look_in_light(self) -> _Steps:
        yield from self._fetch(outside=None)
        stand = yield from self._find(LAMP, outside=None)
        yield from self._go(stand)
        yield f"use {_one_of(LAMP, self.contents[stand])}"

    def _target(self) -> str:
        return _one_of(self.goal.target_type, self.receptacles)

    def _fetch(self, *, outside: str | None) -> Generator[str, str, str]:
        """Find an object of the goal's type, take it, and return its name."""
        place = yield from self._find(self.goal.object_type, outside=outside)
        yield from self._look_into(place)
        name = _one_of(self.goal.object_type, self.contents[place])
        yield f"take {name} from {place}"
        self.contents[place].remove(name)
        return name

    def _find(self, wanted: str, *, outside: str | None) -> Generator[str, str, str]:
        """Return a receptacle with a thing of the wanted kind; search until one is known."""
        while True:
            for place, names in self.contents.items():
                if place != outside and any(kind_of(name) == wanted for name in names):
                    return place
            unseen = [place for place in self.receptacles if place not in self.contents]
            if not unseen:
                raise UsageError("the household expert searched everywhere", expected=f"a {wanted}")
            yield from self._look_into(max(unseen, key=lambda place: self._promise(place, wanted)))

    def _promise(self, place: str, wanted: str) -> float:
        """Return the estimated probability that a receptacle contains something useful, per step of searching it."""
        kind = kind_of(place)
        chance = self._can_hold(kind, wanted)
        if wanted != LAMP and self.goal.task_type is TaskType.LOOK:
            chance += self._can_hold(kind, LAMP)
        return chance / self.numbers[kind] / (2 if kind in OPENABLE else 1)

    def _can_hold(self, kind: str, wanted: str) -> float:
        if wanted == LAMP:
            return float(kind in LAMP_STANDS)
        is_target = kind == self.goal.target_type and self.goal.task_type.treatment is None
        return float(wanted in CONTENTS.get(kind, ()) and not is_target)

    def _look_into(self, place: str) -> _Steps:
        """Go to a receptacle, and open or examine it unless its contents are known."""
        yield from self._go(place)
        if place not in self.contents:
            text = yield f"{'open' if kind_of(place) in OPENABLE else 'examine'} {place}"
            self._read(place, text)

    def _go(self, place: str) -> _Steps:
        if self.here is not None and place in self.together[self.here]:
            return
        text = yield f"go to {place}"
        if text == NOTHING_HAPPENS and self.here is not None:
            self._note_shared_pose(self.here, place)
            return
        self.here = place
        self._read(place, text)

    def _note_shared_pose(self, one: str, other: str) -> None:
        group = self.together[one] | self.together[other]
        for place in group:
            self.together[place] = group

    def _read(self, place: str, text: str) -> None:
        if "you see " in text:
            self.contents[place] = _NAME.findall(text.partition("you see ")[2])
