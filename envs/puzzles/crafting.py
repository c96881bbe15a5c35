"""Crafting: gather materials and make things from them until the goal is made."""

from __future__ import annotations

import re
from random import Random

from agentrl.errors import UsageError

from .bounds import within
from .environment import puzzle_spec
from .planner import Planner
from .rules import Illegal, Played, Puzzle
from .words import words_of

MATERIALS, THINGS = words_of("materials"), words_of("things")
_GET = re.compile(r"get (\d{1,2}) ([a-z]+)", re.ASCII)
_CRAFT = re.compile(r"craft (?:1 )?([a-z]+)(?: using ([a-z0-9, ]+))?", re.ASCII)
MAX_GOT = 9


class Crafting(Puzzle):
    """The rules of crafting, after TextCraft: recipes are shown, materials are free, the goal takes several steps.

    Each instance has new recipes, so that they must be read and cannot be memorized.

    Args:
        depth: Number of crafting steps from materials to the goal.
        distractors: Number of useless recipes.
    """

    name = "crafting"
    fields = ("recipes", "goal", "held")
    action_hint = "get with a number and a material, or craft with the line of a recipe, for example: get 2 oak"
    max_steps = 40
    actions_per_turn = 5

    recipes: dict[str, dict[str, int]]
    """Ingredients of each thing, with their counts."""
    goal: str
    held: dict[str, int]

    def __init__(self, *, depth: int = 3, distractors: int = 4) -> None:
        self.depth = within("depth of crafting", depth, 1, 4)
        self.distractors = within("distractors of crafting", distractors, 0, 20)

    @property
    def task_type(self) -> str:
        """Number of crafting steps to the goal, in words."""
        return f"depth {self.depth}"

    def start(self, rng: Random) -> None:
        """Draw one thing per step, the distractors, and the ingredients of each."""
        things, made = rng.sample(THINGS, self.depth + self.distractors), {}
        for step, thing in enumerate(things[: self.depth]):
            others = rng.sample(MATERIALS, 2) + things[: max(step - 1, 0)]
            made[thing] = {name: rng.randint(1, 3) for name in rng.sample(others, rng.randint(1, 2))}
            if step:
                made[thing][things[step - 1]] = rng.randint(1, 2)
        for thing in things[self.depth :]:
            made[thing] = {name: rng.randint(1, 3) for name in rng.sample(MATERIALS, 2)}
        self.goal, self.held = things[self.depth - 1], {}
        self.recipes = {thing: made[thing] for thing in sorted(made)}

    def play(self, action: str) -> Played:
        """Get a material, or craft a thing from held ingredients."""
        if match := _GET.fullmatch(action):
            return self._get(int(match[1]), match[2])
        if match := _CRAFT.fullmatch(action):
            return self._craft(match[1], match[2])
        raise Illegal("Answer with get or craft, for example: get 2 oak")

    def text(self) -> str:
        """Return the held things."""
        held = ", ".join([f"{count} {name}" for name, count in self.held.items()])
        return f"You have: {held or 'nothing'}."

    def introduction(self) -> str:
        """Return the recipes, the goal and the held things."""
        lines = [recipe_line(thing, parts) for thing, parts in self.recipes.items()]
        return "\n".join(["Recipes:", *lines, f"Goal: craft 1 {self.goal}.", self.text()])

    def actions(self) -> list[str]:
        """Return actions for one of each material in the recipes, and for each thing that can be crafted."""
        named = {name for parts in self.recipes.values() for name in parts if name not in self.recipes}
        lines = [recipe_line(thing, parts) for thing, parts in self.recipes.items() if self._has(parts)]
        return [f"get 1 {name}" for name in sorted(named)] + lines

    def expert(self) -> CraftingExpert:
        """Return a policy that makes only what the goal needs."""
        return CraftingExpert()

    def _get(self, count: int, name: str) -> Played:
        if name in self.recipes:
            raise Illegal(f"The {name} cannot be got, only crafted.")
        if name not in MATERIALS:
            raise Illegal(f"There is no {name}.")
        if not 1 <= count <= MAX_GOT:
            raise Illegal(f"You can get 1 to {MAX_GOT} at a time.")
        self.held[name] = self.held.get(name, 0) + count
        return Played(0.0, f"You got {count} {name}.")

    def _craft(self, thing: str, ingredients: str | None) -> Played:
        parts = self.recipes.get(thing)
        if parts is None:
            raise Illegal(f"There is no recipe for {thing}.")
        if ingredients is not None and _parts(ingredients) != parts:
            raise Illegal(f"The recipe is: {recipe_line(thing, parts)}")
        if not self._has(parts):
            missing = [f"{count} {name}" for name, count in parts.items() if self.held.get(name, 0) < count]
            raise Illegal(f"You need {' and '.join(missing)} for that.")
        for name, count in parts.items():
            self.held[name] -= count
            if not self.held[name]:
                del self.held[name]
        self.held[thing] = self.held.get(thing, 0) + 1
        won = thing == self.goal
        return Played(float(won), f"You crafted 1 {thing}.", over=won, won=won)

    def _has(self, parts: dict[str, int]) -> bool:
        return all(self.held.get(name, 0) >= count for name, count in parts.items())


def recipe_line(thing: str, parts: dict[str, int]) -> str:
    """Return the text of a recipe, which is also the action.

    >>> recipe_line("box", {"oak": 2, "nail": 1})
    'craft 1 box using 2 oak, 1 nail'
    """
    return f"craft 1 {thing} using " + ", ".join([f"{count} {name}" for name, count in parts.items()])


def _parts(text: str) -> dict[str, int]:
    return {name: int(count) for count, name in re.findall(r"(\d{1,2}) ([a-z]+)", text, re.ASCII)}


class CraftingExpert(Planner):
    """Expert that reads the recipes and makes only what the goal needs."""

    def plan(self, text: str) -> list[str]:
        """Return all actions.

        Raises:
            UsageError: the text states no goal.
        """
        goal = re.search(r"Goal: craft 1 (\w+)\.", text)
        if goal is None:
            raise UsageError("the text states no goal of crafting", got=repr(text))
        recipes = {
            thing: _parts(parts) for thing, parts in re.findall(r"^craft 1 (\w+) using (.*)$", text, re.MULTILINE)
        }
        return _steps(goal[1], 1, recipes)


def _steps(name: str, count: int, recipes: dict[str, dict[str, int]]) -> list[str]:
    if name not in recipes:
        return [f"get {count} {name}"]
    steps = []
    for _ in range(count):
        for part, number in recipes[name].items():
            steps += _steps(part, number, recipes)
        steps.append(recipe_line(name, recipes[name]))
    return steps


SPEC = puzzle_spec(
    Crafting,
    description=(
        "Crafting after TextCraft: get materials, and craft things from them by new recipes in each episode, three"
        " steps deep. Options: depth (1 to 4), distractors (0 to 20 useless recipes)."
    ),
    instructions=(
        "You collect materials and craft things until you have made the goal. The recipes list what each thing is"
        " made of. A thing that no recipe makes is a material: you get it with the word get, a number and its"
        " name, for example: get 2 oak. To make a thing, copy the line of its recipe, for example: craft 1 box"
        " using 2 oak, 1 nail. You must already have everything that the recipe uses, and crafting uses it up."
    ),
    reward_range=(0.0, 1.0),
    scores={"random": 0.01, "expert": 1.0},
)
make = SPEC.make
