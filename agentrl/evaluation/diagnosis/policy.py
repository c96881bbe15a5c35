"""Rules about the policy's updates: learning rate, entropy, gradients, length, and success on other tasks.

rule                condition
------------------  ------------------------------------------------------------------------------------------------
success_falls       success is significantly lower, but the reward significantly higher than in the first steps
learning_rate_high  the KL of a step's updates is above `HIGH_KL` in several steps
learning_rate_low   the KL of a step's updates is below `LOW_KL` in all steps, and nothing improves
entropy_rises       entropy is at least `RISE` times the lowest of the last five steps (newest step)
entropy_falls       entropy is at most a third of the highest of the last five steps, or a tenth of the first steps',
                    and success has not risen (newest step)
members_alike       the members of most groups give the same answers, token by token (newest step)
groups_alike        returns no longer differ within groups, for two steps or after a jump in entropy (newest step)
updates_skipped     at least `OFTEN_SKIPPED` of the updates were skipped, because their loss or gradient was not finite
gradient_jumps      the gradient is over `SPIKE` times the median of earlier steps, too few for the trainer's alarm
length_growth       answers grow, the reward correlates with their length within groups, and success has not risen
overfitting         training success has risen, and the success of evaluations has not
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from statistics import fmean, median

from agentrl.config.usual_learning_rate import check_learning_rates
from agentrl.evaluation.diagnosis.finding import ConfigChange, Finding
from agentrl.evaluation.diagnosis.summary import SOLVED, Line, RunSummary, metric, series
from agentrl.observe.idle_steps import share_that_differs

BACK = 5
"""Number of earlier steps to compare the newest one with."""
RISE, FALL, COLLAPSE = 3.0, 1 / 3, 0.1
MIN_CHANGE = 0.5
"""Minimum change of the entropy, in nats; small entropies change by large factors without a problem."""
ALIKE, MIN_ALIKE_GROUPS = 0.5, 3
"""Minimum share and number of groups with identical members."""
SPIKE = 20.0
EARLY_NORMS = (2, 8)
"""Range of the number of earlier gradient norms for this check; with more norms, the trainer's alarm takes over."""
WINDOW = 5
"""Number of steps whose means are compared."""
CERTAIN = 3.0
"""Minimum difference of two windows, in standard errors, that counts as significant."""
CHANCE = 1.0
"""Maximum difference of two steps' success, in standard errors, that counts as chance."""
HIGH_KL, LOW_KL = 0.3, 1e-7
"""KL of a step's policy to that of its start, over several updates: beyond these, the rate is too high or too low."""
LOST_KL, EARLY_STEPS = 1.0, 20
"""KL of a single step that is too much in the first steps of a run."""
OFTEN = 0.05
"""Share of the steps above `HIGH_KL` from which the rate is too high."""
OFTEN_SKIPPED = 0.1
"""Minimum share of skipped updates for reporting a problem."""
LOW_STEPS = 5
"""Minimum number of steps for calling a rate too low."""
GROWTH, ITS_REWARD = 1.4, 0.4
"""Minimum growth of the answers, and minimum correlation of reward and length within groups."""
GAP = 0.15
"""Minimum rise of training success, and minimum distance to that of evaluations."""
EVALUATIONS = 3
"""Minimum number of evaluations for comparing their first with their last."""


def _rate_changes(run: RunSummary, factor: float) -> tuple[ConfigChange, ...]:
    """Return the change of the learning rate, by a factor or to the usual rate of the model, if that is known."""
    line = run.lines[-1] if run.lines else {}
    rate = run.setting("trainer.learning_rate") or metric(line, "train/learning_rate")
    if not rate:
        return ()
    target = float(f"{rate * factor:.1g}")
    usual = [check.usual for check in ([] if run.config is None else check_learning_rates(run.config))]
    if usual and (usual[0] < rate) == (factor < 1) and not 0.5 < usual[0] / rate < 2:
        target = float(f"{usual[0]:.1g}")
    return (ConfigChange(key="trainer.learning_rate", value=target, now=rate),)


WARM_UP = "add a warm-up (trainer.warmup_steps)"


def _recent(lines: Sequence[Line], name: str) -> list[float]:
    """Return the known values of at most `BACK` earlier steps and the newest one; empty if the newest is unknown."""
    if not lines or (now := metric(lines[-1], name)) is None:
        return []
    return [*series(lines[-BACK - 1 : -1], name), now]


