"""The six kinds of tasks, and the wordings and conditions of their goals."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import NamedTuple

from .vocabulary import CLEANABLE, CLEANER, COOLABLE, COOLER, HEATABLE, HEATER, Room


class TaskType(enum.StrEnum):
    """Kinds of tasks, under ALFWorld's names."""

    PLACE = "pick_and_place_simple"
    LOOK = "look_at_obj_in_light"
    CLEAN = "pick_clean_then_place_in_recep"
    HEAT = "pick_heat_then_place_in_recep"
    COOL = "pick_cool_then_place_in_recep"
    TWO = "pick_two_obj_and_place"

    @property
    def treatment(self) -> Treatment | None:
        """Treatment of the object in the clean, heat and cool tasks."""
        return TREATMENTS.get(self)

    @property
    def rooms(self) -> tuple[Room, ...]:
        """The rooms in which such a task is possible."""
        return _ROOMS.get(self, tuple(Room))


class Treatment(NamedTuple):
    """An action that changes an object at an appliance."""

    verb: str
    appliance: str
    objects: frozenset[str]


class Condition(enum.IntFlag):
    """Conditions of an object after treatments."""

    HOT = 1
    COOL = 2
    CLEAN = 4
    SLICED = 8
    TOGGLED = 16


TREATMENTS = {
    TaskType.CLEAN: Treatment("clean", CLEANER, CLEANABLE),
    TaskType.HEAT: Treatment("heat", HEATER, HEATABLE),
    TaskType.COOL: Treatment("cool", COOLER, COOLABLE),
}
_ROOMS = {
    TaskType.LOOK: (Room.LIVING, Room.BEDROOM),
    TaskType.CLEAN: (Room.KITCHEN, Room.BATHROOM),
    TaskType.HEAT: (Room.KITCHEN,),
    TaskType.COOL: (Room.KITCHEN,),
}
TEMPLATES: dict[TaskType, tuple[str, str]] = {
    TaskType.PLACE: ("put a {object} in {target}", "put some {object} on {target}"),
    TaskType.LOOK: ("look at {object} under the {target}", "examine the {object} with the {target}"),
    TaskType.CLEAN: ("put a clean {object} in {target}", "clean some {object} and put it in {target}"),
    TaskType.HEAT: ("put a hot {object} in {target}", "heat some {object} and put it in {target}"),
    TaskType.COOL: ("put a cool {object} in {target}", "cool some {object} and put it in {target}"),
    TaskType.TWO: ("put two {object} in {target}", "find two {object} and put them in {target}"),
}
REQUIRED_CONDITION = {
    TaskType.CLEAN: Condition.CLEAN.value,
    TaskType.HEAT: Condition.HOT.value,
    TaskType.COOL: Condition.COOL.value,
}
_PATTERNS = [
    (task_type, re.compile(template.format(object=r"(?P<object>\w+)", target=r"(?P<target>\w+)")))
    for task_type, templates in TEMPLATES.items()
    for template in templates
]


@dataclass(frozen=True, slots=True)
class Goal:
    """Goal of a task."""

    task_type: TaskType
    object_type: str
    target_type: str
    """Type of the receptacle, or of the lamp."""
    template: int = 0
    """Index of the wording: 0 or 1."""

    @property
    def text(self) -> str:
        """The goal in words, as after "Your task is to: "."""
        return TEMPLATES[self.task_type][self.template].format(object=self.object_type, target=self.target_type)

    @property
    def object_count(self) -> int:
        """Number of objects of the type that the goal asks for."""
        return 2 if self.task_type is TaskType.TWO else 1


def parse_goal(text: str) -> Goal | None:
    """Return the goal of a text; ``None`` if the text has none of the twelve wordings.

    >>> goal = parse_goal("put a hot potato in fridge")
    >>> goal.task_type.value, goal.object_type, goal.target_type
    ('pick_heat_then_place_in_recep', 'potato', 'fridge')
    """
    for position, (task_type, pattern) in enumerate(_PATTERNS):
        if match := pattern.fullmatch(text):
            return Goal(task_type, match["object"], match["target"], position % 2)
    return None
