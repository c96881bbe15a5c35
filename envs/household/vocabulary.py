"""Vocabulary of the household world: rooms, kinds of objects and receptacles, and their possible uses.

The tables are facts of ALFWorld (object sets of actions, containment), in its lower-case names without spaces.
"""

from __future__ import annotations

import enum

HEATER, COOLER, CLEANER = "microwave", "fridge", "sinkbasin"
LAMP = "desklamp"
LAMP_STANDS = ("desk", "dresser", "sidetable")
"""Receptacles on which a lamp may stand; it cannot be picked up, and `CONTENTS` does not list it."""


class Room(enum.StrEnum):
    """Kinds of rooms; a scene is one room."""

    KITCHEN = "kitchen"
    LIVING = "living"
    BEDROOM = "bedroom"
    BATHROOM = "bathroom"


class Ability(enum.IntFlag):
    """Possible uses of an object."""

    PICKUPABLE = 1
    CLEANABLE = 2
    HEATABLE = 4
    COOLABLE = 8
    TOGGLEABLE = 16
    SLICEABLE = 32
    CONTAINER = 64


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _in_order(text: str) -> tuple[str, ...]:
    return tuple(text.split())


HEATABLE = _words("apple bread cup egg mug plate potato tomato")
COOLABLE = _words("apple bowl bread cup egg lettuce mug pan plate pot potato tomato winebottle")
CLEANABLE = _words(
    "apple bowl butterknife cloth cup dishsponge egg fork kettle knife ladle lettuce mug pan plate pot potato soapbar"
    " spatula spoon tomato"
)
TOGGLEABLE = _words("desklamp floorlamp")
SLICEABLE = _words("apple bread egg lettuce potato tomato")
KNIVES = _words("knife butterknife")
OPENABLE = _words("fridge cabinet microwave drawer safe box")
CONTAINERS = _words("bowl box cup mug pan plate pot")
"""Objects that can contain others; no action puts anything into them."""


_TABLE_TOP = _words(
    "alarmclock apple baseballbat basketball book bowl box bread butterknife cd candle cellphone cloth creditcard cup"
    " dishsponge egg fork glassbottle handtowel kettle keychain knife ladle laptop lettuce mug newspaper pan papertowel"
    " pen pencil peppershaker plate pot potato remotecontrol saltshaker soapbar soapbottle spatula spoon spraybottle"
    " statue tennisracket tissuebox toiletpaper toiletpaperroll tomato vase watch wateringcan winebottle"
)
_SEAT = _words("basketball book box cellphone cloth creditcard keychain laptop newspaper pillow remotecontrol")
_DRESSER = _words(
    "alarmclock basketball book bowl box cd candle cellphone cloth creditcard cup glassbottle keychain laptop mug"
    " newspaper pen pencil plate remotecontrol spraybottle statue tennisracket tissuebox toiletpaper toiletpaperroll"
    " vase watch wateringcan winebottle"
)

