"""Rewards for the format of answers (tags, the parts of an agent's turns), and rewards of published systems.

The latter combine the correctness of an answer (`is_solved`) with its format. An answer may be an action on a screen.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, FiniteFloat, NonNegativeInt, PositiveFloat

from agentrl.reward.answers import (
    boxed_answer,
    given_answer,
    golden_answers,
    is_solved,
    policy_text,
    tagged_answer,
    word_f1,
)
from agentrl.task import Task
from agentrl.trajectory import Trajectory

NO_TOOLS = 0.5
"""Share of errors of an episode without tool calls, between that of flawless calls and that of failed ones."""
_POINTING = ("click", "long_press")
_FREE = ("press_home", "press_back", "enter")
SAME_TEXT = 0.5
"""Least F1 of the words of two texts that count as the same input."""
_DESCRIBED = re.compile(r"\s*<description>.*?</description>\s*<think>.*?</think>\s*\\boxed\{.*\}\s*", re.DOTALL)


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
    """Return 1 if the last turn has the format ``<think>…</think> <answer>…</answer>``, else 0 (DeepSeek-R1's format).

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
    text = policy_text(trajectory)
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
    if tagged_answer(policy_text(trajectory)) is None:
        return 0.0
    return 1.0 if is_solved(trajectory, task) else form


def code_r1(trajectory: Trajectory, task: Task, *, form: FiniteFloat = 0.1) -> float:
    """Return 1 + `form` for a right program, `form` for a wrong one, and -1 - `form` in a wrong format (Code-R1).

    The format is ``<think>…</think> <answer>…</answer>`` with a fenced block of code in the answer.
    """
    last = trajectory.completions[-1] if trajectory.completions else ""
    if not has_tags(last, ("think", "answer")) or (tagged_answer(last) or "").count("```") < 2:
        return -1.0 - form
    return 1.0 + form if is_solved(trajectory, task) else form


def search_r1(trajectory: Trajectory, task: Task, *, structure: FiniteFloat = 0.2, final: FiniteFloat = 0.1) -> float:
    """Return the reward of Search-R1 v0.3, which scores exact match and format (arXiv 2505.15117).

    ===============  =============================  ====================
    answer           all turns in the format        otherwise
    ===============  =============================  ====================
    right            1                              1 - `structure`
    wrong            `structure`                    `final`
    none             (not possible)                 0
    ===============  =============================  ====================
    """
    has_form = is_agent_form(trajectory.completions, actions=("search",))
    if tagged_answer(policy_text(trajectory)) is None:
        return 0.0
    if is_solved(trajectory, task):
        return 1.0 if has_form else 1.0 - structure
    return structure if has_form else final


def deepresearcher(trajectory: Trajectory, task: Task) -> float:
    """Return -1 if a turn has a wrong format, else the F1 of the answer's words (DeepResearcher, arXiv 2504.03160)."""
    if not is_agent_form(trajectory.completions, actions=("tool_call",)):
        return -1.0
    return word_f1(given_answer(trajectory), golden_answers(task))


def gui_r1(
    trajectory: Trajectory,
    task: Task,
    *,
    accuracy: Annotated[float, Field(ge=0, le=1)] = 0.8,
    near: PositiveFloat = 140.0,
) -> float:
    """Return `accuracy` for the right action on a screen, and the rest of 1 for the right format (GUI-R1).

    GUI-R1, arXiv 2504.10458. The last answer has the format ``<think>…</think><answer>[{'action': 'click', 'point':
    [123, 300], 'input_text': ''}]</answer>``. The ground truth is an object, or its JSON text, with ``action``,
    ``gt_bbox`` and ``input_text``. A click is right within a box of four numbers, or less than `near` pixels from a
    point of two; the texts of other actions must share half of their words.
    """
    last = trajectory.completions[-1] if trajectory.completions else ""
    if not has_tags(last, ("think", "answer")):
        return 0.0
    action = _read_action(tagged_answer(last) or "")
    if action is None:
        return 0.0
    return accuracy * _is_right(action, _read_truth(task), near) + (1 - accuracy)


def _read_action(text: str) -> Mapping[str, Any] | None:
    """Return the first action of an answer; ``None`` if it is not an action."""
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    first = found[0] if isinstance(found, list) and found else found
    if not isinstance(first, dict) or not isinstance(first.get("action"), str):
        return None
    action = {**first, "action": first["action"].strip().lower()}
    return action if action["action"] not in _POINTING or _numbers(action.get("point"), 2) else None


def _read_truth(task: Task) -> Mapping[str, Any]:
    truth = task.ground_truth
    found = json.loads(truth) if isinstance(truth, str) else truth
    if not isinstance(found, Mapping) or "action" not in found:
        raise ValueError(f"the ground truth of task {task.id} has no action: expected action, gt_bbox, input_text")
    return found


def _is_right(action: Mapping[str, Any], wanted: Mapping[str, Any], near: float) -> bool:
    kind = action["action"]
    if kind != str(wanted["action"]).strip().lower():
        return False
    if kind in _FREE:
        return True
    if kind not in _POINTING:
        given, right = str(action.get("input_text", "")), str(wanted.get("input_text", ""))
        return word_f1(given, [right]) >= SAME_TEXT
    x, y = _numbers(action["point"], 2)
    box = wanted.get("gt_bbox")
    if corners := _numbers(box, 4):
        return corners[0] <= x <= corners[2] and corners[1] <= y <= corners[3]
    point = _numbers(box, 2)
    return bool(point) and math.dist((x, y), point) < near


def _numbers(value: Any, count: int) -> Sequence[float]:
    """Return a list of that many numbers; an empty one for other values."""
    if not isinstance(value, list | tuple) or len(value) != count:
        return ()
    try:
        return [float(one) for one in value] if all(isinstance(one, int | float) for one in value) else ()
    except OverflowError:  # a whole number of hundreds of digits
        return ()


def vision_sr1(trajectory: Trajectory, task: Task, *, form: FiniteFloat = 0.1) -> float:
    r"""Return (1 - `form`) for a right answer, `form` for its format, and 1 if its own description is enough.

    Vision-SR1, arXiv 2508.19652: the first answer has a description, thinking and ``\boxed{…}``. The second one, which
    the loop ``self_described`` asks for, reads the description instead of the image.
    """
    first, second = [*trajectory.completions, "", ""][:2]
    has_form = _DESCRIBED.fullmatch(first) is not None
    return (1 - form) * _is_boxed(first, task) + form * has_form + _is_boxed(second, task)


def _is_boxed(text: str, task: Task) -> bool:
    answer = boxed_answer(text)
    return answer is not None and answer.strip().lower() in {one.strip().lower() for one in golden_answers(task)}
