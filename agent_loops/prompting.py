"""What loops put around observations: the goal again, the admissible actions, how to answer with an example."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.agent_loop import Episode
from agentrl.message import Content, Message, TextPart, system, user

IMAGE_MARK = "[image]"

_TASK_SENTENCE = re.compile(r"^.*\byour task is to:?.*$", re.IGNORECASE | re.MULTILINE)


_EXAMPLE = re.compile(r"[,;:.]?\s*\bfor example:\s*", re.IGNORECASE)
PLACEHOLDER = "(your action)"
READ_NEXT = "You will then see the result. Answer again in the same form."


@dataclass(frozen=True, slots=True)
class ActionHint:
    """An environment's ``action_hint``, taken apart."""

    what: str
    """What an action is; empty where the environment does not say."""
    example: str
    """An action; a placeholder where the environment gives none."""

    @classmethod
    def parse(cls, hint: str) -> ActionHint:
        """Take a hint apart at its last "for example:".

        >>> ActionHint.parse("a whole number, for example: 50")
        ActionHint(what='a whole number', example='50')
        """
        what, *examples = _EXAMPLE.split(hint)
        example = examples[-1].strip() if examples else ""
        return cls(what.strip().rstrip("."), example or PLACEHOLDER)

    @property
    def has_example(self) -> bool:
        """True if the environment gives an example."""
        return self.example != PLACEHOLDER

    @property
    def sentence(self) -> str:
        """What an action is, as a sentence with a blank before it."""
        return f" An action is: {self.what}." if self.what else ""


def content_text(content: Content) -> str:
    """Return the text of an observation, images left out."""
    if isinstance(content, str):
        return content
    return "".join(part.text for part in content if isinstance(part, TextPart))


def remembered(content: Content) -> str:
    """Return an observation as a memory of words keeps it: images by a mark."""
    if isinstance(content, str):
        return content
    return "".join(part.text if isinstance(part, TextPart) else IMAGE_MARK for part in content)


def goal_of(episode: Episode, first_observation: Content) -> str:
    """What to repeat of the goal: as the environment says it, or else what `goal_line` finds."""
    return goal_line(first_observation) if episode.goal is None else episode.goal


def goal_line(first_observation: Content) -> str:
    r"""The line that states the goal: the one with "Your task is to", or else the only one; else there is none.

    >>> goal_line("You are in a room.\n\nYour task is to: put a mug in desk.\n")
    'Your task is to: put a mug in desk.'
    """
    text = content_text(first_observation)
    lines = [line for line in text.splitlines() if line.strip()]
    found = _TASK_SENTENCE.findall(text) or (lines if len(lines) == 1 else [])
    return str(found[-1]).strip() if found else ""


def after(text: str, content: Content) -> Content:
    """Return an observation with text before it."""
    if not text:
        return content
    return text + content if isinstance(content, str) else (TextPart(text=text), *content)


def with_lines(content: Content, lines: Sequence[str]) -> Content:
    """Return an observation with lines of text after it; empty ones are left out."""
    added = "".join(f"\n{line}" for line in lines if line)
    if not added:
        return content
    return content + added if isinstance(content, str) else (*content, TextPart(text=added))


def opening(instructions: Sequence[str], observation: Content) -> list[Message]:
    """Return the first messages: a system message if there is anything to instruct, and the first observation."""
    text = "\n\n".join(part.strip() for part in instructions if part.strip())
    return [*([system(text)] if text else []), user(observation)]


async def action_list(episode: Episode) -> str:
    """Return one line with the actions that the environment accepts now; empty when it does not tell."""
    actions = await episode.admissible_actions()
    return "" if actions is None else f"Admissible actions: {', '.join(actions)}."
