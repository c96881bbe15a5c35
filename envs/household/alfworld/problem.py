"""Reader of the planning problem in a game file, as a house: rooms, things, facts and the goal.

Names follow the original: raw ids are sorted, and within a type the numbers count down. A problem is in PDDL, which
ignores case; its facts and its goal are flat lists of words in parentheses, so a full parser is not needed.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from agentrl.errors import UsageError

from ..facts import START, Facts
from ..goals import Condition, Goal, TaskType
from ..state import House
from ..vocabulary import Ability

_GROUP = re.compile(r"\(([^()]*)\)")
_COMMENT = re.compile(r";[^\n]*")
_ABILITIES = {ability.name.lower(): ability.value for ability in Ability if ability.name} | {
    "isreceptacleobject": Ability.CONTAINER.value
}
_CONDITIONS = {
    "ishot": Condition.HOT.value,
    "iscool": Condition.COOL.value,
    "isclean": Condition.CLEAN.value,
    "issliced": Condition.SLICED.value,
    "istoggled": Condition.TOGGLED.value,
}
_IN_PLACE = {"inreceptacle", "objecttype", "receptacletype"}
_GOALS = {
    TaskType.PLACE: _IN_PLACE,
    TaskType.LOOK: {
        "atlocation", "holds", "inreceptacle", "istoggled", "objecttype", "receptacleatlocation", "toggleable",
    },
    TaskType.CLEAN: {*_IN_PLACE, "cleanable", "isclean"},
    TaskType.HEAT: {*_IN_PLACE, "heatable", "ishot"},
    TaskType.COOL: {*_IN_PLACE, "coolable", "iscool"},
    TaskType.TWO: {*_IN_PLACE, "="},
}  # fmt: skip
"""Predicates of a goal of each type."""


class _Fact(NamedTuple):
    predicate: str
    arguments: tuple[str, ...]


class _Problem:
    """The facts of a problem, by predicate.

    Args:
        init: The initial facts.
    """

    def __init__(self, init: Iterable[_Fact]) -> None:
        self.facts: defaultdict[str, list[tuple[str, ...]]] = defaultdict(list)
        for fact in init:
            self.facts[fact.predicate].append(fact.arguments)
        self.names = demangle({name for found in self.facts.values() for arguments in found for name in arguments})
        location_of = dict(self.pairs("receptacleatlocation"))
        self.receptacles = sorted(location_of)
        first_at: dict[str, int] = {}
        for index, receptacle in enumerate(self.receptacles):
            first_at.setdefault(location_of[receptacle], index)
        self.pose_at: Mapping[str, int] = first_at
        """Pose of the receptacles at each location."""
        self.poses = tuple(first_at[location_of[receptacle]] for receptacle in self.receptacles)
        self.things = sorted({thing for fact in ("objecttype", "inreceptacle") for thing, _ in self.pairs(fact)})

    def pairs(self, predicate: str) -> list[tuple[str, str]]:
        """Return the facts of a predicate with two arguments."""
        return [(pair[0], pair[1]) for pair in self.facts[predicate] if len(pair) == 2]

    def types(self, of: list[str], predicate: str) -> tuple[str, ...]:
        """Return the type of each name, without the suffix; empty for a name without a type."""
        kinds = dict(self.pairs(predicate))
        return tuple(kinds.get(name, "").removesuffix("type") for name in of)

    def flags(self, values: Mapping[str, int]) -> tuple[int, ...]:
        """Return the flags of each thing; `values` are the flags by predicate."""
        flags: Counter[str] = Counter()
        for predicate, value in values.items():
            for (name,) in set(self.facts[predicate]):
                flags[name] += value
        return tuple(flags[thing] for thing in self.things)

    def numbers(self, predicate: str, index_of: Mapping[str, int]) -> tuple[tuple[int, ...], ...]:
        """Return the indices of the objects related to each thing; objects without an index are left out."""
        found: defaultdict[str, set[int]] = defaultdict(set)
        for thing, other in self.pairs(predicate):
            if other in index_of:
                found[thing].add(index_of[other])
        return tuple(tuple(sorted(found[thing])) for thing in self.things)

    def insides(self) -> tuple[tuple[int, ...], ...]:
        """Return the things in each thing."""
        index_of = {thing: index for index, thing in enumerate(self.things)}
        inside = self.pairs("inreceptacleobject")
        return tuple(
            tuple(sorted(index_of[inner] for inner, outer in inside if outer == thing and inner in index_of))
            for thing in self.things
        )

    def start(self) -> int:
        """Return the agent's pose."""
        (location,) = (location for _, location in self.pairs("atlocation"))
        return self.pose_at.get(location, START)


