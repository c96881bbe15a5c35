"""The round trip of exported episodes: `agentrl sft` and `agentrl dpo` train on what `export-episodes` writes."""

import json

import pytest

from agentrl.cli import main
from agentrl.runs.rl import train

FRESH = ("run.name=null", "model.scratch=null")


@pytest.fixture
def agentrl_in(tmp_path, monkeypatch):
    """Run a command in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        with pytest.raises(SystemExit) as end:
            main(words)
        assert not end.value.code

    return run


@pytest.fixture
def run(tiny_run):
    """A run whose episodes earn different rewards, and end their answers in any way."""
    found = tiny_run("trainer.steps=2", "agent.max_turns=2", name="played")
    train(found)
    return found.folder.path


@pytest.mark.slow
def test_exported_conversations_are_learned(run, agentrl_in, tmp_path):
    agentrl_in("export-episodes", str(run), "--to", "sft-jsonl", "--output", "sft.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "sft.jsonl").read_text().splitlines()]
    assert 8 <= len(rows) <= 12, "an empty answer cannot be learned"
    assert [message["role"] for message in rows[0]["messages"]][-1] == "assistant"
    words = ("sft={data: sft.jsonl, epochs: 1}", "agent.max_tokens=256", f"run.directory={tmp_path / 'learned'}")
    agentrl_in("sft", "--model", str(run), *words)
    (learned,) = (folder for folder in (tmp_path / "learned").iterdir() if not folder.is_symlink())
    assert (learned / "metrics.jsonl").read_text().count("sft/loss") >= 1


@pytest.mark.slow
def test_exported_pairs_are_learned(run, agentrl_in, tmp_path):
    agentrl_in("export-episodes", str(run), "--to", "preferences", "--output", "pairs.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    assert rows
    assert all(row["chosen_reward"] > row["rejected_reward"] for row in rows)
    assert all(row["prompt"] and row["chosen"] != row["rejected"] for row in rows)
    words = ("--from", "pairs.jsonl", f"run.directory={tmp_path / 'preferred'}", *FRESH)
    agentrl_in("dpo", str(run / "config.yaml"), "--model", str(run), *words)
    (preferred,) = (folder for folder in (tmp_path / "preferred").iterdir() if not folder.is_symlink())
    lines = [json.loads(line) for line in (preferred / "metrics.jsonl").read_text().splitlines()]
    assert lines
    assert all("preferences/loss" in line for line in lines)
