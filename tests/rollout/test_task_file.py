import json

import pytest

from agentrl.errors import UsageError
from agentrl.message import Message
from agentrl.rollout.task_source import read_tasks, write_tasks
from agentrl.task import Task


def test_json_lines(tmp_path):
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"id": "a", "seed": 3, "ground_truth": 42}\n\n{"prompt": "Go.", "options": {"size": 2}}\n')
    assert list(read_tasks(file, environment="e")) == [
        Task(id="a", environment="e", seed=3, ground_truth=42),
        Task(id="2", environment="e", prompt="Go.", options={"size": 2}),
    ]


def test_a_prompt_may_be_a_list_of_messages(tmp_path):
    asked = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Why?"}]
    for name in ("prompt", "messages"):
        (tmp_path / "t.jsonl").write_text(json.dumps({name: asked}))
        [task] = read_tasks(tmp_path / "t.jsonl", environment="e")
        assert [message.text for message in task.messages] == ["Be short.", "Why?"]
        assert task.prompt == "Be short.\n\nWhy?", "for loops that read the task as text"


def test_written_tasks_are_read_again(tmp_path):
    asked = (Message(role="system", content="Be short."), Message(role="user", content="Why?"))
    tasks = [
        Task(id="a", environment="f", seed=3, options={"size": [2]}, ground_truth=0, type="hard", max_turns=2),
        Task(id="b", environment="f", prompt="Be short.\n\nWhy?", messages=asked, columns={"source": "x"}),
    ]
    write_tasks(tasks, tmp_path / "new" / "t.jsonl")
    assert list(read_tasks(tmp_path / "new" / "t.jsonl", environment="e")) == tasks
    with pytest.raises(UsageError, match="task c cannot be written"):
        write_tasks([Task(id="c", environment="e", options={"at": object()})], tmp_path / "t.jsonl")


def test_parquet(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    table = pa.Table.from_pylist([{"id": "a", "seed": 1, "type": None}, {"id": "b", "seed": 2, "type": "hard"}])
    parquet.write_table(table, tmp_path / "t.parquet")
    assert [(t.id, t.seed, t.type) for t in read_tasks(tmp_path / "t.parquet", environment="e")] == [
        ("a", 1, None),
        ("b", 2, "hard"),
    ]


def test_nulls_of_merged_task_files_are_columns_of_other_rows(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    rows = [
        {"id": None, "seed": None, "options": {"size": 3, "level": None}, "max_turns": None, "columns": {"a": None}},
        {"id": "b", "seed": 0, "options": None, "max_turns": 2, "columns": None},
    ]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    assert list(read_tasks(tmp_path / "t.parquet", environment="e")) == [
        Task(id="1", environment="e", options={"size": 3}, columns={"a": None}),
        Task(id="b", environment="e", max_turns=2),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ('{"messages": []}', "messages of .* line 1 have the wrong type"),
        ('{"messages": [{"role": "boss", "content": "Go."}]}', "line 1: a message has no known role"),
        ("{", "line 1 is not valid JSON"),
        ("3", "line 1 is not an object: got int"),
        ("[1]", "row 1 is not an object: got int"),
        ('{"sed": 3}', "line 1 has unknown columns: got sed, expected id, environment, seed"),
        ('{"wanted": 3}', 'Write values for the environment\'s reset as "options": {"wanted": …}'),
        ('{"id": "a"}\n{"id": "a"}', "two rows with the same id"),
        ('{"id": 1}\n{"id": "1"}', "two rows with the same id"),
        ('{"seed": "3"}', "seed of .* line 1 has the wrong type: got '3', expected a whole number"),
        ('{"max_turns": 0}', "max_turns of .* line 1 is too small: got 0"),
        (
            '{"options": [1]}',
            "options of .* line 1 has the wrong type.*Rename the column if it is not meant as the options",
        ),
        ('{"type": ["a"]}', "type of .* line 1 has the wrong type.*Rename the column if it is not meant as the type"),
        (
            '{"environment": "a"}\n{"environment": "b"}\n{}',
            "several environments: got environment a, b, e.*environments: {a: {name: …, tasks: a.jsonl}",
        ),
        ('{"environment": {"a": 1}}', "environment of .* line 1 has the wrong type"),
        (
            '{"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Go."}]}]}',
            "the prompt of .* line 1 has an image, expected text; .*Reset may return them",
        ),
    ],
)
def test_mistakes_are_named(tmp_path, text, message):
    (tmp_path / "t.jsonl").write_text(text)
    with pytest.raises(UsageError, match=message):
        read_tasks(tmp_path / "t.jsonl", environment="e")


@pytest.mark.parametrize(("name", "message"), [("t.parquet", "cannot be read as Parquet"), ("t.jsonl", "in UTF-8")])
def test_a_file_of_another_kind_is_named(tmp_path, name, message):
    (tmp_path / name).write_bytes(b"\xff\xfe no tasks")
    with pytest.raises(UsageError, match=message):
        read_tasks(tmp_path / name, environment="e")


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("row", "task"),
    [
        ({"type": 3}, {"type": "3"}),
        ({"type": "easy", "id": 7}, {"type": "easy", "id": "7"}),
        ({"type": ["a"], "options": ["x", "y"], "columns": [1], "max_turns": "3"}, {}),
        ({"environment": {"a": 1}, "seed": "s"}, {}),
    ],
)
def test_columns_of_other_data_sets_reach_reset_and_reward_functions_of_a_class_for_trl(tmp_path, row, task, suffix):
    import pyarrow as pa
    from pyarrow import parquet

    path = tmp_path / f"t.{suffix}"
    if suffix == "parquet":
        parquet.write_table(pa.Table.from_pylist([{"prompt": "Go.", **row}]), path)
    else:
        path.write_text(json.dumps({"prompt": "Go.", **row}))
    expected = {"id": "1", "environment": "e", "prompt": "Go.", **task}
    [read] = read_tasks(path, environment="e", reset_columns=True)
    assert read == Task(**expected, options={"prompt": "Go.", **row}, columns=row)


def test_images_that_the_model_does_not_see_are_reported(tmp_path, caplog):
    (tmp_path / "t.jsonl").write_text('{"prompt": "Go.", "images": ["a.png"]}\n{"prompt": "Go.", "images": ["b.png"]}')
    tasks = read_tasks(tmp_path / "t.jsonl", environment="e", reset_columns=True)
    assert [task.options["images"] for task in tasks] == [["a.png"], ["b.png"]]
    [warning] = caplog.messages
    assert warning.endswith("the model does not see column images; reset can return its images")


def test_error_names_the_missing_file(tmp_path):
    with pytest.raises(UsageError, match="cannot read task file"):
        read_tasks(tmp_path / "none.jsonl", environment="e")
