"""Typed verdicts: formats, strict parsing, guided decoding, and the field that is the reward."""

import json
import sys
from types import ModuleType

import pytest
from judge_parts import TASK, episode, judge_at
from pydantic import BaseModel, Field, model_validator
from support.judge_service import judge_service

from agentrl.config.judge import JudgeConfig
from agentrl.errors import ConfigError, EngineError, UsageError
from agentrl.rollout.judges.verdicts import (
    ScoreFormat,
    UnreadableAnswer,
    VerdictField,
    configured_format,
    read_object,
    verdict_weights,
)

ENGINE = {"url": "http://127.0.0.1:1/v1", "model": "m"}
VERDICT = {"reason": "string 200", "score": "number 0..10"}
GOOD = {"reason": "It got there.", "score": 7.5}


class Quality(BaseModel):
    """A verdict of a user's own."""

    correct: bool
    style: int = Field(ge=1, le=5)
    quotes: list[str] = []

    @model_validator(mode="after")
    def _good_style_is_quoted(self):
        if self.style == 5 and not self.quotes:
            raise ValueError("quote what is good")
        return self


@pytest.fixture
def user_module(monkeypatch):
    module = ModuleType("my_verdicts")
    module.Quality, module.number = Quality, 3
    monkeypatch.setitem(sys.modules, "my_verdicts", module)


async def test_a_typed_verdict_is_asked_for_with_its_schema_and_its_field_is_the_reward():
    with judge_service(lambda question, body: GOOD) as service:
        async with judge_at(service, verdict=VERDICT, environment_weight=2.0) as (judge, _):
            score = await judge.score(episode("north"), TASK)
    assert score.reward == pytest.approx(0.75 + 2 * 0.25)
    assert score.components == {"judge": 0.75, "environment": 0.25, "judge/score": 0.75}
    (body,) = service.bodies
    asked = body["response_format"]["json_schema"]
    assert (body["response_format"]["type"], asked["name"], asked["strict"]) == ("json_schema", "answer", True)
    schema = asked["schema"]
    assert list(schema["properties"]) == ["reason", "score"]
    assert schema["properties"]["score"] == {"type": "number", "minimum": 0, "maximum": 10}
    assert (schema["required"], schema["additionalProperties"]) == (["reason", "score"], False)
    assert '- "score": a number from 0 to 10' in service.questions[0]
    assert "Score: N" not in service.questions[0]


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [
        ("Score: 10", "not one JSON object"),
        ('I say {"reason": "r", "score": 10}', "not one JSON object"),
        ('{"reason": "r", "score": 10} {"reason": "r", "score": 1}', "not one JSON object"),
        ('{"reason": "r", "score": 1', "not one JSON object"),
        ('{"reason": "r", "score": 11}', "11 is not a valid value for"),
        ('{"reason": "r", "score": -0.1}', "-0.1 is not a valid value for"),
        *((f'{{"reason": "r", "score": {"9" * digits}}}', "9999 is not a valid value for") for digits in (300, 400)),
        ('{"reason": "r", "score": "10"}', '"10" is not a valid value for'),
        ('{"reason": "r", "score": true}', "true is not a valid value for"),
        ('{"reason": "r", "score": null}', "null is not a valid value for"),
        ('{"reason": "r", "score": NaN}', "NaN, which is not valid JSON"),
        ('{"reason": "r", "score": 1, "score": 10}', "a field twice"),
        ('{"reason": "r"}', "lacks score"),
        ('{"reason": "r", "score": 1, "bonus": 5}', "field 'bonus', which is not allowed"),
        ("[1]", "but not an object"),
        ("[" * 100_000, "nested too deeply"),
        ("", "not one JSON object"),
    ],
)
def test_what_is_not_of_the_form_is_not_read(answer, wrong):
    answer_format = configured_format(JudgeConfig(engine=ENGINE, verdict=VERDICT))
    with pytest.raises(UnreadableAnswer, match=wrong):
        answer_format.read(answer)


def test_a_number_too_large_for_a_float_is_invalid_even_without_bounds():
    field = VerdictField(name="count", kind="number")
    field.check(10**300)
    for value in (10**310, -(10**310)):
        with pytest.raises(UnreadableAnswer, match="is not a valid value for"):
            field.check(value)


