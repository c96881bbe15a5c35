"""All rules, of the check and of the report on the reward's integrity, in the order of the reports."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence

from agentrl.errors import UnknownNameError
from agentrl.testing.env_rules import (
    cheap_play,
    concurrency,
    contract,
    determinism,
    file_access,
    resources,
    scores,
    secrets_told,
    tasks,
)
from agentrl.testing.env_rules.rule import Rule

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
        look=secrets_told.hides_the_answer,
        mend="keep answers out of texts, hints and infos; a choice among given answers is no fault",
    ),
    Rule(look=secrets_told.hides_the_plan, mend="leave the solution out of the observation"),
    Rule(
        look=secrets_told.hides_the_reward,
        mend="leave the reward to the trainer; a score that belongs to the game is no fault",
    ),
    Rule(
        look=file_access.reads_no_files,
        mend="let actions and tools work in a sandbox, or in a folder of their own",
    ),
)
"""Those about what must not be told."""
LAZY = (
    Rule(
        look=cheap_play.doing_nothing_does_not_pay,
        mend="pay at the limit what losing pays, and on the way only for what actions have changed",
    ),
    Rule(
        look=cheap_play.repeating_nonsense_does_not_pay,
        mend="pay at the limit what losing pays; an invalid action may cost, and must not pay",
    ),
    Rule(
        look=cheap_play.giving_up_does_not_pay,
        mend="let giving up be worth no more than losing; make handing over depend on the task",
    ),
    Rule(
        look=cheap_play.saying_everything_does_not_pay,
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
        look=tasks.has_tasks,
        mend="make a task from its number alone; leave a split that is empty out of `splits`",
    ),
    Rule(
        look=tasks.keeps_splits_apart,
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
        look=concurrency.runs_interleaved,
        mend="keep an episode's state in the instance, not in the class, the module or a shared file",
    ),
    Rule(
        look=concurrency.runs_in_threads,
        mend="share nothing that changes, or state `isolation=Isolation.PROCESS`",
    ),
    Rule(
        look=concurrency.is_isolated_enough,
        mend="state `isolation=Isolation.PROCESS`: there, a crash costs the episodes of one worker",
    ),
    Rule(
        look=concurrency.survives_cancellation,
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
        look=scores.is_solved_by_its_expert,
        mend="mend the expert, or state in `scores` what it reaches",
    ),
    Rule(look=scores.survives_mistakes, mend="let `mistake` return only what changes nothing"),
    Rule(
        look=scores.rewards_success,
        mend="let what is called success be what is rewarded; state the true `reward_range`",
    ),
    Rule(look=scores.has_a_random_score, mend="measure the random policy again, and state its score"),
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
    Rule(look=cheap_play.silence_earns_nothing, mend="reward what was done, not that the episode went on"),
    Rule(look=cheap_play.handing_in_earns_nothing, mend="let the task begin unsolved, and judge its result"),
    Rule(
        look=cheap_play.printed_success_earns_nothing,
        mend="judge values that the program returns, elsewhere than where it ran; not its exit code and not its words",
    ),
    Rule(
        look=cheap_play.echoed_success_earns_nothing,
        mend="judge the state that the command left, elsewhere than where it ran; not its exit code and not its words",
    ),
    Rule(look=cheap_play.repeating_earns_nothing, mend="keep answers out of what the policy reads"),
    Rule(
        look=cheap_play.another_solution_earns_nothing,
        mend="let tasks differ in their solutions; a world of one task is no fault",
    ),
    Rule(
        look=cheap_play.openings_tell_no_luck,
        mend="look which tasks the words stand in; that such a task is easier is no fault",
    ),
    Rule(
        look=file_access.keeps_secrets_out_of_the_sandbox,
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
