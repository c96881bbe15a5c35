"""The worst problems of a run or an evaluation, with counts, file and line.

`Evidence` counts over episodes, `agentrl.observe.incidents` counts failures of the user's code, and
`agentrl.observe.diagnosis` reads the metrics of the steps. `top_problems` returns the worst three.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from agentrl.engine import StopReason
from agentrl.errors import Outcome, SourceLocation, with_location
from agentrl.observe.incidents import Incident, Incidents
from agentrl.observe.metrics import sampled_bytes
from agentrl.reward import rewards_differ
from agentrl.trajectory import Trajectory

SHOWN = 3
"""Maximum number of problems that are shown."""
MANY = 0.2
"""Minimum share of episodes, answers or calls for reporting a problem."""
FEW = 0.01
"""Minimum share of failures for reporting them."""
OFTEN = 0.05
"""Minimum share of failures for listing them before problems of the episodes themselves."""
CERTAIN = 4.0
"""Minimum difference of two means, in standard errors, that counts as certain."""
LEAST = 8
"""Minimum number of episodes of each kind for a comparison."""
LONGEST_CAUSE = 200
"""Maximum number of characters of an exception that are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A problem that the user should look at."""

    kind: str
    text: str
    """Description with counts, and a remedy."""
    count: int = 0
    """Number of cases among `of`."""
    of: int = 0
    file: str | None = None
    line: int | None = None
    weight: float = 0.0
    """Severity, up to 1: problems are listed in descending order."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types, without the weight, which only orders problems."""
        record = asdict(self)
        del record["weight"]
        return record

    def __str__(self) -> str:
        return self.text


