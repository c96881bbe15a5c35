"""The state of a house, and the actions that it allows."""

from __future__ import annotations

from collections import defaultdict

from .goals import REQUIRED_CONDITION, TREATMENTS, Condition, TaskType
from .state import NOTHING, House, State
from .texts import enumerate_things
from .vocabulary import KNIVES, Ability

TREATMENT_OF = {treatment.verb: treatment for treatment in TREATMENTS.values()}
PICKUPABLE, TOGGLEABLE, SLICEABLE = Ability.PICKUPABLE.value, Ability.TOGGLEABLE.value, Ability.SLICEABLE.value
_TOGGLED = Condition.TOGGLED.value
_TREATABLE = {"clean": Ability.CLEANABLE.value, "heat": Ability.HEATABLE.value, "cool": Ability.COOLABLE.value}


class Situation:
    """A house in some state. Receptacles and things are indices into the house's lists.

    Args:
        house: The constant part.
        state: The changing part; by default the initial state.
    """

    def __init__(self, house: House, state: State | None = None) -> None:
        self.house = house
        self.facts = house.facts()
        self.state = State.initial(self.facts) if state is None else state
        self.receptacle_named = {name: index for index, name in enumerate(house.receptacles)}
        self.thing_named = {name: index for index, name in enumerate(house.objects)}
        self.at_pose: defaultdict[int, list[int]] = defaultdict(list)
        for receptacle, pose in enumerate(house.poses):
            self.at_pose[pose].append(receptacle)

    def reachable(self, name: str) -> int | None:
        """Return the receptacle with this name if it is at the agent's pose."""
        receptacle = self.receptacle_named.get(name)
        return receptacle if receptacle is not None and self.house.poses[receptacle] == self.state.pose else None

    def here(self) -> list[int]:
        """Return the receptacles at the agent's pose."""
        return self.at_pose.get(self.state.pose, [])

    def is_accessible(self, receptacle: int) -> bool:
        """Return True if things can be put into a receptacle and taken out."""
        return self.state.opened[receptacle] or not self.facts.openable[receptacle]

    def is_held(self, name: str) -> bool:
        """Return True if the agent holds the thing with this name."""
        return self.state.held != NOTHING and self.house.objects[self.state.held] == name

    def is_near(self, thing: int) -> bool:
        """Return True if a thing lies in a receptacle at the agent's pose, open or not."""
        poses, pose = self.house.poses, self.state.pose
        return any(poses[place] == pose for place in self.state.places[thing])

    def can_take(self, thing: int, receptacle: int) -> bool:
        """Return True if a thing can be taken out of a reachable receptacle."""
        return (
            self.state.held == NOTHING
            and receptacle in self.state.places[thing]
            and self.facts.abilities[thing] & PICKUPABLE > 0
            and self.is_accessible(receptacle)
        )

    def can_put(self, receptacle: int) -> bool:
        """Return True if the held thing can be put into a reachable receptacle."""
        accepted = self.facts.accepts.get(self.house.receptacle_types[receptacle], ())
        return self.is_accessible(receptacle) and self.house.object_types[self.state.held] in accepted

    def can_treat(self, verb: str, receptacle: int) -> bool:
        """Return True if the held thing can be cleaned, heated or cooled at a reachable receptacle."""
        at_appliance = self.house.receptacle_types[receptacle] == TREATMENT_OF[verb].appliance
        return at_appliance and self.facts.abilities[self.state.held] & _TREATABLE[verb] > 0

    def can_use(self, thing: int) -> bool:
        """Return True if a thing can be turned on."""
        return self.facts.abilities[thing] & TOGGLEABLE > 0 and self.is_near(thing)

    def can_slice(self, thing: int) -> bool:
        """Return True if the held thing can slice another one."""
        with_knife = self.house.object_types[self.state.held] in KNIVES
        sliceable = self.facts.abilities[thing] & SLICEABLE > 0
        return with_knife and sliceable and self.state.pose in self.state.spots[thing]

    def contents_text(self, receptacle: int) -> str:
        """Describe a receptacle and its visible contents."""
        name = self.house.receptacles[receptacle]
        if not self.facts.openable[receptacle]:
            return f"On the {name}, you see {self._list_contents(receptacle)}."
        if not self.state.opened[receptacle]:
            return f"The {name} is closed."
        return f"The {name} is open. In it, you see {self._list_contents(receptacle)}."

    def _list_contents(self, receptacle: int) -> str:
        objects = self.house.objects
        return enumerate_things([objects[i] for i, places in enumerate(self.state.places) if receptacle in places])

    def next_to(self) -> list[str]:
        """Return the things that `look` lists: those still here, once per receptacle here that they were taken from."""
        state, here = self.state, self.here()
        return [
            self.house.objects[thing]
            for thing, left in enumerate(state.left)
            if left and state.pose in state.spots[thing]
            for receptacle in here
            if receptacle in left
        ]

    def is_goal_reached(self) -> bool:
        """Return True if the state satisfies the goal."""
        if self.house.goal.task_type is TaskType.LOOK:
            return self._is_held_in_light()
        goal, house, state = self.house.goal, self.house, self.state
        required = REQUIRED_CONDITION.get(goal.task_type, 0)
        places = [
            place
            for kind, places, condition in zip(house.object_types, state.places, state.conditions, strict=True)
            if kind == goal.object_type and condition & required == required
            for place in places
            if house.receptacle_types[place] == goal.target_type
        ]
        return any(places.count(place) >= goal.object_count for place in places)

    def _is_held_in_light(self) -> bool:
        goal, house, state = self.house.goal, self.house, self.state
        if state.held == NOTHING or house.object_types[state.held] != goal.object_type:
            return False
        return any(
            kind == goal.target_type and state.conditions[thing] & _TOGGLED and self.is_near(thing)
            for thing, kind in enumerate(house.object_types)
        )
