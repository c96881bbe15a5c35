"""Difficulty pools: what is nearly always or hardly ever solved is played less often.

Whether a task is easy or hard is judged by the mean of a Beta posterior over its success rate, from a uniform prior,
with evidence that fades as the policy changes. After s successes in n tries, d steps ago,

    rate = (1 + s f) / (2 + n f),    f = 2^(-d / half_life)

The mean of the posterior is Laplace's rule of succession (Gelman et al., Bayesian Data Analysis, 3rd ed., section 2.1):
a task that was never played has 1/2, and eight failures of eight make 1/10, not 0. Fading counts are the temporal
discount of MoPPS (Qu et al. 2025, arXiv 2507.04632, section 3), by training step instead of by update, so that what has
not been played for long returns to 1/2 and is tried again.
"""

from __future__ import annotations

import enum
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from agentrl.config.curriculum import PooledBy, PoolsConfig
from agentrl.curriculum.tally import Tally
from agentrl.errors import UsageError
from agentrl.task import Task

Key: TypeAlias = tuple[str, str]
"""An environment's label, and what is judged within it: a task id, a type, or nothing."""


class Pool(enum.StrEnum):
    """How often something is solved."""

    EASY = "easy"
    HARD = "hard"
    OPEN = "open"
    """In between, or not known yet: always played."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Faded counts as they were after a training step."""

    successes: float = 0.0
    tries: float = 0.0
    step: int = 0

    def faded(self, step: int, half_life: float) -> Evidence:
        """The counts at a later step."""
        factor = 2.0 ** (-(step - self.step) / half_life)
        return Evidence(self.successes * factor, self.tries * factor, step)

    @property
    def rate(self) -> float:
        """Mean of the posterior over the success rate."""
        return (1.0 + self.successes) / (2.0 + self.tries)


class Pools:
    """What has been played with what success, and what follows for the next draws.

    Args:
        settings: Thresholds.
        seed: Decides at which of their turns the easy and the hard are played.
    """

    def __init__(self, settings: PoolsConfig, *, seed: int) -> None:
        self.settings = settings
        self.step = 0
        """Training steps done."""
        self._seed = seed
        self._evidence: dict[Key, Evidence] = {}

    def plays(self, environment: str, task: Task | None, turn: int) -> bool:
        """Whether to play what a turn brings: always when it is open, else with probability ``revisit``.

        Args:
            environment: Its label.
            task: The task; ``None`` asks about the environment as a whole.
            turn: Number of the turn in the environment's endless order; it decides, with the seed.
        """
        if self.pool_of(self.key(environment, task)) is Pool.OPEN:
            return True
        return random.Random(f"{self._seed}/revisit/{environment}/{turn}").random() < self.settings.revisit

    def pool_of(self, key: Key) -> Pool:
        """The pool in which something is now."""
        evidence = self._evidence.get(key)
        if evidence is None:
            return Pool.OPEN
        rate = evidence.faded(self.step, self.settings.half_life).rate
        if rate > self.settings.easy_above:
            return Pool.EASY
        return Pool.HARD if rate < self.settings.hard_below else Pool.OPEN

    def key(self, environment: str, task: Task | None) -> Key:
        """What a task is judged with.

        Raises:
            UsageError: it has no type, and types are judged.
        """
        if task is None or self.settings.by is PooledBy.ENVIRONMENT:
            return environment, ""
        if self.settings.by is PooledBy.TASK:
            return environment, task.id
        if task.type is None:
            raise UsageError(
                f"task {task.id} of environment {task.environment} has no type",
                expected="tasks that say their type",
                hint="set curriculum.pools.by=task",
            )
        return environment, task.type

    def learn(self, tallies: Sequence[Tally]) -> None:
        """A training step is complete: its groups count from now on.

        Raises:
            UsageError: an environment does not tell whether a task is solved.
        """
        self.step += 1
        for tally in tallies:
            tally.check_told("curriculum.pools")
            key = self._key_of(tally)
            before = self._evidence.get(key, Evidence()).faded(self.step, self.settings.half_life)
            self._evidence[key] = Evidence(before.successes + tally.successes, before.tries + tally.tries, self.step)

    def sizes(self) -> dict[Pool, int]:
        """How many of what has been played are in each pool now."""
        counts = Counter(map(self.pool_of, self._evidence))
        return {pool: counts[pool] for pool in Pool}

    def _key_of(self, tally: Tally) -> Key:
        by = {PooledBy.TASK: tally.task_id, PooledBy.TYPE: tally.task_type or "", PooledBy.ENVIRONMENT: ""}
        return tally.environment, by[self.settings.by]

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs: plain JSON types, exact."""
        rows = [[*key, found.successes, found.tries, found.step] for key, found in self._evidence.items()]
        return {"step": self.step, "evidence": rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where others were saved."""
        self.step = state["step"]
        self._evidence = {(label, key): Evidence(*numbers) for label, key, *numbers in state["evidence"]}
