"""The budgets of one episode: turns, tokens, seconds, unusable answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from agentrl.agent_loop import EpisodeEnd
from agentrl.config.episodes import AgentConfig
from agentrl.env import EnvironmentSpec
from agentrl.errors import Outcome
from agentrl.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """What an episode may spend, and how long it waits for others."""

    max_turns: int = 50
    max_answer_tokens: int = 256
    max_observation_tokens: int = 2048
    max_tokens: int = 16384
    """Tokens of one sequence, prompt and answers together."""
    max_seconds: float | None = None
    max_invalid: int = 10
    """The unusable answer with this number ends the episode."""
    max_refused: int | None = None
    """The action with this number that the environment does not accept ends the episode."""
    answer_timeout_s: float = 600.0
    """Deadline of the engine's answer."""
    tool_timeout_s: float = 30.0
    score_timeout_s: float | None = 60.0

    @classmethod
    def from_config(
        cls, agent: AgentConfig, spec: EnvironmentSpec, options: Mapping[str, Any], *, answer_timeout_s: float
    ) -> EpisodeLimits:
        """The limits of a run: the agent's, and the environment's step limit under `options` where it is smaller."""
        return cls(
            max_turns=min(agent.max_turns, spec.turns_under(options) or agent.max_turns),
            max_answer_tokens=agent.max_answer_tokens,
            max_observation_tokens=agent.max_observation_tokens,
            max_tokens=agent.max_tokens,
            max_seconds=agent.max_seconds,
            max_invalid=agent.max_invalid,
            max_refused=agent.max_refused,
            answer_timeout_s=answer_timeout_s,
            tool_timeout_s=agent.tool_timeout_s,
        )

    def for_task(self, task: Task) -> EpisodeLimits:
        """The limits of an episode of `task`, which may allow fewer turns."""
        if task.max_turns is None or task.max_turns >= self.max_turns:
            return self
        return replace(self, max_turns=task.max_turns)


class Budget:
    """What one episode has spent.

    Args:
        limits: What it may spend.
        clock: Seconds that only grow.
    """

    def __init__(self, limits: EpisodeLimits, clock: Callable[[], float]) -> None:
        self.limits = limits
        self.turns = 0
        self.invalid = 0
        self.refused = 0
        self._clock = clock
        self._began = clock()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the episode began."""
        return self._clock() - self._began

    @property
    def remaining_s(self) -> float | None:
        """Seconds left; ``None`` without a time budget."""
        return None if self.limits.max_seconds is None else self.limits.max_seconds - self.elapsed_s

    def check_time(self) -> None:
        """End the episode when its seconds are spent.

        Raises:
            EpisodeEnd: truncated_time.
        """
        remaining = self.remaining_s
        if remaining is not None and remaining <= 0:
            raise EpisodeEnd(Outcome.TRUNCATED_TIME)

    def take_turn(self) -> int:
        """Count a turn and give its index.

        Raises:
            EpisodeEnd: truncated_time or truncated_turns.
        """
        self.check_time()
        if self.turns >= self.limits.max_turns:
            raise EpisodeEnd(Outcome.TRUNCATED_TURNS)
        self.turns += 1
        return self.turns - 1

    def answer_tokens(self, prompt_tokens: int, max_context: int) -> int:
        """How many tokens the next answer may have after a prompt of `prompt_tokens`.

        Raises:
            EpisodeEnd: truncated_tokens: there is no room for one.
        """
        room = min(self.limits.max_tokens, max_context) - prompt_tokens
        if room < 1:
            raise EpisodeEnd(Outcome.TRUNCATED_TOKENS)
        return min(room, self.limits.max_answer_tokens)

    def count_invalid(self) -> None:
        """Count an unusable answer.

        Raises:
            EpisodeEnd: policy_error, at the last one allowed.
        """
        self.invalid += 1
        if self.invalid >= self.limits.max_invalid:
            raise EpisodeEnd(Outcome.POLICY_ERROR)

    def count_refused(self) -> None:
        """Count an action that the environment did not accept.

        Raises:
            EpisodeEnd: policy_error, at the last one allowed.
        """
        self.refused += 1
        if self.limits.max_refused is not None and self.refused >= self.limits.max_refused:
            raise EpisodeEnd(Outcome.POLICY_ERROR)
