"""`size=small` applies the section of a recipe that makes it small."""

import pytest

from agentrl.config import load_config
from agentrl.errors import ConfigError

RECIPE = """
environment: guess_number/train
agent: {max_turns: 5}
trainer: {steps: 1000, tasks_per_step: 512}
small:
  agent: {max_turns: 2}
  trainer: {steps: 2}
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def numbers(config):
    return config.agent.max_turns, config.trainer.steps, config.trainer.tasks_per_step


def test_the_section_small_is_left_out_unless_it_is_chosen(recipe):
    assert numbers(load_config(recipe)) == numbers(load_config(recipe, ["size=recipe"])) == (5, 1000, 512)
    assert numbers(load_config(recipe, ["size=small"])) == (2, 2, 512)
    assert numbers(load_config(recipe, ["size=small", "size=recipe"])) == (5, 1000, 512)


def test_overrides_and_not_other_files_go_on_top_of_the_small_size(recipe, tmp_path):
    other = tmp_path / "other.yaml"
    other.write_text("trainer: {steps: 7, tasks_per_step: 8}\n")
    assert numbers(load_config([recipe, other], ["trainer.tasks_per_step=4", "size=small"])) == (2, 2, 4)


def test_a_wrong_key_of_the_small_size_is_named_with_its_line(recipe):
    recipe.write_text(RECIPE.replace("{steps: 2}", "{stepz: 2}"))
    load_config(recipe)
    with pytest.raises(ConfigError, match=r"recipe\.yaml line 7: unknown key trainer\.stepz"):
        load_config(recipe, ["size=small"])


def test_a_size_that_does_not_exist_is_an_error(recipe):
    with pytest.raises(ConfigError, match="no such size, expected size=small or size=recipe"):
        load_config(recipe, ["size=tiny"])
    with pytest.raises(ConfigError, match=r"quickstart\.yaml has no small size"):
        load_config("quickstart", ["size=small"])
    recipe.write_text("environment: guess_number\nsmall: 3\n")
    with pytest.raises(ConfigError, match="small is not a section"):
        load_config(recipe)
