"""Reports of runs and evaluations, exported episodes and model cards, from the command line."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from agentrl.message.data_file import read_rows
from agentrl.training.chat_file import read_chats

Cli = Callable[..., Any]


def test_the_report_of_a_run(agentrl: Cli, trained_run: Path, workplace: Path) -> None:
    ended = agentrl("report", str(trained_run), "--output", "out", "--price-per-hour", "3600")
    assert ended.code == 0, ended.err
    text = (workplace / "out" / "report.md").read_text()
    for title in ("Runs", "Cost", "Settings that differ from their defaults", "Machine and versions", "Curves"):
        assert f"## {title}" in text
    assert "| environment | guess_number/train |" in text
    assert "| trainer.steps | 2 |" in text
    assert "| sampled tokens |" in text
    assert "| machine | " in text
    assert "(3600 per hour)" in text
    assert "CPU time of the trainer's process" in text
    assert f"run.name={trained_run.name}-again" in text
    assert "finished after step 2 of 2" in text
    page = (workplace / "out" / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    assert "<h2>Cost</h2>" in page
    assert (workplace / "out" / "curves.png").is_file()


def test_metrics_of_other_programs_do_not_stop_a_report(agentrl: Cli, trained_run: Path, workplace: Path) -> None:
    copy = Path(shutil.copytree(trained_run, workplace / "foreign", symlinks=True))
    rows = [
        {"step": 1, "reward/mean": "high", "success/mean": -3, "episodes": "4", "time/step_s": [1]},
        {"step": 2, "reward/mean": 0.5, "success/mean": 7, "episodes": 4},
        {"step": 3, "eval/success": 0.5, "eval/at_step": None, "eval/success_low": None, "success/mean": {"a": 1}},
    ]
    (copy / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ended = agentrl("report", "foreign")
    assert ended.code == 0, ended.err
    text = (copy / "report.md").read_text()
    assert "| reward, first and last quarter | 0.500, 0.500 |" in text
    assert "| training success, last quarter | unknown |" in text


def test_runs_of_two_seeds_share_a_curve(agentrl: Cli, trained_run: Path, workplace: Path) -> None:
    for seed in (0, 1):
        copy = Path(shutil.copytree(trained_run, workplace / f"seed-{seed}", symlinks=True))
        config = (copy / "config.yaml").read_text()
        (copy / "config.yaml").write_text(config.replace("seed: 0", f"seed: {seed}"))
    refused = agentrl("report", "seed-0", "seed-1")
    assert refused.code == 2
    assert "needs --output" in refused.err
    ended = agentrl("report", "seed-0", "seed-1", "--output", "both")
    assert ended.code == 0, ended.err
    text = (workplace / "both" / "report.md").read_text()
    assert "# Runs seed-0, seed-1" in text
    assert "|  | seed-0 | seed-1 |" in text
    assert "| run.seed | default | 1 |" in text


def test_evaluations_are_compared_task_by_task(agentrl: Cli, workplace: Path) -> None:
    words = ("eval", "--env", "guess_number", "--tasks", "8", "--policy")
    for policy in ("random", "expert"):
        assert agentrl(*words, policy).code == 0
    folders = sorted(str(folder) for folder in Path("runs/evaluations").iterdir())
    ended = agentrl("report", *reversed(folders), "--output", "side-by-side")
    assert ended.code == 0, ended.err
    text = (workplace / "side-by-side" / "report.md").read_text()
    assert "## Paired comparison on common tasks" in text
    (row,) = [line for line in text.splitlines() if " against " in line]
    assert "| 8 | " in row
    unfinished = Path(folders[0]) / "evaluation.json"
    unfinished.unlink()
    refused = agentrl("report", *folders, "--output", "again")
    assert refused.code == 2
    assert "has no result that can be read" in refused.err


def test_a_folder_that_is_no_run_has_no_report(agentrl: Cli, workplace: Path) -> None:
    refused = agentrl("report", "away")
    assert refused.code == 2
    assert "is not a run or evaluation" in refused.err


def test_episodes_as_chats(agentrl: Cli, trained_run: Path, workplace: Path) -> None:
    ended = agentrl("export-episodes", str(trained_run), "--to", "chat", "--output", "chat.jsonl", "--step", "2")
    assert ended.code == 0, ended.err
    rows = [json.loads(line) for line in (workplace / "chat.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rows} == {2}
    assert {message["role"] for row in rows for message in row["messages"]} >= {"user", "assistant"}
    assert all(isinstance(row["reward"], float) and row["environment"] == "guess_number" for row in rows)
    one = agentrl("export-episodes", str(trained_run), "--to", "chat", "--task", rows[0]["task_id"], "--limit", "1")
    assert one.code == 0, one.err
    assert len((trained_run / "exports" / "chat.jsonl").read_text().splitlines()) == 1
    nothing = agentrl("export-episodes", str(trained_run), "--to", "chat", "--min-reward", "99")
    assert nothing.code == 2
    assert "no episode" in nothing.err


def test_episodes_as_a_data_set(agentrl: Cli, trained_run: Path, workplace: Path) -> None:
    ended = agentrl("export-episodes", str(trained_run), "--to", "hf-dataset", "--output", "set")
    assert ended.code == 0, ended.err
    (file,) = (workplace / "set" / "data").iterdir()
    rows = [row.values for row in read_rows(file)]
    assert set(rows[0]) >= {"messages", "reward", "success", "step", "task_id"}
    assert "path: data/train-*.parquet" in (workplace / "set" / "README.md").read_text()
    assert len(read_chats(file)) == len(rows)
    again = agentrl("export-episodes", str(trained_run), "--to", "hf-dataset", "--output", "set")
    assert again.code == 2
    assert "already exists" in again.err


def test_a_full_disk_leaves_nothing_of_a_data_set(agentrl: Cli, trained_run: Path, workplace: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))  # the same kind of error as of a full disk
    try:
        ended = agentrl("export-episodes", str(trained_run), "--to", "hf-dataset", "--output", "set")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert ended.code == 2
    assert ended.err.startswith("error: cannot write set: got no space left")
    assert not list(workplace.iterdir())
    assert agentrl("export-episodes", str(trained_run), "--to", "hf-dataset", "--output", "set").code == 0


def test_settings_of_a_warm_start_are_listed_only_for_one(agentrl: Cli, trained_run: Path, workplace: Path) -> None:
    config = (trained_run / "config.yaml").read_text()
    shutil.copytree(trained_run, workplace / "mine")
    (workplace / "mine" / "config.yaml").write_text(config.replace("stop_at: null", "stop_at: 0.45"))
    assert agentrl("report", "mine").code == 0
    assert "sft.stop_at" not in (workplace / "mine" / "report.md").read_text()
    (workplace / "mine" / "metrics.jsonl").write_text('{"step": 1, "sft/loss": 1.0}\n')
    assert agentrl("report", "mine").code == 0
    assert "| sft.stop_at | 0.45 |" in (workplace / "mine" / "report.md").read_text()


def test_cards_and_reports_do_not_show_secrets(agentrl: Cli, trained_run: Path, workplace: Path) -> None:
    run = workplace / "runs" / "secretive"
    shutil.copytree(trained_run, run)
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["environment"]["options"] = {"api_key": "in-the-config", "stop_token": "<end>"}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    start = json.loads((run / "start.json").read_text())
    start["command"] = "agentrl train my.yaml 'environment.options={api_key: in-the-command, stop_token: <end>}'"
    (run / "start.json").write_text(json.dumps(start))
    assert agentrl("export", str(run), "my-model").code == 0
    assert agentrl("report", str(run), "--output", "my-report").code == 0
    texts = [workplace / "my-model" / "README.md", *(workplace / "my-report").glob("report.*")]
    for text in (path.read_text() for path in texts):
        assert "in-the-" not in text
        assert "stop_token" in text
        assert "(hidden)" in text
    assert "in-the-config" in (run / "config.yaml").read_text(), "the run can be resumed"


def test_an_exported_model_has_a_card(agentrl: Cli, trained_run: Path, workplace: Path) -> None:
    ended = agentrl("export", str(trained_run), "my-model")
    assert ended.code == 0, ended.err
    card = (workplace / "my-model" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\ntags: [agentrl, reinforcement-learning]\n---\n# Model of ")
    assert "from random weights: finished after step 2 of 2." in card
    assert "## Settings that differ from their defaults" in card
    assert "## How to repeat it" in card
