"""What scripted policies reach."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence

from agentrl.task import Task
from agentrl.testing.env_session import Played, Policy, expert_policy, random_policy
from agentrl.testing.env_subject import Broken, Finding, Missing, Subject

ROUNDED = 0.05
"""How far a stated score may be from the true one: it is rounded, and measured on finitely many episodes."""
IMPLAUSIBLE = 1e-5
"""A number of successes that is rarer than this under the stated score shows that it is wrong."""


def is_solved_by_its_expert(subject: Subject) -> Finding:
    """The expert reaches the stated score."""
    played = [*subject.expert_episodes, *_more(subject, lambda _task: expert_policy())]
    return _score(subject, "expert", played)


def survives_mistakes(subject: Subject) -> Finding:
    """The expert's mistakes change nothing: it reaches its score with them, too."""
    with subject.session() as session:
        session.reset(subject.tasks[0])
        if session.find("expert") is None or not hasattr(session.call("expert"), "mistake"):
            raise Missing("no mistake() of an expert")
    return _score(subject, "expert", subject.play(lambda task: expert_policy(mistakes=0.2, seed=task.seed)))


def has_a_random_score(subject: Subject) -> Finding:
    """The random policy reaches the stated score, the lower bound."""
    played = [*subject.random_episodes, *_more(subject, lambda task: random_policy(task.seed))]
    return _score(subject, "random", played)


def _more(subject: Subject, policy_of: Callable[[Task], Policy]) -> list[Played]:
    """Episodes of further tasks, as many as the effort has time for."""
    count = min(subject.effort.scored, len(subject.source))
    further: Iterator[Task] = (subject.source[index] for index in range(len(subject.tasks), count))
    return subject.play(policy_of, further)


def _score(subject: Subject, policy: str, played: Sequence[Played]) -> Finding:
    verdicts = [episode.is_solved(subject.spec) for episode in played]
    steps = statistics.fmean(len(episode.results) for episode in played)
    total = statistics.fmean(episode.total for episode in played)
    figures = {"episodes": float(len(played)), "mean_return": total, "mean_steps": steps}
    if None in verdicts:
        return Finding(detail=f"mean return {total:g}, {steps:.1f} steps; no success to tell", figures=figures)
    solved = sum(map(bool, verdicts))
    stated = subject.spec.scores.get(policy)
    if stated == 1 and solved < len(played):
        failed = [subject.source[number].id for number, verdict in enumerate(verdicts) if not verdict]
        raise Broken(f"the {policy} is said to solve everything, but not {', '.join(failed[:3])}")
    if stated is not None and _chance(solved, len(played), stated) < IMPLAUSIBLE:
        raise Broken(f"the {policy} solved {solved} of {len(played)}, which a score of {stated:g} does not explain")
    said = "" if stated is None else f", stated {stated:g}"
    detail = f"{solved} of {len(played)} solved{said}; {steps:.1f} steps on average"
    return Finding(detail=detail, figures={**figures, "success": solved / len(played)})


def _chance(solved: int, count: int, stated: float) -> float:
    """Chance of as many successes or more, or of as few or fewer, where the true score is near the stated one."""
    least, most = max(stated - ROUNDED, 0.0), min(stated + ROUNDED, 1.0)
    at_least = sum(_binomial(number, count, most) for number in range(solved, count + 1))
    at_most = sum(_binomial(number, count, least) for number in range(solved + 1))
    return min(at_least, at_most)


def _binomial(number: int, count: int, share: float) -> float:
    return math.comb(count, number) * share**number * (1 - share) ** (count - number)
