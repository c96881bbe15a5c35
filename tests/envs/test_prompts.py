"""Prompts of files: data sets as TRL and verl have them, scored by reward functions."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

import agentrl as package
from agentrl.cli import main
from agentrl.env.lookup import resolve_environment
from agentrl.errors import UsageError
from agentrl.evaluation.settings import evaluation_config
from agentrl.message import system, user
from agentrl.observe.metrics import read_metrics
from agentrl.task import TaskSource, tasks_digest

SMALL = (
    "trainer.steps=1",
    "trainer.tasks_per_step=2",
    "algorithm.group_size=2",
    "agent.max_answer_tokens=4",
    "model.scratch.hidden_size=32",
    "model.scratch.layers=1",
)
ROWS = [
    {"prompt": "2 + 2?", "ground_truth": "4"},
    {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3 + 4?"}], "solution": "7"},
    {"prompt": [{"role": "user", "content": "1 + 4?"}], "reward_model": {"ground_truth": "5"}, "id": 7, "type": "sum"},
]
FUNCTIONS = """
def length(trajectory, task):
    return {scale} * len(trajectory.completions[0])

def of_trl(completions, level, **kwargs):
    return [level[0]]
"""


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def written(folder: Path, *rows: object, name: str = "prompts.jsonl") -> str:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / name)


def tasks_of(file: str, split: str = "train") -> TaskSource:
    return resolve_environment("prompts").tasks(split, files={split: file})


def agentrl(*words: str) -> int | str | None:
    with pytest.raises(SystemExit) as end:
        main(list(words))
    return end.value.code


def test_rows_become_tasks_and_their_other_columns_are_kept(workplace: Path) -> None:
    first, second, third = list(tasks_of(written(workplace, *ROWS)))
    assert (first.prompt, first.ground_truth, first.id) == ("2 + 2?", "4", "train-1")
    assert (second.prompt, second.ground_truth) == ("Be brief.\n\n3 + 4?", None)
    assert (first.messages, second.messages) == ((), (system("Be brief."), user("3 + 4?")))
    assert second.columns == {"solution": "7"}
    assert (third.prompt, third.ground_truth, third.id, third.type) == ("1 + 4?", "5", "7", "sum")
    assert (third.columns["id"], third.columns["type"]) == (7, "sum")


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"title": "?"}], "line 1 has no prompt: got the columns title"),
        ([{"question": " "}], "line 1 has no prompt"),
        ([{"prompt": " "}], "line 1 has no prompt"),
        ([{"prompt": 3}], "line 1 has no prompt: got prompt: 3"),
        ([{"prompt": "a"}, {"prompt": []}], r"line 2 has no prompt: got prompt: \[\]"),
        (
            [{"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}],
            "cannot be answered: got messages of user, a",
        ),
        ([{"prompt": [{"role": "user", "content": None}]}], "cannot be answered: got an empty last message"),
        ([{"prompt": "a", "id": 1}, {"prompt": "b", "id": "1"}], "two rows with the same id"),
        ([], "is empty"),
        (["a"], "line 1 is not an object: got str"),
    ],
)
def test_a_file_without_prompts_is_rejected_with_its_row(workplace: Path, rows: list[object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        tasks_of(written(workplace, *rows))


def test_a_prompt_of_json_text_is_a_conversation_only_if_it_holds_messages(workplace: Path) -> None:
    # maxtext#3559: messages that were written as JSON text for Parquet
    texts = [json.dumps(ROWS[1]["prompt"]), '[{"role": "a rook"}]', "[1, 2] is a list.", '[{"role"']
    found = tasks_of(written(workplace, *({"prompt": text} for text in texts)))
    assert found[0].messages == (system("Be brief."), user("3 + 4?"))
    assert [(task.messages, task.prompt) for task in list(found)[1:]] == [((), text) for text in texts[1:]]


def test_messages_of_a_csv_file_are_a_conversation_or_an_error(workplace: Path) -> None:
    rows = [{"content": "Be brief.", "role": "system"}, {"content": "3 + 4?", "role": "user"}]
    (task,) = tasks_of(written(workplace, {"prompt": str(rows)}))
    assert task.messages == (system("Be brief."), user("3 + 4?"))
    joined = "\n ".join(map(str, rows))
    for text in (f"[{joined}]", f"array([{rows[0]},\n {rows[1]}], dtype=object)"):
        with pytest.raises(UsageError, match=r"line 1 has messages as text that is neither JSON nor Python.*Parquet"):
            tasks_of(written(workplace, {"prompt": text}))


def test_nulls_of_merged_data_sets_are_columns_of_other_rows(workplace: Path) -> None:
    rows = [
        {"prompt": "a", "ground_truth": "1", "id": None},
        {"prompt": "b", "ground_truth": None, "id": None, "type": None, "reward_model": {"ground_truth": "4"}},
        {
            "prompt": "c",
            "ground_truth": 0,
            "images": None,
            "image": "",
            "reward_model": {"style": "rule", "ground_truth": None},
        },
        {"prompt": "d", "ground_truth": "", "id": 0, "type": 0, "images": [None], "reward_model": None},
        {"prompt": [{"role": "user", "content": "e", "name": None, "tool_calls": None}], "ground_truth": False},
    ]
    table = workplace / "rows.parquet"
    texts = [json.loads(json.dumps(row)) for row in rows[:2]]
    parquet.write_table(pa.Table.from_pylist([{**texts[1], **texts[0]}, texts[1]]), table)
    found = tasks_of(written(workplace, *rows))
    assert [(t.id, t.ground_truth, t.type) for t in found] == [
        ("train-1", "1", None),
        ("train-2", "4", None),
        ("train-3", 0, None),
        ("0", "", "0"),
        ("train-5", False, None),
    ]
    assert [(t.id, t.ground_truth) for t in tasks_of(str(table))] == [("train-1", "1"), ("train-2", "4")]


def test_columns_of_verl_and_verifiers_are_read(workplace: Path) -> None:
    rows = [
        {"prompt": "a", "reward_model": json.dumps({"style": "rule", "ground_truth": "72"})},
        {"prompt": "b", "reward_model": json.dumps({"ground_truth": ["7", "8"]}), "ground_truth": None},
        *({"prompt": "c", "reward_model": text} for text in ("rule", "[1]", "{", "[" * 100_000)),
        {"question": "What is 2 + 2?", "answer": "4", "prompt": None},
        {"question": [{"role": "user", "content": "And 3?"}], "answer": "5"},
        {"question": "not this one", "prompt": "d"},
    ]
    found = list(tasks_of(written(workplace, *rows)))
    assert [task.ground_truth for task in found] == ["72", ["7", "8"], *[None] * 7]
    assert [task.prompt for task in found[6:]] == ["What is 2 + 2?", "And 3?", "d"]
    assert found[6].columns == {"question": "What is 2 + 2?", "answer": "4"}
    assert found[7].messages == (user("And 3?"),)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "a", "videos": ["x.mp4"]}, "line 1 has a column videos"),
        ({"prompt": "a", "multi_modal_data": {"image": ["x.png"]}}, "line 1 has a column multi_modal_data"),
        ({"prompt": [{"role": "user", "content": [{"type": "video"}]}]}, "line 1: a message is not text"),
        ({"prompt": [{"role": "boss", "content": "x"}]}, "line 1: a message has no known role"),
        ({"prompt": [*ROWS[1]["prompt"], {"role": "system", "content": "Again."}]}, "messages of system, user, system"),
        ({"prompt": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"},
                     {"role": "user", "content": "c"}]}, "messages of user, system, user"),
        ({"prompt": ["a"]}, "line 1 has no prompt"),
    ],
)  # fmt: skip
def test_prompts_that_would_lose_a_part_are_rejected(workplace: Path, row: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        tasks_of(written(workplace, row))


def test_a_function_for_trl_gets_the_text_of_a_plain_prompt(workplace: Path) -> None:
    lengths: list[int] = []

    def reward_len(completions: list[str], **kwargs: object) -> list[float]:
        lengths.extend(map(len, completions))
        assert kwargs["prompts"] == ["Summarize: the cat sat on the mat."]
        return [-abs(20.0 - len(completion)) for completion in completions]

    file = written(workplace, {"prompt": "Summarize: the cat sat on the mat."})
    result = package.evaluate(prompts=file, policy="random", reward=reward_len, samples=3)
    assert len(lengths) == 3
    assert min(lengths) > 1
    assert result.reward is not None
    assert result.reward.mean == pytest.approx(sum(-abs(20 - length) for length in lengths) / 3)


@pytest.mark.parametrize("command", ["train", "eval"])
def test_columns_that_a_function_needs_are_checked_before_there_is_a_folder(
    workplace: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    (workplace / "needy_rewards.py").write_text("def f(completions, solution):\n    return [1.0]\n")
    rows = [{"prompt": "a", "solution": "1"}, {"prompt": "b", "answer": "2"}]
    file = written(workplace, *rows)
    words = (
        ["--tasks", file, "--model", "scratch", *SMALL]
        if command == "train"
        else ["--prompts", file, "--policy", "random"]
    )
    assert agentrl(command, *words, "--reward", "needy_rewards:f") == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "needs columns that task" in told
    assert "got the columns answer, expected solution" in told
    assert not (workplace / "runs").exists()


def test_the_split_of_evaluations_is_checked_for_columns_too(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (workplace / "needy_rewards.py").write_text("def f(completions, solution):\n    return [1.0]\n")
    train = written(workplace, {"prompt": "a", "solution": "1"})
    valid = written(workplace, {"prompt": "b"}, name="valid.jsonl")
    options = f"environment.options={{files: {{train: {train}, valid: {valid}}}}}"
    words = ["--env", "prompts", "--model", "scratch", "--reward", "needy_rewards:f", options, "evaluation.every=1"]
    assert agentrl("train", *words, "evaluation.tasks=1", *SMALL) == 2
    assert "task valid-1 does not have" in " ".join(capsys.readouterr().err.split())
    assert not (workplace / "runs").exists()


def test_missing_split_file_error_has_an_example(workplace: Path) -> None:
    spec = resolve_environment("prompts")
    with pytest.raises(UsageError, match=r"the prompts of split train are not set.*--tasks prompts.jsonl"):
        spec.tasks("train")
    with pytest.raises(UsageError, match=r"split valid has no file of prompts.*agentrl eval --prompts FILE"):
        spec.tasks("valid", files={"train": written(workplace, *ROWS)})


@pytest.mark.slow
def test_a_data_set_and_a_function_are_enough_to_train_and_to_evaluate(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(workplace, *({"prompt": f"{i} + 1?", "level": i / 10} for i in range(4)))
    (workplace / "own_rewards.py").write_text(FUNCTIONS.format(scale=1))
    rewards = ["--reward", "own_rewards:length", "--reward", "own_rewards:of_trl=10"]
    assert agentrl("train", "--tasks", file, *rewards, "--model", "scratch", *SMALL) == 0
    (metrics,) = list(read_metrics(workplace / "runs" / "latest" / "metrics.jsonl"))
    length, trl = (metrics[f"reward/component/{name}"] for name in ("length", "of_trl"))
    assert metrics["reward/mean"] == pytest.approx(length + 10 * trl)
    assert agentrl("eval", "--prompts", file, "--model", "runs/latest") == 0
    assert "mean reward" in capsys.readouterr().out


def test_an_evaluation_after_a_change_of_the_function_is_another_one(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(workplace, *ROWS)
    words = ["eval", "--prompts", file, "--policy", "random", "--reward", "changing_rewards:length"]
    for scale in (1, 1, 2):
        monkeypatch.delitem(__import__("sys").modules, "changing_rewards", raising=False)
        (workplace / "changing_rewards.py").write_text(FUNCTIONS.format(scale=scale))
        assert agentrl(*words) == 0
    assert len(list((workplace / "runs" / "evaluations").iterdir())) == 2


def test_a_data_set_without_a_reward_function_is_rejected_before_there_is_a_folder(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(workplace, *ROWS)
    for words in ([], ["--reward", "no_such_module:f"], ["--reward", "agentrl.message:parse_int"], ["--reward", "a=x"]):
        assert agentrl("train", "--tasks", file, "--model", "scratch", *words) == 2
    assert not (workplace / "runs").exists()
    told = capsys.readouterr().err
    assert "environment prompts does not give rewards" in told
    assert "expected def reward(trajectory, task) -> float" in told


def test_tasks_of_a_named_environment_are_a_task_file(workplace: Path) -> None:
    assert agentrl("train", "--env", "guess_number", "--tasks", "none.jsonl", *SMALL) == 2
    with pytest.raises(UsageError, match="two sources of tasks"):
        evaluation_config(env="guess_number", prompts="a.jsonl", model="m")


def test_a_user_who_knows_the_prompt_shows_it_in_a_conversation(workplace: Path) -> None:
    spec = resolve_environment("prompts")
    options = {"files": {"train": written(workplace, *ROWS)}, "user": "role", "user_turns": 2}
    task = spec.tasks("train", **options)[0]
    assert (task.prompt, task.messages, task.ground_truth) == (None, (), "4")
    assert spec.roles_of(**options) == ("user",)
    env = spec.make(**options)
    _, info = env.reset(options=dict(task.options))
    assert (info["player"], info["players"]) == ("user", ["agent", "user"])
    assert "2 + 2?" in info["instructions"]["user"]
    assert env.step("A sum, please. #STOP#")[:3] == ("A sum, please.", 0.0, False)
    assert env.step("Which one? #STOP#")[:3] == ("Which one? ", 0.0, False)
    assert env.step("")[:3] == ("(says nothing)", 0.0, False)
    assert env.step("4")[2] is True
    env.reset(options=dict(task.options))
    env.step("2 + 2?")
    env.step("4")
    assert env.step("Thanks #STOP#")[:3] == ("Thanks", 0.0, True)


@pytest.mark.parametrize("options", [{"user": "me"}, {"user_turns": 2}, {"user": "role", "user_turns": 0}])
def test_options_of_the_user_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="user"):
        resolve_environment("prompts").make(**options)


def test_a_changed_row_changes_the_digest_of_a_file(workplace: Path) -> None:
    digests = []
    for prompt in ("a", "b", "a"):
        file = written(workplace, {"prompt": prompt, "solution": 1}, {"prompt": "c", "image": picture(workplace)})
        digests.append(tasks_digest(tasks_of(file)))
    assert digests[0] == digests[2] != digests[1]


def picture(folder: Path) -> str:
    Image.new("RGB", (2, 2)).save(folder / "picture.png")
    return "picture.png"


def leaves(trajectory: Any, task: Any) -> float:
    os.chdir(tempfile.gettempdir())
    return float(bool(task.messages))


def test_a_reward_function_may_change_the_working_folder(workplace: Path) -> None:
    """Paths of the run and of images must not depend on it: functions that run programs change it for a moment."""
    rows = [{"id": name, "prompt": "What is this?", "image": picture(workplace)} for name in "abcd"]
    written(workplace, *rows)
    result = package.evaluate(
        prompts="prompts.jsonl", policy="random", reward=leaves, overrides={"rollout.max_concurrent": 1}
    )
    assert result.reward is not None
    assert result.reward.mean == 1.0
    assert list(workplace.glob("runs/evaluations/*/episodes.jsonl"))


def test_a_dictionary_without_a_score_is_explained(workplace: Path) -> None:
    def compute_score(solution_str: str) -> dict[str, float]:
        return {"reward": 1.0}

    written(workplace, {"prompt": "a"})
    result = package.evaluate(prompts="prompts.jsonl", policy="random", reward=compute_score)
    error = result.episodes[0].trajectory.error
    assert error is not None
    assert "it returned {'reward': 1.0}, expected a number, or a dictionary with a score" in error
