"""A form of schedule in the place of another one: the error names the right place."""

import pytest

from agentrl.builders.checks import check_plan
from agentrl.config import load_config
from agentrl.config.schedule_forms import looks_like_schedule, to_yaml
from agentrl.errors import ConfigError

RATE = "schedules={trainer.learning_rate: "


@pytest.mark.parametrize(
    ("override", "place"),
    [
        ("trainer.learning_rate={0: 1e-3, 100: 1e-4}", f"belong under schedules: {RATE}{{0: 0.001, 100: 0.0001}}}}"),
        ("trainer.learning_rate=[1e-3, 1e-4]", f"{RATE}{{points: {{0: A, 100: B}}, shape: linear}}}}"),
        ("trainer.learning_rate={from: 1e-3, to: 1e-4}", f"{RATE}{{points: {{0: A, 100: B}}, shape: linear}}}}"),
        ("trainer.learning_rate=cosine", "A word is the course of it: trainer.schedule=cosine"),
        ("trainer.learning_rate=linear", f"a line is {RATE}{{points"),
        ("agent.max_turns={0: 3, 10: 5}", "schedules={agent.max_turns: {0: 3, 10: 5}}"),
        ("algorithm.kl_coef={target: 0.2, horizon: 9}", "schedules={algorithm.kl_coef: {target: 0.2, horizon: 9}}"),
        (
            "trainer.schedule=linear",
            f"expected 'constant' or 'cosine'. One word is the course of the learning rate "
            f"over the whole run, trainer.schedule=cosine; a line is {RATE}",
        ),
        ("trainer.schedule={0: 1e-3, 100: 1e-4}", f"values at steps belong under schedules: {RATE}{{0: 0.001, 100"),
        ("schedules=cosine", "One word is the course of the learning rate: trainer.schedule=cosine"),
        ("schedules=[1]", "expected a mapping. Give points"),
        ("schedules={trainer.learning_rate: cosine}", "trainer.schedule=cosine; or give points"),
        ("schedules={trainer.learning_rate: linear}", "which is not a schedule: give points"),
        ("schedules={trainer.schedule: cosine}", "set it on its own: trainer.schedule=cosine"),
        ("schedules={trainer.schedule: {0: cosine}}", "set it on its own: trainer.schedule=cosine"),
        ("schedules={sampling.top_p: {kind: linear, from: 1}}", "has unknown keys, kind, from: give points"),
        ("schedules={sampling: {top_p: {kind: linear, from: 1}}}", "schedule of sampling.top_p has unknown keys, kind"),
        (
            "schedules={sampling.top_p: {5: {agent.max_turns: 3}}}",
            "under the step: schedules={5: {agent.max_turns: 3}}",
        ),
        ("schedules={0: 1.4, 500: 1.45}", "expected the keys that change at step 0 (a stage)"),
        ("schedules={5: {sampling.top_p: {0: 0.9}}}", "outside of stages: schedules={sampling.top_p: {0: 0.9}}"),
        ("schedules={5: {sampling.top_p: {factor: 0.9}}}", "stages: schedules={sampling.top_p: {factor: 0.9}}"),
        (
            "schedules={5: {algorithm.loss_options.clip_high: {factor: 0.9}}}",
            "factor is part of a schedule: schedules={algorithm.loss_options.clip_high: {factor: ...}}",
        ),
        (
            "algorithm.loss_options.clip_high={0: 0.2, 9: 0.1}",
            "belong under schedules: schedules={algorithm.loss_options.clip_high: {0: 0.2, 9: 0.1}}",
        ),
        ("algorithm.shaping={length: {factor: {0: 0.1}}}", "schedules={algorithm.shaping.length.factor: {0: 0.1}}"),
        ("curriculum={0: easy}", "curriculum.horizon={turns: [10, 20], at_steps: [0, 100]}, or schedules={"),
        ("curriculum.horizon={0: 3, 10: 5}", "curriculum.horizon={turns: [10, 20], at_steps: [0, 100]}"),
        ("schedules={curriculum.horizon.turns: {0: 3}}", "by curriculum.horizon.at_steps, or by schedules={"),
    ],
)
def test_a_schedule_in_another_one_s_place_is_an_error_that_names_the_place(override, place):
    with pytest.raises(ConfigError) as caught:
        check_plan(load_config(None, ["environment=guess_number", "trainer.steps=600", override]))
    assert place in str(caught.value)
    assert "problems in the config" not in str(caught.value), "one mistake is one problem"


def test_a_key_that_exists_but_cannot_change_has_no_other_name():
    with pytest.raises(ConfigError, match=r"trainer\.steps cannot change during training") as caught:
        check_plan(load_config(None, ["environment=guess_number", "schedules={trainer.steps: {0: 1}}"]))
    assert "mean" not in str(caught.value)


@pytest.mark.parametrize(
    "override",
    [
        "algorithm.shaping={length: {factor: 0.1}}",
        "schedules={environment.options: {0: {high: 5}}}",
        "schedules={0: {environment: {options: {min: 1, max: 3}}}}",
    ],
)
def test_options_named_like_a_part_of_a_schedule_are_accepted(override):
    config = load_config(None, ["environment=guess_number", override])
    assert config.schedules or config.algorithm.shaping


def test_values_are_written_as_in_a_config():
    assert to_yaml({0: [1, "a"], "shape": None}) == "{0: [1, a], shape: null}"
    assert not looks_like_schedule({"rank": 8})
