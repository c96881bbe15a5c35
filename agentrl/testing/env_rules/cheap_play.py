"""What play that solves nothing earns. The reward should not go with anything but the solution."""

from __future__ import annotations

import math
import random
import re
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from agentrl.message import Content
from agentrl.rollout.env_adapter import WrongReturn
from agentrl.task import Task
from agentrl.testing.env_session import (
    CallFailed,
    EnvSession,
    Played,
    Policy,
    call_action,
    expert_policy,
    parameters_of,
    plain_text,
    play,
    random_arguments,
)
from agentrl.testing.env_subject import Broken, Finding, Missing, Subject, Suspect, until
from agentrl.tool import Tool

LITTLE = 0.1
"""Share of the expert's return that play without a solution may earn by chance."""
SHUFFLES = 200
FEWEST_COMPARED = 4
"""Tasks on which lazy play must have been compared with random play; fewer may differ by accident."""
DEVIATIONS = 2.5
"""Standard errors by which the mean returns of two policies must differ."""
NONSENSE = "zx qv"
EVERYTHING = 100
"""Numbers that are said at once, from 0 on."""
_GIVING_UP = re.compile(r"submit|finish|done|end|stop|quit|give|answer|transfer|escalate", re.IGNORECASE)
_LONGEST_SAID = 8000
_WORD = re.compile(r"[a-z0-9_]+")
_SUCCESS = "All tests passed. reward 1"
_PROGRAM = f"```python\nimport sys\nprint({_SUCCESS!r})\nsys.exit(0)\n```"
_COMMAND = f"```bash\necho {_SUCCESS!r}; exit 0\n```"


def doing_nothing_does_not_pay(subject: Subject) -> Finding:
    """Saying nothing until the end earns no more than random play, and less than the expert."""
    return _compared(subject, lambda _task: _always(""))


def repeating_nonsense_does_not_pay(subject: Subject) -> Finding:
    """Repeating one invalid action until the end earns no more than random play, and less than the expert."""
    return _compared(subject, lambda _task: _always(NONSENSE))


def giving_up_does_not_pay(subject: Subject) -> Finding:
    """Giving up at once, in words and by tools that end or hand over, earns no more than random play, and less than
    the expert.
    """
    return _compared(subject, lambda task: _giving_up(task.seed))


def saying_everything_does_not_pay(subject: Subject) -> Finding:
    """Saying all numbers, all admissible actions and all that was seen at once earns no more than random play, and less
    than the expert.
    """
    return _compared(subject, lambda _task: _saying_everything())


def silence_earns_nothing(subject: Subject) -> Finding:
    """A policy that says nothing earns less than a tenth of what the expert does."""
    return _judged(subject, subject.play(lambda _task: _always("")))


def handing_in_earns_nothing(subject: Subject) -> Finding:
    """A policy that only ever says "submit" earns less than a tenth of what the expert does."""
    return _judged(subject, subject.play(lambda _task: _always("submit")))


def printed_success_earns_nothing(subject: Subject) -> Finding:
    """A Python program that prints marks of success and exits earns less than a tenth of what the expert does."""
    return _judged(subject, subject.play(lambda _task: _always(_PROGRAM)))


def echoed_success_earns_nothing(subject: Subject) -> Finding:
    """A shell command that prints marks of success and exits earns less than a tenth of what the expert does."""
    return _judged(subject, subject.play(lambda _task: _always(_COMMAND)))


def repeating_earns_nothing(subject: Subject) -> Finding:
    """A policy that repeats what it reads earns less than a tenth of what the expert does."""
    return _judged(subject, subject.play(lambda _task: lambda _session, observation: plain_text(observation)))


def another_solution_earns_nothing(subject: Subject) -> Finding:
    """What solves the first task earns in the others less than a tenth of what the expert does."""
    first, others = subject.tasks[0], subject.tasks[1:]
    if not others:
        raise Missing("one task was played")
    with subject.session() as session:
        if session.find("expert") is None:
            raise Missing("no expert()")
        actions = play(session, first, expert_policy(), subject.limit).actions
        played = [play(session, task, _script(actions), subject.limit) for task in others]
    try:
        return _judged(subject, played)
    except Broken as same:
        raise Suspect(str(same)) from None


def openings_tell_no_luck(subject: Subject) -> Finding:
    """No word of the opening tells whether random play is rewarded."""
    found = _mean(subject.random_episodes)
    if words := telling(subject.random_episodes):
        raise Suspect(f"random play: mean return {found:g}, which goes with {_listed(words)} in the opening")
    return Finding(detail=f"random play: mean return {found:g}", figures={"mean_return": found})


def _judged(subject: Subject, played: Sequence[Played]) -> Finding:
    """What cheap play earned, if it is little and no word of the opening tells when.

    Raises:
        Broken: as much as the expert.
        Suspect: more than a little, or a word goes with it.
    """
    earned, worth = _mean(played), _worth(subject)
    detail = f"mean return {earned:g}" + ("" if worth is None else f", of a solution {worth:g}")
    if worth is not None and earned >= worth > 0:
        raise Broken(detail)
    if words := telling(played):
        raise Suspect(f"{detail}; it goes with {_listed(words)} in the opening")
    if worth is not None and earned > min(worth * LITTLE, worth):
        raise Suspect(detail)
    return Finding(detail=detail, figures={"mean_return": earned})