def _steps_since(values: Sequence[float], value: float) -> int:
    return len(values) - 1 - max(i for i, found in enumerate(values[:-1]) if found == value)


def _success_change(lines: Sequence[Line], back: int) -> str:
    """Describe the change of success over some steps, if it has fallen."""
    now, before = metric(lines[-1], "success/mean"), metric(lines[-1 - back], "success/mean")
    if now is None or before is None or now >= before:
        return ""
    return f", and success fell from {before:.0%} to {now:.0%}"


def entropy_rises(run: RunSummary) -> Iterator[Finding]:
    """Compare the newest entropy with the lowest of the steps before."""
    values = _recent(run.lines, "train/entropy")
    if len(values) < 2:
        return
    now, lowest = values[-1], min(values[:-1])
    if now < RISE * lowest or now - lowest < MIN_CHANGE:
        return
    back = _steps_since(values, lowest)
    times = f"{now / lowest:.1f}-fold" if lowest > 0 else "from 0"
    yield Finding(
        kind="entropy_rises",
        sentence=f"entropy rose {times} within {_steps(back)} (train/entropy {lowest:.3g} to {now:.3g})"
        f"{_success_change(run.lines, min(back, len(run.lines) - 1))}",
        changes=_rate_changes(run, 0.2),
        advice=WARM_UP,
        weight=0.88,
        causes=frozenset({"learning_rate_high"}),
    )


def entropy_falls(run: RunSummary) -> Iterator[Finding]:
    """Compare the newest entropy with the highest of the steps before, and with the first steps."""
    lines, values = run.lines, _recent(run.lines, "train/entropy")
    if len(values) < 2:
        return
    now, highest = values[-1], max(values[:-1])
    back = _steps_since(values, highest)
    if now > FALL * highest:  # slowly, but far
        first = series(lines[:WINDOW], "train/entropy")
        highest, back = (fmean(first) if len(lines) > 2 * WINDOW and first else 0.0), len(lines) - 1
        if now > COLLAPSE * highest:
            return
    if highest - now < MIN_CHANGE:
        return
    if _success_rose_since(lines, back) or has_risen(lines, "success/mean"):
        return
    yield Finding(
        kind="entropy_falls",
        sentence=f"entropy fell to {now / highest:.0%} within {_steps(back)} (train/entropy {highest:.3g} to "
        f"{now:.3g}) and success did not rise: the policy is collapsing to a few answers",
        changes=_against_collapse(run),
        advice="or set algorithm.loss_options.clip_high=0.28",
        example=run.example(),
        weight=0.87,
        causes=frozenset({"learning_rate_high"}),
    )


def _success_rose_since(lines: Sequence[Line], back: int) -> bool:
    """Return True if the newest success is above that of `back` steps ago by more than chance, or tasks are solved."""
    now, before = lines[-1:], lines[max(0, len(lines) - 1 - back) :][:1]
    if any(metric(line, "success/mean") is None for line in (*now, *before)):
        return False
    by_chance = CHANCE * math.sqrt(_success_error(now) + _success_error(before))
    return _mean(now, "success/mean") >= SOLVED or _change(before, now, "success/mean") > by_chance


def _against_collapse(run: RunSummary) -> tuple[ConfigChange, ...]:
    coefficient = run.setting("algorithm.entropy_coef") or 0.0
    if coefficient < 0:
        return (run.change("algorithm.entropy_coef", 0.0),)
    return (*_rate_changes(run, 0.3), run.change("algorithm.entropy_coef", 2 * coefficient or 0.001))


def members_alike(run: RunSummary) -> Iterator[Finding]:
    """Find groups whose members sampled the same tokens, in the newest step."""
    now = run.lines[-1] if run.lines else {}
    share, success = metric(now, "groups/identical"), metric(now, "success/mean")
    if share is None or share < ALIKE or (success is not None and success >= SOLVED):
        return
    groups = metric(now, "groups/trained")
    if groups is not None and share * groups < MIN_ALIKE_GROUPS:
        return
    temperature = run.setting("sampling.temperature")
    is_greedy = temperature is not None and temperature < 0.7
    yield Finding(
        kind="members_alike",
        sentence=f"in {share:.0%} of the groups all members gave the same answers, token by token, so there is "
        "nothing to compare",
        changes=(run.change("sampling.temperature", 1.0),) if is_greedy else _rate_changes(run, 0.3),
        advice="" if is_greedy else "raise sampling.temperature, or go back to an earlier checkpoint",
        example=run.example(),
        weight=0.86,
        causes=frozenset({"learning_rate_high", "entropy_falls"}),
    )


