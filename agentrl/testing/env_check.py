"""The conformance check of an environment: `check_env` plays it and says which rules it keeps.

report = check_env("my_game:GuessNumber-v0")
assert report.passed, report
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from agentrl.env import EnvironmentSpec
from agentrl.testing.env_inspection import Extent, inspect_environment
from agentrl.testing.env_report import EnvCheckReport
from agentrl.testing.env_rules.catalogue import PLAYS, RULES, choose_rules
from agentrl.testing.env_subject import Thoroughness


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
