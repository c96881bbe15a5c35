"""Each turn has its own prompt: the goal, a memory of the past, the current observation.

The ledger gets one sequence per turn; the common prefix of their prompts is stored once.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from agentrl.agent_loop import Conversation, Episode
from agentrl.errors import ConfigError
from agentrl.message import Content, Message
from agentrl.registry import load

from .prompting import after, goal_of, opening, text_with_image_marks, with_lines
from .text_answers import TextLoop


class Memory(Protocol):
    """Memory of the past that the policy reads; one object per episode."""

    def add(self, observation: str, action: str) -> None:
        """Remember an observation and the action that followed it."""

    def text(self) -> str:
        """Return the memory as the prompt shows it; empty at first."""


class RecentSteps:
    """Memory of the last steps, word for word.

    Args:
        length: Number of steps; with 0, nothing is remembered.
    """

    def __init__(self, length: int) -> None:
        self._steps: deque[tuple[int, str, str]] = deque(maxlen=length)
        self._count = 0

    def add(self, observation: str, action: str) -> None:
        """Remember a step."""
        self._count += 1
        self._steps.append((self._count, observation, action))

    def text(self) -> str:
        """Return the steps, oldest first."""
        if not self._steps:
            return ""
        steps = "\n".join(f"[{i}] Observation: {seen}\n[{i}] Action: {action}" for i, seen, action in self._steps)
        return f"Steps taken so far: {self._count}. The most recent ones:\n{steps}"


def _memory_class(reference: str) -> Callable[[], Memory]:
    found: Callable[[], Memory] = load(reference)
    if not (hasattr(found, "add") and hasattr(found, "text")):
        raise ConfigError(
            "memory of step_independent is not a memory class",
            got=reference,
            expected="a class with add(observation, action) and text()",
        )
    return found


@dataclass(kw_only=True, eq=False)
class StepIndependent(TextLoop):
    """The policy sees the goal, a memory and the current observation, and answers as in `react_text`.

    Args:
        history: Number of last steps that are remembered word for word.
        memory: ``module:attr`` of a class to use as the memory instead (see `Memory`); created once per episode.
    """

    follow_ups = ()
    sequence_per_turn = True

    history: int = 3
    memory: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.history < 0:
            got = f"history {self.history}"
            raise ConfigError("history of step_independent is negative", got=got, expected="0 or more steps")
        recent = functools.partial(RecentSteps, self.history)
        self._make_memory: Callable[[], Memory] = recent if self.memory is None else _memory_class(self.memory)

    async def run(self, episode: Episode) -> None:
        """Play one episode."""
        first = observation = await episode.reset()
        memory, goal, problem = self._make_memory(), "", ""
        conversation: Conversation | None = None
        while True:
            messages = await self._prompt(episode, [goal, memory.text()], observation, problem)
            conversation = episode.open(messages) if conversation is None else conversation.fork(messages)
            reading = self.read(await self.act(conversation), episode.action_hint)
            problem = reading.problem
            if problem:
                episode.count_invalid(problem)
                continue
            result = await episode.step(reading.action)
            if result.done:
                return
            memory.add(text_with_image_marks(observation), reading.action)
            goal, observation = goal_of(episode, first), result.observation

    async def _prompt(self, episode: Episode, past: list[str], observation: Content, problem: str) -> list[Message]:
        actions = await self.actions(episode)
        shown = after("".join(f"{part}\n\n" for part in past if part), observation)
        return opening(self.instructions(episode), with_lines(shown, [actions, problem]))
