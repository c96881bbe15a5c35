"""Rubrics: files, items of tasks, gates, penalties, one request or one for each item."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from judge_parts import TASK, episode, judge_at
from support.judge_service import judge_service

from agentrl.config.judge import JudgeConfig
from agentrl.errors import EngineError, UsageError

ENGINE = {"url": "http://127.0.0.1:1/v1", "model": "m"}
RUBRIC = """
- name: arrived
  criterion: Does the agent reach the hill?
  weight: 2
  required: true
- name: effort
  criterion: How direct is its way?
  scale: [1, 5]
- name: rude
  criterion: Is it rude?
  scale: yes/no
  weight: -1
"""
VALUES = {"arrived": True, "effort": 4, "rude": False}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rubric.yaml"
    path.write_text(RUBRIC)
    return str(path)


def says(**values):
    """A judge that answers what it is asked for."""

    def answer(question, body):
        names = body["response_format"]["json_schema"]["schema"]["properties"]
        return {name: {**VALUES, "reason": "Because.", **values}[name] for name in names}

    return answer


@pytest.mark.parametrize("requests", ["together", "each"])
async def test_each_item_has_a_component_and_weights_make_the_reward(file, requests):
    with judge_service(says()) as service:
        async with judge_at(service, rubric=file, rubric_requests=requests) as (judge, _):
            score = await judge.score(episode("north"), TASK)
    assert score.reward == pytest.approx((2 * 1 + 1 * 0.75 - 1 * 0) / 3)
    assert score.components == {
        "judge": score.reward,
        "environment": 0.25,
        "judge/arrived": 1.0,
        "judge/effort": 0.75,
        "judge/rude": 0.0,
    }
    asked = [list(body["response_format"]["json_schema"]["schema"]["properties"]) for body in service.bodies]
    alone = [["reason", name] for name in VALUES]
    assert sorted(asked) == sorted([["reason", *VALUES]] if requests == "together" else alone)
    assert any("(Does the agent reach the hill?)" in question for question in service.questions)


@pytest.mark.parametrize(
    ("values", "reward"),
    [
        ({}, 2.75 / 3),
        ({"effort": 5}, 1.0),
        ({"rude": True}, 1.75 / 3),
        ({"arrived": False, "effort": 5}, -1 / 3),
        ({"arrived": False, "effort": 1, "rude": True}, -1 / 3),
    ],
)
async def test_a_gate_that_is_not_passed_gives_the_lowest_reward(file, values, reward):
    with judge_service(says(**values)) as service:
        async with judge_at(service, rubric=file) as (judge, _):
            assert (await judge.score(episode("north"), TASK)).reward == pytest.approx(reward)


@pytest.mark.parametrize("as_text", [False, True])
async def test_a_task_has_items_of_its_own(file, as_text):
    items = [{"name": "polite", "criterion": "Does it greet?", "weight": 3}]
    task = dataclasses.replace(TASK, columns={"rubric": json.dumps(items) if as_text else items})
    with judge_service(says(polite=True)) as service:
        async with judge_at(service, rubric=file, task_rubric="rubric") as (judge, _):
            own = await judge.score(episode("north"), task)
            plain = await judge.score(episode("north"), TASK)
        async with judge_at(service, task_rubric="rubric", reasons=False) as (judge, _):
            alone = await judge.score(episode("north"), task)
            with pytest.raises(UsageError, match="task t-1 does not contain a rubric: got no such column"):
                await judge.score(episode("north"), TASK)
    assert own.reward == pytest.approx((2 + 0.75 + 3) / 6)
    assert plain.reward == pytest.approx(2.75 / 3)
    assert alone.components == {"judge": 1.0, "environment": 0.25, "judge/polite": 1.0}
    assert "reason" not in service.bodies[-1]["response_format"]["json_schema"]["schema"]["properties"]


@pytest.mark.parametrize(
    "column",
    ["no JSON", 3, [{"name": "a"}], [{"name": "arrived", "criterion": "twice?"}], [{"name": "a b", "criterion": "c"}]],
)
async def test_items_of_a_task_that_are_none_are_the_users_to_change(file, column):
    task = dataclasses.replace(TASK, columns={"rubric": column})
    with judge_service(says()) as service:
        async with judge_at(service, rubric=file, task_rubric="rubric") as (judge, _):
            with pytest.raises(UsageError, match="column rubric of task t-1 does not contain a rubric"):
                await judge.score(episode("north"), task)
    assert not service.bodies


@pytest.mark.parametrize(("max_tokens", "longest"), [(512, 400), (100, 200)])
async def test_a_reason_leaves_tokens_for_the_scores(file, max_tokens, longest):
    with judge_service(says()) as service:
        async with judge_at(service, rubric=file, max_tokens=max_tokens) as (judge, _):
            await judge.score(episode("north"), TASK)
    schema = service.bodies[0]["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["reason"] == {"type": "string", "maxLength": longest}
    assert f'"reason": text of at most {longest} characters' in service.questions[0]


async def test_one_item_without_an_answer_fails_the_episode():
    items = [{"name": name, "criterion": f"{name}?"} for name in VALUES]

    def forgets(question, body):
        return {"reason": "r", "rude": "no"} if "rude" in question else says(effort=True)(question, body)

    with judge_service(forgets) as service:
        async with judge_at(service, rubric={"items": items}, rubric_requests="each", attempts=1) as (judge, _):
            with pytest.raises(EngineError, match='"no" is not a valid value for "rude"'):
                await judge.score(episode("north"), TASK)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "needs an item with a weight above 0"),
        ([{"name": "a", "criterion": "c", "weight": -1}], "needs an item with a weight above 0"),
        ([{"name": "a", "criterion": "c"}] * 2, "two items with the same name: a"),
        ([{"name": "a", "criterion": "c", "scale": [5, 5]}], "give the worst and the best score"),
        ([{"name": "a", "criterion": "c", "scale": [1, 2, 3]}], "give the worst and the best score"),
        ([{"name": "a", "criterion": "c", "scale": [0, 5], "required": True}], "answered with yes or no"),
        ([{"name": "a", "criterion": "c", "weight": -1, "required": True}], "state it the other way round"),
        ([{"name": "a", "criterion": "c", "weight": 0}], "has no effect"),
        ([{"name": "a/b", "criterion": "c"}], "String should match"),
        ([{"name": "a", "question": "c"}], "criterion"),
    ],
)
def test_rubrics_that_cannot_work_are_refused(items, message):
    with pytest.raises(ValueError, match=re.compile(message)):
        JudgeConfig(engine=ENGINE, rubric={"items": items})


@pytest.mark.parametrize("text", [None, "items: [", "just words"])
def test_a_file_that_is_no_rubric_is_refused(tmp_path, text):
    path = tmp_path / "rubric.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match="rubric"):
        JudgeConfig(engine=ENGINE, rubric=str(path))


def test_the_example_is_a_rubric():
    example = Path(__file__).parents[2] / "examples" / "rubric.yaml"
    items = JudgeConfig(engine=ENGINE, rubric=str(example)).rubric.items
    assert [(item.name, item.weight, item.scale, item.required) for item in items] == [
        ("correct", 3, None, True),
        ("grounded", 2, [1, 5], False),
        ("short", 1, None, False),
        ("repeats", -1, None, False),
    ]


def test_a_runs_config_holds_the_rubric_itself(file, tmp_path):
    config = JudgeConfig(engine=ENGINE, rubric=file)
    (tmp_path / "rubric.yaml").write_text("- {name: other, criterion: else?}")
    again = JudgeConfig.model_validate(config.model_dump(mode="json"))
    assert [item.name for item in again.rubric.items] == list(VALUES)