def groups_alike(run: RunSummary) -> Iterator[Finding]:
    """Find groups whose returns no longer differ, in the newest step."""
    lines = run.lines
    shares = [share for line in lines[-BACK - 2 :] if (share := share_that_differs(line)) is not None]
    if len(shares) < 3 or shares[-1] > 0:
        return
    jumped = any(
        any(entropy_rises(RunSummary(lines=list(lines[max(0, end - BACK - 1) : end]))))
        for end in range(len(lines), max(0, len(lines) - BACK), -1)
    )
    before = fmean(shares[:-2] if not jumped else shares[:-1])
    if (shares[-2] > 0 and not jumped) or before < ALIKE / 2:
        return
    if run.newest.episodes and run.newest.solved == run.newest.episodes:
        return  # the tasks are solved
    yield Finding(
        kind="groups_alike",
        sentence=f"returns no longer differ within groups: in every group all were equal, while {before:.0%} of the "
        f"groups differed a few steps ago{_success_change(lines, min(BACK, len(lines) - 1))}",
        changes=_rate_changes(run, 0.2),
        advice=WARM_UP,
        weight=0.8,
        causes=frozenset({"learning_rate_high", "entropy_rises", "entropy_falls", "members_alike"}),
    )


def gradient_jumps(run: RunSummary) -> Iterator[Finding]:
    """Compare the newest gradient with those of the first steps."""
    if not run.lines:
        return
    norms = [norm for norm in series(run.lines[: sum(EARLY_NORMS)], "train/grad_norm") if norm]
    now, (least, most) = metric(run.lines[-1], "train/grad_norm"), EARLY_NORMS
    if now is None or len(run.lines) > sum(EARLY_NORMS) or not least <= len(norms) - 1 < most:
        return
    usual = median(norms[:-1])
    if now <= SPIKE * usual:
        return
    yield Finding(
        kind="gradient_jumps",
        sentence=f"the gradient is {now / usual:.0f} times as large as before (train/grad_norm {usual:.3g} to "
        f"{now:.3g})",
        changes=_rate_changes(run, 0.3),
        advice="or lower trainer.max_grad_norm",
        weight=0.78,
        causes=frozenset({"learning_rate_high"}),
    )


def updates_skipped(run: RunSummary) -> Iterator[Finding]:
    """Find updates that changed no weights, because a number was not finite."""
    skipped, applied = (sum(series(run.lines, f"train/{name}")) for name in ("updates_skipped", "updates"))
    if not skipped or skipped < OFTEN_SKIPPED * (skipped + applied):
        return
    yield Finding(
        kind="updates_skipped",
        sentence=f"{skipped:.0f} of {skipped + applied:.0f} updates were skipped, because their loss or gradient was "
        "not finite (train/updates_skipped)" + ("" if applied else ", so the model has not changed"),
        changes=_rate_changes(run, 0.3) if applied else (),
        advice="check your loss, estimator and rewards: agentrl repeat-update FILE, with a file of the run's folder "
        "numerics, shows the first module whose values are not finite",
        weight=0.9 if applied else 0.97,
    )


def learning_rate_high(run: RunSummary) -> Iterator[Finding]:
    """Find updates that move the policy further than its episodes can justify."""
    kls = series(run.lines, "train/kl_old")
    beyond = [kl > HIGH_KL for kl in kls]
    is_recent = len(beyond) >= 2 and all(beyond[-2:])
    is_lost = len(kls) <= EARLY_STEPS and max(kls, default=0.0) > LOST_KL
    if not (is_recent or is_lost or sum(beyond) >= max(2, OFTEN * len(beyond))):
        return
    clipped = series(run.lines, "train/clip_share")
    yield Finding(
        kind="learning_rate_high",
        sentence=f"the learning rate is too high: within a step the policy moves by a KL of {max(kls):.2g} "
        f"({sum(beyond)} of {len(kls)} steps above {HIGH_KL:g}; a healthy step stays below 0.1)",
        changes=_rate_changes(run, 0.1),
        advice=f"{WARM_UP}, or set trainer.max_kl=0.1, which skips the rest of a step",
        evidence=(
            f"train/kl_old {median(kls):.2g} in the median, {max(kls):.2g} at most",
            *((f"train/clip_share {fmean(clipped):.0%}: so many ratios are clipped",) if clipped else ()),
        ),
        count=sum(beyond),
        of=len(kls),
        weight=0.92,
        is_current=is_recent,
    )


