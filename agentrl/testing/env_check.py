"""The conformance check of an environment: `check_env` plays it and reports which rules it keeps.

report = check_env("my_game:GuessNumber-v0")
assert report.passed, report

The check ends when a call of the environment does not return. `reward_integrity` reports what a policy could read, or
do without solving anything, that goes with the reward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.env import AnyEnv, EnvironmentSpec
from agentrl.env_lookup import check_split, parse_env_name, resolve_environment, spec_of
from agentrl.errors import UsageError
from agentrl.rollout.env_adapter import WrongReturn
from agentrl.testing.env_rules import blind, contract, determinism, leaks, resources, rewards
from agentrl.testing.env_session import LONG_CALL, CallFailed, asking, run_watched
from agentrl.testing.env_subject import EFFORTS, CheckDepth, Subject
from agentrl.testing.report import Broken, CheckReport, CheckRow, CheckStatus, Rule, choose_rules

PLAYS = contract.plays_an_episode
"""Checked first, whatever was asked for."""
ELSEWHERE = (determinism.is_the_same_everywhere, contract.keeps_standard_output_clean)
"""Rules about what a new process plays."""
LEAKS = (leaks.hides_the_answer, leaks.hides_the_plan, leaks.hides_the_reward, leaks.reads_no_files)
"""Rules about what the policy must not read."""
LAZY = (
    rewards.doing_nothing_does_not_pay,
    rewards.repeating_nonsense_does_not_pay,
    rewards.giving_up_does_not_pay,
    rewards.saying_everything_does_not_pay,
)
"""Rules about policies that do no work."""
RULES = (
    PLAYS,
    contract.keeps_gymnasium_rules,
    contract.has_tasks,
    contract.keeps_splits_apart,
    determinism.is_deterministic,
    *ELSEWHERE,
    determinism.differs_between_tasks,
    determinism.resets_completely,
    determinism.runs_interleaved,
    determinism.runs_in_threads,
    determinism.is_isolated_enough,
    determinism.survives_cancellation,
    contract.speaks_properly,
    contract.ends_properly,
    contract.accepts_admissible_actions,
    contract.bears_nonsense,
    determinism.has_keys_of_its_states,
    determinism.restores_snapshots,
    rewards.is_solved_by_its_expert,
    rewards.survives_mistakes,
    rewards.rewards_success,
    rewards.has_a_random_score,
    blind.blind_play_solves_little,
    *LEAKS,
    *LAZY,
    resources.releases_everything,
    resources.keeps_its_memory,
    resources.is_as_fast_as_it_says,
)
"""Rules of `check_env`, in the order of the report."""
INTEGRITY = (
    *LEAKS,
    rewards.silence_earns_nothing,
    rewards.handing_in_earns_nothing,
    rewards.printed_success_earns_nothing,
    rewards.echoed_success_earns_nothing,
    rewards.repeating_earns_nothing,
    rewards.another_solution_earns_nothing,
    rewards.openings_tell_no_luck,
    leaks.keeps_secrets_out_of_the_sandbox,
)
"""Rules of `reward_integrity`, in the order of the report."""
ENDLESS = 100
"""Steps after which play stops in environments that state no limit."""


def check_env(
    environment: str | EnvironmentSpec | Callable[..., AnyEnv],
    *,
    options: Mapping[str, Any] | None = None,
    split: str | None = None,
    episodes: int = 8,
    thoroughness: CheckDepth = CheckDepth.QUICK,
    only: Collection[str] = (),
    skip: Collection[str] = (),
    watch: Callable[[str], object] | None = None,
    call_timeout_s: float | None = None,
) -> CheckReport:
    """Check that an environment keeps the rules of its contract (`RULES`).

    Args:
        environment: A name (``household``, ``my_game:GuessNumber-v0``, ``household/valid_seen``), a spec, or the class
            of the environment or a function that makes it.
        options: Options of the environment, put over the spec's own.
        split: Split whose tasks are played; the one in the name, else the spec's first.
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
    inspection = _Inspection(
        rules=choose_rules(RULES, only=only, skip=skip), must_play=PLAYS in choose_rules(RULES, skip=skip), watch=watch
    )
    return inspection.run(environment, options, split, episodes, thoroughness, call_timeout_s)


