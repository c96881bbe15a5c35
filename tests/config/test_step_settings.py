"""Schedules, with their stages: the values of each step by hand, refusals, and the plan."""

import math

import pytest
import yaml

from agentrl.builders.checks import check_plan
from agentrl.config import config_from, dump_config, load_config
from agentrl.config.schedule import ScheduleConfig
from agentrl.config.step_settings import Settings, at_largest, environment_stages, plan_rows, stage_starts
from agentrl.errors import ConfigError

BASE = ["environment=guess_number", "trainer.steps=600"]


def config_of(*overrides):
    return load_config(None, [*BASE, *overrides])


@pytest.mark.parametrize(
    ("form", "own", "values"),
    [
        ({0: 1.4, 500: 1.45}, 1.0, {0: 1.4, 499: 1.4, 500: 1.45, 9000: 1.45}),
        ({500: 1.45}, 1.0, {0: 1.0, 499: 1.0, 500: 1.45}),
        (
            {"points": {0: 1.0, 100: 3.0, 200: 0.0}, "shape": "linear"},
            9.0,
            {0: 1.0, 50: 2.0, 100: 3.0, 150: 1.5, 300: 0},
        ),
        ({"points": {100: 0.0}, "shape": "linear"}, 1.0, {0: 1.0, 25: 0.75, 100: 0.0}),
        (
            {"points": {0: 1.0, 100: 0.0}, "shape": "cosine"},
            1.0,
            {0: 1.0, 50: 0.5, 25: (1 + math.cos(math.pi / 4)) / 2},
        ),
        ({"factor": 0.985}, 0.02, {0: 0.02, 1: 0.0197, 200: 0.02 * 0.985**200}),
        ({"factor": 2, "max": 5.0}, 1.0, {0: 1.0, 2: 4.0, 3: 5.0, 100: 5.0}),
    ],
)
def test_values_of_steps_by_hand(form, own, values):
    schedule = ScheduleConfig.model_validate(form)
    for step, value in values.items():
        assert schedule.at(step, own) == pytest.approx(value), step


def test_interpolated_values_of_integer_keys_are_rounded():
    settings = Settings(config_of("schedules={agent.max_turns: {points: {0: 5, 10: 10}, shape: linear}}"))
    found = []
    for step in range(12):
        settings.advance(step)
        found.append(settings.config.agent.max_turns)
    assert found == [5, 6, 6, 6, 7, 8, 8, 8, 9, 10, 10, 10]


def test_skywork_s_entropy_controller_by_hand():
    """Below the target the coefficient rises by a step, else it falls; at or above it, the loss has none."""
    form = "{target: 0.2, step: 1e-4, min: 0, max: 3e-4, only_below: true}"
    settings = Settings(config_of(f"schedules={{algorithm.entropy_coef: {form}}}"))
    used = []
    for step, entropy in enumerate([0.1, 0.15, 0.19, 0.1, 0.2, 0.3, 0.1], 1):
        settings.observe({"train/entropy": entropy})
        settings.advance(step)
        used.append(settings.config.algorithm.entropy_coef)
    assert used == pytest.approx([1e-4, 2e-4, 3e-4, 3e-4, 0, 0, 2e-4])


def test_a_step_without_the_metric_changes_nothing_and_the_state_is_exact():
    words = ["algorithm.kl_coef=0.1", "schedules={algorithm.kl_coef: {target: 0.01, horizon: 100}}"]
    settings, again = Settings(config_of(*words)), Settings(config_of(*words))
    settings.observe({"train/entropy": 1.0})
    assert settings.state_dict() == {"algorithm.kl_coef": [0.1, 0.1]}
    settings.observe({"train/kl_reference": 0.05, "trajectories/trained": 10})
    settings.observe({"train/kl_reference": 0.009, "trajectories/trained": 10})
    again.load_state_dict(settings.state_dict())
    for one in (settings, again):
        one.advance(2)
    assert again.config.algorithm.kl_coef == settings.config.algorithm.kl_coef == 0.1 * 1.02 * (1 + (0.9 - 1) * 0.1)


def test_keys_stand_flat_or_in_sections_and_survive_a_dump():
    flat = config_of("schedules={sampling.temperature: {0: 1.4}, 5: {agent.max_turns: 3}}")
    nested = config_of("schedules={5: {agent: {max_turns: 3}}, sampling: {temperature: {0: 1.4}}}")
    assert flat == nested == config_from(yaml.safe_load(dump_config(flat)))


def test_stages_change_an_environment_and_keep_earlier_changes():
    config = config_of(
        "schedules={0: {sampling.temperature: 1.4}, "
        "100: {environment: {options: {high: 50}}, agent.max_tokens: 20000}, "
        "200: {environment.split: valid, sampling.temperature: 1.5}, 300: {environment.split: valid}}"
    )
    assert stage_starts(config) == {"": [100, 200]}
    first, second = environment_stages(config)
    assert (first.label, second.label) == ("~1", "~2")
    assert (first.config.environment.options, first.config.environment.split) == ({"high": 50}, "train")
    assert (second.config.environment.options, second.config.environment.split) == ({"high": 50}, "valid")
    settings = Settings(config)
    settings.advance(200)
    assert settings.metrics() == {
        "settings/sampling.temperature": 1.5,
        "settings/agent.max_tokens": 20000,
        "settings/environment": 2,
    }
    assert at_largest(config).agent.max_tokens == 20000


def test_budgets_of_one_of_several_environments_follow_the_run_unless_it_has_its_own():
    mixed = "environments={a: {name: guess_number}, b: {name: frozen_lake, agent: {max_turns: 7}}}"
    config = load_config(None, [mixed, "trainer.steps=9", "schedules={3: {agent.max_turns: 4}}"])
    settings = Settings(config)
    settings.advance(3)
    assert (settings.agent("a").max_turns, settings.agent("b").max_turns) == (4, 7)


