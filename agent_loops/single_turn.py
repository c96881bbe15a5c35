"""Episodes of one question and one answer."""

from __future__ import annotations

import re

from agentrl.agent_loop import AgentLoop, Answer, Conversation, Episode, EpisodeEnd
from agentrl.errors import Outcome
from agentrl.message import Message

from .prompting import ActionHint, opening


class SingleTurn(AgentLoop):
    """The policy answers once, and the environment judges the answer.

    Args:
        tag: Pass only the text in ``<tag>…</tag>`` to the environment, from the last such pair; without it, the whole
            answer without its thinking.
    """

    follow_ups = ()
    plays_one_step = True

    def __init__(self, *, tag: str | None = None) -> None:
        self.tag = tag
        self._tagged = None if tag is None else re.compile(f"<{tag}>(.*?)</{tag}>", re.DOTALL)

    async def run(self, episode: Episode) -> None:
        """Play one episode."""
        observation = await episode.reset()
        rules = [episode.spec.instructions, self.rule(episode.action_hint)]
        await self.answer(episode, episode.open(opening(rules, observation)))

    async def answer(self, episode: Episode, conversation: Conversation) -> None:
        """Let the policy answer in `conversation`, and pass its answer to the environment."""
        action = self.read(await conversation.generate())
        if action is None:
            episode.count_invalid(f"no <{self.tag}>")
            raise EpisodeEnd(Outcome.POLICY_ERROR)
        result = await episode.step(action)
        if not result.done:
            raise EpisodeEnd(Outcome.TRUNCATED_TURNS)

    def rule(self, action_hint: str) -> str:
        """Return the instructions for answering, with an example; empty if neither a tag nor a hint is given."""
        hint = ActionHint.parse(action_hint)
        if self.tag is None and not action_hint:
            return ""
        what = hint.what or "your final answer"
        where = "" if self.tag is None else f" inside <{self.tag}> </{self.tag}>"
        example = hint.example if action_hint else "(your answer)"
        return f"How to answer: write {what}{where}. For example:\n{self.demonstrate(example).text}"

    def read(self, answer: Answer) -> str | None:
        """Return the text for the environment; ``None`` if the tag is missing."""
        if self._tagged is None:
            return answer.text
        found = self._tagged.findall(answer.text)
        return found[-1].strip() if found else None

    def demonstrate(self, action: str) -> Message:
        """Return the answer that contains `action`."""
        text = action if self.tag is None else f"<{self.tag}>{action}</{self.tag}>"
        return Message(role="assistant", content=text)
