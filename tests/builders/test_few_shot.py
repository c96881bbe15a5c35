"""Few-shot examples come from the training split, in runs and in evaluations."""

import json

import pytest

from agentrl.builders.episodes import _few_shot
from agentrl.config import load_config
from agentrl.env.lookup import resolve_environment


def examples_of(*words):
    config = load_config(None, list(words))
    return _few_shot(config, resolve_environment(config.sole_environment.name))


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_examples_are_of_the_training_split(split):
    found = examples_of(f"environment={{name: guess_number, split: {split}}}", "agent.few_shot_turns=3")
    assert (found.count, found._tasks[0].id, found._tasks[7].id) == (3, "train-0", "train-7")


def test_examples_of_a_task_file_are_its_own(tmp_path):
    file = tmp_path / "tasks.jsonl"
    file.write_text("\n".join(json.dumps({"id": f"own-{number}", "seed": number}) for number in range(3)))
    found = examples_of(f"environment={{name: guess_number, tasks: {file}}}", "agent.few_shot_turns=1")
    assert [task.id for task in found._tasks] == ["own-0", "own-1", "own-2"]


def test_there_are_none_unless_they_are_asked_for():
    assert examples_of("environment=guess_number") is None
