"""Table of all rules, and the diagnosis by all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from agentrl.evaluation.diagnosis import episodes, parts, policy
from agentrl.evaluation.diagnosis.finding import Finding
from agentrl.evaluation.diagnosis.summary import RunSummary

Find: TypeAlias = Callable[[RunSummary], Iterator[Finding]]


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: a pure function from a summary to its findings."""

    find: Find
    warns: bool = False
    """True if a running run warns about it at once."""
    of_newest_step: bool = False
    """True if it looks at the newest step, so that a run keeps what it found in earlier ones."""
    of_evaluations: bool = False
    """True if it also makes sense for an evaluation."""


RULES: tuple[Rule, ...] = (
    Rule(parts.code_failures, warns=True, of_evaluations=True),
    Rule(parts.tool_reports_errors, warns=True, of_evaluations=True),
    Rule(episodes.reward_against_success, warns=True, of_evaluations=True),
    Rule(episodes.judge_always_agrees, of_evaluations=True),
    Rule(episodes.constant_reward, of_evaluations=True),
    Rule(episodes.never_rewarded),
    Rule(episodes.nothing_varies, warns=True),
    Rule(episodes.answers_cut, of_evaluations=True),
    Rule(episodes.unusable_answers, of_evaluations=True),
    Rule(episodes.truncated_episodes, of_evaluations=True),
    Rule(policy.updates_skipped, warns=True),
    Rule(policy.learning_rate_high, warns=True),
    Rule(policy.learning_rate_low, warns=True),
    Rule(policy.success_falls, warns=True, of_newest_step=True),
    Rule(policy.entropy_rises, warns=True, of_newest_step=True),
    Rule(policy.entropy_falls, warns=True, of_newest_step=True),
    Rule(policy.members_alike, warns=True, of_newest_step=True),
    Rule(policy.groups_alike, warns=True, of_newest_step=True),
    Rule(policy.gradient_jumps, warns=True, of_newest_step=True),
    Rule(policy.length_growth, warns=True),
    Rule(policy.overfitting, warns=True),
    Rule(parts.engine_disagrees),
    Rule(parts.groups_stale, warns=True),
    Rule(parts.trains_selection, warns=True, of_newest_step=True),
    Rule(parts.tool_slow, of_evaluations=True),
)
"""All rules; the alarms of ``trainer.numerics`` warn about single steps of the trainer in addition."""


def apply_rules(run: RunSummary, *, of_newest_step: bool) -> Iterator[tuple[Rule, Finding]]:
    """Yield the findings of the rules that look at the newest step, or of those that look at the whole run."""
    for rule in RULES:
        if rule.of_newest_step == of_newest_step and (run.is_training or rule.of_evaluations):
            yield from ((rule, finding) for finding in rule.find(run))