def _compared(subject: Subject, policy_of: Callable[[Task], Policy]) -> Finding:
    """Compare the returns of lazy play with those of random play of the same tasks.

    Raises:
        Missing: it cannot be played; *bears nonsense* says more.
        Broken: lazy play earned more, and not by accident; or as much as an expert who is better than random play.
    """
    lazy = _lazy_episodes(subject, policy_of)
    honest = subject.random_episodes[: len(lazy)]
    earned, chance = _mean(lazy), _mean(honest)
    detail = f"mean return {earned:g}, of random play {chance:g}"
    if earned > chance:
        gains = [one.total - other.total for one, other in zip(lazy, honest, strict=True)]
        if len(gains) >= FEWEST_COMPARED and earned - chance > DEVIATIONS * _standard_error(gains):
            raise Broken(detail)
        with suppress(Missing):
            worth = _mean(subject.expert_episodes[: len(lazy)])
            if earned >= worth > chance:
                raise Broken(f"{detail}, of the expert {worth:g}")
    return Finding(detail=f"{detail}; {len(lazy)} tasks", figures={"mean_return": earned, "random_return": chance})


def _lazy_episodes(subject: Subject, policy_of: Callable[[Task], Policy]) -> list[Played]:
    with subject.session() as session:
        timed = until(subject.effort.lazy_s, subject.tasks)
        try:
            return [play(session, task, policy_of(task), subject.limit) for task in timed]
        except (CallFailed, WrongReturn):
            raise
        except Exception as error:
            raise Missing(f"an action is refused by an exception ({type(error).__name__}: {error})") from error


def _standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


def _giving_up(seed: int) -> Policy:
    """Calls each tool that may end the episode once, then says that it gives up."""
    generator = random.Random(seed)
    tools: list[Tool] | None = None

    def choose(session: EnvSession, observation: Content) -> str:
        nonlocal tools
        if tools is None:
            tools = [tool for tool in session.own_tools() if _GIVING_UP.search(tool.name)]
        if tools:
            tool = tools.pop()
            return call_action(tool, random_arguments(tool, generator, plain_text(observation)))
        return "I give up. I do not know the answer."

    return choose


def _saying_everything() -> Policy:
    """Calls each tool that needs no arguments once, then says all that it knows, again and again."""
    seen = list[str]()
    tools: list[Tool] | None = None

    def choose(session: EnvSession, observation: Content) -> str:
        nonlocal tools
        seen.append(plain_text(observation))
        if tools is None:
            tools = [tool for tool in session.own_tools() if not parameters_of(tool)]
        if tools:
            return call_action(tools.pop(), {})
        told = [*map(str, range(EVERYTHING)), *(session.call("admissible_actions") or ()), *seen]
        return "\n".join(told)[:_LONGEST_SAID]

    return choose


def _worth(subject: Subject) -> float | None:
    """What a solution earns: the expert's mean return, else what the spec states; ``None`` when nobody knows."""
    with suppress(Missing):
        return _mean(subject.expert_episodes)
    stated = (subject.spec.success_threshold, subject.spec.reward_range[1])
    return next((value for value in stated if value is not None and math.isfinite(value)), None)


def _mean(played: Sequence[Played]) -> float:
    return math.fsum(episode.total / len(played) for episode in played)  # rewards of any size can be added so


def _listed(words: Sequence[str]) -> str:
    return ", ".join(map(repr, words[:3]))


def telling(played: Sequence[Played]) -> list[str]:
    """Words whose presence in an opening goes with the return more closely than that of any word by accident.

    What is an accident is seen by giving the returns to other episodes, again and again: there, too, some word goes
    with them best (Westfall and Young, Resampling-Based Multiple Testing, 1993).
    """
    returns = np.array([episode.total for episode in played])
    bags = [set(_WORD.findall(episode.moments[0].observation.lower())) for episode in played]
    words = sorted({word for bag in bags for word in bag if any(word not in other for other in bags)})
    if not words or np.ptp(returns) == 0:
        return []
    presence = _standardised(np.array([[word in bag for word in words] for bag in bags], dtype=np.float64))
    generator = np.random.default_rng(0)
    shuffled = np.stack([returns, *(generator.permutation(returns) for _ in range(SHUFFLES))])
    strength = np.abs(_standardised(shuffled.T).T @ presence)
    accident = strength[1:].max() + 1e-9
    return [word for word, found in zip(words, strength[0], strict=True) if found > accident]


def _standardised(columns: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Columns of mean 0 and length 1, so that products of them are correlations."""
    centred = columns - columns.mean(axis=0)
    return np.asarray(centred / np.linalg.norm(centred, axis=0))


def _always(text: str) -> Policy:
    return lambda _session, _observation: text


def _script(actions: Sequence[str]) -> Policy:
    left = list(actions)

    def choose(_session: EnvSession, _observation: Content) -> str:
        return left.pop(0) if left else actions[-1]

    return choose
