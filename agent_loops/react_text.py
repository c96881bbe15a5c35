"""One conversation per episode, in which the policy writes one action per turn, as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.agent_loop import Episode
from agentrl.message import Content, user

from .compaction import Compaction, with_compaction
from .prompting import goal_of, opening, with_lines
from .text_answers import TextLoop


@dataclass(kw_only=True, eq=False)
class ReactText(TextLoop):
    """The policy reads observations and writes one action per turn, as text.

    Args:
        restate_goal: Repeat the goal after each observation: the goal in the info of `reset`, or else the first
            observation's line with "Your task is to", or its only line.
        compact: Let the policy summarize a long conversation and continue from its summary:
            ``{above: 2000, tokens: 256}``.
    """

    restate_goal: bool = False
    compact: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._compaction = Compaction.from_option(self.compact)

    async def run(self, episode: Episode) -> None:
        """Play one episode."""
        observation = await episode.reset()
        goal = goal_of(episode, observation) if self.restate_goal else ""
        actions = await self.actions(episode)
        messages = opening(self.instructions(episode), with_lines(observation, [actions]))
        conversation = with_compaction(episode, episode.open(messages), messages, self._compaction)
        while True:
            reading = self.read(await self.act(conversation), episode.action_hint)
            if reading.problem:
                episode.count_invalid(reading.problem)
                conversation.add(user(reading.problem))
                continue
            result = await episode.step(reading.action)
            if result.done:
                return
            conversation.add(user(await self._next(episode, result.observation, goal)))

    async def _next(self, episode: Episode, observation: Content, goal: str) -> Content:
        actions = await self.actions(episode)
        return with_lines(observation, [actions, goal])
