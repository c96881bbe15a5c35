"""Renamed keys are refused with their current name; configs of earlier runs keep their meaning."""

from pathlib import Path

import pytest

from agentrl.config import config_from, load_config
from agentrl.config.keys import RENAMED_KEYS, all_keys
from agentrl.config.reference import config_reference
from agentrl.errors import ConfigError

FORMER_YAML = """
environment: a
agent:
  shots: 2
  max_invalid: null
model: {lora: {targets: [q_proj]}}
trainer:
  mixture: {balance: 0.5}
"""


def test_a_file_with_renamed_keys_is_refused_with_all_lines_and_current_names(tmp_path):
    file = tmp_path / "former.yaml"
    file.write_text(FORMER_YAML)
    for sources in ([file], ["quickstart", file]):
        with pytest.raises(ConfigError, match="4 problems") as error:
            load_config(sources)
        message = str(error.value)
        assert "renamed key: agent.shots is now agent.few_shot_turns" in message
        assert "renamed key: agent.max_invalid is now agent.max_parse_failures" in message
        assert "renamed key: model.lora.targets is now model.lora.target_modules" in message
        assert "trainer.mixture is now trainer.moe; trainer.mixture.balance is now trainer.moe.aux_loss_coef" in message
    with pytest.raises(ConfigError, match=r"former.yaml line 4: renamed key: agent.shots"):
        load_config(file)


@pytest.mark.parametrize("former", RENAMED_KEYS)
def test_a_renamed_key_is_refused_in_an_override_and_in_python(former):
    match = rf"^renamed key: .*{RENAMED_KEYS[former]}"
    section = {}
    place = section
    for name in former.split("."):
        place[name] = place = {}
    with pytest.raises(ConfigError, match=match):
        config_from({"environment": "a", **section})
    with pytest.raises(ConfigError, match=match.replace("^", rf"override '{former}=2': ")):
        load_config(None, ["environment=a", "model.lora={rank: 2}", "engine=vllm", f"{former}=2"])


def test_renamed_keys_are_listed():
    known = {".".join(key) for key in all_keys()}
    for former, current in RENAMED_KEYS.items():
        assert former not in known
        assert any(key == current or key.startswith(f"{current}.") for key in known)
        assert former not in config_reference()
        line = f"| `{former}` | `{current}` |"
        assert line in (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()


def test_a_saved_aggregation_stays():
    """What a run saved names its aggregation, so that a newer default of its loss does not reach it."""
    saved = config_from({"environment": "a", "algorithm": {"loss": "gspo", "aggregation": "token-mean"}})
    again = config_from(saved.model_dump(mode="json"))
    assert again == saved
    assert again.algorithm.aggregation == "token-mean"
    assert (
        config_from({"environment": "a", "algorithm": {"loss": "gspo"}}).algorithm.aggregation == "seq-mean-token-mean"
    )


def test_the_reference_shows_where_a_name_belongs() -> None:
    assert {"`agent.roles.NAME.tools`", "`adapters.NAME.path`", "`schedules.KEY.points`"} < set(
        config_reference().split()
    )
