"""Descriptions of Gymnasium's own environments: the goal, and names of their actions and observations."""

from __future__ import annotations

from dataclasses import dataclass

_LAKE_MOVES = ("left", "down", "right", "up")
_CLIFF_MOVES = ("up", "right", "down", "left")
_LUNAR_PARTS = (
    "x",
    "y",
    "velocity in x",
    "velocity in y",
    "angle",
    "angular velocity",
    "left leg touches",
    "right leg touches",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """Description of an environment."""

    goal: str
    actions: tuple[str, ...] = ()
    """Names of a discrete space's actions, in the space's order."""
    parts: tuple[str, ...] = ()
    """Names of the numbers of a flat observation, in their order."""


_LAKE = Words(
    goal="Walk over the ice (F) from the start (S) to the goal (G); a hole (H) ends the walk. You stand on the marked"
    " field. The ice may be slippery.",
    actions=_LAKE_MOVES,
)
_CLIFF = Words(
    goal="Walk from the lower left corner to the target (T); you are x. A step onto the cliff (C) costs 100 and takes"
    " you back to the start; any other step costs 1.",
    actions=_CLIFF_MOVES,
)
WORDS: dict[str, Words] = {
    "Acrobot": Words(
        goal="Swing the free end of two linked bars above the line, by a torque on the joint between them.",
        actions=("torque -1", "torque 0", "torque 1"),
        parts=("cos 1", "sin 1", "cos 2", "sin 2", "angular velocity 1", "angular velocity 2"),
    ),
    "Blackjack": Words(
        goal="Come closer to 21 than the dealer without exceeding it.",
        actions=("stick", "hit"),
        parts=("your sum", "dealer's card", "usable ace"),
    ),
    "CartPole": Words(
        goal="Keep the pole upright and the cart within 2.4 of the middle, by pushing the cart.",
        actions=("left", "right"),
        parts=("cart position", "cart velocity", "pole angle", "pole angular velocity"),
    ),
    "CliffWalking": _CLIFF,
    "CliffWalkingSlippery": _CLIFF,
    "FrozenLake": _LAKE,
    "FrozenLake8x8": _LAKE,
    "LunarLander": Words(
        goal="Land gently on the pad at (0, 0).",
        actions=("nothing", "left engine", "main engine", "right engine"),
        parts=_LUNAR_PARTS,
    ),
    "LunarLanderContinuous": Words(
        goal="Land gently on the pad at (0, 0). An action is the power of the main engine and of the side engines,"
        " each from -1 to 1.",
        parts=_LUNAR_PARTS,
    ),
    "MountainCar": Words(
        goal="Drive the car up to position 0.5 on the right hill; the engine alone is too weak, so swing.",
        actions=("push left", "coast", "push right"),
        parts=("position", "velocity"),
    ),
    "MountainCarContinuous": Words(
        goal="Drive the car up to position 0.45 on the right hill; the engine alone is too weak, so swing. An action"
        " is a force from -1 to 1.",
        parts=("position", "velocity"),
    ),
    "Pendulum": Words(
        goal="Swing the pendulum up and hold it there. An action is a torque from -2 to 2.",
        parts=("x", "y", "angular velocity"),
    ),
    "Taxi": Words(
        goal="Fetch the passenger (blue) and set them down at the destination (magenta). The taxi is yellow, and green"
        " with the passenger in it. It can drive through ':' but not through '|'. A step costs 1, a wrong pickup or"
        " dropoff 10; the right dropoff gives 20.",
        actions=("south", "north", "east", "west", "pickup", "dropoff"),
    ),
}
"""Descriptions by the name in the environment's id, without namespace and version."""