CONTENTS: dict[str, frozenset[str]] = {
    "armchair": _SEAT,
    "bathtubbasin": _words("cloth dishsponge handtowel soapbar"),
    "bed": _words("baseballbat basketball book cellphone laptop newspaper pillow tennisracket"),
    "cabinet": _words(
        "book bowl box cd candle cloth cup dishsponge glassbottle handtowel kettle ladle mug newspaper pan peppershaker"
        " plate plunger pot saltshaker soapbar soapbottle spraybottle tissuebox toiletpaper toiletpaperroll vase"
        " wateringcan winebottle"
    ),
    "cart": _words(
        "candle cloth dishsponge handtowel mug papertowel plunger soapbar soapbottle spraybottle statue tissuebox"
        " toiletpaper toiletpaperroll vase"
    ),
    "coffeemachine": _words("mug"),
    "coffeetable": _TABLE_TOP,
    "countertop": _TABLE_TOP,
    "desk": _DRESSER | {"soapbottle"},
    "diningtable": _TABLE_TOP,
    "drawer": _words(
        "book butterknife cd candle cellphone cloth creditcard dishsponge fork handtowel keychain knife ladle newspaper"
        " pen pencil peppershaker remotecontrol saltshaker soapbar soapbottle spatula spoon spraybottle tissuebox"
        " toiletpaper toiletpaperroll watch wateringcan"
    ),
    "dresser": _DRESSER,
    "fridge": _words("apple bowl bread cup egg glassbottle lettuce mug pan plate pot potato tomato winebottle"),
    "garbagecan": _words(
        "apple bread cd cloth dishsponge egg handtowel lettuce newspaper papertowel pen pencil potato soapbar"
        " soapbottle spraybottle tissuebox toiletpaper toiletpaperroll tomato winebottle"
    ),
    "handtowelholder": _words("handtowel"),
    "laundryhamper": _words("cloth"),
    "microwave": _words("apple bowl bread cup egg glassbottle mug plate potato tomato"),
    "ottoman": _SEAT,
    "safe": _words("cd cellphone creditcard keychain statue vase watch"),
    "shelf": _words(
        "alarmclock book bowl box cd candle cellphone cloth creditcard cup dishsponge glassbottle handtowel kettle"
        " keychain mug newspaper papertowel pen pencil peppershaker plate pot remotecontrol saltshaker soapbar"
        " soapbottle spraybottle statue tissuebox toiletpaper toiletpaperroll vase watch wateringcan winebottle"
    ),
    "sidetable": _TABLE_TOP,
    "sinkbasin": _words(
        "apple bowl butterknife cloth cup dishsponge egg fork glassbottle handtowel kettle knife ladle lettuce mug pan"
        " plate pot potato soapbar spatula spoon tomato"
    ),
    "sofa": _SEAT,
    "stoveburner": _words("kettle pan pot"),
    "toaster": frozenset(),
    "toilet": _words(
        "candle cloth dishsponge handtowel newspaper papertowel soapbar soapbottle spraybottle tissuebox toiletpaper"
        " toiletpaperroll"
    ),
    "toiletpaperhanger": _words("toiletpaper toiletpaperroll"),
    "towelholder": _words("towel"),
    "tvstand": _words("tissuebox"),
}
"""Object types that each type of receptacle can contain."""

ROOM_OBJECTS: dict[Room, tuple[str, ...]] = {
    Room.KITCHEN: _in_order(
        "apple mug potato plate egg cup tomato spoon bowl fork knife bread lettuce pan pot spatula butterknife"
        " dishsponge saltshaker peppershaker soapbottle winebottle kettle glassbottle ladle vase statue book"
        " creditcard pen pencil cellphone papertowel"
    ),
    Room.LIVING: _in_order(
        "keychain remotecontrol creditcard book laptop watch newspaper pillow box statue vase tissuebox plate candle"
        " cellphone pen pencil bowl wateringcan"
    ),
    Room.BEDROOM: _in_order(
        "book cd cellphone pen pencil alarmclock keychain creditcard laptop pillow mug bowl box basketball baseballbat"
        " tennisracket watch vase cloth remotecontrol tissuebox statue"
    ),
    Room.BATHROOM: _in_order(
        "soapbar cloth candle spraybottle tissuebox toiletpaper soapbottle handtowel dishsponge toiletpaperroll towel"
        " plunger papertowel vase statue"
    ),
}
"""Kinds of objects in each room, the typical ones first: small houses draw from the beginning of the list."""


def abilities_of(kind: str) -> int:
    """Return the `Ability` flags of a kind of object."""
    return _ABILITIES.get(kind, Ability.PICKUPABLE.value)


_FLAGS = (
    (CLEANABLE, Ability.CLEANABLE),
    (HEATABLE, Ability.HEATABLE),
    (COOLABLE, Ability.COOLABLE),
    (SLICEABLE, Ability.SLICEABLE),
    (CONTAINERS, Ability.CONTAINER),
)
_ABILITIES = {
    kind: Ability.PICKUPABLE.value | sum(flag.value for kinds, flag in _FLAGS if kind in kinds)
    for kind in CLEANABLE | HEATABLE | COOLABLE | SLICEABLE | CONTAINERS
} | dict.fromkeys(TOGGLEABLE, Ability.TOGGLEABLE.value)
