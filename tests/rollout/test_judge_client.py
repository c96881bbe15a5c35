"""The judge's client: known answers are not paid for again, and the budget is a limit."""

import asyncio
import json

import pytest
from judge_parts import TASK, client_of, config_of, episode, group_of, judge_at
from support.judge_service import judge_service

from agentrl.errors import BudgetSpent, EngineError, UsageError
from agentrl.observe.files import read_json_lines
from agentrl.rollout.judges.verdicts import VerdictFormat

SEVEN = "Score: 7"


def seven(question, body):
    return SEVEN


async def test_an_equal_question_is_paid_for_once(tmp_path):
    with judge_service(seven) as service:
        async with judge_at(service) as (judge, counters):
            for _ in range(3):
                assert (await judge.score(episode("north"), TASK)).reward == 0.7
            await judge.score(episode("south"), TASK)
    assert len(service.bodies) == 2
    assert (counters.judge_requests, counters.judge_cached, counters.judge_tokens) == (2, 2, 220)


async def test_concurrent_equal_questions_share_a_request_even_if_the_first_caller_is_cancelled():
    with judge_service(seven, delay_s=0.2) as service:
        async with judge_at(service) as (judge, _):
            asking = [asyncio.create_task(judge.score(episode("north"), TASK)) for _ in range(5)]
            await asyncio.sleep(0.05)
            asking[0].cancel()
            found = await asyncio.gather(*asking, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError)
    assert [score.reward for score in found[1:]] == [0.7] * 4
    assert len(service.bodies) == 1


async def test_without_a_cache_every_question_is_asked():
    with judge_service(seven) as service:
        async with judge_at(service, cache="off") as (judge, _):
            for _ in range(3):
                await judge.score(episode("north"), TASK)
    assert len(service.bodies) == 3


async def test_what_is_in_the_runs_folder_is_known_to_the_next_process(tmp_path):
    file = tmp_path / "judge.jsonl"
    with judge_service(seven) as service:
        async with judge_at(service, file=file) as (judge, _):
            await judge.score(episode("north"), TASK)
        with file.open("ab") as torn:
            torn.write(b'{"key": "torn')
        async with judge_at(service, file=file) as (judge, counters):
            assert (await judge.score(episode("north"), TASK)).reward == 0.7
            await judge.score(episode("south"), TASK)
        async with judge_at(service, file=file, cache="memory") as (judge, _):
            await judge.score(episode("north"), TASK)
    assert (counters.judge_cached, counters.judge_requests) == (1, 1)
    assert len(service.bodies) == 3


async def test_another_model_or_temperature_is_another_question(tmp_path):
    file = tmp_path / "judge.jsonl"
    with judge_service(seven) as service:
        for settings in ({}, {"temperature": 0.5}, {"engine": {"model": "other"}}, {"max_tokens": 9}):
            async with judge_at(service, file=file, **settings) as (judge, _):
                await judge.score(episode("north"), TASK)
    assert len(service.bodies) == 4


class Count(VerdictFormat):
    """Any number, under a schema that the question does not show."""

    instructions = ""

    def __init__(self, most):
        self.schema = {"type": "object", "properties": {"count": {"type": "integer", "maximum": most}}}

    def read(self, answer):
        return json.loads(answer)


async def test_the_same_words_with_another_schema_are_another_question():
    with judge_service(lambda question, body: {"count": len(service.bodies)}) as service:
        client = client_of(service, config_of(service))
        found = [await client.ask("How many?", Count(most), "g") for most in (3, 4, 3)]
        await client.close()
    assert found[0] == found[2] != found[1]
    assert len(service.bodies) == 2


async def test_an_unreadable_answer_is_paid_for_and_not_kept(tmp_path):
    file, answers = tmp_path / "judge.jsonl", iter(["hm", "hm", SEVEN])
    with judge_service(lambda question, body: next(answers)) as service:
        async with judge_at(service, file=file, attempts=1) as (judge, _):
            for _ in range(2):
                with pytest.raises(EngineError):
                    await judge.score(episode("north"), TASK)
        async with judge_at(service, file=file, attempts=1, budget={"max_requests": 3}) as (judge, _):
            assert (await judge.score(episode("north"), TASK)).reward == 0.7
            with pytest.raises(BudgetSpent, match="got 3 requests of 3"):
                await judge.score(episode("south"), TASK)
    assert [json.loads(line)["readable"] for line in file.read_text().splitlines()] == [False, False, True]


@pytest.mark.parametrize(
    ("budget", "spent"),
    [
        ({"max_requests": 2}, "2 requests of 2"),
        ({"max_tokens_total": 220}, "220 tokens of 220"),
        ({"max_cost": 0.00024, "prompt_price": 1.0, "answer_price": 2.0}, "a cost of 0.00024 of 0.00024"),
    ],
)
async def test_a_spent_budget_is_an_error_in_this_process_and_in_the_next(tmp_path, budget, spent):
    file = tmp_path / "judge.jsonl"
    with judge_service(seven) as service:
        for answers in (("north", "south", "west"), ("east",)):
            async with judge_at(service, file=file, budget=budget) as (judge, _):
                for answer in answers[:2] if len(answers) > 1 else ():
                    await judge.score(episode(answer), TASK)
                with pytest.raises(BudgetSpent, match=f"budget of the judge is spent: got {spent}"):
                    await judge.score(episode(answers[-1]), TASK)
                assert (await judge.score(episode("north"), TASK)).reward == 0.7  # known, and free
    assert len(service.bodies) == 2


