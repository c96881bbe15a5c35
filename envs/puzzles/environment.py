"""The environment around the rules of a puzzle."""

from __future__ import annotations

import functools
import hashlib
import inspect
import string
from collections.abc import Mapping
from random import Random
from typing import Any, NamedTuple

import gymnasium
import orjson
from agentrl.envs.content_space import ContentSpace
from gymnasium.spaces import Space, Text

from agentrl.env import EnvironmentSpec, Expert, Isolation
from agentrl.errors import UsageError, did_you_mean
from agentrl.message import Content
from agentrl.task import SeedTasks, seed_tasks

from ..pictures import ObservationForm, legend, observation_form, shows_images, with_picture
from ..splits import split_of_checksum, split_of_seed
from .rules import Illegal, Played, Puzzle, share_gained

SEPARATOR = "||"
MAX_DRAWS = 1000
CHARACTERS = frozenset(string.printable + "√")


class ActionSpace(Text):
    """Space of texts; a sample is a random action of the puzzle instead of random letters."""

    def __init__(self, game: Puzzle) -> None:
        super().__init__(256, charset=CHARACTERS)
        self._game = game

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """Return a random action in the current state of the puzzle."""
        return self._game.guess(Random(int(self.np_random.integers(2**31))))


class _Turn(NamedTuple):
    """Results of the actions of one turn."""

    reward: float
    taken: int
    notes: list[str]
    last: Played


