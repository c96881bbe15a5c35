"""Rows with images: columns and message parts as in data sets for verl, EasyR1 and TRL."""

from __future__ import annotations

import base64
import io
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet
from support.vision import FAMILIES, save_vision_model

from agentrl.config import load_config
from agentrl.env.lookup import resolve_environment
from agentrl.errors import UsageError
from agentrl.message import Content, ImagePart, TextPart, user
from agentrl.observe.metrics import read_metrics
from agentrl.observe.trajectory_store import read_trajectories
from agentrl.runs.rl import train
from agentrl.runs.start import start_run
from agentrl.task import Task, TaskSource


def encoded(colour: str, kind: str = "PNG", side: int = 60) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (side, side), colour).save(file, format=kind)
    return file.getvalue()


RED, BLUE = encoded("red"), encoded("blue", "JPEG")
URL = f"data:image/png;base64,{base64.b64encode(RED).decode()}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two images."""
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "red.png").write_bytes(RED)
    (tmp_path / "blue.jpg").write_bytes(BLUE)
    return tmp_path


def tasks_of(folder: Path, *rows: dict[str, Any]) -> TaskSource:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return resolve_environment("prompts").tasks("train", files={"train": str(file)})


def table_of(folder: Path, *rows: dict[str, Any]) -> TaskSource:
    file = folder / "rows.parquet"
    parquet.write_table(pa.Table.from_pylist(list(rows)), file)
    return resolve_environment("prompts").tasks("train", files={"train": str(file)})


def asked(task: Task) -> Content:
    (message,) = task.messages
    return message.content


@pytest.mark.parametrize(
    "image",
    [
        "figures/red.png",
        {"path": "figures/red.png", "bytes": None},
        {"image": "figures/red.png"},
        URL,
        {"type": "image_url", "image_url": {"url": URL}},
    ],
)
def test_an_image_is_read_from_each_form(folder: Path, image: object) -> None:
    (task,) = tasks_of(folder, {"prompt": "Name <image>, please.", "images": [image], "id": 1})
    first, shown, last = asked(task)
    assert (first, last) == (TextPart(text="Name "), TextPart(text=", please."))
    assert shown == ImagePart(data=RED)
    assert task.columns == {"id": 1}
    assert task.prompt == "Name , please."


def test_rows_of_geometry3k_are_read_as_verl_and_as_easyr1_have_them(folder: Path) -> None:
    struct = {"bytes": BLUE, "path": None}
    verl = {
        "data_source": "hiyouga/geometry3k",
        "prompt": [{"role": "user", "content": "<image>Find x."}],
        "images": [struct],
        "reward_model": {"style": "rule", "ground_truth": "3"},
        "extra_info": {"index": 0, "question": "<image>Find x."},
    }
    for row, columns in (
        (verl, {"data_source", "reward_model", "extra_info"}),
        ({"images": [struct], "problem": "<image>Find x.", "answer": "3"}, {"problem", "answer"}),
    ):
        (task,) = table_of(folder, row)
        assert asked(task) == (ImagePart(data=BLUE, media_type="image/jpeg"), TextPart(text="Find x."))
        assert task.ground_truth == "3"
        assert task.columns.keys() == columns


def test_images_take_the_places_of_placeholders_in_order(folder: Path) -> None:
    red, blue = ImagePart(data=RED), ImagePart(data=BLUE, media_type="image/jpeg")
    column = ["figures/red.png", "blue.jpg"]
    parts = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}, {"type": "text", "text": "?"}]
    inline = [{"type": "image", "image": "blue.jpg"}, {"type": "text", "text": "a <image>?"}]
    history = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "<image>"},
        {"role": "assistant", "content": "Red."},
        {"role": "user", "content": "<image>?"},
    ]
    mixed, alone, many, without, single = tasks_of(
        folder,
        {"prompt": [{"role": "user", "content": parts}], "images": column},
        {"prompt": [{"role": "user", "content": inline}]},
        {"prompt": history, "images": column},
        {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "Same?"}], "images": column},
        {"prompt": "What?", "image": "blue.jpg"},
    )
    assert asked(mixed) == (red, TextPart(text="and"), blue, TextPart(text="?"))
    assert asked(alone) == (blue, TextPart(text="a <image>?"))  # no column: the text is a text
    assert [message.content for message in many.messages] == ["Be brief.", (red,), "Red.", (blue, TextPart(text="?"))]
    assert without.messages[1] == user((red, blue, TextPart(text="Same?")))  # as in TRL
    assert asked(single) == (blue, TextPart(text="What?"))