def read_house(problem: str, *, goal_text: str, scene: int) -> House:
    """Return the house of a planning problem.

    Args:
        problem: The problem in PDDL.
        goal_text: The game's wording of the goal.
        scene: Number of the floor plan.

    Raises:
        UsageError: the goal has none of the six types.
    """
    init, _, goal = _COMMENT.sub("", problem).lower().partition("(:goal")
    read = _Problem(_facts(init.partition("(:init")[2]))
    return House(
        scene=scene,
        receptacles=tuple(read.names[receptacle] for receptacle in read.receptacles),
        receptacle_types=read.types(read.receptacles, "receptacletype"),
        poses=read.poses,
        objects=tuple(read.names[thing] for thing in read.things),
        object_types=read.types(read.things, "objecttype"),
        places=(),
        goal=_read_goal(_facts(goal)),
        stated=_read_facts(read, goal_text),
    )


def demangle(ids: Iterable[str]) -> dict[str, str]:
    """Return a name for each raw id: the type, and a number that counts down in the order of ids.

    >>> demangle(["drawer_bar_1", "drawer_bar_2", "sink_bar_1_bar_sinkbasin"])
    {'drawer_bar_1': 'drawer 2', 'drawer_bar_2': 'drawer 1', 'sink_bar_1_bar_sinkbasin': 'sinkbasin 1'}
    """
    kinds = {}
    for name in sorted(ids):
        kind, bar, _ = name.partition("_bar_")
        if bar:
            kinds[name] = f"{kind}basin" if "basin" in name else kind
    left = Counter(kinds.values())
    names = {}
    for name, kind in kinds.items():
        names[name] = f"{kind} {left[kind]}"
        left[kind] -= 1
    return names


def _facts(text: str) -> list[_Fact]:
    words = (group.split() for group in _GROUP.findall(text))
    return [_Fact(first, tuple(rest)) for first, *rest in filter(None, words) if not first.startswith("?")]


def _read_facts(read: _Problem, goal_text: str) -> Facts:
    accepts: defaultdict[str, set[str]] = defaultdict(set)
    for receptacle, thing in read.pairs("cancontain"):
        accepts[receptacle.removesuffix("type")].add(thing.removesuffix("type"))
    openable, opened = ({name for (name,) in read.facts[predicate]} for predicate in ("openable", "opened"))
    index_of = {receptacle: index for index, receptacle in enumerate(read.receptacles)}
    return Facts(
        accepts={kind: frozenset(things) for kind, things in accepts.items()},
        openable=tuple(receptacle in openable for receptacle in read.receptacles),
        opened=tuple(receptacle in opened for receptacle in read.receptacles),
        abilities=read.flags(_ABILITIES),
        places=read.numbers("inreceptacle", index_of),
        spots=read.numbers("objectatlocation", read.pose_at),
        insides=read.insides(),
        conditions=read.flags(_CONDITIONS),
        start=read.start(),
        goal_text=goal_text,
    )


def _read_goal(facts: list[_Fact]) -> Goal:
    """Return the goal that the facts describe.

    Raises:
        UsageError: it has none of the six types.
    """
    predicates = {fact.predicate for fact in facts}
    for task_type, needed in _GOALS.items():
        if predicates == needed:
            things, targets = (_named_types(facts, predicate) for predicate in ("objecttype", "receptacletype"))
            if task_type is TaskType.LOOK:
                lamps = {fact.arguments[0] for fact in facts if fact.predicate == "istoggled"}
                targets = _named_types([fact for fact in facts if fact.arguments[0] in lamps], "objecttype")
                things -= targets
            if len(things) == len(targets) == 1:
                return Goal(task_type, things.pop(), targets.pop())
    raise UsageError(
        "the household engine does not know this kind of goal",
        got=", ".join(sorted(predicates)),
        expected="a goal of one of ALFWorld's six task types",
        hint="engine=original plays it",
    )


def _named_types(facts: Iterable[_Fact], predicate: str) -> set[str]:
    return {fact.arguments[1].removesuffix("type") for fact in facts if fact.predicate == predicate}
