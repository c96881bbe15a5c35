"""The datasets of `reasoning-gym` as single-turn tasks, judged by their own score functions."""

from __future__ import annotations

import functools
import hashlib
import string
from collections.abc import Mapping
from typing import Any

import gymnasium
from gymnasium.spaces import Text

from agentrl.env import EnvironmentSpec, Isolation
from agentrl.errors import UsageError, did_you_mean
from agentrl.registry import Extra
from agentrl.task import SeedTasks, seed_tasks

from ..splits import split_of_seed, split_of_text
from .reasoning_gym_answers import may_be_scored

EXTRA = Extra(name="reasoning-gym", module="reasoning_gym")
STRIDE = len(SeedTasks.SPLITS) * SeedTasks.SPLIT_SIZE
"""Distance between the dataset seeds that a task tries one after the other."""
MAX_DRAWS = 140
"""Maximum number of seeds that a task tries; they stay below 2**32, the limit of some generators."""


class ReasoningGym(gymnasium.Env[str, str]):
    """One question and one answer; the reward is the score of the dataset's score function, from 0 to 1.

    A question is the first of the dataset under some seed. The checksum of its text decides its split; a task tries
    seeds until the question belongs to the split of the task's range (`SeedTasks`; any other seed draws for training).

    Args:
        dataset: Name of a dataset.
        config: Settings of the dataset except `seed` and `size`, which the tasks set.

    Raises:
        UsageError: the package is not installed, or the dataset or one of its settings is unknown.
    """

    action_hint = "the final answer and nothing else; or reasons, with the answer in <answer> </answer>"

    def __init__(self, *, dataset: str = "leg_counting", **config: Any) -> None:
        self.name, self.config = dataset, config
        self._enter(0)
        self.observation_space = Text(65536, charset=string.printable)
        self.action_space = Text(4096, charset=string.printable)
        self._extract = EXTRA.load("reasoning_gym.utils").extract_answer
        self._over = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Ask the question of the seed.

        Raises:
            UsageError: no question of the seed's split was found in the dataset.
        """
        super().reset(seed=seed)
        first = int(self.np_random.integers(SeedTasks.SPLIT_SIZE)) if seed is None else seed
        wanted = split_of_seed(first)
        for draw in range(MAX_DRAWS):
            self._enter(first % STRIDE + draw * STRIDE)
            if split_of_text(self.entry["question"]) == wanted:
                return self.entry["question"], self._info(solved=False)
        raise UsageError(
            f"dataset {self.name} has too few questions with these settings to fill split {wanted}",
            expected="settings that allow more questions",
        )

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Score the answer, which ends the episode.

        Raises:
            UsageError: the episode is over.
        """
        if self._over:
            raise UsageError(f"the episode of {self.name} is over", expected="reset before the next step")
        self._over = True
        answer = self._extract(action) or action.strip()
        score, valid = 0.0, may_be_scored(answer, type(self.dataset))
        if valid:
            try:
                score = float(self.dataset.score_answer(answer, self.entry))
            except Exception:  # some score functions parse, and raise the errors of their parser
                valid = False
        return f"Score: {score:g}.", score, True, False, {**self._info(solved=score >= 1), "valid": valid}

    def state_key(self) -> str:
        """Return a key of the question and its status: answered or not."""
        return hashlib.blake2b(f"{self.entry['question']}{self._over}".encode(), digest_size=16).hexdigest()

    def snapshot(self) -> dict[str, Any]:
        """Return the episode as JSON types."""
        return {"seed": self._seed, "over": self._over}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Continue from a snapshot."""
        self._enter(snapshot["seed"])
        self._over = snapshot["over"]

    def _enter(self, seed: int) -> None:
        self._seed, self._over = seed, False
        self.dataset = _dataset(self.name, {**self.config, "seed": seed, "size": 1})
        self.entry: Mapping[str, Any] = self.dataset[0]

    def _info(self, *, solved: bool) -> dict[str, Any]:
        return {"success": solved, "task_type": self.name}


def _dataset(name: str, config: Mapping[str, Any]) -> Any:
    factory = EXTRA.load("reasoning_gym.factory")
    EXTRA.load()  # registers the datasets
    known = [known for known in factory.DATASETS if known != "composite"]
    if name not in known:
        raise UsageError(
            "reasoning-gym has no dataset with this name",
            got=repr(name),
            expected=f"one of its {len(known)}",
            hint=did_you_mean(name, known),
        )
    try:
        return factory.create_dataset(name, **config)
    except (TypeError, ValueError, AssertionError) as error:
        raise UsageError(f"dataset {name} of reasoning-gym cannot be created", got=error) from error


SPEC = EnvironmentSpec(
    name="reasoning_gym",
    make=ReasoningGym,
    tasks=functools.partial(seed_tasks, "reasoning_gym"),
    description=(
        "The datasets of reasoning-gym: more than a hundred kinds of generated questions, judged by their own score"
        " functions. Option dataset: its name; other options are the dataset's own."
    ),
    instructions="Answer the question.",
    max_turns=1,
    reward_range=(0.0, 1.0),
    success_threshold=1.0,
    isolation=Isolation.THREAD,
    options={"dataset": "leg_counting"},
    extra=EXTRA,
)
