"""Writer of games in the original's format: a folder with ``game.tw-pddl`` and ``traj_data.json``.

A game's file contains its rules and its grammar (a PDDL domain and a text grammar). With those of the original package,
the original plays the written games; without them, only the household engine does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..facts import START
from ..goals import Condition, Goal, TaskType
from ..state import House
from ..vocabulary import Ability
from .game_file import GAME_FILE, MOVE_COMMAND, TRAJECTORY_FILE, UNKNOWN_GOAL

_START_LOCATION = "loc|0|0|0|30"
_ALWAYS_TYPES = ("SinkbasinType # rtype", "MicrowaveType # rtype", "FridgeType # rtype")
_ALWAYS_OBJECT_TYPES = ("KnifeType # otype", "ButterknifeType # otype")
"""Types that the original's rules require even if the house has no object of the type."""
_ESCAPES = str.maketrans({"-": "_minus_", "#": "-", "|": "_bar_", "+": "_plus_", ".": "_dot_", ",": "_comma_"})
_PREDICATES = {
    Ability.PICKUPABLE: "pickupable",
    Ability.CLEANABLE: "cleanable",
    Ability.HEATABLE: "heatable",
    Ability.COOLABLE: "coolable",
    Ability.TOGGLEABLE: "toggleable",
    Ability.SLICEABLE: "sliceable",
    Ability.CONTAINER: "isReceptacleObject",
}
_CONDITIONS = {
    Condition.HOT: "isHot",
    Condition.COOL: "isCool",
    Condition.CLEAN: "isClean",
    Condition.SLICED: "isSliced",
    Condition.TOGGLED: "isToggled",
}
_PLACED = "(objectType ?o {object}) (receptacleType ?r {target}) (inReceptacle ?o ?r)"
_TREATED = {
    TaskType.PLACE: "",
    TaskType.CLEAN: "(cleanable ?o) (isClean ?o)",
    TaskType.HEAT: "(heatable ?o) (isHot ?o)",
    TaskType.COOL: "(coolable ?o) (isCool ?o)",
}
_TWO = (
    f"(exists (?r # receptacle) (exists (?o # object) (and {_PLACED} (exists (?p # object) (and (not (= ?o ?p))"
    " (objectType ?p {object}) (receptacleType ?r {target}) (inReceptacle ?p ?r))))))"
)
_LOOK = (
    "(exists (?t # object ?r # receptacle ?a # agent ?l # location) (and (objectType ?t {target}) (toggleable ?t)"
    " (isToggled ?t) (receptacleAtLocation ?r ?l) (atLocation ?a ?l) (inReceptacle ?t ?r)))"
    " (exists (?o # object ?a # agent) (and (objectType ?o {object}) (holds ?a ?o)))"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GameRules:
    """Parts of a game file that are the same for all games."""

    domain: str = ""
    """Rules, in PDDL."""
    grammar: str = f'"{UNKNOWN_GOAL}" "{MOVE_COMMAND}"'
    """Grammar, with `UNKNOWN_GOAL` in place of the goal. The default suffices only for the household engine."""


def write_game(folder: Path, house: House, rules: GameRules | None = None) -> Path:
    """Write a game, and return its file.

    Args:
        folder: Folder of the game; created if it is missing.
        house: The game.
        rules: The original's rules, from `agentrl.envs.household.alfworld.original.package_rules`.
    """
    rules = rules or GameRules()
    goal_text = house.facts().goal_text
    game = {
        "pddl_domain": rules.domain,
        "grammar": rules.grammar.replace(UNKNOWN_GOAL, f"Your task is to: {goal_text}."),
        "pddl_problem": problem_of(house),
        "solvable": True,
        "walkthrough": None,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / GAME_FILE).write_text(json.dumps(game), encoding="utf-8")
    (folder / TRAJECTORY_FILE).write_text(json.dumps(trajectory_of(house)), encoding="utf-8")
    return folder / GAME_FILE


def trajectory_of(house: House) -> dict[str, object]:
    """Return the required content of ``traj_data.json``."""
    goal = house.goal
    in_light = goal.task_type is TaskType.LOOK
    return {
        "task_type": goal.task_type.value,
        "scene": {"scene_num": house.scene},
        "pddl_params": {
            "object_target": goal.object_type.capitalize(),
            "parent_target": "" if in_light else goal.target_type.capitalize(),
            "toggle_target": goal.target_type.capitalize() if in_light else "",
            "mrecep_target": "",
            "object_sliced": False,
        },
    }


def problem_of(house: House) -> str:
    """Return the planning problem of a house, in PDDL."""
    ids = _ids(house)
    lines = ["(define (problem game)", "(:domain alfred)", "(:objects", *_declarations(house, ids), ")", "(:init"]
    lines += [f"({' '.join(fact)})" for fact in _facts(house, ids)]
    return _escape("\n".join([*lines, ")", f"(:goal (and {_goal(house.goal)}))", ")", ""]))


@dataclass(frozen=True, slots=True)
class _Ids:
    """Raw ids in the order of the house's lists."""

    receptacles: tuple[str, ...]
    things: tuple[str, ...]

    def location(self, pose: int) -> str:
        """Return the location of a pose."""
        return _START_LOCATION if pose == START else f"loc|{pose + 1}|{pose + 1}|0|30"


def _ids(house: House) -> _Ids:
    receptacles = tuple(_id(name, number) for number, name in enumerate(house.receptacles))
    return _Ids(receptacles, tuple(_id(name, number) for number, name in enumerate(house.objects)))


def _id(name: str, number: int) -> str:
    kind = name.partition(" ")[0]
    position = f"+00.00|+00.00|+{number:02}.00"
    if kind.endswith("basin"):
        return f"{kind.removesuffix('basin').capitalize()}|{position}|{kind.capitalize()}"
    return f"{kind.capitalize()}|{position}"


def _declarations(house: House, ids: _Ids) -> list[str]:
    accepts = house.facts().accepts
    receptacle_types = {_type(kind) for kind in (*house.receptacle_types, *accepts)}
    object_types = {_type(kind) for kind in (*house.object_types, *frozenset().union(*accepts.values()))}
    object_types |= {_type(house.goal.object_type), _type(house.goal.target_type)} - receptacle_types
    declared = {f"{kind} # rtype" for kind in receptacle_types} | set(_ALWAYS_TYPES)
    declared |= {f"{kind} # otype" for kind in object_types} | set(_ALWAYS_OBJECT_TYPES)
    locations = {ids.location(pose) for pose in (*house.poses, house.facts().start)}
    return [
        "agent1 # agent",
        *sorted(declared),
        *(f"{name} # receptacle" for name in ids.receptacles),
        *(f"{name} # object" for name in ids.things),
        *(f"{location} # location" for location in sorted(locations)),
    ]


def _facts(house: House, ids: _Ids) -> Iterator[tuple[str, ...]]:
    facts = house.facts()
    yield "atLocation", "agent1", ids.location(facts.start)
    for kind, things in facts.accepts.items():
        yield from (("canContain", _type(kind), _type(thing)) for thing in sorted(things))
    for number, receptacle in enumerate(ids.receptacles):
        yield "receptacleType", receptacle, _type(house.receptacle_types[number])
        yield "receptacleAtLocation", receptacle, ids.location(house.poses[number])
        if facts.openable[number]:
            yield "openable", receptacle
        if facts.opened[number]:
            yield "opened", receptacle
    for number, thing in enumerate(ids.things):
        yield "objectType", thing, _type(house.object_types[number])
        yield from ((predicate, thing) for predicate in _predicates_of(_PREDICATES, facts.abilities[number]))
        yield from ((predicate, thing) for predicate in _predicates_of(_CONDITIONS, facts.conditions[number]))
        yield from (("inReceptacle", thing, ids.receptacles[place]) for place in facts.places[number])
        yield from (("objectAtLocation", thing, ids.location(pose)) for pose in facts.spots[number])
        yield from (("inReceptacleObject", ids.things[inner], thing) for inner in facts.insides[number])


def _predicates_of(predicates: Mapping[Ability, str] | Mapping[Condition, str], flags: int) -> list[str]:
    return [predicate for flag, predicate in predicates.items() if flags & flag.value]


def _goal(goal: Goal) -> str:
    names = {"object": _type(goal.object_type), "target": _type(goal.target_type)}
    if goal.task_type is TaskType.TWO:
        return _TWO.format(**names)
    if goal.task_type is TaskType.LOOK:
        return _LOOK.format(**names)
    placed = _PLACED.format(**names)
    return f"(exists (?r # receptacle) (exists (?o # object) (and {placed} {_TREATED[goal.task_type]})))"


def _type(kind: str) -> str:
    return f"{kind.capitalize()}Type"


def _escape(text: str) -> str:
    return text.translate(_ESCAPES)
