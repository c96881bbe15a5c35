"""Settings without effect are reported: of a replaced environment, engine or model, or of another command."""

import pytest

from agentrl.config import dump_config, load_config
from agentrl.config.overrides import warn_ignored
from agentrl.errors import ConfigError


def test_another_engine_drops_the_settings_of_the_old_one():
    overrides = ["environment=a", "engine.max_num_seqs=3", "engine=scripted", "engine.delay_s=1"]
    assert load_config(None, overrides).engine.type == "scripted"


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ["environment=b"],
            "override 'environment=b' drops the settings of environment household: environment.options={",
        ),
        (["environment.name=b"], "override 'environment.name=b' drops the settings of environment household"),
        (["environment=b", "environment.options={size: 3}"], None),
        (["environment=household/valid_seen"], None),
        (
            ["engine=vllm"],
            "override 'engine=vllm' drops the settings of engine local: engine.max_num_seqs=128, engine.lanes=2; rep",
        ),
        (["engine=local"], None),
        (["agent.loop=tool_calling"], "drops the settings of agent react_text: agent.options={'format': 'plain'"),
        (["agent.loop=react_text"], None),
    ],
)
def test_settings_that_another_environment_or_engine_drops_are_told(overrides, told, caplog):
    load_config("quickstart", overrides)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (told is not None)
    assert told is None or told in messages[0]


def test_defaults_of_a_saved_config_are_not_told_as_dropped(tmp_path, caplog):
    saved = tmp_path / "config.yaml"
    saved.write_text(dump_config(load_config(None, ["environment=a", "environment.workers=2"])))
    assert load_config(saved, ["environment=b", "engine=vllm"]).environment.workers == 4
    assert [record.getMessage() for record in caplog.records] == [
        "override 'environment=b' drops the settings of environment a: environment.workers=2; "
        "repeat them after it if b accepts them"
    ]


def test_the_local_engine_named_again_keeps_its_settings():
    assert load_config(None, ["environment=a", "engine.max_num_seqs=3", "engine=local"]).engine.max_num_seqs == 3


def test_only_the_override_that_names_another_engine_is_told(caplog):
    overrides = ["environment=a", "engine.max_num_seqs=8", "trainer.steps=2", "engine=vllm", "trainer.steps=3"]
    load_config(None, overrides)
    assert [record.getMessage().partition(" drops")[0] for record in caplog.records] == ["override 'engine=vllm'"]


def test_another_model_drops_the_scratch_sizes_and_keeps_the_rest():
    model = load_config("quickstart", ["model.dtype=bfloat16", "model.path=runs/latest"]).model
    assert (model.path, model.scratch, model.dtype) == ("runs/latest", None, "bfloat16")


@pytest.mark.parametrize(
    ("reads", "word", "warning"),
    [
        ("sft", "trainer.learning_rate=1e-4", "only agentrl train reads it: set sft.learning_rate"),
        ("sft", "trainer={steps: 9}", "only agentrl train reads it: set sft.epochs"),
        ("preferences", "trainer.epochs=3", "only agentrl train reads it: set preferences.epochs"),
        ("preferences", "sft.warmup_steps=3", "only agentrl sft reads it: set preferences.warmup_steps"),
        ("trainer", "sft.epochs=3", "only agentrl sft reads it: set trainer.steps"),
        ("trainer", "sft.episodes=3", "only agentrl sft reads it: remove it"),
        ("trainer", "preferences.schedule=constant", "only agentrl dpo or agentrl reward-model reads it: set trainer."),
    ],
)
def test_a_setting_of_another_command_is_told_with_the_one_to_set(reads, word, warning, caplog):
    warn_ignored([word, "trainer.optimizer=muon", "trainer.max_grad_norm=2", "run.seed=1"], reads=reads)
    assert len(caplog.messages) == 1
    assert " is ignored, because " + warning in caplog.messages[0]
    caplog.clear()
    warn_ignored([word], reads=word.partition(".")[0].partition("=")[0])
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("words", "origin"),
    [
        (["trainer.min_lr_ratio=0.5", "trainer.steps=7"], "override 'trainer.min_lr_ratio=0.5': trainer.min_lr_ratio"),
        (["trainer={min_lr_ratio: 0.5}", "trainer.steps=7"], "override 'trainer={min_lr_ratio: 0.5}': trainer.min_lr"),
        (["trainer.max_kl=1", "trainer.epochs=1"], "override 'trainer.max_kl=1': trainer.max_kl is ignored"),
    ],
)
def test_the_override_of_an_ignored_key_is_named_and_not_the_last_one(words, origin):
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["environment=a", *words])
    assert str(caught.value).startswith(origin)
