"""Texts of the household world, word for word as in ALFWorld."""

from __future__ import annotations

from collections.abc import Sequence

from .goals import Condition

WELCOME = "-= Welcome to TextWorld, ALFRED! =-"
NOTHING_HAPPENS = "Nothing happens."
MIDDLE_OF_ROOM = "You are in the middle of a room. Looking quickly around you, you see {}."
EMPTY_HANDED = "You are not carrying anything."

_HELP_HEAD = (
    "Available commands:\n"
    "  look:                             look around your current location\n"
    "  inventory:                        check your current inventory\n"
    "  go to (receptacle):               move to a receptacle\n"
    "  open (receptacle):                open a receptacle\n"
    "  close (receptacle):               close a receptacle\n"
    "  take (object) from (receptacle):  take an object from a receptacle\n"
)
_HELP_TAIL = (
    "  examine (something):              examine a receptacle or an object\n"
    "  use (object):                     use an object\n"
    "  heat (object) with (receptacle):  heat an object using a receptacle\n"
    "  clean (object) with (receptacle): clean an object using a receptacle\n"
    "  cool (object) with (receptacle):  cool an object using a receptacle\n"
    "  slice (object) with (object):     slice an object using a sharp object\n"
)


def help_text(place_command: str) -> str:
    """Return the list of commands; `place_command` puts an object down: ``"move (object) to (receptacle)"``."""
    return f"{_HELP_HEAD}  {place_command}:  place an object in or on a receptacle\n{_HELP_TAIL}"


def enumerate_things(names: Sequence[str]) -> str:
    """Return a list with articles.

    >>> enumerate_things([]), enumerate_things(["fork 1"]), enumerate_things(["fork 2", "fork 1"])
    ('nothing', 'a fork 1', 'a fork 2, and a fork 1')
    """
    if len(names) < 2:
        return f"a {names[0]}" if names else "nothing"
    return f"a {', a '.join(names[:-1])}, and a {names[-1]}"


def introduction(view: str, goal: str) -> str:
    """Return the first observation: the view from the agent's pose, and the task."""
    return f"{WELCOME}\n\n{view}\n\nYour task is to: {goal}."


def room_view(receptacles: Sequence[str]) -> str:
    """Return the view from the middle of the room."""
    return MIDDLE_OF_ROOM.format(enumerate_things(receptacles))


def facing(receptacles: Sequence[str], next_to: Sequence[str] = ()) -> str:
    """Return the answer to `look` in front of receptacles.

    >>> facing(["drawer 4", "drawer 3"])
    'You are facing the drawer 4, and drawer 3. Next to it, you see nothing.'
    """
    names = receptacles[0] if len(receptacles) == 1 else f"{', '.join(receptacles[:-1])}, and {receptacles[-1]}"
    return f"You are facing the {names}. Next to it, you see {enumerate_things(next_to)}."


def describe_container(name: str, contents: Sequence[str]) -> str:
    """Return the answer to `examine` for an object that can contain others.

    >>> describe_container("mug 1", [])
    'This is a normal mug 1. In it, you see nothing.'
    """
    return f"This is a normal {name}. In it, you see {enumerate_things(contents)}."


def describe_object(name: str, condition: int) -> str:
    """Return the answer to `examine` for any other object.

    >>> describe_object("egg 1", Condition.COOL)
    'This is a cold egg 1.'
    >>> describe_object("egg 1", Condition.COOL | Condition.CLEAN | Condition.SLICED)
    'This is a cool and clean sliced egg 1.'
    """
    if condition == Condition.COOL:
        return f"This is a cold {name}."
    temperature = "hot" if condition & Condition.HOT else "cool" if condition & Condition.COOL else ""
    treated = " and ".join(filter(None, [temperature, "clean" if condition & Condition.CLEAN else ""]))
    words = " ".join(filter(None, [treated, "sliced" if condition & Condition.SLICED else ""]))
    return f"This is a {words} {name}." if words else f"There's nothing special about {name}."
