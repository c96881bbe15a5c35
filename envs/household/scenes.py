"""Scenes: 120 rooms, 30 of each kind, numbered as ALFWorld's floor plans, and their furniture.

A scene's furniture depends only on its number and the size of the house. No two scenes of a kind of room have the same
furniture, so training never shows the rooms of held-out scenes.
"""

from __future__ import annotations

import enum
import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from .state import number_names
from .vocabulary import OPENABLE, Room

SCENES_PER_ROOM = 30
FIRST_SCENE = {Room.KITCHEN: 1, Room.LIVING: 201, Room.BEDROOM: 301, Room.BATHROOM: 401}
HELD_OUT = {
    Room.KITCHEN: (5, 10, 15, 20, 25, 30),
    Room.LIVING: (204, 209, 214, 219, 224, 229),
    Room.BEDROOM: (303, 308, 313, 318, 323, 328),
    Room.BATHROOM: (404, 409, 414, 419, 424, 429),
}
"""Scenes of the unseen splits; they contain the four that ALFWorld holds out (10, 219, 308, 424)."""
MAX_SEARCH_COST = 38
"""Maximum number of steps to search every receptacle, so that every task can be done within 50 steps."""
_SHARED_POSE = 0.25
_NEIGHBOURLY = frozenset({"cabinet", "drawer", "shelf"})
"""Kinds of furniture that may stand so close together that several are reached from one pose."""
_FIXED: dict[Room, tuple[str, ...]] = {
    Room.KITCHEN: ("countertop", "fridge", "microwave", "sinkbasin"),
    Room.LIVING: ("coffeetable", "sidetable", "sofa"),
    Room.BEDROOM: ("bed", "desk"),
    Room.BATHROOM: ("countertop", "sinkbasin", "toilet"),
}
"""Furniture of every room of a kind, so that each of its task types is possible."""


class Size(enum.StrEnum):
    """Size of houses."""

    TINY = "tiny"
    SMALL = "small"
    MEDIUM = "medium"
    FULL = "full"
    """As in ALFWorld: up to 26 receptacles and 32 objects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Ranges of a size."""

    receptacles: Mapping[Room, tuple[int, int]]
    objects: tuple[int, int]
    object_types: int
    """Number of a room's kinds of objects that occur, the typical ones first."""


EXTENTS = {
    Size.TINY: Extent(receptacles=dict.fromkeys(Room, (5, 7)), objects=(5, 8), object_types=7),
    Size.SMALL: Extent(receptacles=dict.fromkeys(Room, (7, 10)), objects=(9, 13), object_types=11),
    Size.MEDIUM: Extent(receptacles=dict.fromkeys(Room, (10, 14)), objects=(14, 20), object_types=16),
    Size.FULL: Extent(
        receptacles={Room.KITCHEN: (20, 26), Room.LIVING: (14, 22), Room.BEDROOM: (12, 20), Room.BATHROOM: (10, 16)},
        objects=(24, 32),
        object_types=100,
    ),
}


@dataclass(frozen=True, slots=True)
class _Piece:
    kind: str
    weight: float
    most: int


def _pieces(text: str) -> tuple[_Piece, ...]:
    rows = (row.split() for row in text.split(","))
    return tuple(_Piece(kind, float(weight), int(most)) for kind, weight, most in rows)


