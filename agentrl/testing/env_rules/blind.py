"""Rule about blind play: the success of policies that ignore observations.

If a fixed sequence of actions solves half of the tasks, success does not show that a policy reads its observations.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from textwrap import shorten

from agentrl.message import Content
from agentrl.rollout.env_returns import WrongReturn
from agentrl.task import Task
from agentrl.testing.env_session import CallFailed, EnvSession, PlayedEpisode, Policy, play
from agentrl.testing.env_subject import Subject, until
from agentrl.testing.report import CheckFinding, RuleSkipped, RuleWarned, rule

NOTHING, SUBMIT, FIRST_LISTED, ONE_ACTION, SEQUENCE = KINDS = (
    "nothing",
    "submit",
    "first listed action",
    "one action",
    "fixed sequence",
)
MAX_ACTIONS, MAX_SEQUENCES = 8, 12
"""Maximum numbers of candidates."""
SHARE = 0.25
"""Maximum success of blind play relative to the expert's, if the spec states no score of blind play."""
UNLIKELY = 1e-3
"""Significance level: blind play succeeds too often if its success count is less probable than this."""
ROUNDED = 0.05
MIN_TASKS = 4
_SHOWN_ACTIONS = 6


@dataclass(slots=True, kw_only=True)
class BlindPolicy:
    """Policy with fixed actions, and its episodes."""

    kind: str
    actions: Sequence[str] = ()
    """Actions in order, repeated from the start; if empty, the first action that the environment lists."""
    own_task: str | None = None
    """Id of the task whose expert took these actions, which does not count."""
    played: list[PlayedEpisode] = field(default_factory=list)
    is_refused: bool = False
    """True if the environment raised an exception, so there is no score."""

    def policy(self) -> Policy:
        """Return the policy for one episode."""
        ahead = itertools.cycle(self.actions)
        if self.kind != FIRST_LISTED:
            return lambda _session, _observation: next(ahead)
        chosen: list[str] = []

        def choose(session: EnvSession, _observation: Content) -> str:
            if not chosen:
                chosen.append(next(iter(session.call("admissible_actions") or ("",))))
            return chosen[0]

        return choose

    def score(self, subject: Subject) -> float:
        """Return the success rate, or the mean return if success is unknown."""
        verdicts = [episode.is_solved(subject.spec) for episode in self.played]
        if not verdicts or None in verdicts:
            return statistics.fmean(episode.total for episode in self.played) if self.played else -math.inf
        return sum(map(bool, verdicts)) / len(verdicts)

    def describe(self, subject: Subject) -> str:
        """Return the policy's actions and score as text."""
        more = ", …" if len(self.actions) > _SHOWN_ACTIONS else ""
        shown = ", ".join(shorten(action, 30, placeholder="…") for action in self.actions[:_SHOWN_ACTIONS])
        named = f" ({shown}{more})" if self.kind in (ONE_ACTION, SEQUENCE) else ""
        return f"{self.kind}{named} {self.score(subject):.2f}"


@rule("draw harder or more varied tasks, or state the score of blind play: scores={'blind': 0.3, …}")
def blind_play_solves_little(subject: Subject) -> CheckFinding:
    """Play that ignores observations (no action, "submit", one action, a fixed sequence) solves few tasks, or as many
    as the spec states.
    """
    best = _best_of_each_kind(subject)
    if not best:
        raise RuleSkipped("the environment refuses fixed actions with an exception")
    top = max(best.values(), key=lambda blind: blind.score(subject))
    figures = {f"{kind.replace(' ', '_')}": blind.score(subject) for kind, blind in best.items()}
    detail = ", ".join(blind.describe(subject) for blind in best.values())
    verdicts = [episode.is_solved(subject.spec) for episode in top.played]
    if None in verdicts:
        return CheckFinding(f"mean return of blind play: {detail}", figures)
    detail = f"success of blind play on {len(verdicts)} tasks: {detail}"
    likely = _chance_of_more(sum(map(bool, verdicts)), len(verdicts), _max_success(subject)) >= UNLIKELY
    if len(verdicts) >= MIN_TASKS and not likely:
        raise RuleWarned(f"{detail}; {_reference(subject)}")
    return CheckFinding(detail, figures | {"success": top.score(subject)})


def _reference(subject: Subject) -> str:
    stated = subject.spec.scores.get("blind")
    return "the spec states no score of blind play" if stated is None else f"stated {stated:g}"


def _max_success(subject: Subject) -> float:
    """Return the maximum plausible success of blind play."""
    stated = subject.spec.scores.get("blind")
    if stated is not None:
        return min(stated + ROUNDED, 1.0)
    with suppress(RuleSkipped):
        verdicts = [bool(episode.is_solved(subject.spec)) for episode in subject.expert_episodes]
        return SHARE * statistics.fmean(verdicts)
    return SHARE


def _best_of_each_kind(subject: Subject) -> Mapping[str, BlindPolicy]:
    """Try all candidates on the tasks of the check, and then the best of each kind on further tasks."""
    candidates = [*_candidates(subject)]
    pairs = [(task, blind) for task in subject.tasks for blind in candidates if blind.own_task != task.id]
    with subject.session() as session:
        for task, blind in until(3 * subject.effort.lazy_s, pairs):
            _try(session, subject, task, blind)
        best: dict[str, BlindPolicy] = {}
        for blind in sorted(candidates, key=lambda blind: blind.score(subject), reverse=True):
            if blind.played and not blind.is_refused:
                best.setdefault(blind.kind, blind)
        further = range(len(subject.tasks), min(subject.effort.scored, len(subject.source)))
        if further and best:
            for blind in best.values():
                blind.played.clear()  # selected on these episodes, so their score is biased
            for index in until(subject.effort.scored_s, further):
                for blind in best.values():
                    _try(session, subject, subject.source[index], blind)
    return {kind: best[kind] for kind in KINDS if kind in best}


def _try(session: EnvSession, subject: Subject, task: Task, blind: BlindPolicy) -> None:
    try:
        if not blind.is_refused:
            blind.played.append(play(session, task, blind.policy(), subject.limit))
    except (CallFailed, WrongReturn):
        raise
    except Exception:  # the rule `answers invalid actions` reports it
        blind.is_refused = True


def _candidates(subject: Subject) -> Iterator[BlindPolicy]:
    yield BlindPolicy(kind=NOTHING, actions=[""])
    yield BlindPolicy(kind=SUBMIT, actions=["submit"])
    yield BlindPolicy(kind=FIRST_LISTED)
    experts: Sequence[PlayedEpisode] = ()
    with suppress(RuleSkipped):
        experts = subject.expert_episodes
    taken = Counter(action for episode in (*experts, *subject.random_episodes) for action in episode.actions)
    frequent = [action for action, _ in taken.most_common(MAX_ACTIONS)]
    for action in frequent:
        yield BlindPolicy(kind=ONE_ACTION, actions=[action])
    for task, episode in list(zip(subject.tasks, experts, strict=False))[:MAX_SEQUENCES]:
        if episode.actions:
            more = [action for action in frequent if action not in episode.actions]
            yield BlindPolicy(kind=SEQUENCE, actions=[*episode.actions, *more], own_task=task.id)
    if len(frequent) > 1:
        yield BlindPolicy(kind=SEQUENCE, actions=frequent)


def _chance_of_more(solved: int, count: int, share: float) -> float:
    """Return the probability of at least `solved` successes if the true success rate is `share`."""
    return sum(math.comb(count, n) * share**n * (1 - share) ** (count - n) for n in range(solved, count + 1))