@dataclass(slots=True, kw_only=True)
class Moments:
    """Running count, mean and sum of squared deviations (Welford, 1962)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        """Add a number."""
        self.count += 1
        step = value - self.mean
        self.mean += step / self.count
        self.squares += step * (value - self.mean)

    @property
    def error(self) -> float:
        """Squared standard error of the mean; 0 for fewer than two numbers."""
        return self.squares / (self.count - 1) / self.count if self.count > 1 else 0.0


@dataclass(slots=True, kw_only=True)
class Range:
    """Smallest and largest number so far."""

    low: float = math.inf
    high: float = -math.inf

    def add(self, value: float) -> None:
        """Add a number."""
        self.low, self.high = min(self.low, value), max(self.high, value)

    @property
    def is_constant(self) -> bool:
        """True if there were numbers, and all were equal up to rounding."""
        return self.low <= self.high and not rewards_differ([self.low, self.high])


@dataclass(slots=True, kw_only=True)
class Evidence:
    """Counts over the episodes of a run or an evaluation."""

    episodes: int = 0
    """Number of episodes without infrastructure failures."""
    solved: int = 0
    judged: int = 0
    """Episodes whose success is known."""
    turns: int = 0
    unusable: int = 0
    """Turns whose answer was not a usable action."""
    cut: int = 0
    """Turns whose answer was cut off, because its tokens ran out."""
    outcomes: Counter[str] = field(default_factory=Counter)
    remarks: Counter[str] = field(default_factory=Counter)
    """Error messages about answers that could not be used."""
    rewards: dict[str, Range] = field(default_factory=dict)
    """Ranges of the whole reward (``""``) and of its components."""
    by_success: dict[bool, Moments] = field(default_factory=lambda: {True: Moments(), False: Moments()})
    """Rewards of solved and of other episodes."""
    answers: set[int] = field(default_factory=set)
    """Hashes of the sampled tokens of a few episodes, which show whether episodes differ."""

    def add(self, trajectory: Trajectory) -> None:
        """Add an episode that has ended."""
        if trajectory.outcome is None or not trajectory.outcome.is_trainable:
            return
        self.episodes += 1
        self.outcomes[trajectory.outcome.value] += 1
        self.turns += len(trajectory.turns)
        self.cut += sum(turn.stop_reason == StopReason.LENGTH for turn in trajectory.turns)
        metrics = trajectory.metrics
        self.unusable += int(metrics.get("invalid_answers", 0.0) + metrics.get("invalid_actions", 0.0))
        if trajectory.outcome is Outcome.POLICY_ERROR and trajectory.error:
            self.remarks[trajectory.error[:LONGEST_CAUSE]] += 1
        if trajectory.success is not None:
            self.judged, self.solved = self.judged + 1, self.solved + trajectory.success
        if trajectory.reward is not None:
            for name, value in {**trajectory.reward_components, "": trajectory.reward}.items():
                self.rewards.setdefault(name, Range()).add(value)
            if trajectory.success is not None:
                self.by_success[trajectory.success].add(trajectory.reward)
        if len(self.answers) < LEAST:
            self.answers.add(hash((sampled_bytes(trajectory), repr(trajectory.transcript))))


def top_problems(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """Return the worst problems, the worst one first."""
    return tuple(sorted(problems, key=lambda problem: -problem.weight)[:SHOWN])


def problem_lines(problems: Sequence[Problem]) -> list[str]:
    """Format problems, one line each."""
    return [f"problem {number}: {problem}" for number, problem in enumerate(problems, 1)]


def failures(incidents: Incidents) -> list[Problem]:
    """Return the problems from failures of rewards, environments and tools."""
    return [problem for one in incidents.worst() if (problem := _failure(one, incidents)) is not None]


def _failure(one: Incident, incidents: Incidents) -> Problem | None:
    of = incidents.calls[one.subject] if one.kind == "tool" else incidents.attempts
    share = one.count / of if of else 0.0
    if share < FEW:
        return None
    what = f"the tool {one.subject}" if one.kind == "tool" else one.subject
    where = "" if one.file is None else f" ({one.file} line {one.line})"
    unit, effect = _effect(one.kind, share)
    cause = " ".join(one.cause[:LONGEST_CAUSE].split())
    return Problem(
        kind=f"{one.kind}_failed" if one.kind == "tool" else one.kind,
        text=f"{what} failed in {one.count} of {of} {unit}: {cause}{where}; {effect}",
        count=one.count,
        of=of,
        file=one.file,
        line=one.line if one.file is not None else None,
        weight=0.75 + 0.25 * share if share >= OFTEN else 0.3 + share,
    )


def _effect(kind: str, share: float) -> tuple[str, str]:
    if kind == "tool":
        which = "" if share == 1 else " in these calls"
        return "calls", f"the policy reads only that it failed{which}"
    if kind == Outcome.REWARD_ERROR:
        return "attempts", "these episodes are excluded from training and results: fix the function"
    return "attempts", "the episodes are played again or dropped"


CONSTANT = "constant_reward"


def reward_problems(evidence: Evidence, definitions: Mapping[str, SourceLocation | None]) -> list[Problem]:
    """Return problems of the rewards.

    Args:
        evidence: Counts over all episodes.
        definitions: Reward functions by their names in messages; empty if the environment gives the rewards.
    """
    return [*_against_success(evidence, definitions), *_constant(evidence, definitions)]


def names_of(definitions: Mapping[str, SourceLocation | None]) -> str:
    """Return the names of reward functions, each with its file and line; empty if there are none."""
    return " and ".join(with_location(name, location) for name, location in definitions.items())


def _sole_location(definitions: Mapping[str, SourceLocation | None]) -> SourceLocation | None:
    """Return the location of the reward function, if there is exactly one."""
    return next(iter(definitions.values())) if len(definitions) == 1 else None


def _against_success(evidence: Evidence, definitions: Mapping[str, SourceLocation | None]) -> list[Problem]:
    solved, failed = evidence.by_success[True], evidence.by_success[False]
    if min(solved.count, failed.count) < LEAST or solved.mean >= failed.mean:
        return []
    if failed.mean - solved.mean < CERTAIN * math.sqrt(solved.error + failed.error):
        return []
    who, location = names_of(definitions) or "the environment", _sole_location(definitions)
    return [
        Problem(
            kind="reward_against_success",
            text=f"solved episodes get lower rewards than others: a mean of {solved.mean:.3g} in {solved.count} "
            f"solved ones, {failed.mean:.3g} in {failed.count} others, so training lowers success: check the sign "
            f"in {who}",
            count=solved.count,
            of=solved.count + failed.count,
            file=None if location is None else location.file,
            line=None if location is None else location.line,
            weight=1.0,
        )
    ]


def _constant(evidence: Evidence, definitions: Mapping[str, SourceLocation | None]) -> list[Problem]:
    whole = evidence.rewards.get("")
    if whole is None or not whole.is_constant or evidence.episodes < LEAST or len(evidence.answers) < 2:
        return []
    if not definitions and not (0 < evidence.solved < evidence.judged) and (evidence.solved or whole.high == 0):
        return []  # all tasks of an environment are solved, or all failed: the reward is not the cause
    if evidence.solved == evidence.judged > 0 and whole.high > 0:
        return []  # all episodes are solved and rewarded
    who, location = names_of(definitions) or "the environment", _sole_location(definitions)
    solved = f", {evidence.solved} of {evidence.judged} solved" if evidence.judged else ""
    unusable = min(1.0, evidence.unusable / evidence.turns) if evidence.turns else 0.0
    answers = f"; {unusable:.0%} of the answers could not be used as actions" if unusable >= MANY else ""
    hint = "check which arguments it receives"
    if whole.high == 0:
        hint = f"if they all deserve it, try easier tasks or a warm start; otherwise, {hint}"
    elif not evidence.judged:
        hint = f"if all answers are right, the tasks are too easy; otherwise, {hint}"
    return [
        Problem(
            kind=CONSTANT,
            text=f"{who} gave the same reward, {whole.high:g}, to all {evidence.episodes} episodes{solved}, although "
            f"their answers differ: nothing can be learned from it{answers}; {hint}",
            count=evidence.episodes,
            of=evidence.episodes,
            file=None if location is None else location.file,
            line=None if location is None else location.line,
            weight=0.95,
        )
    ]


def episode_problems(evidence: Evidence) -> list[Problem]:
    """Return problems of the episodes: answers that are not actions, budgets that are too small."""
    if not evidence.episodes:
        return []
    found = []
    if evidence.turns and (share := min(1.0, evidence.unusable / evidence.turns)) >= MANY:
        remark = f", most often: {evidence.remarks.most_common(1)[0][0]}" if evidence.remarks else ""
        found.append(
            Problem(
                kind="unusable_answers",
                text=f"{evidence.unusable} of {evidence.turns} answers could not be used as actions{remark}; check "
                "agent.loop and agent.max_answer_tokens, or try a warm start (agentrl sft)",
                count=evidence.unusable,
                of=evidence.turns,
                weight=0.3 + 0.55 * share,
            )
        )
    if evidence.turns and (share := evidence.cut / evidence.turns) >= MANY:
        found.append(
            Problem(
                kind="answers_cut",
                text=f"{evidence.cut} of {evidence.turns} answers were cut off before their end: raise "
                "agent.max_answer_tokens, or agent.max_tokens if the context is full",
                count=evidence.cut,
                of=evidence.turns,
                weight=0.25 + 0.5 * share,
            )
        )
    for outcome, key in (
        (Outcome.TRUNCATED_TOKENS, "agent.max_tokens"),
        (Outcome.TRUNCATED_TURNS, "agent.max_turns"),
        (Outcome.TRUNCATED_TIME, "agent.max_seconds"),
    ):
        count = evidence.outcomes[outcome.value]
        if (share := count / evidence.episodes) >= MANY:
            found.append(
                Problem(
                    kind=outcome.value,
                    text=f"{count} of {evidence.episodes} episodes ended because {_BUDGET[outcome]} ran out ({key})",
                    count=count,
                    of=evidence.episodes,
                    weight=0.2 + 0.4 * share,
                )
            )
    return found


_BUDGET = {
    Outcome.TRUNCATED_TOKENS: "their tokens",
    Outcome.TRUNCATED_TURNS: "their turns",
    Outcome.TRUNCATED_TIME: "their time",
}
