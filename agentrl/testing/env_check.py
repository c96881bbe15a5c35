"""The conformance check of an environment: `check_env` plays it and says which rules it keeps.

report = check_env("my_game:GuessNumber-v0")
assert report.passed, report

The rules are listed here, in the order of the reports; it looks by one after the other, and ends when a call of the
environment does not return. `reward_integrity` is a report on what a policy could read, or do without solving anything,
that goes with the reward.
"""

from __future__ import annotations

import difflib
import inspect
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.env import EnvironmentSpec
from agentrl.env_lookup import check_split, parse_env_name, resolve_environment
from agentrl.errors import UnknownNameError, UsageError
from agentrl.rollout.env_adapter import WrongReturn
from agentrl.testing.env_rules import (
    contract,
    determinism,
    leaks,
    resources,
    rewards,
)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Rule of the check: what is demanded, how it is looked for, and what to do where it is broken."""

    look: Callable[[Subject], Finding]
    """Says what it found, or raises `Broken`, `Suspect` or `Missing`. Its name is the rule's; its docstring says what
    is demanded."""
    mend: str
    """The next step for whoever broke it."""

    @property
    def name(self) -> str:
        """Name in reports."""
        return self.look.__name__.replace("_", " ")

    @property
    def demand(self) -> str:
        """Demand of the rule, in a sentence."""
        return " ".join((inspect.getdoc(self.look) or "").partition("\n\n")[0].split())


PLAYS = Rule(
    look=contract.plays_an_episode,
    mend="mend what the message names; every other rule needs an episode",
)
"""Looked at first, whatever was asked for."""
ELSEWHERE = (
    Rule(
        look=determinism.is_the_same_everywhere,
        mend="sort what comes from sets, folders and `hash()`; register what `make` is by name in a module",
    ),
    Rule(
        look=contract.keeps_standard_output_clean,
        mend="print to standard error, or log; standard output belongs to the results of commands",
    ),
)
"""Those that look at what a new process plays."""
LEAKS = (
    Rule(
        look=leaks.hides_the_answer,
        mend="keep answers out of texts, hints and infos; a choice among given answers is no fault",
    ),
    Rule(look=leaks.hides_the_plan, mend="leave the solution out of the observation"),
    Rule(
        look=leaks.hides_the_reward,
        mend="leave the reward to the trainer; a score that belongs to the game is no fault",
    ),
    Rule(
        look=leaks.reads_no_files,
        mend="let actions and tools work in a sandbox, or in a folder of their own",
    ),
)
"""Those about what must not be told."""
LAZY = (
    Rule(
        look=rewards.doing_nothing_does_not_pay,
        mend="pay at the limit what losing pays, and on the way only for what actions have changed",
    ),
    Rule(
        look=rewards.repeating_nonsense_does_not_pay,
        mend="pay at the limit what losing pays; an invalid action may cost, and must not pay",
    ),
    Rule(
        look=rewards.giving_up_does_not_pay,
        mend="let giving up be worth no more than losing; make handing over depend on the task",
    ),
    Rule(
        look=rewards.saying_everything_does_not_pay,
        mend="grade one answer: take several for none, and ask which is meant",
    ),
)
"""Those about policies that do no work."""
RULES = (
    PLAYS,
    Rule(
        look=contract.keeps_gymnasium_rules,
        mend="do what the message says; pass `seed` on with `super().reset(seed=seed)`",
    ),
    Rule(
        look=contract.has_tasks,
        mend="make a task from its number alone; leave a split that is empty out of `splits`",
    ),
    Rule(
        look=contract.keeps_splits_apart,
        mend="give each split seeds, ids and content of its own, for example by the checksum of the opening state",
    ),
    Rule(
        look=determinism.is_deterministic,
        mend="draw from `self.np_random` only; no global generator, clock, or order of a set",
    ),
    *ELSEWHERE,
    Rule(
        look=determinism.differs_between_tasks,
        mend="use the seed, or the options, in `reset`; offer fewer tasks where there are no more",
    ),
    Rule(look=determinism.resets_completely, mend="set every attribute of an episode anew in `reset`"),
    Rule(
        look=determinism.runs_interleaved,
        mend="keep an episode's state in the instance, not in the class, the module or a shared file",
    ),
    Rule(
        look=determinism.runs_in_threads,
        mend="share nothing that changes, or state `isolation=Isolation.PROCESS`",
    ),
    Rule(
        look=determinism.is_isolated_enough,
        mend="state `isolation=Isolation.PROCESS`: there, a crash costs the episodes of one worker",
    ),
    Rule(
        look=determinism.survives_cancellation,
        mend="release in `finally` what was taken before an `await`; let `reset` start from anything",
    ),
    Rule(
        look=contract.speaks_properly,
        mend="return what the message expects: every run refuses the rest; state the true `reward_range`",
    ),
    Rule(
        look=contract.ends_properly,
        mend="return the last observation of the episode, and wait for `reset`; state `max_turns` if nothing ends it",
    ),
    Rule(
        look=contract.accepts_admissible_actions,
        mend="list only what `step` understands in this state, and something as long as the episode goes on",
    ),
    Rule(
        look=contract.bears_nonsense,
        mend='answer what is not understood in words, with `info["valid"] = False`',
    ),
    Rule(
        look=determinism.has_keys_of_its_states,
        mend="make the key from the state alone, as text: of sorted plain data, or its checksum",
    ),
    Rule(
        look=determinism.restores_snapshots,
        mend="save all of the state, steps and generators included, as JSON types",
    ),
    Rule(
        look=rewards.is_solved_by_its_expert,
        mend="mend the expert, or state in `scores` what it reaches",
    ),
    Rule(look=rewards.survives_mistakes, mend="let `mistake` return only what changes nothing"),
    Rule(
        look=rewards.rewards_success,
        mend="let what is called success be what is rewarded; state the true `reward_range`",
    ),
    Rule(look=rewards.has_a_random_score, mend="measure the random policy again, and state its score"),
    *LEAKS,
    *LAZY,
    Rule(
        look=resources.releases_everything,
        mend="close files, threads and processes in `close`, even without a reset; keep no list of instances",
    ),
    Rule(
        look=resources.keeps_its_memory,
        mend="drop in `reset` what an episode collected; bound caches",
    ),
    Rule(
        look=resources.is_as_fast_as_it_says,
        mend="state `isolation=Isolation.THREAD` or `PROCESS`, or make steps faster",
    ),
)
"""Those of `agentrl.testing.check_env`."""
INTEGRITY = (
    *LEAKS,
    Rule(look=rewards.silence_earns_nothing, mend="reward what was done, not that the episode went on"),
    Rule(look=rewards.handing_in_earns_nothing, mend="let the task begin unsolved, and judge its result"),
    Rule(
        look=rewards.printed_success_earns_nothing,
        mend="judge values that the program returns, elsewhere than where it ran; not its exit code and not its words",
    ),
    Rule(
        look=rewards.echoed_success_earns_nothing,
        mend="judge the state that the command left, elsewhere than where it ran; not its exit code and not its words",
    ),
    Rule(look=rewards.repeating_earns_nothing, mend="keep answers out of what the policy reads"),
    Rule(
        look=rewards.another_solution_earns_nothing,
        mend="let tasks differ in their solutions; a world of one task is no fault",
    ),
    Rule(
        look=rewards.openings_tell_no_luck,
        mend="look which tasks the words stand in; that such a task is easier is no fault",
    ),
    Rule(
        look=leaks.keeps_secrets_out_of_the_sandbox,
        mend="judge in another sandbox than the one in which the policy acts",
    ),
)
"""Those of `agentrl.testing.reward_integrity`."""


def choose_rules(rules: Sequence[Rule], *, only: Collection[str] = (), skip: Collection[str] = ()) -> tuple[Rule, ...]:
    """The rules that are asked for.

    Args:
        rules: To choose among.
        only: Names of the rules to check; all when empty. Blanks may be written as dashes or underscores.
        skip: Names of rules to leave out.

    Raises:
        UnknownNameError: there is no such rule.
    """
    names = [rule.name for rule in rules]
    wanted, unwanted = {_known(name, names) for name in only}, {_known(name, names) for name in skip}
    return tuple(rule for rule in rules if rule.name not in unwanted and (not wanted or rule.name in wanted))


def _known(name: str, names: Sequence[str]) -> str:
    plain = name.replace("-", " ").replace("_", " ").lower()
    if plain in names:
        return plain
    near = difflib.get_close_matches(plain, names, n=1)
    raise UnknownNameError(
        "there is no rule of this name",
        got=repr(name),
        expected=", ".join(names),
        hint=f"did you mean {near[0]!r}?" if near else None,
    )


ENDLESS = 100
"""Steps after which play stops in environments that state no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Extent of a check: what is played, and how much of it."""

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
    """Look at an environment by rules.

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
    """Progress of a check: the rows so far."""

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
    """Look by a rule; what the environment raises breaks the rule, because nothing may escape from it."""
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
    """Check that an environment keeps the rules of its contract (`RULES`).

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
