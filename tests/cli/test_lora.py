"""A run with adapters on the command line: training, resuming, evaluation, export, and training on top of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from agentrl.cli import main
from agentrl.runs.start import resume_run

Cli = Callable[..., Any]
START = ("--env", "guess_number", "model.lora={rank: 4}", "algorithm.kl_coef=0.1", "trainer.learning_rate=1e-2",
         "algorithm.entropy_coef=0.1")  # fmt: skip
"""An entropy bonus trains even where all episodes fail."""


def words(path: Path) -> list[str]:
    return [str(file.name) for file in sorted(path.iterdir())]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, small: tuple[str, ...]) -> Path:
    """An untrained model, from a run that learns at rate 0."""
    runs = tmp_path_factory.mktemp("base") / "runs"
    with pytest.raises(SystemExit) as end:
        main(["train", "--env", "guess_number", "--model", "scratch", *small, f"run.directory={runs}",
              "trainer.steps=1", "trainer.learning_rate=0"])  # fmt: skip
    assert not end.value.code
    return (runs / "latest").resolve()


def test_resuming_and_exporting_a_run_warn_of_another_base(
    agentrl: Cli, base: Path, workplace: Path, small: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    model = workplace / "base"
    shutil.copytree(next((base / "checkpoints").glob("step-*")) / "model", model)
    scratch = tuple(word for word in small if not word.startswith("model.scratch"))
    ended = agentrl("train", *START, "--model", str(model), *scratch, "trainer.steps=1")
    assert ended.code == 0, ended.err
    (model / "tokenizer_config.json").touch()
    run = (workplace / "runs" / "latest").resolve()
    resume_run(run, ["trainer.steps=2"])
    assert "have changed" not in caplog.text
    path = model / "model.safetensors"
    save_file({name: tensor + 0.5 for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    warning = f"the files of {model} have changed since the run was started"
    resume_run(run, ["trainer.steps=2"])
    assert warning in caplog.text
    for options in ((), ("--adapter",)):
        caplog.clear()
        assert agentrl("export", str(run), f"exported{len(options)}", *options).code == 0
        assert warning in caplog.text


@pytest.mark.slow
def test_a_run_with_adapters(agentrl: Cli, base: Path, workplace: Path, small: tuple[str, ...]) -> None:
    model = ("--model", str(base))
    scratch = tuple(word for word in small if not word.startswith("model.scratch"))
    ended = agentrl(
        "train", *START, *model, *scratch, "rollout.max_staleness=1", "trainer.steps=2", "checkpoint.every=1"
    )
    assert ended.code == 0, ended.err
    run = (workplace / "runs" / "latest").resolve()
    saved = run / "checkpoints" / "step-000002" / "model"
    assert {"adapter_config.json", "adapter_model.safetensors", "config.json", "tokenizer.json"} <= set(words(saved))
    assert "model.safetensors" not in words(saved)

    again = agentrl("train", "--resume", str(run), "trainer.steps=3")
    assert again.code == 0, again.err
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert steps[-1]["train/kl_reference"] > 0

    evaluated = agentrl("eval", "--model", str(run), "--tasks", "2")
    assert evaluated.code == 0, evaluated.err

    assert agentrl("export", str(run), "whole").code == 0
    assert agentrl("export", str(run), "parts", "--shard-size", "20KB", "--dtype", "bfloat16").code == 0
    assert "model.safetensors.index.json" in words(workplace / "parts")
    assert agentrl("export", str(run), "adapter", "--adapter").code == 0
    whole = load_file(workplace / "whole" / "model.safetensors")
    start = load_file(base / "checkpoints" / "step-000001" / "model" / "model.safetensors")
    assert whole.keys() == start.keys()
    changed = {name for name in whole if not whole[name].equal(start[name])}
    assert changed
    assert all(name.endswith("_proj.weight") for name in changed)
    assert "adapter_model.safetensors" in words(workplace / "adapter")

    ended = agentrl("train", *START, "--model", "adapter", *scratch, "trainer.steps=1", "run.name=onwards")
    assert ended.code == 0, ended.err
    merged = load_file(workplace / "runs" / "onwards" / "model" / "model.safetensors")
    assert all(merged[name].equal(whole[name]) for name in whole)


def test_what_has_no_adapter_exports_none(agentrl: Cli, base: Path, workplace: Path) -> None:
    ended = agentrl("export", str(base), "adapter", "--adapter")
    assert ended.code == 2
    assert "has no adapter" in ended.err
    assert list(workplace.iterdir()) == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.lora={dropout: 0.1}", "works with agentrl sft only"),
        ("model.lora={target_modules: [nonsense]}", "matches no layer"),
        ("model.lora={rnk: 4}", "rank"),
        ("model.lora={quantize: nf4}", "needs a GPU"),
    ],
)
def test_what_cannot_be_adapted(agentrl: Cli, base: Path, workplace: Path, override: str, message: str) -> None:
    ended = agentrl("train", "--env", "guess_number", "--model", str(base), "agent.loop=react_text", override)
    assert ended.code == 2
    assert message in ended.err