@pytest.mark.parametrize(
    "around",
    [
        *("{}", "\n {}\n", "```json\n{}\n```", "```\n{}\n```", "```JSON\n{}```"),
        '<think>\n{{"score": 1}}\n</think>\n\n{}',
        "Well.\n</think>\n\n{}",  # chat templates may begin the thinking
    ],
)
def test_a_fence_and_thinking_may_stand_around_an_object(around):
    assert read_object(around.format(json.dumps(GOOD))) == GOOD


def test_texts_may_have_line_breaks_and_tags_of_thinking():
    assert read_object('{"reason": "a </think>\nb"}') == {"reason": "a </think>\nb"}


def score_format(pattern=None, high=10):
    return ScoreFormat(pattern, -10, high)


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        # inspect_ai#4026, #4283: the same verdict, decorated; a zero-width space before the number
        *((text, 4) for text in ("Score: 4", "score = 4.", "**Score:** 4", "**Score: 4**", "__Score__: __4__")),
        *((text, 4) for text in ("Score: [[4]]", "Score:\u200b4", "Score：4", "Score (0-10): 4", "SCORE: *4*/10")),
        *((text, 4) for text in ("Score: 4 out of 10", "Score: 4/10, since", "Score: 4, since 3 of 5 hold")),
        ("Score: 7.5", 7.5),
        ("Score: -3", -3),
        ("A perfect answer has Score: 10. **Score:** 4", 4),
        ("Score: 4. There is no reason for an underscore: 9, nor for a style-score: 8 or a sub_score: 7", 4),
    ],
)
def test_a_score_is_read_however_it_is_decorated(answer, score):
    assert score_format().read(answer) == {"score": score}


@pytest.mark.parametrize(
    "last",
    [
        *("Score: N/A", "Score: eight", "Score:", "Score: 8,5", "Score: 8e1", "Score: −3", "Score: 8th"),
        # the score of another scale, or a range
        *("Score: 4/5", "**Score: 4**/5", "Score: 4 of 5", "Score: 4%", "Score: 3-4", "Score: 3 to 4"),
    ],
)
def test_an_earlier_score_does_not_stand_for_a_last_one_that_cannot_be_read(last):
    # inspect_ai#4697, #4872: the judge's own words on the way must not become its verdict
    with pytest.raises(UnreadableAnswer):
        score_format().read(f"A perfect answer would get Score: 10.\n{last}")


def test_a_scale_that_ends_at_the_highest_score_is_the_judges():
    assert score_format(high=100).read("Score: 85%") == {"score": 85}
    assert score_format(r"Rating: (\d)", high=5).read("Rating: 4/5") == {"score": 4}


def test_a_score_in_thinking_is_not_the_score():  # PrimeIntellect-ai/verifiers#213
    answer_format = ScoreFormat(r"Score: (\d+)", 0, 10)
    assert answer_format.read("<think>Score: 9?</think>Score: 3")["score"] == 3
    for answer in ("<think>Score: 9? No", "Score: 9?</think>It is good."):
        with pytest.raises(UnreadableAnswer):
            answer_format.read(answer)


async def test_an_unreadable_verdict_is_retried_with_the_reason_and_then_is_an_infrastructure_failure():
    with judge_service(lambda question, body: {"reason": "r", "score": 42}) as service:
        async with judge_at(service, verdict=VERDICT, attempts=2) as (judge, counters):
            with pytest.raises(EngineError, match=r"no score for g/0\.0.*42 is not a valid value for"):
                await judge.score(episode("north"), TASK)
    first, second = service.bodies
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    assert '42 is not a valid value for "score": a number from 0 to 10' in second["messages"][-1]["content"]
    assert (counters.judge_requests, counters.judge_unreadable) == (2, 2)
    assert first["messages"] == second["messages"][:1]


async def test_a_typed_answer_that_a_server_takes_for_thinking_is_read_and_no_other():
    # vllm#19222, vllm#48863, xinference#3673: the JSON of an answer arrives as reasoning_content, without content
    with judge_service(lambda question, body: GOOD, thinks=True) as service:
        async with judge_at(service, verdict=VERDICT) as (judge, _):
            assert (await judge.score(episode("north"), TASK)).reward == 0.75
    for says, settings in (('It is good: {"reason": "r", "score": 9}', {"verdict": VERDICT}), ("Score: 9", {})):
        with judge_service(lambda question, body, says=says: says, thinks=True) as service:
            async with judge_at(service, attempts=2, **settings) as (judge, _):
                with pytest.raises(EngineError, match="gave no score"):
                    await judge.score(episode("north"), TASK)
        assert len(service.bodies) == 2