async def test_requests_in_flight_count_towards_the_budget_but_rejected_ones_do_not():
    with judge_service(seven, delay_s=0.1) as service:
        async with judge_at(service, budget={"max_requests": 3}) as (judge, _):
            work = [judge.score(episode(f"go {i}", member=i), TASK) for i in range(10)]
            found = await asyncio.gather(*work, return_exceptions=True)
            assert sum(isinstance(score, BudgetSpent) for score in found) == 7
    assert len(service.bodies) == 3
    answers = iter([400, SEVEN])
    with judge_service(lambda question, body: next(answers)) as service:
        async with judge_at(service, budget={"max_requests": 1}) as (judge, _):
            with pytest.raises(EngineError, match="returned an error"):
                await judge.score(episode("north"), TASK)
            assert (await judge.score(episode("north"), TASK)).reward == 0.7


async def test_a_cancelled_request_counts_in_this_process_and_the_next(tmp_path):
    file = tmp_path / "judge.jsonl"
    with judge_service(seven, delay_s=0.2) as service:
        async with judge_at(service, file=file, budget={"max_requests": 1}) as (judge, _):
            asked = asyncio.create_task(judge.score(episode("north"), TASK))
            await asyncio.to_thread(service.asked.wait, 20.0)
        with pytest.raises(asyncio.CancelledError):
            await asked
        async with judge_at(service, file=file, budget={"max_requests": 1}) as (judge, _):
            with pytest.raises(BudgetSpent, match="got 1 requests of 1"):
                await judge.score(episode("north"), TASK)
    assert len(service.bodies) == 1
    (record,) = read_json_lines(file)
    assert (record["readable"], record["answer"]) == (False, "")
    assert (record["prompt_tokens"], record["answer_tokens"]) == (0, 0), "its cost is unknown"


async def test_a_service_that_counts_no_tokens_cannot_have_a_budget_of_them():
    with judge_service(seven, usage=None) as service:
        async with judge_at(service, budget={"max_tokens_total": 100}) as (judge, _):
            with pytest.raises(UsageError, match=r"does not report its tokens.*max_requests instead"):
                await judge.score(episode("north"), TASK)


async def test_no_more_requests_run_at_once_than_are_allowed_and_waiting_costs_no_deadline():
    with judge_service(seven, delay_s=0.05) as service:
        async with judge_at(service, engine={"max_concurrent": 2}) as (judge, _):
            await asyncio.gather(*(judge.score(episode(f"go {i}"), TASK) for i in range(8)))
    assert service.most_at_once == 2


WITHOUT = {"budget": {"max_requests": 3, "when_spent": "environment"}, "environment_weight": 2.0}


async def test_after_the_budget_a_group_has_either_verdicts_or_environment_rewards(caplog):
    with judge_service(seven) as service:
        async with judge_at(service, **WITHOUT) as (judge, counters):
            one = [await judge.score(t, TASK) for t in group_of("a", "b", group="one")]
            two = [await judge.score(t, TASK) for t in group_of("c", "d", group="two")]
            three = [await judge.score(t, TASK) for t in group_of("a", "e", group="three")]
    assert [score.reward for score in one] == [1.2, 1.2]
    assert [score.reward for score in two] == [1.2, None]  # the second could not be judged as the first was
    assert [score.reward for score in three] == [0.5, 0.5]  # also where the verdict is known
    assert all("judge" not in score.components for score in three)
    assert counters.judge_without == 2
    (said,) = [r.message for r in caplog.records if "budget" in r.message]
    assert said == (
        "the budget of the judge is spent (3 requests of 3): from group three on, only the environment rewards episodes"
    )


async def test_a_group_whose_first_episode_finds_the_budget_spent_discards_the_verdicts_of_others():
    with judge_service(seven, delay_s=0.1) as service:
        settings = {**WITHOUT, "budget": {"max_requests": 1, "when_spent": "environment"}}
        async with judge_at(service, **settings) as (judge, _):
            found = await asyncio.gather(*(judge.score(t, TASK) for t in group_of("a", "b", "c")))
    assert [score.reward for score in found] == [0.5] * 3


async def test_a_group_that_cannot_be_ranked_to_its_end_goes_without():
    def first(question, body):
        return {"reason": "r", "better": "1"}

    with judge_service(first) as service:
        async with judge_at(service, compare="pairwise", **WITHOUT) as (judge, _):
            scores = await judge.score_group(group_of("a", "b", "c"), TASK)
            later = await judge.score_group(group_of("d", "e", group="later"), TASK)
        async with judge_at(service, compare="pairwise", budget={"max_requests": 3}) as (judge, _):
            with pytest.raises(BudgetSpent):
                await judge.score_group(group_of("a", "b", "c"), TASK)
    assert [score.reward for score in [*scores, *later]] == [0.5] * 5