def test_rows_of_a_merged_data_set_may_lack_images(folder: Path) -> None:
    image = {"bytes": RED, "path": None}
    first, second = table_of(
        folder, {"prompt": "Say <image>.", "images": None}, {"prompt": "What is <image>?", "images": [image, None]}
    )
    assert (first.prompt, first.messages) == ("Say <image>.", ())
    assert asked(second)[1] == ImagePart(data=RED)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"images": ["none.png"]}, r"image 1 of .*line 1 cannot be read: got .*none.png: No such file.*relative paths"),
        ({"images": ["figures"]}, r"image 1 of .*line 1 cannot be read: got .*figures: Is a directory"),
        ({"images": ["a\0b"]}, r"image 1 of .*line 1 cannot be read: got .*null"),
        ({"images": ["https://example.com/a.png"]}, "line 1 is on the web.*Download the images"),
        ({"images": ["rows.jsonl"]}, "image 1 of .*is not a valid image: got .*they begin with b'"),
        ({"images": ["program.eps"]}, "image 1 of .*is not a valid image: got .*they begin with b'%!PS"),
        ({"images": ["cut.png"]}, "image 1 of .*is not a valid image"),
        ({"images": ["blue.jpg", "cut.jpg"]}, "image 2 of .*is not a valid image: got .*Truncated"),
        ({"images": [base64.b64encode(RED * 99).decode()]}, "base64 needs data:image/png;base64, before it"),
        ({"images": ["data:image/png;base64,***"]}, "the data: URL of image 1 .* is not valid base64"),
        ({"images": ["data:text/plain,x"]}, "is not a data: URL of an image"),
        ({"images": [{"bytes": "iVBO"}]}, "image 1 of .* has bytes that are text"),
        ({"images": [{"path": "blue.jpg", "max_pixels": 9}]}, "settings that are not supported: got max_pixels"),
        ({"images": [7]}, "image 1 of .* cannot be read: got 7"),
        ({"images": ["blue.jpg"], "image": "blue.jpg"}, "images in two columns"),
        ({"prompt": "<image> <image>", "images": ["blue.jpg"]}, "got 2 <image> for 1 images"),
        ({"prompt": "<image>", "images": ["blue.jpg"] * 2}, "got 1 <image> for 2 images"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "got 1 <image> for 0 images"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "video"}]}], "images": ["blue.jpg"]},
            "neither text nor an image",
        ),
    ],
)
def test_rows_with_unusable_images_are_rejected(folder: Path, row: dict[str, Any], words: str) -> None:
    Image.new("RGB", (4, 4)).save(folder / "program.eps")
    (folder / "cut.png").write_bytes(RED[:-30])
    (folder / "cut.jpg").write_bytes(BLUE[:-200])
    with pytest.raises(UsageError, match=words):
        tasks_of(folder, {"prompt": "What?", **row})


def test_base64_may_have_line_breaks(folder: Path) -> None:
    (task,) = tasks_of(
        folder, {"prompt": "What?", "images": [f"data:image/png;base64,{base64.encodebytes(RED).decode()}"]}
    )
    assert task.messages[0].content[0].data == RED


def test_a_file_that_vanished_is_named_when_its_task_is_drawn(folder: Path) -> None:
    tasks = tasks_of(folder, {"prompt": "a", "images": ["blue.jpg"]}, {"prompt": "b"})
    (folder / "blue.jpg").unlink()
    assert tasks[1].prompt == "b"
    with pytest.raises(UsageError, match=r"image 1 of .*line 1 cannot be read"):
        tasks[0]


def test_the_environment_shows_images_if_a_row_of_its_files_has_any(folder: Path) -> None:
    spec, file = resolve_environment("prompts"), folder / "rows.jsonl"
    rows = [{"prompt": "a"}, {"prompt": "b", "images": ["blue.jpg"]}]
    for count, expected in ((1, False), (2, True)):
        tasks_of(folder, *rows[:count])
        os.utime(file, ns=(count, count))
        assert spec.shows_images({"files": {"train": str(file)}}) is expected
    assert not spec.shows_images({"files": {"train": str(folder / "none.jsonl")}})
    assert not spec.shows_images({})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_vision_model(FAMILIES[0], folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["single_turn", "react_text"])
def test_a_step_on_rows_with_images(folder: Path, model: Path, loop: str) -> None:
    both = ["figures/red.png", "blue.jpg"]
    tasks_of(folder, *({"prompt": f"{n}?", "images": both[: 1 + n % 2], "ground_truth": "1"} for n in range(4)))
    settings = [
        *("environment.name=prompts", f"environment.options={{files: {{train: {folder / 'rows.jsonl'}}}}}"),
        *(f"agent.loop={loop}", "agent.max_turns=1", "agent.max_answer_tokens=6", "agent.max_tokens=600"),
        *("agent.reward=[solved]", "algorithm.group_size=2", "trainer.steps=1"),
        *("trainer.tasks_per_step=2", f"model.path={model}", f"run.directory={folder / 'runs'}"),
        *("engine.max_num_seqs=4", "engine.cache_tokens=4096", "engine.max_context=600"),
    ]
    run = start_run(load_config(None, settings), kind="test")
    train(run)
    (line,) = read_metrics(run.folder.metrics_file)
    assert line["mismatch/prob_abs_mean"] < 1e-4
    counts = sorted(len(t.trajectory.sequences[0].images) for t in read_trajectories(run.folder.trajectories))
    assert set(counts) <= {1, 2}
    assert len(counts) == 4