async def test_a_truncated_answer_is_rejected_even_if_it_looks_complete():
    with judge_service(lambda question, body: 'The agent wrote "Score: 10"', finish="length") as service:
        async with judge_at(service, attempts=1) as (judge, _):
            with pytest.raises(EngineError, match="cut off"):
                await judge.score(episode("Score: 10"), TASK)


async def test_a_rejected_response_format_is_moved_to_the_prompt_with_one_warning(caplog):
    with judge_service(lambda question, body: GOOD, guided=False) as service:
        async with judge_at(service, verdict=VERDICT) as (judge, _):
            for answer in ("north", "south"):
                assert (await judge.score(episode(answer), TASK)).components["judge"] == 0.75
    assert ["response_format" in body for body in service.bodies] == [True, False, False]
    assert [r.message for r in caplog.records if "rejects response_format" in r.message] == [
        "the judge rejects response_format (400, 'response_format is not supported'): from now on, only "
        "the prompt describes the format"
    ]


@pytest.mark.parametrize("guided", ["auto", "always"])
async def test_bounds_that_a_service_rejects_are_left_out_of_the_schema(guided, caplog):
    # laravel/ai#715, the-llm-council#55: Anthropic and OpenAI know only some keywords of JSON schemas
    verdict = {"reason": "string 200", "maximum": "number 0..10"}
    answers = iter([{"reason": "r", "maximum": 11}, {"reason": "r", "maximum": 7.5}, {"reason": "r", "maximum": 2.5}])

    def says(_, body):
        fields = body["response_format"]["json_schema"]["schema"]["properties"]
        if bounds := {"minimum", "maximum", "maxLength"} & {name for field in fields.values() for name in field}:
            return 400, f"For 'number' type, properties {', '.join(bounds)} are not supported"
        return next(answers)

    with judge_service(says) as service:
        async with judge_at(service, verdict=verdict, guided=guided) as (judge, _):
            for answer, reward in (("north", 0.75), ("south", 0.25)):
                assert (await judge.score(episode(answer), TASK)).components["judge"] == reward
    sent = [body["response_format"]["json_schema"]["schema"]["properties"] for body in service.bodies]
    assert len(sent) == 4
    assert sent[1:] == [{"reason": {"type": "string"}, "maximum": {"type": "number"}}] * 3
    assert len([record for record in caplog.records if "only the prompt describes the bounds" in record.message]) == 1


async def test_guided_always_fails_where_there_are_no_schemas_and_never_sends_none():
    with judge_service(lambda question, body: GOOD, guided=False) as service:
        async with judge_at(service, verdict=VERDICT, guided="always") as (judge, _):
            with pytest.raises(EngineError, match="response_format is not supported"):
                await judge.score(episode("north"), TASK)
        async with judge_at(service, verdict=VERDICT, guided="never") as (judge, _):
            await judge.score(episode("north"), TASK)
    assert ["response_format" in body for body in service.bodies] == [True, False]


async def test_a_request_rejected_for_another_reason_does_not_disable_schemas(caplog):
    refusals = iter([400, 400, GOOD])
    with judge_service(lambda question, body: next(refusals)) as service:
        async with judge_at(service, verdict=VERDICT) as (judge, _):
            with pytest.raises(EngineError, match="returned an error"):
                await judge.score(episode("north"), TASK)
            await judge.score(episode("north"), TASK)
    assert ["response_format" in body for body in service.bodies] == [True, False, True]
    assert not [record for record in caplog.records if "response_format" in record.message]


async def test_several_fields_are_weighted_and_penalties_count_below_zero():
    verdict = {"correct": "boolean", "style": "integer 1..5", "rude": "boolean"}
    reward = {"correct": 3, "style": 1, "rude": -2}
    with judge_service(lambda question, body: {"correct": True, "style": 3, "rude": True}) as service:
        async with judge_at(service, verdict=verdict, reward=reward) as (judge, _):
            score = await judge.score(episode("north"), TASK)
    assert score.reward == pytest.approx((3 * 1 + 1 * 0.5 - 2 * 1) / 4)
    assert score.components["judge/style"] == 0.5
    weights = verdict_weights(
        config := JudgeConfig(engine=ENGINE, verdict=verdict, reward=reward), configured_format(config)
    )
    assert weights.lowest == pytest.approx(-0.5)


