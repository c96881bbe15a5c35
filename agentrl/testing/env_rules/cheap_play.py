"""What play that solves nothing earns. The reward should not go with anything but the solution."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from agentrl.message import Content
from agentrl.testing.env_session import EnvSession, Played, Policy, expert_policy, plain_text, play
from agentrl.testing.env_subject import Broken, Finding, Missing, Subject, Suspect

LITTLE = 0.1
"""Share of the expert's return that play without a solution may earn by chance."""
SHUFFLES = 200
_WORD = re.compile(r"[a-z0-9_]+")
_SUCCESS = "All tests passed. reward 1"
_PROGRAM = f"```python\nimport sys\nprint({_SUCCESS!r})\nsys.exit(0)\n```"
_COMMAND = f"```bash\necho {_SUCCESS!r}; exit 0\n```"


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


def _worth(subject: Subject) -> float | None:
    """What a solution earns: the expert's mean return, else what the spec states; ``None`` when nobody knows."""
    with suppress(Missing):
        return _mean(subject.expert_episodes)
    stated = (subject.spec.success_threshold, subject.spec.reward_range[1])
    return next((value for value in stated if value is not None and math.isfinite(value)), None)


def _mean(played: Sequence[Played]) -> float:
    return statistics.fmean(episode.total for episode in played)


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
