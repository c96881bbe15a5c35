"""Horizons that grow: episodes of few turns first, and of more once a step is reached or enough of them succeed."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.config.curriculum import HorizonConfig
from agentrl.curriculum.tally import Tally


class Horizon:
    """Turns of the next episodes of each environment.

    By success an environment reaches the next stage when, over the last ``over_steps`` training steps in which it was
    played at its present one, successes / episodes exceeds ``success_above``. It then counts anew, and never goes back.

    Args:
        settings: The stages.
    """

    def __init__(self, settings: HorizonConfig) -> None:
        self.settings = settings
        self._stage: dict[str, int] = defaultdict(int)
        self._recent: dict[str, list[tuple[int, int]]] = defaultdict(list)
        """Successes and tries at the present stage, by training step."""

    @property
    def wants_tallies(self) -> bool:
        """Whether it grows by success."""
        return self.settings.at_steps is None

    def turns(self, environment: str, step: int) -> int:
        """Turns of an episode that is started after `step` training steps."""
        steps = self.settings.at_steps
        stage = self._stage[environment] if steps is None else bisect.bisect_right(steps, step) - 1
        return self.settings.turns[stage]

    def learn(self, tallies: Sequence[Tally]) -> None:
        """A training step is complete.

        Raises:
            UsageError: an environment does not tell whether a task is solved.
        """
        if not self.wants_tallies:
            return
        told: dict[str, list[Tally]] = defaultdict(list)
        for tally in tallies:
            tally.check_told("curriculum.horizon.success_above, or use curriculum.horizon.at_steps")
            if tally.horizon == self.settings.turns[self._stage[tally.environment]] and tally.tries:
                told[tally.environment].append(tally)
        for environment, found in told.items():
            self._count(environment, sum(t.successes for t in found), sum(t.tries for t in found))

    def _count(self, environment: str, successes: int, tries: int) -> None:
        over, above = self.settings.over_steps, self.settings.success_above
        recent = [*self._recent[environment], (successes, tries)][-over:]
        self._recent[environment] = recent
        solved, played = (sum(counts) for counts in zip(*recent, strict=True))
        is_last = self._stage[environment] == len(self.settings.turns) - 1
        if above is not None and not is_last and len(recent) == over and solved > above * played:
            self._stage[environment] += 1
            self._recent[environment] = []

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs: plain JSON types."""
        return {"stage": dict(self._stage), "recent": {name: list(counts) for name, counts in self._recent.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another one was saved."""
        self._stage = defaultdict(int, state["stage"])
        recent = {name: [(solved, played) for solved, played in counts] for name, counts in state["recent"].items()}
        self._recent = defaultdict(list, recent)
