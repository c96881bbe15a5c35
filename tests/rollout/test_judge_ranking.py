"""Ranking inside a group: pairs, lists, position bias, ties, and groups that cannot be ranked."""

import asyncio
import random

import pytest
from judge_parts import TASK, episode, group_of, judge_at
from support.judge_service import agents_words, attempts_in, judge_service, mark_of

from agentrl.errors import EngineError, EnvironmentFailure, Outcome, RewardFailure, UsageError
from agentrl.reward import GroupScorer, Score, checked_group_scores
from agentrl.rollout.judges.scorers import bradley_terry, pairs_of, win_rates


def quality(question):
    """How many a's the agent of each attempt wrote."""
    return [agents_words(attempt, mark_of(question)).count("a") for attempt in attempts_in(question)]


def fair(question, body):
    """A judge that prefers more a's."""
    found = quality(question)
    if "ranking" in body["response_format"]["json_schema"]["schema"]["properties"]:
        order = sorted(range(len(found)), key=lambda i: -found[i])
        return {"reason": "Count.", "ranking": [i + 1 for i in order]}
    first, second = found
    return {"reason": "Count.", "better": "tie" if first == second else "1" if first > second else "2"}


def biased(question, body):
    """A judge that only looks at the order."""
    if "ranking" in body["response_format"]["json_schema"]["schema"]["properties"]:
        return {"reason": "First.", "ranking": list(range(1, len(quality(question)) + 1))}
    return {"reason": "First.", "better": "1"}


def rewards(scores):
    return [score.reward for score in scores]


async def test_pairs_give_the_win_rate_and_each_is_asked_in_both_orders():
    with judge_service(fair) as service:
        async with judge_at(service, compare="pairwise", environment_weight=2.0) as (judge, counters):
            scores = await judge.score_group(group_of("a", "aaa", "b", "aa"), TASK)
    assert rewards(scores) == pytest.approx([1 / 3 + 0.5, 1.5, 0.5, 2 / 3 + 0.5])
    assert scores[1].components == {"judge": 1.0, "environment": 0.25}
    assert len(service.bodies) == 4 * 3
    orders = {tuple(quality(question)) for question in service.questions}
    assert orders == {(i, j) for i in (0, 1, 2, 3) for j in (0, 1, 2, 3) if i != j}
    assert (counters.judge_pairs, counters.judge_agreeing) == (6, 6)
    assert "2 agents were given the same task" in service.questions[0]


@pytest.mark.parametrize("how", ["pairwise", {"how": "pairwise", "opponents": 2}, "listwise"])
async def test_a_judge_that_only_looks_at_the_order_gives_equal_rewards(how):
    """Pairs cancel exactly, lists on average."""
    settings = {"how": "listwise", "rounds": 60} if how == "listwise" else how
    with judge_service(biased) as service:
        async with judge_at(service, compare=settings) as (judge, counters):
            found = rewards(await judge.score_group(group_of("a", "aaa", "b", "aa", "aaaa"), TASK))
    assert found == pytest.approx([0.5] * 5, abs=0.15 if how == "listwise" else 1e-9)
    assert counters.judge_agreeing == 0


@pytest.mark.parametrize("how", ["pairwise", "listwise"])
async def test_the_order_of_members_does_not_matter(how):
    answers = ["a", "aaa", "b", "aa"]
    shuffled = random.Random(3).sample(range(4), 4)
    with judge_service(fair) as service:
        async with judge_at(service, compare=how) as (judge, _):
            one = rewards(await judge.score_group(group_of(*answers), TASK))
            other = rewards(await judge.score_group(group_of(*(answers[i] for i in shuffled)), TASK))
    assert [one[i] for i in shuffled] == pytest.approx(other)


async def test_lists_give_the_mean_place_over_rounds_in_other_orders():
    with judge_service(fair) as service:
        async with judge_at(service, compare="listwise") as (judge, _):
            found = rewards(await judge.score_group(group_of("a", "aaa", "b", "aa"), TASK))
    assert found == pytest.approx([1 / 3, 1.0, 0.0, 2 / 3])
    assert len(service.bodies) == 3
    assert len({tuple(quality(question)) for question in service.questions}) > 1


@pytest.mark.parametrize("how", ["pairwise", "listwise"])
async def test_equal_episodes_get_equal_rewards_without_a_comparison(how):
    with judge_service(biased) as service:
        async with judge_at(service, compare=how) as (judge, _):
            assert rewards(await judge.score_group(group_of("a", "a", "a"), TASK)) == [0.5] * 3
            assert not service.bodies
            first, _, third = rewards(await judge.score_group(group_of("a", "b", "a"), TASK))
    assert first == third


