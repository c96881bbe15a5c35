"""Text that loops add to observations: the goal, the admissible actions, and how to answer, with an example."""

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
    """Parts of an environment's ``action_hint``."""

    what: str
    """Description of an action; empty if the environment gives none."""
    example: str
    """Example of an action; a placeholder if the environment gives none."""

    @classmethod
    def parse(cls, hint: str) -> ActionHint:
        """Split a hint at its "for example:".

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
        """Sentence that describes an action, with a leading space; empty without a description."""
        return f" An action is: {self.what}." if self.what else ""


def content_text(content: Content) -> str:
    """Return the text of an observation without its images."""
    if isinstance(content, str):
        return content
    return "".join(part.text for part in content if isinstance(part, TextPart))


def text_with_image_marks(content: Content) -> str:
    """Return the text of an observation with a mark in place of each image."""
    if isinstance(content, str):
        return content
    return "".join(part.text if isinstance(part, TextPart) else IMAGE_MARK for part in content)


def goal_of(episode: Episode, first_observation: Content) -> str:
    """Return the goal to repeat: the environment's own text, or else the line that `goal_line` finds."""
    return goal_line(first_observation) if episode.goal is None else episode.goal


def goal_line(first_observation: Content) -> str:
    r"""Return the line that states the goal: the one with "Your task is to", or else the only line, or else "".

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
    """Return an observation with lines of text after it; empty lines are left out."""
    added = "".join(f"\n{line}" for line in lines if line)
    if not added:
        return content
    return content + added if isinstance(content, str) else (*content, TextPart(text=added))


def opening(instructions: Sequence[str], observation: Content) -> list[Message]:
    """Return the first messages: a system message unless there are no instructions, and the first observation."""
    text = "\n\n".join(part.strip() for part in instructions if part.strip())
    return [*([system(text)] if text else []), user(observation)]


async def action_list(episode: Episode) -> str:
    """Return one line with the admissible actions; empty if the environment does not list them."""
    actions = await episode.admissible_actions()
    return "" if actions is None else f"Admissible actions: {', '.join(actions)}."
