"""Training on pairs from the command line: a policy and a reward model."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl.builders.models import build_renderer
from agentrl.config import load_config
from agentrl.errors import UsageError
from agentrl.observe.metrics import read_metrics
from agentrl.observe.model_folder import find_model
from agentrl.observe.trajectory_store import TrajectoryStore, read_trajectories
from agentrl.render.tokenizers import load_tokenizer
from agentrl.training.stored_episodes import check_pair_tokens, read_preference_pairs

Cli = Callable[..., Any]
QUICK = ("preferences={epochs: 2, pairs_per_update: 2}", "trackers=[]")


@pytest.fixture
def played(trained_run: Path, workplace: Path) -> Path:
    """The small run with episodes of which one is better for certain."""
    run = workplace / "played"
    shutil.copytree(trained_run, run)
    stored = next(iter(read_trajectories(run / "trajectories"))).trajectory
    store = TrajectoryStore(run / "trajectories", step=9)
    for member, reward in enumerate((0.0, 9.0)):
        episode = copy.deepcopy(stored)
        episode.id, episode.task_id, episode.reward = f"certain/{member}.0", "certain", reward
        store.start(episode)
        store.end(episode)
    store.close()
    return run


def test_a_policy_learns_from_the_pairs_of_a_run(agentrl: Cli, played: Path, workplace: Path) -> None:
    words = (*QUICK, f"run.directory={workplace / 'runs'}", "preferences.warmup_steps=999")
    ended = agentrl("dpo", "--from", str(played), *words)
    assert ended.code == 0, ended.err
    assert "preferences.warmup_steps 999 is not below the" in ended.err
    run = (workplace / "runs" / "latest").resolve()
    assert run.name.startswith("guess_number-dpo-")
    assert "measure it: agentrl eval --model" in ended.err
    assert read_metrics(run / "metrics.jsonl")[-1]["preferences/loss"] > 0
    assert Path(find_model(str(run))).parent.parent.parent == run


def test_one_file_of_a_run_will_do(agentrl: Cli, played: Path, workplace: Path) -> None:
    file = played / "trajectories" / "step-000009.jsonl"
    ended = agentrl("dpo", "--from", str(file), "--dry-run")
    assert ended.code == 0, ended.err
    assert f"- {file}" in ended.out.replace("\n  ", " ") or str(file.name) in ended.out
    assert not (workplace / "runs").exists()


def test_options_come_before_the_runs_config_and_keys_before_options(
    agentrl: Cli, played: Path, trained_run: Path, workplace: Path
) -> None:
    words = ("--model", str(trained_run), "--dry-run")
    ended = agentrl("dpo", "--from", str(played), *words)
    assert ended.code == 0, ended.err
    config = yaml.safe_load(ended.out)
    assert (config["model"]["path"], config["preferences"]["sources"]) == (str(trained_run), [str(played.resolve())])
    file = played / "trajectories" / "step-000009.jsonl"
    ended = agentrl("dpo", "--from", str(played), *words, f"preferences.sources=['{file}']", "preferences.epochs=5")
    assert ended.code == 0, ended.err
    config = yaml.safe_load(ended.out)
    assert (config["preferences"]["sources"], config["preferences"]["epochs"]) == ([str(file)], 5)
    own = yaml.safe_load(agentrl("dpo", "--from", str(played), "--dry-run").out)
    assert own["model"]["path"] != str(trained_run)


def test_a_reward_model_learns_from_the_pairs_of_a_run(agentrl: Cli, played: Path, workplace: Path) -> None:
    words = (QUICK[0], "trackers=[tensorboard]", f"run.directory={workplace / 'runs'}")
    ended = agentrl("reward-model", "--from", str(played), *words)
    assert ended.code == 0, ended.err
    run = (workplace / "runs" / "latest").resolve()
    assert list(run.rglob("events.out.tfevents.*"))
    assert f"agent.reward_model.path=runs/{run.name}" in ended.err.replace("\n", "")
    assert 0 <= read_metrics(run / "metrics.jsonl")[-1]["reward_model/accuracy"] <= 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("dpo quickstart", "no source of episodes is given"),
        ("dpo quickstart --from nowhere", "no trajectories found in"),
        ("dpo --from PLAYED preferences.loss=ppo", "does not learn from pairs of episodes"),
        ("dpo --from PLAYED preferences.loss=spin", "preferences.pairs=demonstrations"),
        ("reward-model quickstart --from PLAYED", "starts from a language model"),
        ("reward-model --from PLAYED preferences.loss_options.beta=1", "preferences.loss is ignored"),
        (
            "reward-model --from PLAYED trainer.processes=2 trainer.tensor_parallel=2",
            "a reward model supports only sharding",
        ),
    ],
)
def test_what_cannot_work_is_said_before_a_folder_is_made(
    agentrl: Cli, played: Path, workplace: Path, words: str, message: str
) -> None:
    ended = agentrl(*words.replace("PLAYED", str(played)).split())
    assert ended.code == 2, ended.err
    assert message in " ".join(ended.err.split())
    assert not (workplace / "runs").exists()


def _pair(question: str, better: str | None, worse: str) -> dict[str, Any]:
    sides = {"chosen": better, "rejected": worse}
    answers = {side: text and [{"role": "assistant", "content": text}] for side, text in sides.items()}
    return {"prompt": [{"role": "user", "content": question}], **answers}


KTO = {
    "prompt": [{"role": "user", "content": "Guess."}],
    "completion": [{"role": "assistant", "content": "5."}],
    "label": True,
}
DIFFERENT = {
    "chosen": [{"role": "user", "content": "A"}, {"role": "assistant", "content": "5."}],
    "rejected": [{"role": "user", "content": "B"}, {"role": "assistant", "content": "6."}],
}


def test_a_file_of_pairs_and_a_model_need_no_config(agentrl: Cli, trained_run: Path, workplace: Path) -> None:
    file = workplace / "pairs.jsonl"
    file.write_text(json.dumps(_pair("Guess.", "I say 5.", "No.")) + "\n")
    words = (
        "dpo",
        "--from",
        str(file),
        "--model",
        str(trained_run),
        f"run.directory={workplace / 'runs'}",
        "trackers=[]",
    )
    shown = yaml.safe_load(agentrl(*words, "--dry-run").out)
    assert shown["environment"] is None
    assert not (workplace / "runs").exists()
    ended = agentrl(*words, "preferences.epochs=1")
    assert ended.code == 0, ended.err
    assert (workplace / "runs" / "latest").resolve().name.startswith("chat-dpo-")
    alone = agentrl("dpo", "--from", str(file))
    assert "or a file of pairs and --model" in " ".join(alone.err.split())
    scratch = agentrl("dpo", "--model", "scratch", "--from", str(file))
    assert scratch.code == 2
    assert "a file of pairs needs a model: got" in " ".join(scratch.err.split())
    ended = agentrl("reward-model", "quickstart", "--from", str(file), "--model", str(trained_run), "--dry-run")
    assert (ended.code, "learns from the episodes of runs: got the pairs of" in " ".join(ended.err.split())) == (
        2,
        True,
    )


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Guess.", "chosen": "I say 5.", "rejected": "No."},  # TRL's standard format
        {
            "prompt": "Guess.",
            **{
                side: _pair("Guess.", "I say 5.", "No.")["prompt"] + _pair("", "I say 5.", "No.")[side]
                for side in ("chosen", "rejected")
            },
        },  # UltraFeedback
    ],
)
def test_texts_are_a_question_and_two_answers(tmp_path: Path, trained_run: Path, row: dict[str, Any]) -> None:
    file = tmp_path / "pairs.jsonl"
    config = load_config("quickstart", ["model.scratch=null", f"model.path={trained_run}"])
    path = find_model(str(trained_run))
    renderer = build_renderer(config, path, load_tokenizer(path))
    file.write_text(json.dumps(_pair("Guess.", "I say 5.", "No.")) + "\n" + json.dumps(row) + "\n")
    messages, texts = read_preference_pairs(file, renderer)
    for side in ("better", "worse"):
        expected, found = (getattr(pair, side).sequences[0] for pair in (messages, texts))
        assert list(found.token_ids) == list(expected.token_ids)
        assert list(found.sources) == list(expected.sources)


def test_a_text_without_a_prompt_is_not_a_pair(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"chosen": "Human: Guess. Assistant: 5.", "rejected": "Human: Guess. Assistant: 6."}))
    settings = load_config("quickstart", [f"preferences={{sources: [{file}]}}"]).preferences
    assert settings is not None
    with pytest.raises(UsageError, match=r"is not a pair of conversations.*or each a text"):
        check_pair_tokens(settings, None)


def test_the_config_of_a_reward_model_is_printed_without_training(agentrl: Cli, played: Path, workplace: Path) -> None:
    ended = agentrl("reward-model", "--from", str(played), "--dry-run", "preferences.epochs=3")
    assert ended.code == 0, ended.err
    assert yaml.safe_load(ended.out)["preferences"]["epochs"] == 3
    assert not (workplace / "runs").exists()


def test_pairs_of_a_file_that_are_too_long_or_equal_are_left_out(
    agentrl: Cli, trained_run: Path, workplace: Path
) -> None:
    file = workplace / "pairs.jsonl"
    long, equal = _pair("word " * 900, "I say 5.", "No."), _pair("Guess.", "I say 5.", "I say 5.")
    words = ("dpo", "quickstart", "model.scratch=null", "--model", str(trained_run), "--from", str(file))
    words = (*words, "agent.max_tokens=300", "trackers=[]", f"run.directory={workplace / 'runs'}")
    for rows, message in (
        ([], "contains neither pairs nor episodes, expected rows"),
        ([{"messages": []}], "contains neither pairs nor episodes, expected rows"),
        ([_pair("Guess.", None, "No."), _pair("Guess.", "I say 5.", "No.")], "line 1 is not a pair of conversations"),
        (
            [{"prompt": "Guess.", "completion": "5.", "label": True}],
            "is not a file of pairs: got completion, label, prompt",
        ),
        (
            [_pair("Guess.", "I say 5.", "No."), KTO],
            "line 2 is not a pair of conversations: got the columns prompt, completion",
        ),
        (
            [_pair("Guess.", "I say 5.", "No."), DIFFERENT],
            "of {file} line 2 begin with different prompts: got 'A' and 'B'",
        ),
        ([long, equal], "got 1 pair longer than agent.max_tokens (300), 1 pair whose two sides are equal"),
    ):
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        ended = agentrl(*words)
        assert (ended.code, message.format(file=file) in " ".join(ended.err.split())) == (2, True), ended.err
        assert not list(workplace.glob("runs/*"))
    array = workplace / "pairs.json"
    array.write_text(json.dumps([long, equal]))
    ended = agentrl(*(str(array) if word == str(file) else word for word in words))
    assert "got 1 pair longer" in " ".join(ended.err.split()), "JSON arrays are read"
    (workplace / "notes.txt").write_text("Nothing.")
    ended = agentrl(*(str(workplace / "notes.txt") if word == str(file) else word for word in words))
    assert "got a file of another kind" in " ".join(ended.err.split())
    rows = [long, equal, *(_pair(f"Guess {number}.", f"I say {number}.", "No.") for number in range(4))]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ended = agentrl(*words, "preferences.learning_rate=1e-2", "preferences.pairs_per_update=2")
    assert ended.code == 0, ended.err
    assert "left out: 1 pair whose two sides are equal" in ended.err
    assert "4 pairs from" in ended.err
    metrics = read_metrics(workplace / "runs" / "latest" / "metrics.jsonl")
    assert len(metrics) == 2
    assert metrics[1]["preferences/loss"] < metrics[0]["preferences/loss"]