async def test_fewer_opponents_take_fewer_requests_and_still_find_the_order():
    answers = ["a" * count for count in range(1, 9)]
    with judge_service(fair) as service:
        async with judge_at(service, compare={"how": "pairwise", "opponents": 4}) as (judge, _):
            found = rewards(await judge.score_group(group_of(*answers), TASK))
    assert len(service.bodies) == 2 * (8 * 4 // 2)
    assert all(0 < reward < 1 for reward in found)
    assert found[-1] == max(found)
    assert found[0] == min(found)


def test_bradley_terry_on_all_pairs_is_nearly_the_win_rate():
    generator = random.Random(1)
    results = {pair: generator.choice([0.0, 0.25, 0.5, 0.75, 1.0]) for pair in pairs_of(6, None, seed="")}
    assert bradley_terry(results, 6) == pytest.approx(win_rates(results, 6), abs=0.03)
    assert sum(bradley_terry(results, 6)) == pytest.approx(3.0)


def test_bradley_terry_of_two_by_hand():
    """One win and the prior: p / (p + q) with p q = 1 and p (0.2 / (p + 1) + 1 / (p + q)) = 1.1."""
    better, worse = bradley_terry({(0, 1): 1.0}, 2)
    p = (better / worse) ** 0.5
    assert p * (0.2 / (p + 1) + 1 / (p + 1 / p)) == pytest.approx(1.1, abs=1e-6)
    assert better + worse == pytest.approx(1.0)


@pytest.mark.parametrize(
    "answer", [{"reason": "r", "better": "3"}, {"reason": "r", "better": 1}, "the first", {"reason": "r"}]
)
async def test_one_comparison_that_cannot_be_read_fails_the_group(answer):
    with judge_service(lambda question, body: answer) as service:
        async with judge_at(service, compare="pairwise", attempts=2) as (judge, _):
            with pytest.raises(EngineError, match="no score for g"):
                await judge.score_group(group_of("a", "b"), TASK)


@pytest.mark.parametrize(
    "ranking", [[1, 2], [1, 2, 2], [0, 1, 2], [1, 2, 3, 4], ["1", "2", "3"], [True, 2, 3], None, 1]
)
async def test_a_list_that_is_no_ranking_fails_the_group(ranking):
    with judge_service(lambda question, body: {"reason": "r", "ranking": ranking}) as service:
        async with judge_at(service, compare="listwise", attempts=1) as (judge, _):
            with pytest.raises(EngineError, match="each number from 1 to 3 once"):
                await judge.score_group(group_of("a", "b", "c"), TASK)


async def test_a_group_of_one_has_no_rank():
    with judge_service(fair) as service:
        async with judge_at(service, compare="pairwise") as (judge, _):
            with pytest.raises(EngineError, match=r"group g cannot be ranked: got 1 episode"):
                await judge.score_group(group_of("a"), TASK)
            with pytest.raises(UsageError, match="compares the episodes of a group"):
                await judge.score(episode("a"), TASK)


async def test_a_group_with_an_episode_in_text_only_has_no_ranks():
    episodes = group_of("a", "aa", "aaa")
    episodes[1].sequences.clear()
    with judge_service(fair) as service:
        async with judge_at(service, compare="pairwise") as (judge, _):
            with pytest.raises(UsageError, match="got an episode with text only"):
                await judge.score_group(episodes, TASK)
    assert not service.bodies


class Lengths(GroupScorer):
    """Ranks by something else than a judge; `gives` stands in for its scores."""

    def __init__(self, gives=None):
        self._gives = gives

    async def score_group(self, trajectories, task):
        """Longest first."""
        await asyncio.sleep(0)
        lengths = [trajectory.sampled_tokens for trajectory in trajectories]
        return (
            [Score(reward=float(length == max(lengths))) for length in lengths] if self._gives is None else self._gives
        )


@pytest.mark.parametrize(
    "gives", [[], [Score(reward=1.0)], [Score(reward=float("nan")), Score(reward=0.0)], [1.0, 0.0]]
)
async def test_a_scorer_of_groups_that_gives_something_else_has_failed(gives):
    with pytest.raises(EnvironmentFailure):
        await checked_group_scores(Lengths(gives), group_of("a", "bb"), TASK)


@pytest.mark.parametrize("count", [1, 3, 5])
async def test_too_few_and_too_many_group_scores_are_a_failure(count):
    gives = [Score(reward=0.25 * number) for number in range(count)]
    with pytest.raises(RewardFailure, match=rf"did not score each episode: got {count}, expected 2"):
        await checked_group_scores(Lengths(gives), group_of("a", "bb"), TASK)


async def test_a_group_with_too_many_scores_has_failed_with_all_its_episodes(make_runner):
    runner, group = make_runner(None, "north", scorer=Lengths([Score(reward=1.0)] * 4)), group_of("a", "bb", "ccc")
    await runner.score_group(group, TASK)
    assert [(one.outcome, one.reward) for one in group] == [(Outcome.REWARD_ERROR, None)] * 3
    (incident,) = runner.counters.incidents.worst()
    assert (incident.kind, incident.subject, incident.count) == ("reward_error", "Lengths", 3)


async def test_a_runner_scores_the_episodes_that_infrastructure_left(make_runner, play, worlds):
    ended = []

    class Observer:
        def on_start(self, trajectory):
            """Nothing."""

        def on_turn(self, trajectory, turn):
            """Nothing."""

        def on_end(self, trajectory):
            ended.append((trajectory.id, trajectory.reward, trajectory.outcome))

    runner = make_runner(None, "north", scorer=Lengths(), observer=Observer())
    with pytest.raises(UsageError, match="Lengths compares the episodes of a group"):
        await play(runner)
    group = group_of("a", "bbb", "cc")
    group[1].outcome = Outcome.ENGINE_ERROR
    await runner.score_group(group, TASK)
    assert [trajectory.reward for trajectory in group] == [0.0, None, 1.0]
    assert [(name, reward) for name, reward, _ in ended] == [("g/0.0", 0.0), ("g/2.0", 1.0)]
    group = group_of("a", "bbb")
    runner.scorer = Lengths([])
    await runner.score_group(group, TASK)
    assert {trajectory.outcome for trajectory in group} == {Outcome.REWARD_ERROR}
    assert all(trajectory.reward is None and "did not score each" in trajectory.error for trajectory in group)
