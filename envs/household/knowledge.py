"""What a reader of the household's text knows after each answer."""

from __future__ import annotations

import re

from .goals import Goal
from .texts import NOTHING_HAPPENS
from .vocabulary import OPENABLE

_NAME = re.compile(r"\ba (\w+ \d+)")
_ARRIVED = re.compile(r"You arrive at (\w+ \d+)\.")
_SEEN = re.compile(r"(?:On the|The) (\w+ \d+)(?: is open\. In it)?, you see (.*)\.")
_CLOSED = re.compile(r"(?:The (\w+ \d+) is closed|You close the (\w+ \d+))\.")
_TAKEN = re.compile(r"You pick up the (\w+ \d+) from the (\w+ \d+)\.")
_PUT = re.compile(r"You (?:move|put) the (\w+ \d+) (?:to|in/on) the (\w+ \d+)\.")
_TREATED = re.compile(r"You (heat|cool|clean) the (\w+ \d+) using ")
_GO = "go to "
_OPPOSITE = {"heat": "cool", "cool": "heat"}


def kind_of(name: str) -> str:
    """The type in a name.

    >>> kind_of("cabinet 8")
    'cabinet'
    """
    return name.partition(" ")[0]


class Knowledge:
    """What the answers have told so far.

    Args:
        introduction: The first observation.
        goal: What it asks for.
    """

    def __init__(self, introduction: str, goal: Goal) -> None:
        self.receptacles: list[str] = _NAME.findall(introduction)
        self.contents: dict[str, list[str]] = {}
        """What lies in each receptacle that was looked into."""
        self.held: str | None = None
        self.origin: str | None = None
        """Where the held object was taken from."""
        self.treated: set[str] = set()
        """Objects that were cleaned, heated or cooled as the goal asks."""
        self._verb = goal.task_type.treatment.verb if goal.task_type.treatment else None
        self._open: set[str] = set()
        self._here: str | None = None
        self._together = {place: {place} for place in self.receptacles}

    def is_at(self, place: str) -> bool:
        """Whether the agent stands at a receptacle, or at another one that is known to share its pose."""
        return self._here is not None and place in self._together[self._here]

    def is_accessible(self, place: str) -> bool:
        """Whether a receptacle is known to be open, or has nothing to open."""
        return place in self._open or kind_of(place) not in OPENABLE

    def learn(self, action: str, answer: str) -> None:
        """Take in what the world answered to an action."""
        if answer == NOTHING_HAPPENS:
            self._note_shared_pose(action.removeprefix(_GO))
            return
        if found := _ARRIVED.match(answer):
            self._here = found[1]
        if found := _SEEN.search(answer):
            self.contents[found[1]] = _NAME.findall(found[2])
            self._open.add(found[1])
        if found := _CLOSED.search(answer):
            self._open.discard(found[1] or found[2])
        if found := _TAKEN.match(answer):
            self.held, self.origin = found[1], found[2]
            self.contents.get(found[2], [found[1]]).remove(found[1])
        if found := _PUT.match(answer):
            self.held = None
            self.contents.setdefault(found[2], []).append(found[1])
        if found := _TREATED.match(answer):
            self._note_treatment(found[1], found[2])

    def _note_treatment(self, verb: str, name: str) -> None:
        if verb == self._verb:
            self.treated.add(name)
        elif _OPPOSITE.get(verb) == self._verb:
            self.treated.discard(name)

    def _note_shared_pose(self, place: str) -> None:
        """Going to a receptacle did nothing: the agent stands there already."""
        if self._here is not None and place in self._together:
            group = self._together[self._here] | self._together[place]
            for member in group:
                self._together[member] = group
