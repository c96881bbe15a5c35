"""The conformance check of an environment: `check_env` plays it and says which rules it keeps.

report = check_env("my_game:GuessNumber-v0")
assert report.passed, report

- Looks at an environment by one rule after the other, and ends when a call of the environment does not return.
- What a policy could read, or do without solving anything, that goes with the reward: a report per environment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.env import EnvironmentSpec
from agentrl.env_lookup import check_split, parse_env_name, resolve_environment
from agentrl.errors import UsageError
from agentrl.rollout.env_adapter import WrongReturn
from agentrl.testing.env_rules.catalogue import ELSEWHERE, INTEGRITY, PLAYS, RULES, choose_rules
from agentrl.testing.env_rules.rule import Rule
from agentrl.testing.env_session import (
    LONG_CALL,
    CallFailed,
    asking,
    run_watched,
)
from agentrl.testing.env_subject import (
    EFFORTS,
    Broken,
    Finding,
    Missing,
    Subject,
    Suspect,
    Thoroughness,
)
from agentrl.testing.report import CheckRow, CheckStatus, EnvCheckReport

ENDLESS = 100
"""Steps after which play stops in environments that state no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """What is played, and how much of it."""

    options: Mapping[str, Any] | None
    """Of the environment, put over the spec's own."""
    split: str | None
    """Whose tasks are played; the one in the name when ``None``, else the spec's first."""
    episodes: int
    """How many tasks are played, at least."""
    thoroughness: Thoroughness
    call_timeout_s: float | None
    """Seconds within which each call must return; what the thoroughness says when ``None``."""


def inspect_environment(
    environment: str | EnvironmentSpec,
    rules: Sequence[Rule],
    extent: Extent,
    *,
    must_play: bool = True,
    watch: Callable[[str], object] | None = None,
) -> EnvCheckReport:
    """What rules say of an environment.

    Args:
        environment: A name, or a spec.
        rules: In the order of the report.
        extent: What is played.
        must_play: Whether no rule is looked at when no episode can be played.
        watch: Called with the name of each rule before it is looked at.

    Raises:
        UsageError: no such environment or split, the options are wrong, or a package or data is missing.
    """
    spec, named_split = _find(environment)
    inspection = _Inspection(rules=rules, must_play=must_play, watch=watch)
    if spec.extra is not None:
        spec.extra.load()
    chosen = check_split(spec, extent.split or named_split or spec.splits[0])
    options = {**spec.options, **(extent.options or {})}
    source = spec.tasks(chosen, **options)  # in this thread: some libraries can be loaded in the main one only
    effort = EFFORTS[extent.thoroughness]

    def inspect() -> None:
        with asking("listing the tasks", times=LONG_CALL):
            tasks = [source[index] for index in range(min(extent.episodes, len(source)))]
        inspection.look_at(
            Subject(
                spec=spec,
                options=options,
                split=chosen,
                source=source,
                tasks=tasks,
                limit=spec.turns_under(options) or ENDLESS,
                effort=effort,
                plays_elsewhere=any(rule in ELSEWHERE for rule in rules),
            )
        )

    try:
        run_watched(inspect, effort.call_s if extent.call_timeout_s is None else extent.call_timeout_s)
    except CallFailed as failed:
        inspection.give_up(str(failed))
    return EnvCheckReport(environment=spec.name, split=chosen, rows=tuple(inspection.rows))


@dataclass(slots=True, kw_only=True)
class _Inspection:
    """How far the rules have been looked at."""

    rules: Sequence[Rule]
    must_play: bool
    """Whether no rule is looked at when no episode can be played."""
    watch: Callable[[str], object] | None
    rows: list[CheckRow] = field(default_factory=list)
    now: Rule = PLAYS
    begun: float = field(default_factory=time.perf_counter)

    def look_at(self, subject: Subject) -> None:
        """Look at all rules.

        Raises:
            UsageError: the environment cannot be made.
        """
        if self.must_play and PLAYS not in self.rules:
            row = _check(PLAYS, subject)
            self.rows += [] if row.passed else [row]
        for rule in self.rules:
            if self.must_play and any(row.check == PLAYS.name and not row.passed for row in self.rows):
                break
            self.now, self.begun = rule, time.perf_counter()
            if self.watch is not None:
                self.watch(rule.name)
            self.rows.append(_check(rule, subject))
        self._skip_the_rest("no episode can be played")

    def give_up(self, reason: str) -> None:
        """Say of the rule that is being looked at that it failed, and leave out the others."""
        seconds = time.perf_counter() - self.begun
        failed = CheckRow(
            check=self.now.name, status=CheckStatus.FAILED, detail=reason, mend=self.now.mend, seconds=seconds
        )
        self.rows = [*self.rows, failed]  # a thread that comes back late has the list from before
        self._skip_the_rest(f"the check ended: {reason}")

    def _skip_the_rest(self, reason: str) -> None:
        looked_at = {row.check for row in self.rows}
        rest = [rule.name for rule in self.rules if rule.name not in looked_at]
        self.rows += [CheckRow(check=name, status=CheckStatus.SKIPPED, detail=reason) for name in rest]


