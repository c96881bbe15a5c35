"""The household world word for word: a transcript, then every rule and quirk."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from agentrl.envs.household.engine import World
from agentrl.envs.household.goals import Goal, TaskType, parse_goal
from agentrl.envs.household.state import House
from agentrl.envs.household.syntax import PutSyntax

TRANSCRIPT = """\
> go to sinkbasin 1
You arrive at sinkbasin 1. On the sinkbasin 1, you see a fork 2, a fork 1, a potato 4, and a potato 3.
> take potato 3 from sinkbasin 1
You pick up the potato 3 from the sinkbasin 1.
> go to microwave 1
You arrive at microwave 1. The microwave 1 is closed.
> heat potato 3 with microwave 1
You heat the potato 3 using the microwave 1.
> go to fridge 1
You arrive at fridge 1. The fridge 1 is closed.
> open fridge 1
You open the fridge 1. The fridge 1 is open. In it, you see a tomato 2, and a tomato 1.
> move potato 3 to fridge 1
You move the potato 3 to the fridge 1.
"""

INTRODUCTION = """\
-= Welcome to TextWorld, ALFRED! =-

You are in the middle of a room. Looking quickly around you, you see a cabinet 8, a cabinet 7, a cabinet 6, \
a cabinet 5, a cabinet 4, a cabinet 3, a cabinet 2, a cabinet 1, a countertop 1, a drawer 8, a drawer 7, a drawer 6, \
a drawer 5, a drawer 4, a drawer 3, a drawer 2, a drawer 1, a fridge 1, a microwave 1, a shelf 2, a shelf 1, \
and a sinkbasin 1.

Your task is to: put a hot potato in fridge."""

HELP = """\
Available commands:
  look:                             look around your current location
  inventory:                        check your current inventory
  go to (receptacle):               move to a receptacle
  open (receptacle):                open a receptacle
  close (receptacle):               close a receptacle
  take (object) from (receptacle):  take an object from a receptacle
  move (object) to (receptacle):  place an object in or on a receptacle
  examine (something):              examine a receptacle or an object
  use (object):                     use an object
  heat (object) with (receptacle):  heat an object using a receptacle
  clean (object) with (receptacle): clean an object using a receptacle
  cool (object) with (receptacle):  cool an object using a receptacle
  slice (object) with (object):     slice an object using a sharp object
