"""Limits of an episode, and its budget of turns, tokens and seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from agentrl.agent_loop import EpisodeEnd
from agentrl.config.environment import AgentConfig
from agentrl.env import EnvironmentSpec
from agentrl.errors import Outcome
from agentrl.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """Limits of an episode: turns, tokens, seconds, unusable answers, and deadlines of its waits."""

    max_turns: int = 50
    max_answer_tokens: int = 256
    max_observation_tokens: int = 2048
    max_tokens: int = 16384
    """Maximum number of tokens of one sequence, prompt and answers together."""
    max_seconds: float | None = None
    max_parse_failures: int = 10
    """Number of unusable answers that ends the episode."""
    max_rejected_actions: int | None = None
    """Number of actions rejected by the environment that ends the episode; ``None`` for no limit."""
    answer_timeout_s: float = 600.0
    tool_timeout_s: float = 30.0
    score_timeout_s: float | None = 60.0

    @classmethod
    def from_config(
        cls, agent: AgentConfig, spec: EnvironmentSpec, options: Mapping[str, Any], *, answer_timeout_s: float
    ) -> EpisodeLimits:
        """Return the limits of a run: the agent's, and the environment's step limit under `options` if smaller."""
        return cls(
            max_turns=min(agent.max_turns, spec.turns_under(options) or agent.max_turns),
            max_answer_tokens=agent.max_answer_tokens,
            max_observation_tokens=agent.max_observation_tokens,
            max_tokens=agent.max_tokens,
            max_seconds=agent.max_seconds,
            max_parse_failures=agent.max_parse_failures,
            max_rejected_actions=agent.max_rejected_actions,
            answer_timeout_s=answer_timeout_s,
            tool_timeout_s=agent.tool_timeout_s,
        )

    def for_task(self, task: Task) -> EpisodeLimits:
        """Return the limits of an episode of `task`, which may lower the maximum number of turns."""
        if task.max_turns is None or task.max_turns >= self.max_turns:
            return self
        return replace(self, max_turns=task.max_turns)


class Budget:
    """Budget of one episode: counts what it has used, and raises `EpisodeEnd` when a limit is reached."""

    def __init__(self, limits: EpisodeLimits, clock: Callable[[], float]) -> None:
        self.limits = limits
        self.turns = 0
        self.requests = 0
        """Number of turns that were begun, including failed ones."""
        self.invalid = 0
        self.rejected = 0
        self._clock = clock
        self._began = clock()

    def add_elapsed(self, seconds: float) -> None:
        """Add the seconds that the episode took before its run was killed; negative values are ignored."""
        self._began -= seconds

    @property
    def elapsed_s(self) -> float:
        """Seconds since the episode began."""
        return self._clock() - self._began

    @property
    def remaining_s(self) -> float | None:
        """Seconds left; ``None`` without a time budget."""
        return None if self.limits.max_seconds is None else self.limits.max_seconds - self.elapsed_s

    def check_time(self) -> None:
        """End the episode (truncated_time) if its time is used up."""
        remaining = self.remaining_s
        if remaining is not None and remaining <= 0:
            raise EpisodeEnd(Outcome.TRUNCATED_TIME)

    def take_turn(self, *, is_counted: bool = True) -> int:
        """Count a turn and return the index of its request; end the episode with truncated_time or truncated_turns.

        Args:
            is_counted: The turn is the agent's; other turns count only as requests.
        """
        self.check_time()
        if is_counted and self.turns >= self.limits.max_turns:
            raise EpisodeEnd(Outcome.TRUNCATED_TURNS)
        self.turns += is_counted
        self.requests += 1
        return self.requests - 1

    def give_back_turn(self) -> None:
        """Undo `take_turn` for a request that the engine did not answer."""
        self.turns -= 1

    def answer_tokens(self, prompt_tokens: int, max_context: int) -> int:
        """Return the maximum number of tokens of the next answer; end the episode with truncated_tokens if it is 0."""
        room = min(self.limits.max_tokens, max_context) - prompt_tokens
        if room < 1:
            raise self.prompt_too_long(max_context, prompt_tokens)
        return min(room, self.limits.max_answer_tokens)

    def prompt_too_long(self, max_context: int, prompt_tokens: int | None = None) -> EpisodeEnd:
        """Return the exception for an episode whose prompt leaves no room for an answer (truncated_tokens)."""
        limit, name = min((max_context, "the model's context"), (self.limits.max_tokens, "agent.max_tokens"))
        size = f"more than {limit}" if prompt_tokens is None else str(prompt_tokens)
        return EpisodeEnd(
            Outcome.TRUNCATED_TOKENS,
            f"the prompt has {size} tokens, and {name} of {limit} leaves no room for an answer",
        )

    def count_invalid(self) -> None:
        """Count an unusable answer; at the limit the episode ends (policy_error)."""
        self.invalid += 1
        if self.invalid >= self.limits.max_parse_failures:
            raise EpisodeEnd(Outcome.POLICY_ERROR)

    def count_rejected(self) -> None:
        """Count an action that the environment rejected; at the limit the episode ends (policy_error)."""
        self.rejected += 1
        if self.limits.max_rejected_actions is not None and self.rejected >= self.limits.max_rejected_actions:
            raise EpisodeEnd(Outcome.POLICY_ERROR)
