"""Task pools of the curriculum: estimates by hand, skipped tasks and returning tasks."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config.environment import CurriculumConfig, PoolsConfig
from agentrl.errors import UsageError
from agentrl.rollout.curriculum import GroupOutcome, Pool, Pools, SuccessEstimate
from agentrl.rollout.task_order import TaskSampler
from agentrl.task import Task

KEY = ("a", "t")


def outcome(successes, tries=8, *, task="t", kind=None, environment="a"):
    return GroupOutcome(
        position=0,
        environment=environment,
        task_id=task,
        task_type=kind,
        horizon=None,
        episodes=tries,
        tries=tries,
        successes=successes,
    )


def pools(**settings):
    return Pools(PoolsConfig(**settings), seed=0)


@pytest.mark.parametrize(
    ("successes", "tries", "steps", "rate"),
    [(0, 0, 0, 1 / 2), (0, 8, 0, 1 / 10), (8, 8, 0, 9 / 10), (3, 8, 0, 4 / 10), (0, 8, 10, 1 / 6), (8, 8, 20, 3 / 4)],
)
def test_rates_by_hand(successes, tries, steps, rate):
    """Half-life 10: after 10 steps 8 failures count as 4, (1 + 0) / (2 + 4); after 20 steps 8 successes count as 2."""
    assert SuccessEstimate(successes, tries, 5).fade_to(5 + steps, 10).rate == pytest.approx(rate)


@settings(deadline=None)
@given(st.integers(0, 64), st.integers(0, 64), st.integers(0, 500), st.floats(0.5, 300))
def test_a_rate_lies_between_the_share_and_one_half(successes, failures, steps, half_life):
    rate = SuccessEstimate(successes, successes + failures, 0).fade_to(steps, half_life).rate
    share = successes / (successes + failures) if successes + failures else 0.5
    assert min(share, 0.5) - 1e-12 <= rate <= max(share, 0.5) + 1e-12


def test_few_tries_decide_nothing():
    found = pools()
    found.learn([outcome(8)])
    assert found.pool_of(KEY) is Pool.OPEN, "8 of 8 make 0.9, which is not above 0.9"
    found.learn([outcome(8)])
    assert found.pool_of(KEY) is Pool.EASY
    assert found.pool_of(("a", "never played")) is Pool.OPEN


def test_what_is_not_played_is_tried_again():
    found = pools(half_life=10)
    for _ in range(5):
        found.learn([outcome(0)])
    assert found.pool_of(KEY) is Pool.HARD
    steps = 0
    while found.pool_of(KEY) is Pool.HARD:
        found.learn([])
        steps += 1
        assert steps < 100
    assert steps == 22  # 8 (1 + … + 2^-0.4) = 34.99 tries after five steps; 1 / (2 + n) reaches 0.1 at 8 of them


def test_new_evidence_outweighs_old():
    found = pools(half_life=2)
    for _ in range(20):
        found.learn([outcome(0)])
    assert found.pool_of(KEY) is Pool.HARD
    for _ in range(4):
        found.learn([outcome(6)])
    assert found.pool_of(KEY) is Pool.OPEN


@pytest.mark.parametrize(("by", "key"), [("task", "t"), ("type", "k"), ("environment", "")])
def test_what_is_judged_together(by, key):
    found = pools(by=by)
    task = Task(id="t", environment="a", type="k")
    assert found.key("a", task) == ("a", key)
    for _ in range(3):
        found.learn([outcome(0, kind="k")])
    assert found.pool_of(("a", key)) is Pool.HARD
    assert found.pool_of(("b", key)) is Pool.OPEN
    assert found.sizes() == {Pool.EASY: 0, Pool.HARD: 1, Pool.OPEN: 0}


def test_tasks_without_a_type_cannot_be_judged_by_it():
    with pytest.raises(UsageError, match=r"has no type.*curriculum\.pools\.by=task"):
        pools(by="type").key("a", Task(id="t", environment="a"))


def test_the_easy_and_the_hard_are_played_at_the_share_asked_for():
    found = pools(revisit=0.25)
    for _ in range(3):
        found.learn([outcome(0)])
    played = sum(found.plays("a", Task(id="t", environment="a"), turn) for turn in range(4000))
    assert 0.22 < played / 4000 < 0.28
    assert all(found.plays("a", Task(id="open", environment="a"), turn) for turn in range(50))


class Tasks:
    """Twelve tasks, of which a third each is solved always, never, and half of the time."""

    RATES = (1.0, 0.0, 0.5)

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return Task(id=str(index), environment="a")


def test_groups_that_differ_become_the_rule_and_no_task_is_lost():
    curriculum = CurriculumConfig(pools=PoolsConfig(revisit=0.1, half_life=50))
    sampler = TaskSampler({"a": Tasks()}, seed=0, curriculum=curriculum)
    draws = []
    for _ in range(200):
        ids = [sampler.next().task.id for _ in range(6)]
        sampler.learn([outcome(round(8 * Tasks.RATES[int(name) % 3]), task=name) for name in ids])
        draws.extend(ids)
    late = draws[600:]
    useful = sum(int(name) % 3 == 2 for name in late) / len(late)
    assert useful > 0.7, "without pools it would be a third"
    assert set(late) == {str(number) for number in range(12)}
    assert sampler.metrics()["curriculum/easy"] + sampler.metrics()["curriculum/hard"] > 4


def test_episodes_that_a_limit_ended_count_as_failures_once_success_is_reported():
    cut = replace(outcome(0, tries=8, task="u"), tries=0)
    found = pools()
    with pytest.raises(UsageError, match=r"task u does not report success.*Remove curriculum\.pools"):
        found.learn([cut, replace(cut, finished=1)])
    found.learn([cut])
    assert found.sizes()[Pool.OPEN] == 1, "nothing is known about it yet"
    found = pools()
    found.learn([outcome(8), cut])
    found.learn([replace(outcome(2, tries=8), tries=2), cut])
    evidence = dict(zip((("a", "t"), ("a", "u")), found._evidence.values(), strict=True))
    fade = 2.0 ** (-1 / found.settings.half_life)
    assert evidence["a", "t"].successes == pytest.approx(8 * fade + 2)
    assert [evidence["a", task].tries for task in "tu"] == pytest.approx([8 * fade + 8, 8 * fade + 8])
    found.learn([cut])
    with pytest.raises(UsageError, match="task u does not report success"):
        found.learn([replace(cut, environment="silent", finished=8)])
