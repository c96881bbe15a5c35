"""Rewards for the form of answers (tags, the parts of an agent's turns), and those of published systems.

The latter join whether a task is solved (`is_solved`) with the form of the answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pydantic import FiniteFloat, NonNegativeInt

from agentrl.reward.answers import given_answer, golden_answers, is_solved, tagged_answer, word_f1, written
from agentrl.task import Task
from agentrl.trajectory import Trajectory

NO_TOOLS = 0.5
"""Share of errors of an episode without tool calls, between that of flawless calls and that of failed ones."""


def has_tags(text: str, tags: Sequence[str]) -> bool:
    """Return True if a text consists of these tags, each once, in this order, with only spaces between them.

    >>> has_tags("<think>a</think> <answer>b</answer>", ["think", "answer"])
    True
    >>> has_tags("so <think>a</think><answer>b</answer>", ["think", "answer"])
    False
    """
    pattern = r"\s*".join(rf"<{tag}>(?:(?!</?{tag}>).)*</{tag}>" for tag in tags)
    once = all(text.count(f"<{tag}>") == text.count(f"</{tag}>") == 1 for tag in tags)
    return once and re.fullmatch(rf"\s*{pattern}\s*", text, re.DOTALL) is not None


def think_answer_format(trajectory: Trajectory, task: Task, *, tags: Sequence[str] = ("think", "answer")) -> float:
    """Return 1 if the last turn has the form ``<think>…</think> <answer>…</answer>``, else 0 (DeepSeek-R1's format).

    DeepSeek-R1, arXiv 2501.12948, section 2.2.2.
    """
    return float(bool(trajectory.completions) and has_tags(trajectory.completions[-1], tags))


def tag_count_format(trajectory: Trajectory, task: Task, *, tags: Sequence[str] = ("think", "answer")) -> float:
    """Return the share of opening and closing tags that occur exactly once in the last turn (Open-R1's tag count)."""
    last = trajectory.completions[-1] if trajectory.completions else ""
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    return sum(last.count(mark) == 1 for mark in marks) / len(marks)


def is_agent_form(
    completions: Sequence[str], *, actions: Sequence[str] = ("search", "tool_call"), answer: str = "answer"
) -> bool:
    """Return True if each turn is a thought and one action, and the last one a thought and the answer.

    Args:
        completions: Texts of the turns.
        actions: Tags of actions.
        answer: Tag of the answer.
    """
    if not completions:
        return False
    *earlier, last = completions
    return has_tags(last, ("think", answer)) and all(
        any(has_tags(turn, ("think", action)) for action in actions) for turn in earlier
    )


def agent_format(
    trajectory: Trajectory, task: Task, *, actions: Sequence[str] = ("search", "tool_call"), answer: str = "answer"
) -> float:
    """Return 1 if every turn is ``<think>…</think>`` and an action or, in the end, ``<answer>…</answer>``, else 0.

    Search-R1, arXiv 2503.09516, with one block of thinking per turn.
    """
    return float(is_agent_form(trajectory.completions, actions=actions, answer=answer))


def tool_call_count(
    trajectory: Trajectory,
    task: Task,
    *,
    each: FiniteFloat = 0.1,
    most: NonNegativeInt | None = None,
    tool: str | None = None,
) -> float:
    """Return `each` for every tool call, at most `most` of them; only of the tool of a name, if given."""
    count = sum(tool is None or call.name == tool for call in trajectory.tool_calls)
    return each * (count if most is None else min(count, most))


def tool_error_ratio(trajectory: Trajectory, task: Task) -> float:
    """Return the share of tool results that contain the word error; 0.5 without tool results.

    rStar2-Agent, arXiv 2508.20722: a penalty of resampling, with weight 0 in the reward.
    """
    results = [message.text.lower() for message in trajectory.messages if message.role == "tool"]
    return sum("error" in text for text in results) / len(results) if results else NO_TOOLS


def answer_tag_ratio(trajectory: Trajectory, task: Task, *, tag: str = "answer") -> float:
    """Return the number of surplus answers over the number of turns, at most 1; 1 without a complete pair of tags.

    rStar2-Agent, arXiv 2508.20722: a penalty of resampling, with weight 0 in the reward.
    """
    text = written(trajectory)
    opened, closed = text.count(f"<{tag}>"), text.count(f"</{tag}>")
    pairs = len(re.findall(rf"<{tag}>.*?</{tag}>", text, re.DOTALL))
    if not pairs or opened != pairs or closed != pairs:
        return 1.0
    return min((pairs - 1) / len(trajectory.completions), 1.0)


def retool(trajectory: Trajectory, task: Task) -> float:
    """Return 1 for a right answer, else min(-0.6, -1 + 0.1 (n - 2) / 2), where n counts messages as verl does.

    ReTool, arXiv 2504.11536 (verl's recipe): a wrong answer costs less after more tool calls. n is 2 for an answer
    without calls, and each turn with a call adds 2.
    """
    if is_solved(trajectory, task):
        return 1.0
    messages = 2 * len(trajectory.completions)
    return min(-0.6, -1 + 0.1 * (messages - 2) / 2)


def tinyzero(trajectory: Trajectory, task: Task, *, form: FiniteFloat = 0.1) -> float:
    """Return 1 for a right answer, `form` for a wrong one in answer tags, and 0 otherwise (TinyZero's countdown)."""
    if tagged_answer(written(trajectory)) is None:
        return 0.0
    return 1.0 if is_solved(trajectory, task) else form


def code_r1(trajectory: Trajectory, task: Task, *, form: FiniteFloat = 0.1) -> float:
    """Return 1 + `form` for a right program, `form` for a wrong one, and -1 - `form` without the right form (Code-R1).

    The form is ``<think>…</think> <answer>…</answer>`` with a fenced block of code in the answer.
    """
    last = trajectory.completions[-1] if trajectory.completions else ""
    if not has_tags(last, ("think", "answer")) or (tagged_answer(last) or "").count("```") < 2:
        return -1.0 - form
    return 1.0 + form if is_solved(trajectory, task) else form


def search_r1(trajectory: Trajectory, task: Task, *, structure: FiniteFloat = 0.2, final: FiniteFloat = 0.1) -> float:
    """Return the reward of Search-R1 v0.3, which scores exact match and form (arXiv 2505.15117).

    ===============  =============================  ====================
    answer           form of all turns is right     form is wrong
    ===============  =============================  ====================
    right            1                              1 - `structure`
    wrong            `structure`                    `final`
    none             (not possible)                 0
    ===============  =============================  ====================
    """
    has_form = is_agent_form(trajectory.completions, actions=("search",))
    if tagged_answer(written(trajectory)) is None:
        return 0.0
    if is_solved(trajectory, task):
        return 1.0 if has_form else 1.0 - structure
    return structure if has_form else final


def deepresearcher(trajectory: Trajectory, task: Task) -> float:
    """Return -1 if a turn has the wrong form, else the F1 of the answer's words (DeepResearcher, arXiv 2504.03160)."""
    if not is_agent_form(trajectory.completions, actions=("tool_call",)):
        return -1.0
    return word_f1(given_answer(trajectory), golden_answers(task))
