"""Supervised fine-tuning from the command line."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.waiting import wait_until

from agentrl.observe.metrics import read_metrics

Cli = Callable[..., Any]


def test_a_dry_run_is_about_the_warm_start(agentrl: Cli, workplace: Path) -> None:
    ended = agentrl("sft", "quickstart", "sft={episodes: 30, epochs: 2}", "agent.max_tokens=1000", "--dry-run")
    assert ended.code == 0, ended.err
    _, _, arithmetic = ended.out.partition("quantity ")
    assert re.search(r"demonstrations +30 ", arithmetic)
    assert f"at most {30 * 1000 * 2:,}" in arithmetic
    assert "groups per step" not in arithmetic
    assert list(workplace.iterdir()) == []


@pytest.mark.slow
def test_a_warm_start_leaves_a_model_that_can_be_evaluated(agentrl: Cli, workplace: Path) -> None:
    ended = agentrl(
        "sft",
        *("--env", "household/train", "--model", "scratch"),
        *("environment.options={size: tiny}", "agent.loop=react_text", "agent.max_turns=12", "agent.max_tokens=1024"),
        *("sft.episodes=8", "sft.epochs=1", "trackers=[]"),
        *("model.scratch.hidden_size=32", "model.scratch.layers=1"),
    )
    assert ended.code == 0, ended.err
    assert "loss" in ended.err
    evaluated = agentrl("eval", "--model", "runs/latest", "--tasks", "1")
    assert evaluated.code == 0, evaluated.err
    assert "household/valid_seen" in evaluated.out


@pytest.mark.slow
def test_a_file_of_conversations_is_learnt_with_adapters(
    agentrl: Cli, trained_run: Path, workplace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chat = {"messages": [{"role": "user", "content": "Guess."}, {"role": "assistant", "content": "I say 50."}]}
    (workplace / "chats.jsonl").write_text("\n".join([json.dumps(chat)] * 6))
    words = ("sft", "--data", "chats.jsonl", "--model", str(trained_run), "model.lora={rank: 4, dropout: 0.1}")
    unread = ("checkpoint.every=5", "trainer.mini_batches=2", "algorithm.loss_options.clip_low=0.1")
    told = agentrl(*words, "trainer.learning_rate=1e-2", *unread, "checkpoint.keep=3", "--dry-run")
    assert told.code == 0, told.err
    assert "chats.jsonl" in told.out
    assert "trainer.learning_rate is ignored, because only agentrl train reads it: set sft.learning_rate" in caplog.text
    for key in unread:
        assert f"{key.partition('=')[0]} is ignored, because only agentrl train reads it: remove it" in caplog.text
    assert "checkpoint.keep is ignored" not in caplog.text
    ended = agentrl(
        *words, "sft={tokens_per_update: 60, learning_rate: 1e-2, epochs: 8, warmup_steps: 99}", "trackers=[]"
    )
    assert ended.code == 0, ended.err
    assert re.search(r"sft.warmup_steps 99 is not below the \d+ optimizer steps of the run", ended.err)
    losses = [json.loads(line)["sft/loss"] for line in Path("runs/latest/metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0]
    evaluated = agentrl("eval", "--model", "runs/latest", "--env", "guess_number", "--tasks", "1")
    assert evaluated.code == 0, evaluated.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("sft", "--data", "none.jsonl", "--model", "x/y"), "cannot read conversations none.jsonl"),
        (("sft", "--data", "chats.jsonl"), "sft.data needs a model"),
        (("sft", "--data", "chats.jsonl", "--model", "x/y", "sft.episodes=3"), "sft.episodes is ignored with sft.data"),
        (("train", "--model", "x/y", "sft.data=chats.jsonl"), "training needs an environment"),
        (("sft", "--model", "x/y"), "no environment is set"),
    ],
)
def test_what_a_file_of_conversations_asks_for(
    agentrl: Cli, workplace: Path, words: tuple[str, ...], message: str
) -> None:
    chat = {"messages": [{"role": "user", "content": "Guess."}, {"role": "assistant", "content": "50"}]}
    (workplace / "chats.jsonl").write_text(json.dumps(chat))
    ended = agentrl(*words)
    assert ended.code == 2
    assert message in ended.err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_warm_start_ends_after_its_update_and_leaves_its_model(
    agentrl: Cli, workplace: Path, number: int
) -> None:
    words = ("sft", "--env", "household/train", "--model", "scratch", "trackers=[]", "run.name=stopped")
    tiny = ("environment.options={size: tiny}", "agent.loop=react_text", "agent.max_turns=12", "agent.max_tokens=1024")
    small = ("sft={episodes: 200, tokens_per_update: 300}", "model.scratch={hidden_size: 32, layers: 1}")
    program = [sys.executable, "-c", "from agentrl.cli import main; main()"]
    process = subprocess.Popen([*program, *words, *tiny, *small], stderr=subprocess.PIPE, text=True)
    folder = workplace / "runs" / "stopped"
    wait_until(lambda: len(read_metrics(folder / "metrics.jsonl")) >= 3, "the third update", within_s=120)
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130, told
    assert re.search(r"stopped after update \d+; resume with: agentrl sft --resume runs/stopped\n", told)
    assert told.rstrip().endswith("train it: agentrl train … model.path=runs/stopped")
    ended = agentrl("eval", "--model", "runs/stopped", "--tasks", "1")
    assert ended.code == 0, ended.err
    refused = agentrl("sft", "--resume", "runs/stopped", "--env", "household/train")
    assert (refused.code, "a run is resumed with its own config" in refused.err) == (2, True)
    resumed = agentrl("sft", "--resume", "runs/stopped", "sft.learning_rate=1e-4")
    assert resumed.code == 0, resumed.err
    assert "changed: sft.learning_rate: 1e-05 -> 0.0001" in resumed.err
    assert re.search(r"resumes after update \d+ of \d+", resumed.err)
    updates = [line["step"] for line in read_metrics(folder / "metrics.jsonl")]
    assert updates == [*range(1, len(updates) + 1)]
    over = agentrl("sft", "--resume", "runs/stopped")
    assert (over.code, "the training has ended" in over.err) == (0, True)
