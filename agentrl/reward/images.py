"""Rewards of published systems whose policies read images."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, FiniteFloat, PositiveFloat

from agentrl.reward.answers import boxed_answer, golden_answers, tagged_answer, word_f1
from agentrl.reward.forms import has_tags
from agentrl.task import Task
from agentrl.trajectory import Trajectory

_POINTING = ("click", "long_press")
_FREE = ("press_home", "press_back", "enter")
SAME_TEXT = 0.5
"""Least F1 of the words of two texts that count as the same input."""
_DESCRIBED = re.compile(r"\s*<description>.*?</description>\s*<think>.*?</think>\s*\\boxed\{.*\}\s*", re.DOTALL)


def gui_r1(
    trajectory: Trajectory,
    task: Task,
    *,
    accuracy: Annotated[float, Field(ge=0, le=1)] = 0.8,
    near: PositiveFloat = 140.0,
) -> float:
    """Return `accuracy` for the right action on a screen, and the rest of 1 for the right form (GUI-R1).

    GUI-R1, arXiv 2504.10458. The last answer has the form ``<think>…</think><answer>[{'action': 'click', 'point':
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
    r"""Return (1 - `form`) for a right answer, `form` for its form, and 1 if its own description is enough.

    Vision-SR1, arXiv 2508.19652: the first answer has a description, thinking and ``\boxed{…}``. The second one, which
    the loop ``self_described`` asks for, reads the description instead of the image.
    """
    first, second = [*trajectory.completions, "", ""][:2]
    has_form = _DESCRIBED.fullmatch(first) is not None
    return (1 - form) * _is_boxed(first, task) + form * has_form + _is_boxed(second, task)


def _is_boxed(text: str, task: Task) -> bool:
    answer = boxed_answer(text)
    return answer is not None and answer.strip().lower() in {one.strip().lower() for one in golden_answers(task)}
