"""Rewards of published systems, which join whether a task is solved (`is_solved`) with the form of the answer."""

from __future__ import annotations

from agentrl.rewards.answers import given_answer, golden_answers, is_solved, tagged_answer, word_f1, written
from agentrl.rewards.forms import has_tags, is_agent_form
from agentrl.task import Task
from agentrl.trajectory import Trajectory


def retool(trajectory: Trajectory, task: Task) -> float:
    """Return 1 for a right answer, else min(-0.6, -1 + 0.1 (n - 2) / 2), where n counts messages as verl does.

    ReTool, arXiv 2504.11536 (verl's recipe): a wrong answer costs less after more tool calls. n is 2 for an answer
    without calls, and each turn with a call adds 2.
    """
    if is_solved(trajectory, task):
        return 1.0
    messages = 2 * len(trajectory.completions)
    return min(-0.6, -1 + 0.1 * (messages - 2) / 2)


def tinyzero(trajectory: Trajectory, task: Task, *, form: float = 0.1) -> float:
    """Return 1 for a right answer, `form` for a wrong one in answer tags, and 0 otherwise (TinyZero's countdown)."""
    if tagged_answer(written(trajectory)) is None:
        return 0.0
    return 1.0 if is_solved(trajectory, task) else form


def code_r1(trajectory: Trajectory, task: Task, *, form: float = 0.1) -> float:
    """Return 1 + `form` for a right program, `form` for a wrong one, and -1 - `form` without the right form (Code-R1).

    The form is ``<think>…</think> <answer>…</answer>`` with a fenced block of code in the answer.
    """
    last = trajectory.completions[-1] if trajectory.completions else ""
    if not has_tags(last, ("think", "answer")) or (tagged_answer(last) or "").count("```") < 2:
        return -1.0 - form
    return 1.0 + form if is_solved(trajectory, task) else form


def search_r1(trajectory: Trajectory, task: Task, *, structure: float = 0.2, final: float = 0.1) -> float:
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
