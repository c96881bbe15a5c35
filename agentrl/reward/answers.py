"""Answers in an episode's texts: tags, boxes, and whether the task is solved."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal

from agentrl.message.data_file import list_in_text
from agentrl.task import Task
from agentrl.trajectory import Trajectory

_ARTICLE = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])[-+]?\.\d+")
_MINUS = re.compile(r"-(?=\d)|(?<!\w)-(?=\w)")
"""A minus, in contrast to a hyphen."""
_NO_MARKS = str.maketrans("", "", "".join(set(string.punctuation) - set("+*/^=<>{}")))
_UPRIGHT = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")


def policy_text(trajectory: Trajectory) -> str:
    """Return the whole text of the policy, including thinking and the markup of tool calls."""
    return "\n".join(trajectory.completions)


def boxed_answer(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{…}`` or ``\fbox{…}`` of a text; ``None`` without a complete one.

    >>> boxed_answer(r"so \boxed{1} or rather \boxed{\frac{1}{2}}"), boxed_answer(r"\boxed{1")
    ('\\frac{1}{2}', None)
    """
    depth, start = 0, -1
    for box in _BOX.finditer(text):
        start = box.end()
    for brace in _BRACE.finditer(text, start) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0 and brace[0] == "}":
            return text[start + 1 : brace.start()]
    return None


def tagged_answer(text: str, tag: str = "answer") -> str | None:
    """Return the content of the last pair of tags, without spaces around it; ``None`` without one.

    >>> tagged_answer("<answer>1</answer> <answer> 2 </answer>"), tagged_answer("<answer>1")
    ('2', None)
    >>> tagged_answer("It goes into <answer> tags. <answer>3</answer>")
    '3'
    """
    found = re.findall(rf"<{tag}>((?:(?!<{tag}>).)*?)</{tag}>", text, re.DOTALL)
    return found[-1].strip() if found else None


def without_thinking(text: str) -> str:
    """Return the text after its last thinking; thinking without an end extends to the end of the text.

    >>> without_thinking("<think>1</think> 2"), without_thinking("1</think> 2"), without_thinking("<think>1")
    (' 2', ' 2', '')
    """
    return text.rpartition("</think>")[2].partition("<think>")[0]


def given_answer(trajectory: Trajectory) -> str:
    """Return the answer of an episode: in answer tags or a box of the last turn after its thinking, else its text."""
    last = without_thinking(trajectory.final_text)
    for found in (tagged_answer(last), boxed_answer(last)):
        if found is not None:
            return found
    return trajectory.final_text


def golden_answers(task: Task) -> list[str]:
    """Return the correct answers in a task's row: one or several, possibly as the text of a list of texts."""
    truth = task.ground_truth
    if isinstance(truth, dict):
        truth = truth.get("target", truth.get("answer"))
    if truth is None:
        return []
    found = list_in_text(truth)
    if isinstance(found, list) and all(isinstance(one, str) for one in found):
        truth = found
    return [str(one) for one in truth] if isinstance(truth, list | tuple) else [str(truth)]


def normalize(text: str) -> str:
    """Return a text in lower case without punctuation and articles (SQuAD, arXiv 1606.05250), if it has other words."""
    kept = _ARTICLE.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()
    return " ".join(kept or text.lower().split())


def is_same(answer: str, golden: str) -> bool:
    r"""Return True if two answers differ only in spaces, case, punctuation and articles, or in how numbers are written.

    Signs, decimal points and the operators of formulas do not count as punctuation.

    >>> is_same("The U.S., 1,000.0", "us 1000"), is_same(r"\text{B}", "b"), is_same("-5", "5"), is_same("1.5", "15")
    (True, True, False, False)
    """
    return answer.strip() == golden.strip() or (_key(answer) == _key(golden) != ("", []))


def _key(text: str) -> tuple[str, list[Decimal]]:
    plain = _UPRIGHT.sub(r"\1", text.replace("\u2212", "-"))
    numbers = [Decimal(number.replace(",", "")) for number in _NUMBER.findall(plain)]
    marked = _MINUS.sub("\u2212", _NUMBER.sub("0", plain)).lower().translate(_NO_MARKS)
    return " ".join(_ARTICLE.sub(" ", marked).split() or marked.split()), numbers  # a choice may be "A"


def word_f1(answer: str, golden: Sequence[str]) -> float:
    """Return the best harmonic mean of precision and recall over words."""
    return max((_word_f1(normalize(answer).split(), normalize(text).split()) for text in golden), default=0.0)


def _word_f1(answer: list[str], golden: list[str]) -> float:
    if not answer or not golden:
        return float(answer == golden)
    return 2 * (Counter(answer) & Counter(golden)).total() / (len(answer) + len(golden))


def is_solved(trajectory: Trajectory, task: Task) -> bool:
    """Return True if the task is solved.

    The environment decides, by its success or else by a reward that is not 0; without these, the answer must be the
    same as one of the task's correct ones (`is_same`).
    """
    if trajectory.success is not None:
        return trajectory.success
    if trajectory.environment_reward:
        return trajectory.environment_reward > 0
    answer = given_answer(trajectory)
    return any(is_same(answer, golden) for golden in golden_answers(task))


def solved(trajectory: Trajectory, task: Task) -> float:
    """Return 1 if the task is solved, else 0; see `is_solved`."""
    return float(is_solved(trajectory, task))


def boxed(trajectory: Trajectory, task: Task) -> float:
    r"""Return 1 if the last turn contains a complete ``\boxed{…}``, else 0."""
    return float(bool(trajectory.completions) and boxed_answer(trajectory.completions[-1]) is not None)


def answer_f1(trajectory: Trajectory, task: Task) -> float:
    """Return the F1 of the words of the answer with the best correct answer, 0 to 1."""
    return word_f1(given_answer(trajectory), golden_answers(task))
