"""What a policy could read, or do without solving anything, that goes with the reward: a report per environment.

report = reward_integrity("code", options={"size": "tiny"})
assert report.passed, report
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from agentrl.env import EnvironmentSpec
from agentrl.testing.env_inspection import Extent, inspect_environment
from agentrl.testing.env_report import EnvCheckReport
from agentrl.testing.env_rules.catalogue import INTEGRITY, choose_rules
from agentrl.testing.env_subject import Thoroughness


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