class PuzzleEnv(gymnasium.Env[Content, str]):
    """A puzzle as an environment. An episode is a function of the options, the seed and the actions.

    The checksum of its `identity` decides the split of an instance, and a seed draws instances until one belongs to the
    split of its range (`SeedTasks`; any other seed draws for training), so no two splits share an instance.

    Args:
        rules: The puzzle.
        max_steps: Actions after which an episode is truncated; by default the puzzle's number.
        actions_per_turn: Maximum number of actions in a turn, separated by ``||``; by default the puzzle's number.
        observation: ``text``, or ``image`` for a picture, if the puzzle can be drawn.
        options: Options of the puzzle.

    Raises:
        UsageError: an option is unknown or out of its range.
    """

    def __init__(
        self,
        rules: type[Puzzle],
        *,
        max_steps: int | None = None,
        actions_per_turn: int | None = None,
        observation: str = ObservationForm.TEXT,
        **options: Any,
    ) -> None:
        self.form = observation_form(observation, of=rules.name, has_pictures=bool(rules.looks))
        self.game = _make_game(rules, options)
        self.max_steps = rules.max_steps if max_steps is None else max_steps
        self.actions_per_turn = rules.actions_per_turn if actions_per_turn is None else actions_per_turn
        if self.max_steps < 1 or self.actions_per_turn < 1:
            raise UsageError(
                f"a limit of {rules.name} is too small",
                got=f"max_steps {self.max_steps}, actions_per_turn {self.actions_per_turn}",
                expected="at least 1",
            )
        self.observation_space: Space[Content] = (
            Text(8192, charset=CHARACTERS) if self.form is ObservationForm.TEXT else ContentSpace(8192)
        )
        self.action_space = ActionSpace(self.game)
        self._steps = 0
        self._over = True
        self._progress_at_start = 0.0

    @property
    def action_hint(self) -> str:
        """Description of an action, with an example."""
        what, _, example = self.game.action_hint.partition(", for example: ")
        if not example and not self._over:
            example = next(iter(self.game.actions() or []), "")
        marker = ", for example: " if example else ""
        if self.actions_per_turn == 1:
            return f"{what}{marker}{example}"
        return f"{what}; or up to {self.actions_per_turn} actions with {SEPARATOR} between them{marker}{example}"

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Content, dict[str, Any]]:
        """Start with the instance of the seed."""
        super().reset(seed=seed)
        if options:
            raise UsageError(f"{self.game.name} has no reset options", got=", ".join(options), expected="a seed")
        self._draw_instance(int(self.np_random.integers(SeedTasks.SPLIT_SIZE)) if seed is None else seed)
        self._steps, self._over = 0, False
        self._progress_at_start = self.game.progress()
        return self._introduction(), self._opening_info()

    def step(self, action: str) -> tuple[Content, float, bool, bool, dict[str, Any]]:
        """Take the actions of one turn, up to the first illegal one.

        Raises:
            UsageError: the episode is over.
        """
        if self._over:
            raise UsageError(f"the episode of {self.game.name} is over", expected="reset before the next step")
        parts = action.split(SEPARATOR) if self.actions_per_turn > 1 else [action]
        turn = self._take(parts)
        self._steps += turn.taken
        truncated = not turn.last.over and self._steps >= self.max_steps
        self._over = turn.last.over or truncated
        reward = turn.reward + self._reward_at_limit() if truncated else turn.reward
        if turn.taken < len(parts):
            turn.notes.append(f"Actions taken: {turn.taken} of {len(parts)}.")
        info = {"success": turn.last.won, "task_type": self.game.task_type, "valid": turn.last.legal}
        if self.game.players:
            info |= {"player": self.game.to_move, "rewards": dict(turn.last.rewards)}
        return self._situation(turn.notes), reward, turn.last.over, truncated, info

    def admissible_actions(self) -> list[str] | None:
        """Return the legal actions; ``None`` if there are too many to list."""
        return self.game.actions()

    def expert(self) -> Expert:
        """Return a policy that plays well from the texts only, with one action per turn."""
        return self.game.expert()

    def state_key(self) -> str:
        """Return a key of the full state, independent of the number of steps."""
        return hashlib.blake2b(orjson.dumps(self.game.state()), digest_size=16).hexdigest()

    def snapshot(self) -> dict[str, Any]:
        """Return the episode as JSON types."""
        state = {
            "game": self.game.state(),
            "steps": self._steps,
            "over": self._over,
            "progress_at_start": self._progress_at_start,
        }
        copied: dict[str, Any] = orjson.loads(orjson.dumps(state))
        return copied

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Continue from a snapshot, in this environment or another one with the same options."""
        self.game.load(orjson.loads(orjson.dumps(snapshot["game"])))
        self._steps, self._over = snapshot["steps"], snapshot["over"]
        self._progress_at_start = snapshot["progress_at_start"]

    def _reward_at_limit(self) -> float:
        """Return the reward of losing plus the share of the missing progress that the actions made."""
        return self.game.loss_reward + share_gained(self._progress_at_start, self.game.progress())

    def _opening_info(self) -> dict[str, Any]:
        info: dict[str, Any] = {"success": False, "task_type": self.game.task_type, "goal": self.game.goal_text()}
        if self.game.players:
            info |= {"players": list(self.game.players), "player": self.game.to_move}
        return info

    def _introduction(self) -> Content:
        if self.form is ObservationForm.TEXT:
            return self.game.introduction()
        return with_picture(legend(self.game.looks), self.game.text(), self.game.looks)

    def _situation(self, notes: list[str]) -> Content:
        if self.form is ObservationForm.TEXT:
            return "\n".join([*notes, self.game.text()])
        return with_picture("\n".join(notes), self.game.text(), self.game.looks)

    def _take(self, parts: list[str]) -> _Turn:
        reward, taken, notes, played = 0.0, 0, [], Played()
        for part in parts[: min(self.actions_per_turn, self.max_steps - self._steps)]:
            played = self._play(" ".join(part.lower().split()))
            reward, taken = reward + played.reward, taken + 1
            if played.note:
                notes.append(played.note)
            if played.over or not played.legal:
                break
        return _Turn(reward, taken, notes, played)

    def _play(self, action: str) -> Played:
        try:
            return self.game.play(action)
        except Illegal as illegal:
            return Played(reward=self.game.illegal_reward, note=str(illegal), legal=False)

    def _draw_instance(self, seed: int) -> None:
        rng, split = Random(f"{self.game.name}/{seed}"), split_of_seed(seed)
        for _ in range(MAX_DRAWS):
            self.game.start(rng)
            if split_of_checksum(_checksum(self.game.identity())) == split:
                return
        raise UsageError(
            f"{self.game.name} has too few instances with these options to fill split {split}",
            expected="options that allow more instances",
        )


def _checksum(identity: Any) -> int:
    return int(hashlib.blake2b(orjson.dumps(identity), digest_size=16).hexdigest()[:8], 16)


def puzzle_spec(
    rules: type[Puzzle],
    *,
    description: str,
    instructions: str,
    reward_range: tuple[float, float],
    scores: Mapping[str, float],
    version: int = 0,
) -> EnvironmentSpec:
    """Return the registry's entry of a puzzle."""
    return EnvironmentSpec(
        name=rules.name,
        make=functools.partial(PuzzleEnv, rules),
        tasks=functools.partial(seed_tasks, rules.name),
        description=description,
        instructions=instructions,
        max_turns=rules.max_steps,
        reward_range=reward_range,
        isolation=Isolation.INLINE,
        images_of=shows_images,
        scores=scores,
        version=version,
    )


def _make_game(rules: type[Puzzle], options: Mapping[str, Any]) -> Puzzle:
    known = list(inspect.signature(rules).parameters)
    for name in options:
        if name not in known:
            raise UsageError(
                f"{rules.name} has no option {name!r}",
                expected=", ".join([*known, "max_steps", "actions_per_turn", "observation"]),
                hint=did_you_mean(name, known),
            )
    return rules(**options)
