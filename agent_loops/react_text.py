"""Thoughts and actions as text: ``<think>…</think><action>…</action>``, or the environment's own way."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from agentrl.agent_loop import AgentLoop, Answer, Episode
from agentrl.engine import StopReason
from agentrl.errors import ConfigError
from agentrl.message import Content, Message, user

from .prompting import action_list, goal_of, opening, with_lines

_ACTION = re.compile(r"<action>(.*?)</action>", re.DOTALL)


class AnswerFormat(enum.StrEnum):
    """How an answer is written."""

    REACT = "react"
    """Thoughts in ``<think>``, then the action in ``<action>``."""
    ACTION_TAG = "action_tag"
    """The action in ``<action>``."""
    PLAIN = "plain"
    """The answer is the action."""
    FREE = "free"
    """The environment reads the whole answer: its instructions say how actions are marked in it."""


_RULES = {
    AnswerFormat.REACT: "Think first, inside <think> </think>. Then give one action inside <action> </action>.",
    AnswerFormat.ACTION_TAG: "Answer with one action inside <action> </action>.",
    AnswerFormat.PLAIN: "Answer with one action and nothing else.",
    AnswerFormat.FREE: "",
}


_WHOLE = frozenset({AnswerFormat.PLAIN, AnswerFormat.FREE})
"""Formats in which the whole answer goes to the environment."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What an answer says: an action, or else a problem in words for the policy."""

    action: str
    problem: str = ""


class ReactText(AgentLoop):
    """The policy reads observations and writes one action per turn, as text.

    Args:
        format: ``react``, ``action_tag``, ``plain`` or ``free``.
        list_actions: List the admissible actions after each observation, where the environment tells them.
        restate_goal: Repeat the goal after each observation: as the environment says it in the info of `reset`, or else
            the first observation's line with "Your task is to", or its only line.
        explain: Put the environment's instructions, its action hint and the answer's format into a system message;
            off for small models that learn the protocol from demonstrations.
    """

    def __init__(
        self,
        *,
        format: str = "react",
        list_actions: bool = False,
        restate_goal: bool = False,
        explain: bool = True,
    ) -> None:
        try:
            self.format = AnswerFormat(format)
        except ValueError as error:
            raise ConfigError("unknown answer format", got=repr(format), expected=", ".join(AnswerFormat)) from error
        self.list_actions = list_actions
        self.restate_goal = restate_goal
        self.explain = explain

    async def run(self, episode: Episode) -> None:
        """Play one episode."""
        observation = await episode.reset()
        goal = goal_of(episode, observation) if self.restate_goal else ""
        actions = await action_list(episode) if self.list_actions else ""
        conversation = episode.open(opening(self.instructions(episode), with_lines(observation, [actions])))
        while True:
            reading = self.read(await conversation.generate())
            if reading.problem:
                episode.invalid(reading.problem)
                conversation.add(user(reading.problem))
                continue
            result = await episode.step(reading.action)
            if result.done:
                return
            conversation.add(user(await self._next(episode, result.observation, goal)))

    async def _next(self, episode: Episode, observation: Content, goal: str) -> Content:
        actions = await action_list(episode) if self.list_actions else ""
        return with_lines(observation, [actions, goal])

    def instructions(self, episode: Episode) -> list[str]:
        """Return the parts of the system message."""
        return [episode.spec.instructions, episode.action_hint, _RULES[self.format]] if self.explain else []

    def read(self, answer: Answer) -> Reading:
        """Return the action of an answer."""
        if self.format in _WHOLE:
            action = answer.text.strip()
            return Reading(action, "" if action else f"Your answer is empty. {_RULES[self.format]}".strip())
        actions = _ACTION.findall(answer.text)
        if len(actions) == 1 and actions[0].strip():
            return Reading(actions[0].strip())
        cut = "was cut off before its end" if answer.stop_reason is StopReason.LENGTH else "holds no action"
        count = f"holds {len(actions)} actions" if len(actions) > 1 else cut
        return Reading("", f"Your answer {count}. {_RULES[self.format]}")

    def demonstrate(self, action: str) -> Message:
        """Return the answer that takes `action`, with a thought that only names it."""
        if self.format in _WHOLE:
            return Message(role="assistant", content=action)
        thought = f"<think>I will {action}.</think>" if self.format is AnswerFormat.REACT else ""
        return Message(role="assistant", content=f"{thought}<action>{action}</action>")