def test_the_plan_is_printed():
    config = config_of(
        "schedules={sampling.temperature: {0: 1.4, 500: 1.45}, 100: {agent.max_tokens: 24576}, "
        "algorithm.entropy_coef: {target: 0.2, step: 1e-4, max: 0.005}}",
    )
    assert plan_rows(config) == [
        ("sampling.temperature", "0: 1.4, 500: 1.45", "schedules"),
        ("algorithm.entropy_coef", "0, then train/entropy to 0.2 (+-0.0001 a step, max 0.005)", "schedules"),
        ("agent.max_tokens", "0: 16384, 100: 24576", "schedules"),
    ]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["schedules={sampling.temprature: {0: 1}}"], "mean 'sampling.temperature'?"),
        (
            ["schedules={algorithm.loss_options.clip_hihg: {0: 0.2}}"],
            "mean 'algorithm.loss_options.clip_high'?",
        ),
        (["schedules={algorithm.group_size: {0: 4}}"], "algorithm.group_size cannot change during training"),
        (["schedules={algorithm.shaping.overlong.buffer: {0: 4}}"], "cannot change during training"),
        (["schedules={5: {environment.name: household}}"], "environment.name cannot change"),
        (["schedules={sampling.temperature: {0: warm}}"], "is not a number: got 'warm'"),
        (["schedules={sampling.temperature: {0: true}}"], "is not a number: got True"),
        (["schedules={sampling.top_p: {0: 0.9, 10: 1.5}}"], "sampling.top_p is invalid at step 10: got 1.5"),
        (["schedules={agent.max_answer_tokens: {10: 99999}}"], "an answer could never fit"),
        (
            ["schedules={agent.max_turns: {2: 9999999999}}"],
            "schedules, at step 2: agent.max_turns: got 9,999,999,999,",
        ),
        (
            ["schedules={sampling.temperature: 3}"],
            "schedules.sampling.temperature is 3, which is not a schedule: give poi",
        ),
        (
            ["schedules={sampling.temperature: {start: 3}}"],
            "sampling.temperature has unknown keys, start",
        ),
        (["schedules={algorithm.kl_coef: {target: 1, stepp: 2}}"], "mean schedules.algorithm.kl_coef.step?"),
        (
            ["schedules={algorithm.loss_options.clip_high: {0: 0.2, 9: -1}}"],
            "at step 9 of the schedules: a clip is neg",
        ),
        (["schedules={sampling.temperature: {0: 1, 9: 0}}"], "at step 9 of the schedules"),
        (["schedules={algorithm.entropy_coef: {600: 0.1}}"], "changes after the end of the run"),
        (["schedules={algorithm.entropy_coef: {target: 0.2, step: 1e-4, max: .inf}}"], "finite number"),
        (["schedules={algorithm.kl_coef: {target: 0.2, step: 1, min: -1}}"], "algorithm.kl_coef is invalid"),
        (["schedules={agent.max_turns: {target: 3, step: 1}}"], "has a target without a metric"),
        (["schedules={algorithm.kl_coef: {target: 3, step: 1, metric: train/klold}}"], "Did you mean 'train/kl_old'?"),
        (["schedules={trainer.learning_rate: {factor: 9}}"], "trainer.learning_rate is invalid at step 599: got inf"),
        (["schedules={algorithm.norm_length: {5: 100}}"], "has no value at step 0"),
        (["schedules={algorithm.kl_coef: {5: 0.1}}"], "the run starts without a reference policy"),
        (["schedules={sampling.top_k: {0: 0}, 5: {sampling.top_k: 0}}"], "in a stage and on its own"),
        (["schedules={trainer.learning_rate: {0: 1e-5}}", "trainer.schedule=cosine"], "both change the learning rate"),
        (["schedules={sampling.temperature: {0: 1}}", "rollout.max_staleness=1"], "only in synchronous training"),
        (["schedules={sampling.temperature: {5: 1, 2: 1}}"], "expected increasing steps from 0"),
        (["schedules={sampling.temperature: {factor: 2, target: 1}}"], "has factor and target"),
        (
            ["schedules={sampling.temperature: {factor: 2, shape: linear}}"],
            "shape of a schedule is ignored with factor",
        ),
        (["schedules={algorithm.kl_coef: {target: 0.1}}"], "by step or by horizon"),
        (["schedules={algorithm.entropy_coef: {factor: 0.9}}"], "changes nothing: got algorithm.entropy_coef 0"),
        (
            [
                "algorithm.shaping={kl: {coef: 1, target: 1, horizon: 9}}",
                "schedules={algorithm.shaping.kl.coef: {5: 2}}",
            ],
            "is adapted by algorithm.shaping.kl.target already",
        ),
    ],
)
def test_plans_that_cannot_work_are_refused(overrides, message):
    with pytest.raises(ConfigError) as caught:
        check_plan(config_of(*overrides))
    assert message in str(caught.value)


def test_a_target_ignores_metrics_that_are_not_finite_and_a_factor_keeps_integers():
    words = (
        "schedules={algorithm.entropy_coef: {target: 0.2, step: 0.1, max: 1}, agent.max_turns: {factor: 1.1, max: 20}}"
    )
    settings = Settings(config_of(words, "agent.max_turns=10"))
    settings.observe({"train/entropy": math.nan})
    settings.advance(1)
    assert settings.config.algorithm.entropy_coef == 0.0
    assert (settings.config.agent.max_turns, type(settings.config.agent.max_turns)) == (11, int)
    settings.observe({"train/entropy": 0.1})
    settings.advance(2)
    assert settings.config.algorithm.entropy_coef == 0.1
