"""Rules about information that must be hidden from the policy: answers, plans, the reward, and files of this machine.

A finding about texts is an indication, not a proof. An opened file is detected for any process, even if none of its
content is shown (Linux only).
"""

from __future__ import annotations

import ctypes
import inspect
import numbers
import os
import re
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from agentrl.task import Task
from agentrl.testing.env_session import EnvSession, PlayedEpisode, plain_text
from agentrl.testing.env_subject import Subject
from agentrl.testing.report import CheckFinding, RuleFailed, RuleSkipped, RuleWarned, rule
from agentrl.tool import Tool

ANSWER = r"answers?|solutions?|secrets?|ground[ _]truth|gold|labels?|passwords?"
_ANSWER_NAME = re.compile(rf"(?:^|_)(?:{ANSWER}|hidden)$")
_LONG = 4
"""Minimum number of characters of a text that does not occur by chance."""
_FEW = 3
"""Minimum number of tasks, plans or rewards for a conclusion."""
_SHORT_PLAN = 3
_LONG_ACTION = 8
IN_OPEN = 0x20
_EVENTS_BYTES = 4096
CHECKED_TASKS = 4
"""Maximum number of tasks whose sandbox is inspected."""


@rule("keep answers out of texts, hints and infos; a choice among given answers is fine")
def hides_the_answer(subject: Subject) -> str:
    """The texts that the policy reads first contain no answer: prompt, opening, hint, tools, info of reset.

    Answers are a task's ground truth, and attributes of the environment with names such as ``solution``. An answer
    counts as shown if in every task it follows a word like "answer" or has some length, and it differs between tasks.
    """
    shown: dict[str, list[str]] = {}
    with subject.session() as session:
        for task in subject.tasks:
            text = _first_texts(session, task)
            for source, answers in _answers(session, task).items():
                found = [answer for answer in answers if _tells(text, answer)]
                shown.setdefault(source, []).extend(found[:1])
    if not shown:
        raise RuleSkipped("no task has a known answer")
    for source, found in shown.items():
        if len(found) >= len(subject.tasks) and len(set(found)) >= min(_FEW, len(found)) > 1:
            raise RuleWarned(
                f"{source} appears in the texts that the policy reads first, for example {found[0][:60]!r}"
            )
    return f"looked for {', '.join(shown)}"


def _first_texts(session: EnvSession, task: Task) -> str:
    observation, info = session.start(task)
    tools = session.find("tools") or ()
    parts = [
        task.prompt or "",
        plain_text(observation),
        str(session.find("action_hint") or ""),
        *(f"{name}: {value}" for name, value in info.items()),
        *(tool.schema["function"]["description"] for tool in tools),
        *(session.call_tool(tool, {}) for tool in tools if _needs_nothing(tool)),
    ]
    return "\n".join(parts)


def _needs_nothing(tool: Tool) -> bool:
    return not tool.is_stateful and not tool.schema["function"]["parameters"]["properties"]


def _answers(session: EnvSession, task: Task) -> dict[str, list[str]]:
    """Return the known answers by their source."""
    found = {} if task.ground_truth is None else {"the task's ground truth": _texts(task.ground_truth)}
    bare = getattr(session.env, "unwrapped", session.env)
    inner = [value for value in _attributes(bare).values() if type(value).__module__ not in ("builtins", "numpy")]
    for owner in (bare, *inner):
        for name, value in _attributes(owner).items():
            if _ANSWER_NAME.search(name) and _texts(value):
                found[f"the attribute {name}"] = _texts(value)
    return found


def _attributes(owner: object) -> Mapping[str, Any]:
    return {} if inspect.isclass(owner) or inspect.ismodule(owner) else getattr(owner, "__dict__", {})


def _texts(value: object) -> list[str]:
    if isinstance(value, bool):
        return []
    if isinstance(value, str | numbers.Real):
        return [str(value)] if str(value).strip() else []
    if isinstance(value, list | tuple):
        return [text for item in value for text in _texts(item)]
    return []


def _tells(text: str, answer: str) -> bool:
    whole = rf"(?<!\w){re.escape(answer.strip())}(?!\w)"
    if len(answer.strip()) >= _LONG and re.search(whole, text, re.IGNORECASE):
        return True
    return re.search(rf"\b(?:{ANSWER})\b\W*(?:is\W+)?{whole}", text, re.IGNORECASE) is not None


@rule("remove the solution from the observation")
def hides_the_plan(subject: Subject) -> str:
    """The first observation does not contain the expert's actions in order."""
    found = [
        _holds(episode.moments[0].observation, episode.actions)
        for episode in subject.expert_episodes
        if _is_telling(episode.actions)
    ]
    different = {episode.actions for episode in subject.expert_episodes}
    if len(found) >= _FEW and len(different) >= _FEW and 2 * sum(found) > len(found):
        raise RuleWarned(f"{sum(found)} of {len(found)} first observations contain the expert's whole plan")
    return f"{sum(found)} of {len(found)} first observations contain a plan"


def _is_telling(actions: Sequence[str]) -> bool:
    return len(actions) >= _SHORT_PLAN or (len(actions) == 1 and len(actions[0]) >= _LONG_ACTION)


