"""Signs of failing training: each is detected where it occurs, and not in healthy runs."""

import re

import pytest

from agentrl.evaluation.diagnosis.rules import apply_rules
from agentrl.evaluation.diagnosis.summary import RunSummary


def lines_of(**columns):
    """Metrics of steps, by the last part of their names: entropy, norm, success, reward, identical, differ."""
    names = {
        "entropy": "train/entropy",
        "norm": "train/grad_norm",
        "success": "success/mean",
        "reward": "reward/mean",
        "identical": "groups/identical",
        "rate": "train/learning_rate",
    }
    count = len(next(iter(columns.values())))
    lines = [{"step": step + 1, "episodes": 32.0, "reward/std": 0.5} for step in range(count)]
    for column, values in columns.items():
        for line, value in zip(lines, values, strict=True):
            if column == "differ":
                line |= {"groups/trained": 4.0, "groups/zero_variance": 4.0 - value}
            elif value is not None:
                line[names[column]] = value
    return lines


def signs(lines):
    """What the rules find that look at the newest step."""
    return [finding for _, finding in apply_rules(RunSummary(lines=lines), of_newest_step=True)]


def kinds(lines):
    return {sign.kind for sign in signs(lines)}


def first_step(kind, lines):
    return next((n for n in range(1, len(lines) + 1) if kind in kinds(lines[:n])), None)


REPORTED = lines_of(
    entropy=[0.40, 0.42, 0.55, 0.9, 1.9, 1.6, 0.9, 0.4, 0.38],
    success=[0.09, 0.13, 0.16, 0.06, 0.0, 0.0, 0.0, 0.0, 0.0],
    differ=[2, 3, 3, 1, 0, 0, 0, 0, 0],
    rate=[1e-5] * 9,
)
"""The run of the report: a learning rate of 1e-5 without warm-up."""


def test_the_entropy_of_the_reported_run_is_named_while_it_rises():
    assert first_step("entropy_rises", REPORTED) == 5
    (sign,) = [sign for sign in signs(REPORTED[:5]) if sign.kind == "entropy_rises"]
    assert (
        "entropy rose 4.7-fold within 4 steps (train/entropy 0.4 to 1.9), and success fell from 9% to 0%" in sign.text
    )
    assert "set trainer.learning_rate=2e-06 (now 1e-05); add a warm-up (trainer.warmup_steps)" in sign.text


def test_the_fall_of_the_reported_run_and_its_groups_are_named():
    assert first_step("entropy_falls", REPORTED) == 8
    assert first_step("groups_alike", REPORTED) == 5, "at once, as the entropy jumped"


def test_groups_that_become_alike_without_a_jump_are_named_at_the_second_step():
    lines = lines_of(differ=[2, 3, 2, 3, 0, 0, 0], success=[0.3, 0.3, 0.3, 0.3, 0.0, 0.0, 0.0])
    assert first_step("groups_alike", lines) == 6
    assert kinds(lines_of(differ=[0, 0, 0, 0])) == set()
    assert kinds(lines_of(differ=[2, 3, 2, 0, 3, 0])) == set()


@pytest.mark.parametrize(
    "entropy",
    [
        [0.4, 0.5, 0.6, 0.7, 0.8, 0.9],
        [0.02, 0.05, 0.09, 0.2, 0.3],  # many times as much, and little all the same
        [1.9, 1.7, 1.5, 1.2, 1.0, 0.9, 0.8],
        [0.6, 0.5, 0.4, 0.3, 0.2, 0.15],
        [0.4, None, None, 0.5],
        [1.0],
    ],
)
def test_ordinary_entropies_are_no_sign(entropy):
    assert first_step("entropy_rises", lines_of(entropy=entropy)) is None
    assert first_step("entropy_falls", lines_of(entropy=entropy)) is None


def test_the_newest_entropy_is_compared_with_those_of_five_earlier_steps():
    assert first_step("entropy_rises", lines_of(entropy=[0.4, 1.0, 1.0, 1.0, 1.0, 1.25])) == 6
    assert first_step("entropy_rises", lines_of(entropy=[0.4, 1.0, 1.0, 1.0, 1.0, 1.0, 1.25])) is None


def test_a_slow_rise_over_many_steps_is_no_sign():
    assert first_step("entropy_rises", lines_of(entropy=[0.4 * 1.15**step for step in range(20)])) is None


def test_entropy_that_falls_while_success_rises_is_learning():
    learning = lines_of(entropy=[1.9, 1.0, 0.5], success=[0.1, 0.4, 0.7])
    assert kinds(learning) == set()
    stuck = lines_of(entropy=[1.9, 1.0, 0.5], success=[0.1, 0.1, 0.1])
    assert kinds(stuck) == {"entropy_falls"}


@pytest.mark.parametrize(("success", "expected"), [(0.53, True), (0.6, True), (0.7, False), (0.97, False)])
def test_success_that_is_higher_by_chance_has_not_risen(success, expected):
    """Of 32 episodes, a standard error of the difference is four of them."""
    assert ("entropy_falls" in kinds(lines_of(entropy=[1.9, 0.4], success=[0.5, success]))) is expected


