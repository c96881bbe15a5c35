"""The rules: the effect of each command on the state, and its answer.

A command is admissible exactly if `World.step` answers it; otherwise the answer is ``None``, which the environment
shows as "Nothing happens.". Quirks of the original that are kept: the agent teleports; appliances work closed; a lamp
that was used once stays on; slicing reaches into closed receptacles; nothing is ever full; `look` also lists a thing
that was moved between two receptacles at one pose as "next to" them.
"""

from __future__ import annotations

from .admissible import admissible_commands
from .goals import Condition
from .situation import TREATMENT_OF, Situation
from .state import NOTHING, House, State
from .syntax import PutSyntax
from .texts import EMPTY_HANDED, describe_container, describe_object, facing, help_text, introduction, room_view
from .vocabulary import Ability

_EFFECTS = {
    "clean": (Condition.CLEAN.value, 0),
    "heat": (Condition.HOT.value, Condition.COOL.value),
    "cool": (Condition.COOL.value, Condition.HOT.value),
}
"""Flags that each verb sets and clears."""
_CONTAINER = Ability.CONTAINER.value


class World(Situation):
    """A house in some state, and the effects of commands.

    Args:
        house: The constant part of the game.
        state: The current state; by default the initial one.
        put_syntax: Form of the command that puts an object down.
    """

    def __init__(self, house: House, state: State | None = None, put_syntax: PutSyntax = PutSyntax.MOVE) -> None:
        super().__init__(house, state)
        self.put_syntax = put_syntax
        self._commands = {
            "go": self._go,
            "take": self._take,
            put_syntax.value: self._put,
            "open": self._open,
            "close": self._close,
            "examine": self._examine,
            "use": self._use,
            "slice": self._slice,
            "look": self._look,
            "inventory": self._inventory,
            "help": self._help,
        }
        self.solved = self.is_goal_reached()

    def introduction(self) -> str:
        """Return the first observation."""
        view = self._view() if self.here() else room_view(self.house.receptacles)
        return introduction(view, self.facts.goal_text)

    def step(self, command: str) -> str | None:
        """Carry out a command and return its answer; ``None``, without a change, if it is not admissible."""
        verb, _, rest = command.strip().partition(" ")
        if verb in TREATMENT_OF:
            return self._treat(verb, rest)
        handler = self._commands.get(verb)
        return None if handler is None else handler(rest)

    def _go(self, rest: str) -> str | None:
        to, _, name = rest.partition(" ")
        receptacle = self.receptacle_named.get(name)
        if to != "to" or receptacle is None or self.house.poses[receptacle] == self.state.pose:
            return None
        self.state.pose = self.house.poses[receptacle]
        self.solved = self.is_goal_reached()
        return f"You arrive at {name}. {self.contents_text(receptacle)}"

    def _open(self, name: str) -> str | None:
        receptacle = self.reachable(name)
        if receptacle is None or not self.facts.openable[receptacle] or self.state.opened[receptacle]:
            return None
        self.state.opened[receptacle] = True
        return f"You open the {name}. {self.contents_text(receptacle)}"

    def _close(self, name: str) -> str | None:
        receptacle = self.reachable(name)
        if receptacle is None or not (self.facts.openable[receptacle] and self.state.opened[receptacle]):
            return None
        self.state.opened[receptacle] = False
        return f"You close the {name}."

    def _take(self, rest: str) -> str | None:
        name, _, place = rest.partition(" from ")
        thing, receptacle = self.thing_named.get(name), self.reachable(place)
        if thing is None or receptacle is None or not self.can_take(thing, receptacle):
            return None
        state = self.state
        state.places[thing] = _without(state.places[thing], receptacle)
        state.spots[thing] = _without(state.spots[thing], state.pose)
        if len(self.here()) > 1:
            state.left[thing] = _with(state.left[thing], receptacle)
        state.held = thing
        self.solved = self.is_goal_reached()
        return f"You pick up the {name} from the {place}."

    def _put(self, rest: str) -> str | None:
        name, _, place = rest.partition(self.put_syntax.separator)
        receptacle = self.reachable(place)
        if receptacle is None or not self.is_held(name) or not self.can_put(receptacle):
            return None
        state, thing = self.state, self.state.held
        state.places[thing] = _with(state.places[thing], receptacle)
        state.spots[thing] = _with(state.spots[thing], state.pose)
        state.left[thing] = _without(state.left[thing], receptacle)
        state.held = NOTHING
        self.solved = self.is_goal_reached()
        if self.put_syntax is PutSyntax.PUT:
            return f"You put the {name} in/on the {place}."
        return f"You move the {name} to the {place}."

    def _treat(self, verb: str, rest: str) -> str | None:
        name, _, place = rest.partition(" with ")
        receptacle = self.reachable(place)
        if receptacle is None or not self.is_held(name) or not self.can_treat(verb, receptacle):
            return None
        sets, clears = _EFFECTS[verb]
        conditions = self.state.conditions
        conditions[self.state.held] = conditions[self.state.held] & ~clears | sets
        self.solved = self.is_goal_reached()
        return f"You {verb} the {name} using the {place}."

    def _use(self, name: str) -> str | None:
        thing = self.thing_named.get(name)
        if thing is None or not self.can_use(thing):
            return None
        self.state.conditions[thing] |= Condition.TOGGLED.value
        self.solved = self.is_goal_reached()
        return f"You turn on the {name}."

    def _slice(self, rest: str) -> str | None:
        name, _, knife = rest.partition(" with ")
        thing = self.thing_named.get(name)
        if thing is None or not self.is_held(knife) or not self.can_slice(thing):
            return None
        self.state.conditions[thing] |= Condition.SLICED.value
        return f"You sliced the {name} with the {knife}."

    def _examine(self, name: str) -> str | None:
        receptacle = self.reachable(name)
        if receptacle is not None:
            return self.contents_text(receptacle)
        if not self.is_held(name):
            return None
        held = self.state.held
        if self.facts.abilities[held] & _CONTAINER:
            return describe_container(name, [self.house.objects[thing] for thing in self.facts.insides[held]])
        return describe_object(name, self.state.conditions[held])

    def _look(self, rest: str) -> str | None:
        return None if rest else self._view()

    def _view(self) -> str:
        """Return the view from here; in the middle of the room, nothing is listed after the start of an episode."""
        here = self.here()
        return facing([self.house.receptacles[one] for one in here], self.next_to()) if here else room_view([])

    def _inventory(self, rest: str) -> str | None:
        if rest:
            return None
        if self.state.held == NOTHING:
            return EMPTY_HANDED
        return f"You are carrying: a {self.house.objects[self.state.held]}."

    def _help(self, rest: str) -> str | None:
        return None if rest else help_text(f"{self.put_syntax} (object){self.put_syntax.separator}(receptacle)")

    def admissible(self) -> list[str]:
        """Return the admissible commands, sorted."""
        return admissible_commands(self, self.put_syntax)


def _with(numbers: tuple[int, ...], number: int) -> tuple[int, ...]:
    return tuple(sorted({*numbers, number}))


def _without(numbers: tuple[int, ...], number: int) -> tuple[int, ...]:
    return tuple(other for other in numbers if other != number)
