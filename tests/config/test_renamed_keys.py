"""Configs that older versions wrote: renamed keys, dropped keys that held their default, and defaults that changed."""

from pathlib import Path

import pytest

from agentrl.config import config_from, dump_config, load_config
from agentrl.config.load import all_keys, warn_once
from agentrl.config.overrides import RENAMED_KEYS, new_path
from agentrl.config.reference import config_reference
from agentrl.errors import ConfigError


def test_the_saved_config_of_an_older_run_can_be_read_where_it_held_defaults():
    old = {"environment": "a", "trainer": {"logprob_chunk": 2048}, "sft": {"min_lr_ratio": 0.1}}
    assert config_from(old) == config_from({"environment": "a"})
    with pytest.raises(ConfigError, match=r"unknown key trainer\.logprob_chunk"):
        config_from({**old, "trainer": {"logprob_chunk": 64}})


OLD_YAML = """
environment: a
agent: {shots: 2, max_refused: 3, max_invalid: 4}
engine: {slots: 9}
model: {lora: {targets: [q_proj], whole: [norm]}}
trainer:
  mixture: {balance: 0.5}
"""


def test_old_names_of_keys_are_read_with_one_warning_that_names_both(tmp_path, caplog):
    warn_once.cache_clear()
    (tmp_path / "old.yaml").write_text(OLD_YAML)
    config = load_config(tmp_path / "old.yaml", ["trainer.mixture.replay=true", "trainer.numerics={most_skipped: 3}"])
    load_config(tmp_path / "old.yaml", ["trainer.mixture.replay=true", "trainer.numerics={most_skipped: 3}"])
    assert (config.model.lora.target_modules, config.model.lora.modules_to_save) == (["q_proj"], ["norm"])
    assert config.trainer.moe.model_dump() == {"aux_loss_coef": 0.5, "router_replay": True}
    assert config.trainer.numerics.max_skipped == 3
    agent = config.agent
    assert (agent.few_shot_turns, agent.max_rejected_actions, agent.max_parse_failures) == (2, 3, 4)
    assert config.engine.max_num_seqs == 9
    (warning,) = caplog.messages
    for old, new in RENAMED_KEYS.items():
        assert (f"{old} is now {new}" in warning) == (old != "engine.max_running")
    caplog.clear()
    assert load_config(None, ["environment=a", "engine=vllm", "engine.max_running=7"]).engine.max_num_seqs == 7
    assert caplog.messages[0].startswith("renamed config keys: engine.max_running is now engine.max_num_seqs;")
    assert not any(old in dump_config(config) for old in ("mixture", "most_skipped", "targets", "whole"))


def test_old_names_mix_with_new_ones_from_elsewhere(tmp_path, caplog):
    (tmp_path / "old.yaml").write_text(OLD_YAML)
    (tmp_path / "older.yaml").write_text("trainer: {mixture: null}")
    config = load_config([tmp_path / "old.yaml"], ["trainer.moe.aux_loss_coef=0.1"])
    assert config.trainer.moe.aux_loss_coef == 0.1
    assert load_config([tmp_path / "old.yaml", tmp_path / "older.yaml"]).trainer.moe is None
    (tmp_path / "old.yaml").write_text(OLD_YAML.replace("0.5", "x"))
    with pytest.raises(ConfigError, match=r"old.yaml line 7: trainer.moe.aux_loss_coef: got 'x'"):
        load_config(tmp_path / "old.yaml")


def test_an_old_default_is_renamed_silently_and_both_names_are_refused(caplog):
    assert config_from({"environment": "a", "trainer": {"mixture": None}}) == config_from({"environment": "a"})
    assert not caplog.messages
    with pytest.raises(ConfigError, match=r"trainer.mixture is the old name of trainer.moe, and both are set"):
        config_from({"environment": "a", "trainer": {"mixture": {}, "moe": {}}})


def test_renamed_keys_exist_in_the_same_section():
    known = {".".join(key) for key in all_keys()}
    for old, new in RENAMED_KEYS.items():
        assert old not in known
        assert any(key == new or key.startswith(f"{new}.") for key in known)
        assert new_path(tuple(old.split(".")[:-1])) == tuple(new.split(".")[:-1])
        assert old not in config_reference()
        assert f"| `{old}` | `{new}` |" in (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()


@pytest.mark.parametrize(
    ("old", "estimator"),
    [
        ({"kl_estimator": "k3", "kl_coef": 0.1}, "k3"),
        ({"kl_estimator": "k3", "kl_coef": 0.1, "reference": None}, "k3"),
        ({"kl_coef": 0.0, "reference": {"kl_estimator": "k3", "refresh_every": 5}}, "k3"),
        ({"kl_coef": 0.1, "reference": {}}, "k3+"),
    ],
)
def test_the_estimator_of_an_older_run_stays(old, estimator):
    config = config_from({"environment": "a", "algorithm": old})
    assert config.algorithm.reference.kl_estimator == estimator


def test_the_aggregation_of_an_older_run_stays():
    """What a run saved names its aggregation, so that a newer default of its loss does not reach it."""
    saved = config_from({"environment": "a", "algorithm": {"loss": "gspo", "aggregation": "token-mean"}})
    again = config_from(saved.model_dump(mode="json"))
    assert again == saved
    assert again.algorithm.aggregation == "token-mean"
    assert (
        config_from({"environment": "a", "algorithm": {"loss": "gspo"}}).algorithm.aggregation == "seq-mean-token-mean"
    )
