"""What is the case in a house, and what is therefore possible."""

from __future__ import annotations

from collections import defaultdict

from .goals import REQUIRED_CONDITION, TREATMENTS, Condition, TaskType
from .state import HELD, NOTHING, House, State
from .texts import enumerate_things
from .vocabulary import CONTENTS, KNIVES, OPENABLE, SLICEABLE, TOGGLEABLE

TREATMENT_OF = {treatment.verb: treatment for treatment in TREATMENTS.values()}


class Situation:
    """A house in some state. Receptacles and things are indices into the house's lists.

    Args:
        house: What does not change.
        state: What does; the initial state when left out.
    """

    def __init__(self, house: House, state: State | None = None) -> None:
        self.house = house
        self.state = State.initial(house) if state is None else state
        self.receptacle_named = {name: index for index, name in enumerate(house.receptacles)}
        self.thing_named = {name: index for index, name in enumerate(house.objects)}
        self.at_pose: defaultdict[int, list[int]] = defaultdict(list)
        for receptacle, pose in enumerate(house.poses):
            self.at_pose[pose].append(receptacle)

    def reachable(self, name: str) -> int | None:
        """The receptacle of this name, if it is at the agent's pose."""
        receptacle = self.receptacle_named.get(name)
        return receptacle if receptacle is not None and self.house.poses[receptacle] == self.state.pose else None

    def is_openable(self, receptacle: int) -> bool:
        """Whether a receptacle has a door or a lid."""
        return self.house.receptacle_types[receptacle] in OPENABLE

    def is_accessible(self, receptacle: int) -> bool:
        """Whether things can be put into a receptacle and taken out."""
        return self.state.opened[receptacle] or not self.is_openable(receptacle)

    def is_held(self, name: str) -> bool:
        """Whether the thing of this name is in the hand."""
        return self.state.held != NOTHING and self.house.objects[self.state.held] == name

    def is_near(self, thing: int) -> bool:
        """Whether a thing lies in a receptacle at the agent's pose, open or not."""
        place = self.state.places[thing]
        return place != HELD and self.house.poses[place] == self.state.pose

    def can_take(self, thing: int, receptacle: int) -> bool:
        """Whether a thing can be taken out of a receptacle, which is within reach."""
        return (
            self.state.held == NOTHING
            and self.state.places[thing] == receptacle
            and self.house.object_types[thing] not in TOGGLEABLE
            and self.is_accessible(receptacle)
        )

    def can_put(self, receptacle: int) -> bool:
        """Whether the held thing can be put into a receptacle, which is within reach."""
        accepted = CONTENTS[self.house.receptacle_types[receptacle]]
        return self.is_accessible(receptacle) and self.house.object_types[self.state.held] in accepted

    def can_treat(self, verb: str, receptacle: int) -> bool:
        """Whether the held thing can be cleaned, heated or cooled at a receptacle, which is within reach."""
        treatment = TREATMENT_OF[verb]
        at_appliance = self.house.receptacle_types[receptacle] == treatment.appliance
        return at_appliance and self.house.object_types[self.state.held] in treatment.objects

    def can_slice(self, thing: int) -> bool:
        """Whether the held thing can slice another one."""
        with_knife = self.house.object_types[self.state.held] in KNIVES
        return with_knife and self.house.object_types[thing] in SLICEABLE and self.is_near(thing)

    def contents_text(self, receptacle: int) -> str:
        """What a look at a receptacle says."""
        name = self.house.receptacles[receptacle]
        if not self.is_openable(receptacle):
            return f"On the {name}, you see {self._list_contents(receptacle)}."
        if not self.state.opened[receptacle]:
            return f"The {name} is closed."
        return f"The {name} is open. In it, you see {self._list_contents(receptacle)}."

    def _list_contents(self, receptacle: int) -> str:
        objects = self.house.objects
        return enumerate_things([objects[i] for i, place in enumerate(self.state.places) if place == receptacle])

    def is_goal_reached(self) -> bool:
        """Whether the state is what the goal asks for."""
        if self.house.goal.task_type is TaskType.LOOK:
            return self._is_held_in_light()
        goal, house, state = self.house.goal, self.house, self.state
        required = REQUIRED_CONDITION.get(goal.task_type, 0)
        places = [
            place
            for kind, place, condition in zip(house.object_types, state.places, state.conditions, strict=True)
            if kind == goal.object_type
            and place != HELD
            and condition & required == required
            and house.receptacle_types[place] == goal.target_type
        ]
        return any(places.count(place) >= goal.needed for place in places)

    def _is_held_in_light(self) -> bool:
        goal, house, state = self.house.goal, self.house, self.state
        if state.held == NOTHING or house.object_types[state.held] != goal.object_type:
            return False
        return any(
            kind == goal.target_type and state.conditions[thing] & Condition.TOGGLED and self.is_near(thing)
            for thing, kind in enumerate(house.object_types)
        )
