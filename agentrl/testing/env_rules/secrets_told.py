"""What a policy reads and must not: the answer, the way to it, the reward. A finding here is a smell, not a proof."""

from __future__ import annotations

import inspect
import numbers
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from agentrl.task import Task
from agentrl.testing.env_session import EnvSession, Played, plain_text
from agentrl.testing.env_subject import Finding, Missing, Subject, Suspect
from agentrl.tool import Tool

ANSWER = r"answers?|solutions?|secrets?|ground[ _]truth|gold|labels?|passwords?"
_ANSWER_NAME = re.compile(rf"(?:^|_)(?:{ANSWER}|hidden)$")
_LONG = 4
"""Characters from which a text does not stand somewhere by chance."""
_FEW = 3
"""Tasks, plans or rewards below which nothing is concluded."""
_SHORT_PLAN = 3
_LONG_ACTION = 8


def hides_the_answer(subject: Subject) -> Finding:
    """No answer stands in what the policy reads first: prompt, opening, hint, tools, info of reset.

    Answers are a task's ground truth, and attributes of the environment that are called so. An answer is told when, in
    every task, it follows a word like "answer", or is a text of some length, and it differs between tasks.
    """
    told: dict[str, list[str]] = {}
    with subject.session() as session:
        for task in subject.tasks:
            text = _first_texts(session, task)
            for source, answers in _answers(session, task).items():
                found = [answer for answer in answers if _tells(text, answer)]
                told.setdefault(source, []).extend(found[:1])
    if not told:
        raise Missing("no task says what its answer is")
    for source, found in told.items():
        if len(found) >= len(subject.tasks) and len(set(found)) >= min(_FEW, len(found)) > 1:
            raise Suspect(f"{source} stands in what the policy reads first, for example {found[0][:60]!r}")
    return Finding(detail=f"looked for {', '.join(told)}")


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
    """Answers by where they are known from."""
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


def hides_the_plan(subject: Subject) -> Finding:
    """The first observation does not hold what the expert then does, action by action."""
    told = [
        _holds(episode.moments[0].observation, episode.actions)
        for episode in subject.expert_episodes
        if _is_telling(episode.actions)
    ]
    different = {episode.actions for episode in subject.expert_episodes}
    if len(told) >= _FEW and len(different) >= _FEW and 2 * sum(told) > len(told):
        raise Suspect(f"{sum(told)} of {len(told)} first observations hold the expert's whole plan")
    return Finding(detail=f"{sum(told)} of {len(told)} first observations hold a plan")


def _is_telling(actions: Sequence[str]) -> bool:
    return len(actions) >= _SHORT_PLAN or (len(actions) == 1 and len(actions[0]) >= _LONG_ACTION)


def _holds(text: str, actions: Sequence[str]) -> bool:
    """Whether the actions stand in the text one after the other, with little between them."""
    return re.search(r"\W+(?:\w{1,4}\W+)?".join(map(re.escape, actions)), text, re.IGNORECASE) is not None


def hides_the_reward(subject: Subject) -> Finding:
    """An observation after which the episode goes on does not tell the number of the reward."""
    episodes: list[Played] = list(subject.random_episodes)
    with suppress(Missing):
        episodes += subject.expert_episodes
    steps = [result for episode in episodes for result in episode.results if result.reward and not result.done]
    told = [result.reward for result in steps if _tells_reward(plain_text(result.observation), result.reward)]
    if len(told) >= _FEW and 2 * len(told) > len(steps):
        raise Suspect(f"{len(told)} of {len(steps)} rewards stand in the observation, for example {told[0]:g}")
    return Finding(detail=f"{len(told)} of {len(steps)} rewards on the way stand in the observation")


def _tells_reward(text: str, reward: float) -> bool:
    forms = {f"{reward:g}", f"{reward:.1f}", f"{reward:.2f}", f"{reward:.3f}", str(reward)}
    number = "|".join(re.escape(form) for form in sorted(forms, key=len, reverse=True))
    words = r"\b(?:rewards?|scores?|returns?|points?)\b\W{0,4}(?:(?:is|was|of)\W+)?"
    return re.search(rf"{words}\+?(?:{number})(?![\w.]*\d)", text, re.IGNORECASE) is not None