_MOVABLE: dict[Room, tuple[_Piece, ...]] = {
    Room.KITCHEN: _pieces(
        "cabinet 7 12, drawer 5 8, stoveburner 3 4, countertop 2 3, shelf 1.5 3, diningtable 1.5 2, garbagecan 1.5 1,"
        " coffeemachine 1.5 1, toaster 1 1, sidetable 0.5 1"
    ),
    Room.LIVING: _pieces(
        "drawer 5 10, shelf 3 10, armchair 2 2, sidetable 1.5 4, cabinet 1.5 8, diningtable 1 2, dresser 1 2,"
        " garbagecan 1 1, tvstand 1 2, sofa 0.5 2, coffeetable 0.5 2, desk 0.5 1, ottoman 0.5 1, safe 0.3 1"
    ),
    Room.BEDROOM: _pieces(
        "drawer 5 12, shelf 4 10, sidetable 2 2, dresser 1.5 2, garbagecan 1 1, cabinet 1 4, armchair 0.7 2, "
        " safe 0.5 1, diningtable 0.5 1, desk 0.5 2, laundryhamper 0.5 1, bed 0.3 2"
    ),
    Room.BATHROOM: _pieces(
        "cabinet 4 9, drawer 3 8, bathtubbasin 1.5 1, garbagecan 1.5 1, handtowelholder 1.5 2, toiletpaperhanger 1.5 1,"
        " sinkbasin 1 2, shelf 1 4, towelholder 1 1, countertop 0.5 2, sidetable 0.4 1, cart 0.4 1, dresser 0.3 1"
    ),
}
"""Optional furniture: kind, relative frequency, and maximum number in a room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The furniture of a scene, in the order in which it is listed."""

    scene: int
    room: Room
    types: tuple[str, ...]
    poses: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Type and number of each receptacle."""
        return number_names(self.types)

    @property
    def search_cost(self) -> int:
        """Maximum number of steps to search every receptacle: one to go there, and one to open it, or to find out that
        a neighbour is already within reach.
        """
        shared = Counter(self.poses)
        return sum(1 + (t in OPENABLE or shared[p] > 1) for t, p in zip(self.types, self.poses, strict=True))


def room_of(scene: int) -> Room:
    """Return the kind of room of a scene.

    Raises:
        KeyError: the scene does not exist.
    """
    return _ROOM_OF[scene]


def scenes(room: Room) -> range:
    """Return the numbers of a room's scenes."""
    return range(FIRST_SCENE[room], FIRST_SCENE[room] + SCENES_PER_ROOM)


_ROOM_OF = {scene: room for room in Room for scene in scenes(room)}


def layout_of(scene: int, size: Size) -> Layout:
    """Return the furniture of a scene."""
    return _layouts(room_of(scene), size)[scene]


@functools.cache
def _layouts(room: Room, size: Size) -> dict[int, Layout]:
    taken: set[tuple[str, ...]] = set()
    layouts = {}
    for scene in scenes(room):
        random = Random(f"scene {scene} {size}")
        types = _furnish(room, EXTENTS[size], random)
        while types in taken:
            types = _furnish(room, EXTENTS[size], random)
        taken.add(types)
        layouts[scene] = Layout(scene=scene, room=room, types=types, poses=_arrange(types, random))
    return layouts


def _furnish(room: Room, extent: Extent, random: Random) -> tuple[str, ...]:
    low, high = extent.receptacles[room]
    count = low + int(random.random() * (high - low + 1))
    types = list(_FIXED[room])
    while len(types) < count:
        allowed = [
            piece for piece in _MOVABLE[room] if types.count(piece.kind) < piece.most and _fits(piece.kind, types)
        ]
        if not allowed:
            break
        types.append(_draw(allowed, random))
    return tuple(sorted(types))


def _fits(kind: str, types: list[str]) -> bool:
    return sum(1 + (t in OPENABLE or t in _NEIGHBOURLY) for t in [*types, kind]) <= MAX_SEARCH_COST


def _draw(pieces: list[_Piece], random: Random) -> str:
    point = random.random() * sum(piece.weight for piece in pieces)
    for piece in pieces:
        point -= piece.weight
        if point < 0:
            return piece.kind
    return pieces[-1].kind


def _arrange(types: tuple[str, ...], random: Random) -> tuple[int, ...]:
    poses: list[int] = []
    for index, kind in enumerate(types):
        is_shared = kind in _NEIGHBOURLY and index > 0 and types[index - 1] == kind and random.random() < _SHARED_POSE
        poses.append(poses[-1] if is_shared else index)
    return tuple(poses)