def learning_rate_low(run: RunSummary) -> Iterator[Finding]:
    """Find updates that hardly move the policy, although episodes differ."""
    lines = [line for line in run.lines if (metric(line, "train/advantage_abs_mean") or 0.0) > 0]
    if len(lines) < LOW_STEPS or has_risen(lines, "success/mean") or has_risen(lines, "reward/mean"):
        return
    kls = [kl for kl in series(lines, "train/kl_old") if kl > 0 or _updates_several(run)]
    is_slow = len(kls) >= LOW_STEPS and max(kls) < LOW_KL
    usual = [check for check in ([] if run.config is None else check_learning_rates(run.config)) if check.is_far]
    is_far = len(lines) >= 2 * LOW_STEPS and any(check.ratio < 1 for check in usual)
    if not (is_slow or (is_far and not (kls and max(kls) > 100 * LOW_KL))):
        return
    yield Finding(
        kind="learning_rate_low",
        sentence=f"the learning rate is too low: {len(lines)} steps with differing returns have hardly moved the "
        "policy",
        changes=_rate_changes(run, 10.0),
        evidence=(
            *((f"train/kl_old at most {max(kls):.1g}: the ratio of new and old policy stays at 1",) if kls else ()),
            f"reward/mean {_first(lines, 'reward/mean')} in the first steps, {_last(lines, 'reward/mean')} in the last",
        ),
        count=len(lines),
        of=len(run.lines),
        weight=0.75,
        is_current=len(lines) >= 2 * LOW_STEPS,
    )


def _updates_several(run: RunSummary) -> bool:
    """Return True if a step has several updates, of which all but the first move from the step's start."""
    return max((metric(line, "train/updates") or 0.0 for line in run.lines), default=0.0) > 1