async def test_a_pydantic_model_is_a_verdict_with_its_validators(user_module):
    answers = iter([{"correct": True, "style": 5}, {"correct": True, "style": 5, "quotes": ["north"]}])
    settings = {"verdict": "my_verdicts:Quality", "reward": {"correct": 1, "style": 1}}
    with judge_service(lambda question, body: next(answers)) as service:
        async with judge_at(service, **settings) as (judge, _):
            assert (await judge.score(episode("north"), TASK)).reward == 1.0
    assert "quote what is good" in service.bodies[1]["messages"][-1]["content"]


async def test_a_json_schema_file_is_a_verdict(tmp_path):
    file = tmp_path / "verdict.json"
    score = {"type": "integer", "minimum": 1, "maximum": 5, "description": "how well it did"}
    verdict = {"type": "string", "enum": ["good", "bad"]}
    schema = {"type": "object", "properties": {"verdict": verdict, "score": score}, "required": ["verdict", "score"]}
    file.write_text(json.dumps(schema))
    config = JudgeConfig(engine=ENGINE, verdict=str(file))
    answer_format = configured_format(config)
    assert answer_format.read('{"verdict": "good", "score": 4}')["score"] == 4
    assert '"score": a whole number from 1 to 5 (how well it did)' in answer_format.instructions
    for wrong in ('{"verdict": "fine", "score": 4}', '{"verdict": "bad", "score": 1.5}'):
        with pytest.raises(UnreadableAnswer):
            answer_format.read(wrong)
    again = JudgeConfig.model_validate(config.model_dump())
    file.unlink()  # what a run's folder holds is enough to go on
    assert configured_format(again).schema == answer_format.schema


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"verdict": {"score": "number"}}, "does not describe field score.*number 0..10"),
        ({"verdict": {"score": "number 5..5"}}, "has no range"),
        ({"verdict": {"the score": "boolean"}}, "does not describe field the score"),
        ({"verdict": {}}, "has no fields"),
        ({"verdict": {"reason": "string"}}, "got 0 fields that are numbers"),
        ({"verdict": {"a": "boolean", "b": "boolean"}}, "got 2 fields.*: a, b, expected agent.judge.reward=NAME"),
        (
            {"verdict": VERDICT, "reward": "scores"},
            "names 'scores': got a name that is not.*Did you mean 'score'",
        ),
        ({"verdict": VERDICT, "reward": "reason"}, "a field without bounds"),
        ({"verdict": VERDICT, "reward": {"score": 0}}, "invalid weight of score"),
        ({"verdict": VERDICT, "reward": {"score": -1}}, "no weight above 0"),
        ({"verdict": "my_verdicts:number"}, "which is int"),
        ({"verdict": "score"}, "which does not name a class"),
        ({"verdict": {"type": "object", "properties": {"a": {"type": "array"}}, "required": ["a"]}}, "not supported"),
        ({"verdict": {"type": "object", "properties": {"a": {"type": "boolean"}}}}, "not required"),
    ],
)
def test_verdicts_that_cannot_work_are_refused(settings, message, user_module):
    config = JudgeConfig(engine=ENGINE, **settings)
    with pytest.raises(ConfigError, match=message):
        verdict_weights(config, configured_format(config))


def test_a_class_that_is_not_there_is_named(user_module):
    with pytest.raises(UsageError, match=r"my_verdicts has no 'Qualty'. Did you mean 'Quality'"):
        configured_format(JudgeConfig(engine=ENGINE, verdict="my_verdicts:Qualty"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"verdict": VERDICT, "low": 1.0}, r"agent\.judge\.low is ignored with agent\.judge\.verdict"),
        ({"reward": "score"}, r"agent\.judge\.reward is ignored by a judge without typed answers"),
        ({"verdict": VERDICT, "compare": "pairwise"}, "verdict and compare: set only one"),
        ({"guided": "never"}, "guided is ignored"),
        ({"rubric_requests": "each"}, "rubric_requests is ignored"),
        ({"verdict": "missing.json"}, "cannot read missing.json"),
        ({"compare": {"how": "listwise", "opponents": 2}}, "opponents is ignored with listwise"),
        ({"compare": {"how": "pairwise", "rounds": 2}}, "rounds is ignored with pairwise"),
        ({"compare": {"how": "pairwise", "opponents": 3}}, "expected an even number"),
        ({"budget": {"max_cost": 5}}, "needs prompt_price or answer_price"),
        ({"budget": {"when_spent": "environment"}}, "ignored without a limit"),
        ({"budget": {"when_spent": "environment", "max_requests": 5}}, "every episode would have a reward of 0"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        JudgeConfig(engine=ENGINE, **settings)
