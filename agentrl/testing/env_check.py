"""Conformance check of environments: `check_env` plays an environment and reports the rules that it passes.

report = check_env("my_game:GuessNumber-v0")
assert report.passed, report

The check ends if a call of the environment does not return. `reward_integrity` looks for rewards without a solution:
texts that reveal it to the policy, and actions that solve nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.env import AnyEnv, EnvironmentSpec
from agentrl.env.lookup import check_split, parse_env_name, resolve_environment, spec_of
from agentrl.errors import UsageError
from agentrl.rollout.env_returns import WrongReturn
from agentrl.testing.env_rules import blind, contract, determinism, leaks, resources, rewards
from agentrl.testing.env_session import LONG_CALL, CallFailed, asking, run_watched
from agentrl.testing.env_subject import EFFORTS, CheckDepth, Subject
from agentrl.testing.report import CheckReport, CheckRow, CheckRule, CheckStatus, RuleFailed, choose_rules

PLAYS = contract.plays_an_episode
"""Rule that is always checked first."""
ELSEWHERE = (determinism.is_the_same_everywhere, contract.keeps_standard_output_clean)
"""Rules about play in a new process."""
LEAKS = (leaks.hides_the_answer, leaks.hides_the_plan, leaks.hides_the_reward, leaks.reads_no_files)
"""Rules about information that must be hidden from the policy."""
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
    contract.returns_valid_values,
    contract.ends_properly,
    contract.accepts_admissible_actions,
    contract.answers_invalid_actions,
    determinism.has_stable_state_keys,
    determinism.restores_snapshots,
    rewards.is_solved_by_its_expert,
    rewards.survives_mistakes,
    rewards.rewards_success,
    rewards.has_a_random_score,
    blind.blind_play_solves_little,
    *LEAKS,
    *LAZY,
    resources.releases_everything,
    resources.keeps_memory_constant,
    resources.steps_are_fast_enough,
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
    rewards.openings_do_not_predict_rewards,
    leaks.keeps_secrets_out_of_the_sandbox,
)
"""Rules of `reward_integrity`, in the order of the report."""
ENDLESS = 100
"""Maximum number of steps in environments that state no limit."""


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
        environment: Name (``household``, ``my_game:GuessNumber-v0``, ``household/valid_seen``), spec, class, or factory
            of the environment.
        options: Options of the environment, which override the spec's own.
        split: Split whose tasks are played; by default the one in the name, or else the spec's first.
        episodes: Minimum number of tasks that are played.
        thoroughness: Amount of further play, for scores, timing, memory and splits.
        only: Names of the rules to check; all if empty.
        skip: Names of rules to skip.
        watch: Called with the name of each rule before it is checked.
        call_timeout_s: Deadline in seconds of each call of the environment (10 in a quick check, 30 in a full one);
            making the environment may take six times as long. If a call misses it, the check ends with its report.

    Raises:
        UsageError: the environment, split or rule does not exist, the options are wrong, or a package or data is
            missing.
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
    """Look for leaks, play trivial policies, and inspect the policy's sandbox (`INTEGRITY`).

    The arguments and errors are those of `check_env`; the check is a full one. Every policy plays `episodes` tasks:
    only many tasks distinguish a telling word in the opening from chance.
    """
    inspection = _Inspection(rules=choose_rules(INTEGRITY, only=only, skip=skip), must_play=True, watch=watch)
    return inspection.run(environment, options, split, episodes, CheckDepth.FULL, call_timeout_s)


@dataclass(slots=True, kw_only=True)
class _Inspection:
    """State of a check: its rules, and the rows so far."""

    rules: Sequence[CheckRule]
    must_play: bool
    """True if all rules are skipped when no episode can be played."""
    watch: Callable[[str], object] | None
    rows: list[CheckRow] = field(default_factory=list)
    now: CheckRule = PLAYS
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
            UsageError: the environment or split does not exist, the options are wrong, or a package or data is missing.
        """
        spec, named_split = _find(environment)
        if spec.extra is not None:
            spec.extra.load()
        options = {**spec.options, **(options or {})}
        chosen = check_split(spec, split or named_split or spec.splits_under(options)[0])
        source = spec.tasks_under(
            chosen, options
        )  # in this thread, because some libraries load only in the main thread
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
            self.rows = [*self.rows, row]  # a thread that returns late keeps the old list
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


def _check(rule: CheckRule, subject: Subject) -> CheckRow:
    """Check a rule; an exception of the environment breaks it."""
    start = time.perf_counter()
    try:
        found = rule.check(subject)
    except WrongReturn as wrong:
        found = RuleFailed(wrong.args[0])
    except Exception as error:
        if rule is PLAYS and isinstance(error, UsageError):
            raise  # the user must provide the missing requirement
        found = error
    return rule.row(found, time.perf_counter() - start)