def _windows(lines: Sequence[Line], *names: str) -> tuple[Sequence[Line], Sequence[Line]] | None:
    """Return the first and the last steps whose metrics are known; ``None`` for fewer than four steps."""
    first = list(islice(_lines_with(lines, names), 2 * WINDOW))
    last = list(islice(_lines_with(reversed(lines), names), 2 * WINDOW))
    window = min(WINDOW, len(first) // 2)
    return None if window < 2 else (first[:window], last[:window][::-1])


def _lines_with(lines: Iterable[Line], names: Sequence[str]) -> Iterator[Line]:
    return (line for line in lines if all(metric(line, name) is not None for name in names))


def has_risen(lines: Sequence[Line], name: str) -> bool:
    """Return True if a metric of episodes is significantly higher in the last steps than in the first."""
    windows = _windows(lines, name)
    if windows is None:
        return False
    error = _success_error if name == "success/mean" else _reward_error
    return _change(*windows, name) > CERTAIN * math.sqrt(sum(map(error, windows)))


def success_falls(run: RunSummary) -> Iterator[Finding]:
    """Compare the first steps with the newest ones, by the standard deviations within steps."""
    windows = _windows(run.lines, "success/mean", "reward/mean")
    if windows is None:
        return
    first, last = windows
    success, reward = _change(first, last, "success/mean"), _change(first, last, "reward/mean")
    success_error = math.sqrt(sum(_success_error(part) for part in windows))
    reward_error = math.sqrt(sum(_reward_error(part) for part in windows))
    if success > -CERTAIN * success_error or reward < CERTAIN * reward_error or not success or not reward:
        return
    before, now = _mean(first, "success/mean"), _mean(last, "success/mean")
    yield Finding(
        kind="success_falls",
        sentence=f"success fell from {before:.0%} to {now:.0%} while the reward rose from "
        f"{_mean(first, 'reward/mean'):.3g} to {_mean(last, 'reward/mean'):.3g}: the reward depends on something other "
        "than success, or its sign is wrong",
        advice="compare solved with other episodes, and correct the reward",
        example=run.example(),
        weight=0.9,
        causes=frozenset({"reward_against_success", "length_growth"}),
    )


def length_growth(run: RunSummary) -> Iterator[Finding]:
    """Find answers that grow because longer ones are rewarded more, while success does not."""
    name = "tokens/sampled_per_episode"
    windows, pays = _windows(run.lines, name), run.episodes.length_and_reward.correlation
    if windows is None or pays < ITS_REWARD or has_risen(run.lines, "success/mean"):
        return
    before, now = (_mean(part, name) for part in windows)
    if now < GROWTH * before:
        return
    yield Finding(
        kind="length_growth",
        sentence=f"episodes grow because length is rewarded: from {before:.0f} to {now:.0f} sampled tokens per "
        "episode, while success did not rise",
        changes=(run.change("algorithm.shaping", "{length: {factor: 0.1}}"),),
        advice="or correct the reward, so that it does not count words; "
        "algorithm.aggregation=seq-mean-token-sum-norm keeps the loss from favouring long answers",
        evidence=(
            f"{name} {before:.0f} in the first steps, {now:.0f} in the last",
            f"correlation of reward and length within groups {pays:.2f}",
        ),
        example=run.example(),
        weight=0.88,
    )


def overfitting(run: RunSummary) -> Iterator[Finding]:
    """Compare the rise of training success with that of the evaluations."""
    train = _windows(run.lines, "success/mean")
    held_out = series(run.lines, "eval/success")
    if train is None or len(held_out) < EVALUATIONS or not has_risen(run.lines, "success/mean"):
        return
    before, now = (_mean(part, "success/mean") for part in train)
    first, last = held_out[0], fmean(held_out[-2:])
    margin = max(0.05, *(_interval(line) for line in run.lines))
    if now - before < GAP or last - first > margin / 2 or now - last < GAP:
        return
    split = run.setting("evaluation.split")
    yield Finding(
        kind="overfitting",
        sentence=f"the policy learns only its training tasks: training success rose from {before:.0%} to {now:.0%}, "
        f"that of evaluations went from {first:.0%} to {last:.0%}",
        advice="train on more and more varied tasks (environment.options, a larger split), stop at the checkpoint with "
        "the best evaluation, or set algorithm.kl_coef=0.001; check that the evaluation's tasks are of the same kind"
        f"{'' if split is None else f' (evaluation.split {split})'}",
        evidence=tuple(
            f"step {int(line.get('eval/at_step', line['step']))}: evaluation {line['eval/success']:.0%}, training "
            f"{metric(line, 'success/mean') or 0.0:.0%}"
            for line in [line for line in run.lines if metric(line, "eval/success") is not None][-EVALUATIONS:]
        ),
        weight=0.7,
    )


def _interval(line: Line) -> float:
    """Return the width of the interval of a step's evaluation; 0 without one."""
    low, high = metric(line, "eval/success_low"), metric(line, "eval/success_high")
    return 0.0 if low is None or high is None else high - low


def _mean(lines: Sequence[Line], name: str) -> float:
    return fmean(float(line[name]) for line in lines)


def _first(lines: Sequence[Line], name: str) -> str:
    return f"{fmean(series(lines[:WINDOW], name) or [math.nan]):.3g}"


def _last(lines: Sequence[Line], name: str) -> str:
    return f"{fmean(series(lines[-WINDOW:], name) or [math.nan]):.3g}"


def _change(first: Sequence[Line], last: Sequence[Line], name: str) -> float:
    return _mean(last, name) - _mean(first, name)


def _episodes(line: Line) -> float:
    return max(1.0, metric(line, "episodes") or 1.0)


def _success_error(lines: Sequence[Line]) -> float:
    """Return the squared standard error of the mean success, with one success and one failure added."""
    episodes = sum(map(_episodes, lines))
    share = (_mean(lines, "success/mean") * episodes + 1) / (episodes + 2)
    return share * (1 - share) / episodes


def _reward_error(lines: Sequence[Line]) -> float:
    """Return the squared standard error of the mean reward."""
    return fmean((metric(line, "reward/std") or 0.0) ** 2 for line in lines) / sum(map(_episodes, lines))


def _steps(count: int) -> str:
    return "one step" if count == 1 else f"{count} steps"