def test_an_entropy_that_is_not_a_number_is_unknown():
    assert kinds(lines_of(entropy=[0.4, float("nan"), 1.9])) == {"entropy_rises"}
    assert kinds(lines_of(entropy=[0.4, 1.9, float("nan")])) == set()


@pytest.mark.parametrize(
    ("identical", "success", "expected"),
    [(0.75, 0.1, True), (0.5, None, True), (0.49, 0.1, False), (1.0, 0.96, False), (None, 0.1, False)],
)
def test_members_that_answer_alike_are_named_unless_the_task_is_solved(identical, success, expected):
    found = kinds(lines_of(identical=[identical], success=[success]))
    assert found == ({"members_alike"} if expected else set())


@pytest.mark.parametrize(
    ("norms", "expected"),
    [
        ([1.0, 1.2, 25.0], True),
        ([1.0, 1.2, 19.0], False),
        ([1.0, 2.0, 35.0], True),  # of the earlier ones alone
        ([1.0, 30.0], False),  # one step is no measure
        ([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 30.0], False),  # the trainer's own alarm says it
        ([0.0, 0.0, 5.0], False),
    ],
)
def test_an_early_jump_of_the_gradient_is_named(norms, expected):
    assert ("gradient_jumps" in kinds(lines_of(norm=norms))) is expected


def test_success_that_falls_while_the_reward_rises_is_named():
    lines = lines_of(
        success=[0.36, 0.34, 0.31, 0.2, 0.12, 0.05, 0.0, 0.0], reward=[-0.4, -0.3, -0.3, 0.0, 0.2, 0.5, 0.7, 0.9]
    )
    assert first_step("success_falls", lines) in (4, 5, 6)
    (sign,) = [sign for sign in signs(lines) if sign.kind == "success_falls"]
    assert "success fell from 30% to 4% while the reward rose from -0.25 to 0.575" in sign.text
    assert "its sign is wrong" in sign.text


@pytest.mark.parametrize(
    ("success", "reward"),
    [
        ([0.3, 0.3, 0.3, 0.3, 0.28, 0.29], [0.1, 0.1, 0.1, 0.9, 0.9, 0.9]),  # success stays, but for chance
        ([0.3, 0.3, 0.3, 0.0, 0.0, 0.0], [0.5, 0.5, 0.5, 0.1, 0.1, 0.1]),  # both fall
        ([0.1, 0.1, 0.1, 0.6, 0.6, 0.6], [0.1, 0.1, 0.1, 0.6, 0.6, 0.6]),
        ([0.36, 0.0], [0.1, 0.9]),  # two steps
        ([None] * 6, [0.1, 0.1, 0.1, 0.9, 0.9, 0.9]),
    ],
)
def test_other_changes_of_success_are_no_sign(success, reward):
    assert kinds(lines_of(success=success, reward=reward)) == set()


def test_nothing_shows_before_the_first_step():
    assert signs([]) == []


def test_a_selection_of_the_started_episodes_is_named():
    line = {"step": 1, "bias/turns": -0.23, "bias/turns_margin": 0.04, "bias/reward": 0.2, "bias/reward_margin": 0.15}
    line |= {"time/bias/seconds": -0.3, "time/bias/seconds_margin": 0.02, "rollout/groups_stale": 3.0}
    (sign,) = signs([line])
    assert sign.kind == "trains_selection"
    assert "-23% turns (chance alone: ±4%), -30% seconds (chance alone: ±2%); slow groups" in sign.text
    assert "set rollout.batch_order=windowed, or raise rollout.max_staleness" in sign.text
    (failed,) = signs([line | {"rollout/groups_stale": 0.0}])
    assert "groups fail (rollout/groups_failed)" in failed.text
    assert signs([{"step": 1, "bias/turns": -0.02, "bias/turns_margin": 0.0}]) == []
    assert signs([{"step": 1, "bias/turns": 0.0, "bias/turns_margin": 0.0}]) == []


@pytest.mark.parametrize(
    ("skipped", "applied", "words"),
    [
        ([1, 1], [0, 0], "2 of 2 updates were skipped.*, so the model has not changed.*agentrl repeat-update"),
        ([0, 1, 0], [4, 3, 0], "1 of 8 updates were skipped"),
        ([0, 1], [8, 8], None),
        ([0, 0], [1, 1], None),
    ],
)
def test_skipped_updates_are_named(skipped, applied, words):
    lines = lines_of(norm=[1.0] * len(skipped))
    for line, missed, done in zip(lines, skipped, applied, strict=True):
        line |= {"train/updates_skipped": float(missed), "train/updates": float(done)}
    found = [sign for _, sign in apply_rules(RunSummary(lines=lines), of_newest_step=False)]
    texts = [sign.text for sign in found if sign.kind == "updates_skipped"]
    assert len(texts) == (words is not None)
    assert words is None or re.search(words, texts[0], re.DOTALL)
