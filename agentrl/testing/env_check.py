"""The conformance check of an environment: `check_env` plays it and says which rules it keeps.

report = check_env("my_game:GuessNumber-v0")
assert report.passed, report
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from agentrl.env import EnvironmentSpec
from agentrl.env_lookup import check_split, parse_env_name, resolve_environment
from agentrl.testing.env_report import CheckRow, CheckStatus, EnvCheckReport
from agentrl.testing.env_rules.catalogue import choose_rules
from agentrl.testing.env_rules.rule import Rule
from agentrl.testing.env_session import EnvSession
from agentrl.testing.env_subject import EFFORTS, Broken, Finding, Missing, Subject, Suspect, Thoroughness

ENDLESS = 100
"""Steps after which play stops in environments that state no limit."""


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

    Raises:
        UsageError: no such environment, split or rule, the options are wrong, or a package or data is missing.
    """
    rules = choose_rules(only=only, skip=skip)
    subject = _subject(environment, options or {}, split, episodes, thoroughness)
    EnvSession(subject.spec.make, subject.options).close()  # what it cannot be made without is missing for all rules
    rows = []
    for rule in rules:
        if watch is not None:
            watch(rule.name)
        rows.append(_check(rule, subject))
    return EnvCheckReport(environment=subject.spec.name, split=subject.split, rows=tuple(rows))


def _subject(
    environment: str | EnvironmentSpec,
    options: Mapping[str, Any],
    split: str | None,
    episodes: int,
    thoroughness: Thoroughness,
) -> Subject:
    spec, named_split = _find(environment)
    if spec.extra is not None:
        spec.extra.load()
    chosen = check_split(spec, split or named_split or spec.splits[0])
    merged = {**spec.options, **options}
    source = spec.tasks(chosen, **merged)
    return Subject(
        spec=spec,
        options=merged,
        split=chosen,
        source=source,
        tasks=[source[index] for index in range(min(episodes, len(source)))],
        limit=spec.turns_under(merged) or ENDLESS,
        effort=EFFORTS[thoroughness],
    )


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
    except Exception as error:
        return CheckStatus.FAILED, Finding(detail=f"{type(error).__name__}: {error}")