def reward_integrity(
    environment: str | EnvironmentSpec | Callable[..., AnyEnv],
    *,
    options: Mapping[str, Any] | None = None,
    split: str | None = None,
    episodes: int = 16,
    only: Collection[str] = (),
    skip: Collection[str] = (),
    watch: Callable[[str], object] | None = None,
    call_timeout_s: float | None = None,
) -> CheckReport:
    """Look for leaks, let cheap policies play, and read what the policy's sandbox shows (`INTEGRITY`).

    The arguments and errors are those of `check_env`; the check is a full one. Every policy plays `episodes` tasks: a
    word of the opening can only be told from an accident in many.
    """
    inspection = _Inspection(rules=choose_rules(INTEGRITY, only=only, skip=skip), must_play=True, watch=watch)
    return inspection.run(environment, options, split, episodes, CheckDepth.FULL, call_timeout_s)


@dataclass(slots=True, kw_only=True)
class _Inspection:
    """Progress of a check: the rows so far."""

    rules: Sequence[Rule]
    must_play: bool
    """Whether no rule is checked when no episode can be played."""
    watch: Callable[[str], object] | None
    rows: list[CheckRow] = field(default_factory=list)
    now: Rule = PLAYS
    begun: float = field(default_factory=time.perf_counter)

    def run(
        self,
        environment: str | EnvironmentSpec | Callable[..., AnyEnv],
        options: Mapping[str, Any] | None,
        split: str | None,
        episodes: int,
        thoroughness: CheckDepth,
        call_timeout_s: float | None,
    ) -> CheckReport:
        """Find the environment and check all rules on it.

        Raises:
            UsageError: no such environment or split, the options are wrong, or a package or data is missing.
        """
        spec, named_split = _find(environment)
        if spec.extra is not None:
            spec.extra.load()
        chosen = check_split(spec, split or named_split or spec.splits[0])
        options = {**spec.options, **(options or {})}
        source = spec.tasks(chosen, **options)  # in this thread: some libraries can be loaded in the main one only
        effort = EFFORTS[thoroughness]

        def inspect() -> None:
            with asking("listing the tasks", times=LONG_CALL):
                tasks = [source[index] for index in range(min(episodes, len(source)))]
            self._look_at(
                Subject(
                    spec=spec,
                    options=options,
                    split=chosen,
                    source=source,
                    tasks=tasks,
                    limit=spec.turns_under(options) or ENDLESS,
                    effort=effort,
                    plays_elsewhere=any(rule in ELSEWHERE for rule in self.rules),
                )
            )

        try:
            run_watched(inspect, effort.call_s if call_timeout_s is None else call_timeout_s)
        except CallFailed as failed:
            row = self.now.row(failed, time.perf_counter() - self.begun)
            self.rows = [*self.rows, row]  # a thread that comes back late has the list from before
            self._skip_the_rest(f"the check ended: {failed}")
        return CheckReport(kind="environment", name=spec.name, split=chosen, rows=tuple(self.rows))

    def _look_at(self, subject: Subject) -> None:
        rules = [PLAYS, *(rule for rule in self.rules if rule is not PLAYS)] if self.must_play else self.rules
        for rule in rules:
            self.now, self.begun = rule, time.perf_counter()
            if self.watch is not None and rule in self.rules:
                self.watch(rule.name)
            row = _check(rule, subject)
            if rule in self.rules or not row.passed:
                self.rows.append(row)
            if self.must_play and rule is PLAYS and not row.passed:
                break
        self._skip_the_rest("no episode can be played")

    def _skip_the_rest(self, reason: str) -> None:
        looked_at = {row.check for row in self.rows}
        rest = [rule.name for rule in self.rules if rule.name not in looked_at]
        self.rows += [CheckRow(check=name, status=CheckStatus.SKIPPED, detail=reason) for name in rest]


def _find(environment: str | EnvironmentSpec | Callable[..., AnyEnv]) -> tuple[EnvironmentSpec, str | None]:
    if not isinstance(environment, str):
        return spec_of(environment), None
    name, split = parse_env_name(environment)
    return resolve_environment(name), split


def _check(rule: Rule, subject: Subject) -> CheckRow:
    """Check a rule; an exception of the environment breaks it, because nothing may escape from it."""
    start = time.perf_counter()
    try:
        found = rule.look(subject)
    except WrongReturn as wrong:
        found = Broken(wrong.args[0])
    except Exception as error:
        if rule is PLAYS and isinstance(error, UsageError):
            raise  # what it cannot be made without is the user's to provide
        found = error
    return rule.row(found, time.perf_counter() - start)
