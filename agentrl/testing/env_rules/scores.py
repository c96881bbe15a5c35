"""What scripted policies reach."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from agentrl.task import Task
from agentrl.testing.env_session import Played, Policy, expert_policy, random_policy
from agentrl.testing.env_subject import Broken, Finding, Missing, Subject, Suspect

ROUNDED = 0.05
"""How far a stated score may be from the true one: it is rounded, and measured on finitely many episodes."""
IMPLAUSIBLE = 1e-5
"""A number of successes that is rarer than this under the stated score shows that it is wrong."""


def is_solved_by_its_expert(subject: Subject) -> Finding:
    """The expert reaches the stated score."""
    played = [*subject.expert_episodes, *_more(subject, lambda _task: expert_policy())]
    found = _score(subject, "expert", played)
    if "expert" not in subject.spec.scores:
        _doubt_expert(found, _measured(subject, subject.random_episodes))
    return found


def _doubt_expert(expert: Finding, chance: Finding) -> None:
    """Scores that nobody stated are doubted where they are no use.

    Raises:
        Suspect: the expert solves nothing, or is no better than random play.
    """
    if expert.figures.get("success") == 0:
        raise Suspect(f"the expert solves nothing: {expert.detail}")
    kinds = ("success", "mean_return") if "success" in chance.figures else ("mean_return",)
    if all(expert.figures.get(kind, 0.0) <= chance.figures[kind] for kind in kinds):
        raise Suspect(f"the expert is no better than random play: {expert.detail}, random {chance.detail}")


def rewards_success(subject: Subject) -> Finding:
    """What the environment calls success is rewarded: some solved episode returns more than the least, and not 0."""
    played = list(subject.random_episodes)
    with suppress(Missing):
        played += subject.expert_episodes
    solved = [episode.total for episode in played if episode.results and episode.results[-1].info.get("success")]
    if not solved:
        raise Missing("no episode with success")
    least = subject.spec.reward_range[0]
    if all(total == 0 or total <= least for total in solved):
        raise Suspect(f"{len(solved)} of {len(played)} episodes are successes, and all return {max(solved):g}")
    return Finding(detail=f"{len(solved)} successes return {min(solved):g} to {max(solved):g}")


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
    found = _score(subject, "random", played)
    if found.figures.get("success") == 1 and "random" not in subject.spec.scores:
        raise Suspect(f"random play solves everything, so there is nothing to learn: {found.detail}")
    return found


def _more(subject: Subject, policy_of: Callable[[Task], Policy]) -> list[Played]:
    """Episodes of further tasks, as many as the effort has time for."""
    count = min(subject.effort.scored, len(subject.source))
    further: Iterator[Task] = (subject.source[index] for index in range(len(subject.tasks), count))
    return subject.play(policy_of, further)


def _score(subject: Subject, policy: str, played: Sequence[Played]) -> Finding:
    """What a policy reached, compared with what is stated of it."""
    found = _measured(subject, played)
    stated, success = subject.spec.scores.get(policy), found.figures.get("success")
    if stated is None or success is None:
        return found
    solved = round(success * len(played))
    if stated == 1 and solved < len(played):
        verdicts = [episode.is_solved(subject.spec) for episode in played]
        failed = [subject.source[number].id for number, verdict in enumerate(verdicts) if not verdict]
        raise Broken(f"the {policy} is said to solve everything, but not {', '.join(failed[:3])}")
    if _chance(solved, len(played), stated) < IMPLAUSIBLE:
        raise Broken(f"the {policy} solved {solved} of {len(played)}, which a score of {stated:g} does not explain")
    return Finding(detail=found.detail.replace(" solved;", f" solved, stated {stated:g};"), figures=found.figures)


def _measured(subject: Subject, played: Sequence[Played]) -> Finding:
    verdicts = [episode.is_solved(subject.spec) for episode in played]
    steps = statistics.fmean(len(episode.results) for episode in played)
    total = math.fsum(episode.total / len(played) for episode in played)
    figures = {"episodes": float(len(played)), "mean_return": total, "mean_steps": steps}
    if None in verdicts:
        return Finding(detail=f"mean return {total:g}, {steps:.1f} steps; no success to tell", figures=figures)
    solved = sum(map(bool, verdicts))
    detail = f"{solved} of {len(played)} solved; {steps:.1f} steps on average"
    return Finding(detail=detail, figures={**figures, "success": solved / len(played)})


def _chance(solved: int, count: int, stated: float) -> float:
    """Chance of as many successes or more, or of as few or fewer, where the true score is near the stated one."""
    least, most = max(stated - ROUNDED, 0.0), min(stated + ROUNDED, 1.0)
    at_least = sum(_binomial(number, count, most) for number in range(solved, count + 1))
    at_most = sum(_binomial(number, count, least) for number in range(solved + 1))
    return min(at_least, at_most)


def _binomial(number: int, count: int, share: float) -> float:
    return math.comb(count, number) * share**number * (1 - share) ** (count - number)