"""


APPLIANCES = {"heat": "microwave 1", "cool": "fridge 1", "clean": "sinkbasin 1"}
ALWAYS = ["help", "inventory", "look"]


def do(world: World, *commands: str) -> str | None:
    """The answer to the last command; the ones before it must be admissible."""
    *first, last = commands
    for command in first:
        assert world.step(command) is not None, command
    return world.step(last)


def test_a_game_reads_like_the_original(kitchen: House) -> None:
    world = World(kitchen)
    assert world.introduction() == INTRODUCTION
    lines = TRANSCRIPT.splitlines()
    for command, answer in zip(lines[::2], lines[1::2], strict=True):
        assert not world.solved
        assert world.step(command.removeprefix("> ")) == answer
    assert world.solved


@pytest.mark.parametrize(
    ("commands", "answer"),
    [
        (["look"], "You are in the middle of a room. Looking quickly around you, you see nothing."),
        (["go to cabinet 2", "look"], "You are facing the cabinet 2. Next to it, you see nothing."),
        (["go to drawer 3", "look"], "You are facing the drawer 4, and drawer 3. Next to it, you see nothing."),
        (["inventory"], "You are not carrying anything."),
        (["go to countertop 1", "take mug 1 from countertop 1", "inventory"], "You are carrying: a mug 1."),
        (["help"], HELP),
        (["go to shelf 1"], "You arrive at shelf 1. On the shelf 1, you see nothing."),
        (["go to drawer 1", "open drawer 1"], "You open the drawer 1. The drawer 1 is open. In it, you see nothing."),
        (["go to drawer 1", "open drawer 1", "close drawer 1"], "You close the drawer 1."),
        (["go to drawer 1", "open drawer 1", "go to shelf 1", "go to drawer 1"],
         "You arrive at drawer 1. The drawer 1 is open. In it, you see nothing."),
        (["go to drawer 1", "examine drawer 1"], "The drawer 1 is closed."),
        (["go to drawer 3", "examine drawer 4"], "The drawer 4 is closed."),
        (["go to drawer 3", "open drawer 4"], "You open the drawer 4. The drawer 4 is open. In it, you see a spoon 1."),
        (["go to countertop 1", "take mug 1 from countertop 1", "examine mug 1"],
         "This is a normal mug 1. In it, you see nothing."),
        (["  look\n"], "You are in the middle of a room. Looking quickly around you, you see nothing."),
    ],
)  # fmt: skip
def test_answers(kitchen: House, commands: list[str], answer: str) -> None:
    assert do(World(kitchen), *commands) == answer


@pytest.mark.parametrize(
    "commands",
    [
        ["Go to shelf 1"],
        ["go to  shelf 1"],
        ["go shelf 1"],
        ["go to shelf 3"],
        ["go to shelf 1", "go to shelf 1"],
        ["go to drawer 3", "go to drawer 4"],
        ["look around"],
        ["inventory please"],
        ["help me"],
        [""],
        ["open fridge 1"],
        ["go to countertop 1", "open countertop 1"],
        ["go to fridge 1", "close fridge 1"],
        ["go to fridge 1", "open fridge 1", "open fridge 1"],
        ["go to fridge 1", "take tomato 1 from fridge 1"],
        ["go to countertop 1", "take mug 1"],
        ["go to countertop 1", "take mug 1 from shelf 1"],
        ["go to countertop 1", "take mug 1 from countertop 1", "take knife 1 from countertop 1"],
        ["go to countertop 1", "take mug 1 from countertop 1", "take mug 1 from countertop 1"],
        ["go to countertop 1", "take mug 1 from countertop 1", "go to fridge 1", "move mug 1 to fridge 1"],
        ["go to countertop 1", "take bread 1 from countertop 1", "go to shelf 1", "move bread 1 to shelf 1"],
        ["go to countertop 1", "take mug 1 from countertop 1", "put mug 1 in/on countertop 1"],
        ["go to countertop 1", "move mug 1 to countertop 1"],
        ["go to countertop 1", "examine mug 1"],
        ["go to countertop 1", "slice bread 1 with knife 1"],
        ["go to countertop 1", "take knife 1 from countertop 1", "slice mug 1 with knife 1"],
        ["go to countertop 1", "take knife 1 from countertop 1", "go to shelf 1", "slice bread 1 with knife 1"],
        ["go to microwave 1", "heat mug 1 with microwave 1"],
        ["go to countertop 1", "take knife 1 from countertop 1", "go to microwave 1", "heat knife 1 with microwave 1"],
        ["go to countertop 1", "take mug 1 from countertop 1", "go to fridge 1", "heat mug 1 with fridge 1"],
        ["go to countertop 1", "take mug 1 from countertop 1", "heat mug 1 with microwave 1"],
        ["use mug 1"],
        ["dance"],
    ],
)
def test_what_is_not_admissible_does_nothing(kitchen: House, commands: list[str]) -> None:
    world = World(kitchen)
    for command in commands[:-1]:
        assert world.step(command) is not None
    before = world.state.to_plain()
    assert world.step(commands[-1]) is None
    assert world.state.to_plain() == before


def test_a_closed_appliance_works(kitchen: House) -> None:
    world = World(kitchen)
    do(world, "go to countertop 1", "take mug 1 from countertop 1", "go to fridge 1")
    assert world.step("cool mug 1 with fridge 1") == "You cool the mug 1 using the fridge 1."


@pytest.mark.parametrize(
    ("treatments", "description"),
    [
        ([], "There's nothing special about potato 1."),
        (["heat"], "This is a hot potato 1."),
        (["cool"], "This is a cold potato 1."),
        (["clean"], "This is a clean potato 1."),
        (["heat", "cool"], "This is a cold potato 1."),
        (["cool", "heat"], "This is a hot potato 1."),
        (["clean", "heat"], "This is a hot and clean potato 1."),
        (["cool", "clean"], "This is a cool and clean potato 1."),
        (["clean", "heat", "cool"], "This is a cool and clean potato 1."),
        (["slice"], "This is a sliced potato 1."),
        (["slice", "heat"], "This is a hot sliced potato 1."),
        (["slice", "cool"], "This is a cool sliced potato 1."),
        (["slice", "clean"], "This is a clean sliced potato 1."),
        (["slice", "clean", "heat"], "This is a hot and clean sliced potato 1."),
        (["slice", "clean", "cool"], "This is a cool and clean sliced potato 1."),
    ],
)
def test_examining_shows_the_condition_of_an_object(kitchen: House, treatments: list[str], description: str) -> None:
    world = World(kitchen)
    do(world, "go to countertop 1")
    if "slice" in treatments:
        do(world, "take knife 1 from countertop 1")
        assert world.step("slice potato 1 with knife 1") == "You sliced the potato 1 with the knife 1."
        do(world, "move knife 1 to countertop 1")
    do(world, "take potato 1 from countertop 1")
    for verb in treatments:
        if verb != "slice":
            place = APPLIANCES[verb]
            answer = do(world, f"go to {place}", f"{verb} potato 1 with {place}")
            assert answer == f"You {verb} the potato 1 using the {place}."
    assert world.step("examine potato 1") == description


def test_slicing_reaches_into_closed_receptacles_and_nowhere_else(build_house: Callable[..., House]) -> None:
    house = build_house("put a knife in drawer", {"fridge 1": ["tomato"], "countertop 1": ["knife"]})
    world = World(house)
    do(world, "go to countertop 1", "take knife 1 from countertop 1", "go to fridge 1")
    assert "slice tomato 1 with knife 1" in world.admissible()
    assert world.step("slice tomato 1 with knife 1") == "You sliced the tomato 1 with the knife 1."


def test_a_thing_moved_between_neighbours_lies_next_to_them_too(kitchen: House) -> None:
    world = World(kitchen)
    do(world, "go to drawer 3", "open drawer 3", "open drawer 4", "take spoon 1 from drawer 4")
    assert world.step("look") == "You are facing the drawer 4, and drawer 3. Next to it, you see nothing."
    do(world, "move spoon 1 to drawer 4")
    assert world.step("look") == "You are facing the drawer 4, and drawer 3. Next to it, you see nothing."
    do(world, "take spoon 1 from drawer 4", "move spoon 1 to drawer 3")
    assert world.step("look") == "You are facing the drawer 4, and drawer 3. Next to it, you see a spoon 1."
    do(world, "go to shelf 1")
    assert world.step("look") == "You are facing the shelf 1. Next to it, you see nothing."


def test_a_lamp_stays_on_and_cannot_be_taken(study: House) -> None:
    world = World(study)
    assert do(world, "go to desk 1", "take desklamp 1 from desk 1") is None
    assert world.step("use desklamp 1") == "You turn on the desklamp 1."
    state = world.state.to_plain()
    assert world.step("use desklamp 1") == "You turn on the desklamp 1."
    assert world.state.to_plain() == state


def test_old_syntax_uses_put(kitchen: House) -> None:
    world = World(kitchen, put_syntax=PutSyntax.PUT)
    do(world, "go to countertop 1", "take mug 1 from countertop 1")
    assert "put mug 1 in/on countertop 1" in world.admissible()
    assert world.step("move mug 1 to countertop 1") is None
    assert world.step("put mug 1 in/on countertop 1") == "You put the mug 1 in/on the countertop 1."
    assert "  put (object) in/on (receptacle):  place an object in or on a receptacle\n" in str(world.step("help"))


def test_admissible_commands_are_listed_as_in_the_original(kitchen: House) -> None:
    world = World(kitchen)
    assert world.admissible() == sorted([*(f"go to {name}" for name in kitchen.receptacles), *ALWAYS])
    world.step("go to drawer 3")
    elsewhere = [f"go to {name}" for name in kitchen.receptacles if name not in ("drawer 3", "drawer 4")]
    here = ["examine drawer 3", "examine drawer 4", "open drawer 3", "open drawer 4"]
    assert world.admissible() == sorted([*elsewhere, *here, *ALWAYS])
    do(world, "go to sinkbasin 1", "take potato 3 from sinkbasin 1")
    elsewhere = [f"go to {name}" for name in kitchen.receptacles if name != "sinkbasin 1"]
    here = ["clean potato 3 with sinkbasin 1", "examine potato 3", "examine sinkbasin 1"]
    assert world.admissible() == sorted([*elsewhere, *here, "move potato 3 to sinkbasin 1", *ALWAYS])


@pytest.mark.parametrize(
    ("goal", "things", "commands"),
    [
        ("put some mug on shelf", {"countertop 1": ["mug"]},
         ["go to countertop 1", "take mug 1 from countertop 1", "go to shelf 2", "move mug 1 to shelf 2"]),
        ("clean some mug and put it in shelf", {"countertop 1": ["mug"]},
         ["go to countertop 1", "take mug 1 from countertop 1", "go to sinkbasin 1", "clean mug 1 with sinkbasin 1",
          "go to shelf 2", "move mug 1 to shelf 2"]),
        ("put a cool mug in shelf", {"shelf 1": ["mug"]},
         ["go to shelf 1", "take mug 1 from shelf 1", "go to fridge 1", "cool mug 1 with fridge 1", "go to shelf 1",
          "move mug 1 to shelf 1"]),
        ("find two mug and put them in shelf", {"countertop 1": ["mug"], "shelf 1": ["mug"]},
         ["go to countertop 1", "take mug 2 from countertop 1", "go to shelf 1", "move mug 2 to shelf 1"]),
    ],
)  # fmt: skip
def test_a_goal_is_reached_by_its_last_command_only(
    build_house: Callable[..., House], goal: str, things: dict[str, list[str]], commands: list[str]
) -> None:
    house = build_house(goal, things)
    world = World(house)
    for command in commands:
        assert not world.solved
        assert world.step(command) is not None, command
    assert world.solved


def test_two_things_in_two_receptacles_are_not_two_in_one(build_house: Callable[..., House]) -> None:
    assert not World(build_house("put two mug in shelf", {"shelf 1": ["mug"], "shelf 2": ["mug"]})).solved
    assert World(build_house("put two mug in shelf", {"shelf 1": ["mug", "mug"]})).solved


def test_what_is_hot_must_still_be_hot_in_the_end(kitchen: House) -> None:
    world = World(kitchen)
    do(world, "go to countertop 1", "take potato 1 from countertop 1", "go to microwave 1")
    do(world, "heat potato 1 with microwave 1", "go to fridge 1", "cool potato 1 with fridge 1", "open fridge 1")
    world.step("move potato 1 to fridge 1")
    assert not world.solved


def test_looking_in_light_needs_the_thing_in_hand_the_lamp_on_and_near(study: House) -> None:
    world = World(study)
    do(world, "go to desk 1", "use desklamp 1", "go to bed 1", "take book 1 from bed 1")
    assert not world.solved
    assert world.step("go to desk 1") is not None
    assert world.solved


@pytest.mark.parametrize("task_type", TaskType)
@pytest.mark.parametrize("template", [0, 1])
def test_goals_can_be_read_back(task_type: TaskType, template: int) -> None:
    goal = Goal(task_type, "soapbar", "desklamp", template)
    assert parse_goal(goal.text) == goal


def test_other_texts_are_no_goals() -> None:
    assert parse_goal("fly a kite in garden") is None
