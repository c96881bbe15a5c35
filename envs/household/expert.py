"""A scripted policy that solves every task through the text alone: it reads what a model would read.

It searches where the thing is likeliest per step of searching (a closed receptacle costs two steps), remembers what
it has seen, and learns that two receptacles share a pose when going from one to the other does nothing. It decides
anew at every step, so it goes on from whatever state somebody else has brought about.
"""

from __future__ import annotations

import re
from collections import Counter

from agentrl.errors import UsageError
from agentrl.message import Content

from .goals import TaskType, parse_goal
from .knowledge import Knowledge, kind_of
from .syntax import PutSyntax
from .vocabulary import CONTENTS, LAMP, LAMP_STANDS, OPENABLE

_GOAL = re.compile(r"Your task is to: (.*)\.")


class HouseholdExpert:
    """Plays one episode. The first observation is the introduction; each later one answers the last action.

    Args:
        put_syntax: How an object is put down.
    """

    def __init__(self, put_syntax: PutSyntax = PutSyntax.MOVE) -> None:
        self._put_syntax = put_syntax
        self._player: _Player | None = None
        self._latest = ""

    def act(self, observation: Content) -> str:
        """The next action.

        Raises:
            UsageError: the first observation states no goal, or nothing is left to do.
        """
        if not isinstance(observation, str):
            raise UsageError("the household expert reads text only", got=type(observation).__name__)
        if self._player is None:
            self._player = _Player(observation, self._put_syntax)
        else:
            self._player.knowledge.learn(self._latest, observation)
        self._latest = self._player.choose()
        return self._latest

    def overruled(self, action: str) -> None:
        """Take note that `action` was taken in place of the latest one."""
        self._latest = action


class _Player:
    """Decides by what it knows."""

    def __init__(self, introduction: str, put_syntax: PutSyntax) -> None:
        stated = _GOAL.search(introduction)
        goal = parse_goal(stated[1]) if stated else None
        if goal is None:
            raise UsageError("the observation states no household goal", got=repr(introduction[-80:]))
        self.goal = goal
        self.knowledge = Knowledge(introduction, goal)
        self._put_syntax = put_syntax
        self._numbers = Counter(map(kind_of, self.knowledge.receptacles))

    def choose(self) -> str:
        """The next action."""
        held = self.knowledge.held
        if held is None:
            return self._fetch()
        if kind_of(held) != self.goal.object_type:
            return self._put_away(held)
        if self.goal.task_type is TaskType.LOOK:
            return self._light()
        if (treatment := self.goal.task_type.treatment) and held not in self.knowledge.treated:
            appliance = self._first(treatment.appliance)
            return self._go(appliance) or f"{treatment.verb} {held} with {appliance}"
        return self._put(held, self._first(self.goal.target_type))

    def _first(self, kind: str) -> str:
        return next(place for place in self.knowledge.receptacles if kind_of(place) == kind)

    def _fetch(self) -> str:
        """Find an object of the goal's type that is not yet where it belongs, and take it."""
        done = self._done()
        if self.goal.task_type is not TaskType.LOOK and len(done) >= self.goal.needed:
            raise UsageError("the household expert has nothing left to do", got=", ".join(done))
        for place, names in self.knowledge.contents.items():
            for name in names:
                if kind_of(name) == self.goal.object_type and name not in done:
                    return self._reach(place) or f"take {name} from {place}"
        return self._search(self.goal.object_type)

    def _done(self) -> list[str]:
        if self.goal.task_type is TaskType.LOOK:
            return []
        there = self.knowledge.contents.get(self._first(self.goal.target_type), [])
        finished = self.knowledge.treated if self.goal.task_type.treatment else there
        return [name for name in there if kind_of(name) == self.goal.object_type and name in finished]

    def _put_away(self, held: str) -> str:
        """Put an object down that is of no use: here, or where it was."""
        for place in self.knowledge.receptacles:
            fits = kind_of(held) in CONTENTS[kind_of(place)]
            if fits and self.knowledge.is_at(place) and self.knowledge.is_accessible(place):
                return self._put(held, place)
        return self._put(held, self.knowledge.origin or self._first(self.goal.target_type))

    def _put(self, held: str, place: str) -> str:
        return self._reach(place) or f"{self._put_syntax} {held}{self._put_syntax.separator}{place}"

    def _light(self) -> str:
        for place, names in self.knowledge.contents.items():
            for name in names:
                if kind_of(name) == LAMP:
                    return self._go(place) or f"use {name}"
        return self._search(LAMP)

    def _search(self, wanted: str) -> str:
        unseen = [place for place in self.knowledge.receptacles if place not in self.knowledge.contents]
        if not unseen:
            raise UsageError("the household expert searched everywhere", expected=f"a {wanted}")
        place = max(unseen, key=lambda place: self._promise(place, wanted))
        return self._reach(place) or f"examine {place}"

    def _promise(self, place: str, wanted: str) -> float:
        """How likely a receptacle is to show something of use, per step that looking into it takes."""
        kind = kind_of(place)
        chance = self._can_hold(kind, wanted)
        if wanted != LAMP and self.goal.task_type is TaskType.LOOK:
            chance += self._can_hold(kind, LAMP)
        return chance / self._numbers[kind] / (2 if kind in OPENABLE else 1)

    def _can_hold(self, kind: str, wanted: str) -> float:
        if wanted == LAMP:
            return float(kind in LAMP_STANDS)
        is_target = kind == self.goal.target_type and self.goal.task_type.treatment is None
        return float(wanted in CONTENTS[kind] and not is_target)

    def _go(self, place: str) -> str | None:
        return None if self.knowledge.is_at(place) else f"go to {place}"

    def _reach(self, place: str) -> str | None:
        """The next action towards being at a receptacle with it open; ``None`` when that is so."""
        if action := self._go(place):
            return action
        return None if self.knowledge.is_accessible(place) else f"open {place}"