def _holds(text: str, actions: Sequence[str]) -> bool:
    """Return True if the actions follow one another in the text, with little between them."""
    return re.search(r"\W+(?:\w{1,4}\W+)?".join(map(re.escape, actions)), text, re.IGNORECASE) is not None


@rule("remove the reward from the observation; a score that belongs to the game is fine")
def hides_the_reward(subject: Subject) -> str:
    """Observations before the last one do not state the reward."""
    episodes: list[PlayedEpisode] = list(subject.random_episodes)
    with suppress(RuleSkipped):
        episodes += subject.expert_episodes
    steps = [result for episode in episodes for result in episode.results if result.reward and not result.done]
    found = [result.reward for result in steps if _tells_reward(plain_text(result.observation), result.reward)]
    if len(found) >= _FEW and 2 * len(found) > len(steps):
        raise RuleWarned(f"{len(found)} of {len(steps)} rewards appear in the observation, for example {found[0]:g}")
    return f"{len(found)} of {len(steps)} intermediate rewards appear in the observation"


def _tells_reward(text: str, reward: float) -> bool:
    forms = {f"{reward:g}", f"{reward:.1f}", f"{reward:.2f}", f"{reward:.3f}", str(reward)}
    number = "|".join(re.escape(form) for form in sorted(forms, key=len, reverse=True))
    words = r"\b(?:rewards?|scores?|returns?|points?)\b\W{0,4}(?:(?:is|was|of)\W+)?"
    return re.search(rf"{words}\+?(?:{number})(?![\w.]*\d)", text, re.IGNORECASE) is not None


@contextmanager
def _watching(path: Path) -> Iterator[Callable[[], bool]]:
    """Watch a file; the function returns True if it was opened since the last call (without inotify always False)."""
    libc = ctypes.CDLL(None)
    descriptor = int(libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)) if hasattr(libc, "inotify_init1") else -1

    def was_opened() -> bool:
        try:
            return descriptor >= 0 and bool(os.read(descriptor, _EVENTS_BYTES))
        except BlockingIOError:
            return False

    try:
        if descriptor >= 0:
            libc.inotify_add_watch(descriptor, os.fsencode(path), IN_OPEN)
        yield was_opened
    finally:
        if descriptor >= 0:
            os.close(descriptor)


@rule("let actions and tools work in a sandbox, or in their own folder")
def reads_no_files(subject: Subject) -> str:
    """No action and no tool opens files of this machine, which may contain answers and tests."""
    mark = secrets.token_hex(16)
    with tempfile.TemporaryDirectory() as folder, subject.session() as session:
        path = Path(folder) / "answer.txt"
        path.write_text(mark, encoding="utf-8")
        tried = 0
        with _watching(path) as was_opened:
            for what, shown in _tries(session, subject, str(path)):
                tried += 1
                if mark in shown:
                    raise RuleWarned(f"{what} shows a file of this machine: let it run in a sandbox")
                if was_opened():
                    raise RuleWarned(f"{what} opens a file of this machine: let it run in a sandbox")
    return f"{tried} ways tried"


def _tries(session: EnvSession, subject: Subject, path: str) -> Iterator[tuple[str, str]]:
    """Try actions and tools, and yield each with its output."""
    command, program = f"cat {path}", f"print(open({path!r}).read())"
    texts = (path, command, f"open({path!r}).read()", program, f"file://{path}")
    for text in (*texts, f"```bash\n{command}\n```", f"```python\n{program}\n```"):
        session.reset(subject.tasks[0])
        yield f"the action {text.replace(path, 'FILE')!r}", plain_text(session.step(text).observation)
    session.reset(subject.tasks[0])
    for tool in session.find("tools") or ():
        if tool.is_stateful:
            continue
        for text in texts:
            yield f"the tool {tool.name}", session.call_tool(tool, dict.fromkeys(_text_arguments(tool), text))


def _text_arguments(tool: Tool) -> list[str]:
    parameters = tool.schema["function"]["parameters"]["properties"]
    return [name for name, described in parameters.items() if described.get("type") == "string"]


@rule("grade in another sandbox than the one in which the policy acts")
def keeps_secrets_out_of_the_sandbox(subject: Subject) -> CheckFinding:
    """The policy's sandbox contains no hidden test and no solution, at the start or after a step.

    ``visible()`` returns the readable texts by their location, ``secrets()`` texts that may not occur in them.
    """
    read = 0
    with subject.session() as session:
        if session.find("visible") is None or session.find("secrets") is None:
            raise RuleSkipped("no visible() and secrets(), which describe a sandbox")
        tasks = subject.tasks[:CHECKED_TASKS]
        for task in tasks:
            session.reset(task)
            read += _count_visible(session)
            if not session.step("").done:
                read += _count_visible(session)
    return CheckFinding(f"{read} texts read, {len(tasks)} tasks", {"read": float(read)})


def _count_visible(session: EnvSession) -> int:
    """Return the number of visible texts.

    Raises:
        RuleFailed: a text contains a secret.
    """
    shown: Mapping[str, str] = session.call("visible")
    secrets: Sequence[str] = session.call("secrets")
    for location, text in shown.items():
        for secret in filter(str.strip, secrets):
            if secret in text:
                raise RuleFailed(f"{location} shows {secret[:60]!r}")
    return len(shown)
