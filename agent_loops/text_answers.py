"""Actions as text for all loops: ``<think>…</think><action>…</action>``, or the environment's own format."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentrl.agent_loop import PLAIN_TURN, AgentLoop, Answer, Conversation, Episode, TurnOptions
from agentrl.engine import StopReason
from agentrl.errors import ConfigError
from agentrl.message import Message

from .prompting import READ_NEXT, ActionHint, action_list

_FIRST_ACTION = re.compile(r"<action>(.*?)(?:</action>|\n|$)")
_ACTION = re.compile(r"<action>((?:(?!<action>).)*?)</action>", re.DOTALL)


class AnswerFormat(enum.StrEnum):
    """Format of an answer."""

    REACT = "react"
    """Thoughts in ``<think>``, then the action in ``<action>``."""
    ACTION_TAG = "action_tag"
    """The action in ``<action>``."""
    PLAIN = "plain"
    """The answer is the action."""
    FREE = "free"
    """The environment reads the whole answer: its instructions say how actions are marked in it."""


_RULES = {
    AnswerFormat.REACT: "first think inside <think> </think>, then write one action inside <action> </action>.",
    AnswerFormat.ACTION_TAG: "write one action inside <action> </action>.",
    AnswerFormat.PLAIN: "write one action and nothing else.",
}
"""Instruction for each format; a free answer follows the environment's own instructions."""


_WHOLE = frozenset({AnswerFormat.PLAIN, AnswerFormat.FREE})
"""Formats in which the whole answer goes to the environment."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The action of an answer, or else a description of its problem for the policy."""

    action: str
    problem: str = ""


@dataclass(kw_only=True, eq=False)
class TextLoop(AgentLoop):
    """A loop in which the policy writes actions as text. Its fields are options of every such loop.

    Args:
        format: ``react``, ``action_tag``, ``plain`` or ``free``.
        list_actions: List the admissible actions after each observation, if the environment reports them.
        explain: Put the environment's instructions, its action hint and the answer's format into a system message;
            turn it off for small models that learn the protocol from demonstrations.
        prefill: Text that each answer with an action begins with, such as ``<action>`` for a model that does not keep
            to the format by itself; it is not trained. The action then ends at ``</action>`` or at the end of its line.
        stop: Text at which each answer with an action ends, such as ``</action>``; it stays in the answer.
    """

    format: str = "react"
    list_actions: bool = False
    explain: bool = True
    prefill: str = ""
    stop: str = ""

    def __post_init__(self) -> None:
        try:
            self._format = AnswerFormat(self.format)
        except ValueError as error:
            expected = ", ".join(AnswerFormat)
            raise ConfigError("unknown answer format", got=repr(self.format), expected=expected) from error
        if not isinstance(self.prefill, str):
            raise ConfigError(
                "prefill is not a string", got=repr(self.prefill), expected="the start of each answer: <action>"
            )
        if not isinstance(self.stop, str):
            raise ConfigError("stop is not a string", got=repr(self.stop), expected="the end of each answer: </action>")

    @classmethod
    def answer_forms(cls, answer_format: str) -> Sequence[Mapping[str, Any]]:
        """Return the options without and with the start of an action, which even a small model can complete."""
        begun = {"format": AnswerFormat.ACTION_TAG.value, "prefill": "<action>", "stop": "</action>"}
        return ({},) if answer_format else ({}, begun)

    async def act(self, conversation: Conversation, options: TurnOptions = PLAIN_TURN) -> Answer:
        """Sample an answer with an action, which begins with `prefill` and ends at `stop`."""
        if self.stop:
            options = replace(options, stop=(*options.stop, self.stop))
        return await conversation.generate(prefill=self.prefill, options=options)

    async def actions(self, episode: Episode) -> str:
        """Return the line with the admissible actions; empty if they are not listed."""
        return await action_list(episode) if self.list_actions else ""

    def instructions(self, episode: Episode) -> list[str]:
        """Return the parts of the system message."""
        return [episode.spec.instructions, self.rule(episode.action_hint)] if self.explain else []

    def rule(self, action_hint: str) -> str:
        """Return the instructions for answering, with an example in the exact format."""
        if self._format is AnswerFormat.FREE:
            return ""
        hint = ActionHint.parse(action_hint)
        rule = f"{_RULES[self._format]}{hint.sentence}"
        if hint.has_example:  # small models would repeat a placeholder
            rule += f" For example:\n{self._example(action_hint)}"
        return f"How to answer: {rule}\n{READ_NEXT}"

    def _example(self, action_hint: str) -> str:
        return self.demonstrate(ActionHint.parse(action_hint).example).text

    def read(self, answer: Answer, action_hint: str = "") -> Reading:
        """Return the action of an answer, or its problem with an example of a valid answer.

        Args:
            answer: The policy's answer.
            action_hint: The environment's description of an action.
        """
        if self._format in _WHOLE:
            action = answer.text.strip()
            return Reading(action, "" if action else self._remark("was empty", action_hint))
        actions = (_FIRST_ACTION.findall(answer.text)[:1] if self.prefill else []) or _ACTION.findall(answer.text)
        if len(actions) == 1 and actions[0].strip():
            return Reading(actions[0].strip())
        if len(actions) > 1:
            return Reading("", self._remark(f"had {len(actions)} actions, but only one is allowed", action_hint))
        if answer.stop_reason is StopReason.LENGTH:
            return Reading("", self._remark("was too long and was cut off before its action", action_hint))
        missing = "an empty <action> </action>" if actions else "no <action> </action>"
        return Reading("", self._remark(f"had {missing}", action_hint))

    def _remark(self, problem: str, action_hint: str) -> str:
        form = "" if self._format is AnswerFormat.FREE else f", in this form:\n{self._example(action_hint)}"
        return f"Your last answer {problem}, so nothing happened. Answer again{form or '.'}"

    def demonstrate(self, action: str) -> Message:
        """Return the answer that takes `action`, with a thought that only names it."""
        if self._format in _WHOLE:
            return Message(role="assistant", content=action)
        thought = f"<think>My next action is {action}.</think>\n" if self._format is AnswerFormat.REACT else ""
        return Message(role="assistant", content=f"{thought}<action>{action}</action>")