def _find(environment: str | EnvironmentSpec) -> tuple[EnvironmentSpec, str | None]:
    if isinstance(environment, EnvironmentSpec):
        return environment, None
    name, split = parse_env_name(environment)
    return resolve_environment(name), split


def _check(rule: Rule, subject: Subject) -> CheckRow:
    start = time.perf_counter()
    status, finding = _look(rule, subject)
    return CheckRow(
        check=rule.name,
        status=status,
        detail=finding.detail,
        figures=finding.figures,
        mend=rule.mend if status in (CheckStatus.FAILED, CheckStatus.WARNED) else "",
        seconds=time.perf_counter() - start,
    )


def _look(rule: Rule, subject: Subject) -> tuple[CheckStatus, Finding]:
    """What a rule says; what the environment raises breaks the rule, because nothing may escape from it."""
    try:
        return CheckStatus.PASSED, rule.look(subject)
    except Missing as missing:
        return CheckStatus.SKIPPED, Finding(detail=str(missing))
    except Suspect as suspect:
        return CheckStatus.WARNED, Finding(detail=str(suspect))
    except Broken as broken:
        return CheckStatus.FAILED, Finding(detail=str(broken))
    except CallFailed as failed:
        return CheckStatus.FAILED, Finding(detail=str(failed))
    except WrongReturn as wrong:
        return CheckStatus.FAILED, Finding(detail=wrong.args[0])
    except Exception as error:
        if rule is PLAYS and isinstance(error, UsageError):
            raise  # what it cannot be made without is the user's to provide
        return CheckStatus.FAILED, Finding(detail=f"{type(error).__name__}: {error}")


def check_env(
    environment: str | EnvironmentSpec,
    *,
    options: Mapping[str, Any] | None = None,
    split: str | None = None,
    episodes: int = 8,
    thoroughness: Thoroughness = Thoroughness.QUICK,
    only: Collection[str] = (),
    skip: Collection[str] = (),
    watch: Callable[[str], object] | None = None,
    call_timeout_s: float | None = None,
) -> EnvCheckReport:
    """Check that an environment keeps the rules of its contract (`agentrl.testing.env_rules.catalogue`).

    Args:
        environment: A name (``household``, ``my_game:GuessNumber-v0``, ``household/valid_seen``), or a spec.
        options: Of the environment, put over the spec's own.
        split: Whose tasks are played; the one in the name, else the spec's first.
        episodes: How many tasks are played, at least.
        thoroughness: How much more is played, for scores, timing, memory and splits.
        only: Names of the rules to check; all when empty.
        skip: Names of rules to leave out.
        watch: Called with the name of each rule before it is checked.
        call_timeout_s: Seconds within which each call of the environment must return (10 in a quick check, 30 in a
            full one), and six times as long for making it. After one that does not, the check ends with its report.

    Raises:
        UsageError: no such environment, split or rule, the options are wrong, or a package or data is missing.
    """
    extent = Extent(
        options=options, split=split, episodes=episodes, thoroughness=thoroughness, call_timeout_s=call_timeout_s
    )
    return inspect_environment(
        environment,
        choose_rules(RULES, only=only, skip=skip),
        extent,
        must_play=PLAYS in choose_rules(RULES, skip=skip),
        watch=watch,
    )


def reward_integrity(
    environment: str | EnvironmentSpec,
    *,
    options: Mapping[str, Any] | None = None,
    split: str | None = None,
    episodes: int = 16,
    only: Collection[str] = (),
    skip: Collection[str] = (),
    watch: Callable[[str], object] | None = None,
    call_timeout_s: float | None = None,
) -> EnvCheckReport:
    """Look for leaks, let cheap policies play, and read what the policy's sandbox shows.

    Args:
        environment: A name (``code``, ``my_game:GuessNumber-v0``, ``code/valid``), or a spec.
        options: Of the environment, put over the spec's own.
        split: Whose tasks are played; the one in the name, else the spec's first.
        episodes: Tasks that every policy plays; a word of the opening can only be told from an accident in many.
        only: Names of the rules to look at; all when empty.
        skip: Names of rules to leave out.
        watch: Called with the name of each rule before it is looked at.
        call_timeout_s: As of `check_env`; 30 when left out.

    Raises:
        UsageError: no such environment, split or rule, the options are wrong, or a package or data is missing.
    """
    extent = Extent(
        options=options,
        split=split,
        episodes=episodes,
        thoroughness=Thoroughness.FULL,
        call_timeout_s=call_timeout_s,
    )
    return inspect_environment(environment, choose_rules(INTEGRITY, only=only, skip=skip), extent, watch=watch)
