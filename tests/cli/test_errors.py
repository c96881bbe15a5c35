"""Failures: one message on standard error, the documented exit code, and a traceback only with --debug."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.commands import COMMANDS
from agentrl.errors import TrainingError, UsageError
from agentrl.observe.run_folder import RunDirectory

Cli = Callable[..., Any]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train", "no config and no environment"),
        ("train quickstrt", "or a name from agentrl config list. Did you mean quickstart or quickstart_ppo?"),
        ("train grpo", "Did you mean household/grpo"),
        ("eval household/valid", "It is the name of an environment: give it as --env household/valid"),
        ("eval --env dungeon", "expected a name from agentrl env list, a registered Gymnasium id"),
        ("train quickstart quickstart2", "no config file quickstart2"),
        ("train quickstart a={b: 0.1 c}", "quotes around a value with spaces"),
        ("train quickstart trainer.learning_rate=inf", "expected a finite number"),
        ("train quickstart trainer.adam.betas=[2,3]", "trainer.adam.betas: got 2, expected less than 1"),
        ("train quickstart trainer.stepz=3", "did you mean trainer.steps?"),
        ("train quickstart trainer.steps=many", "trainer.steps"),
        ("train quickstart trainer.steps=0", "trainer.steps"),
        ("train --env houshold", "household"),
        ("train --env no_such_module:Thing-v0", "no module no_such_module"),
        ("train --env guess_number --model ./nowhere", "no model found"),
        ("train --env guess_number engine=scripted", "cannot be"),
        ("train --env guess_number agent.loop=react_txt", "react_text"),
        ("train --env guess_number sampling.top_p=0.9", "whole distribution"),
        ("train --env guess_number algorithm.advantage=grop", "grpo"),
        ("train --env guess_number algorithm.loss_options={clip_hihg:0.3}", "clip_high"),
        ("train quickstart trackers=[wandbb]", "Did you mean 'wandb'?"),
        ("train --resume nowhere", "nowhere is not a run: got no such folder"),
        ("train --resume nowhere quickstart", "resumed with its own config"),
        ("sft --env gymnasium --model scratch", "no expert"),
        ("eval", "the evaluation has no environment"),
        ("eval --env household", "the evaluation has no policy"),
        ("eval --env household/test --policy expert", "no split"),
        ("eval --env gymnasium --policy expert --tasks 2", "no expert"),
        (
            "eval --env household --policy expert environment.options={colour:red}",
            "household does not accept its options",
        ),
        (
            "eval --env terminal --policy expert environment.options={colour:red}",
            "terminal does not accept its options",
        ),
        ("env serve guess_number colour=red", "guess_number does not accept its options: got colour=red"),
        ("env show FrozenLake-v1 colour=red", "unexpected keyword argument 'colour'"),
        ("env check household colour=red", "household does not accept its options: got colour=red"),
        ("env check terminal colour=red", "terminal does not accept its options: got colour=red"),
        ("env check telecom colour=red", "telecom does not accept its options: got colour=red"),
        ("env validate terminal colour=red", "terminal does not accept its options: got colour=red"),
        ("env show household colour=red", "household does not accept its options: got colour=red"),
        ("env play terminal colour=red", "terminal does not accept its options: got colour=red"),
        ("eval --env guess_number --model m --url http://127.0.0.1:1 --engine local", "has no address"),
        ("view nowhere", "nowhere is not a run or evaluation: got no such folder"),
        ("dpo", "expected --from RUN"),
        ("reward-model", "expected --from RUN"),
        ("export . out --shard-size 0", "is not a file size: got '0'"),
        ("export nowhere out", "not a run or checkpoint"),
        ("env show houshold", "household"),
        ("env show json", "For an environment in the module json, write json:EnvId"),
        ("env show json:", "has no name after the module"),
        ("env play guess_number --task 999999999", "no task has this number"),
        ("env play guess_number size", "expected key=value"),
        ("tool show calculater", "calculator"),
        ("tool call calculator expression=2+", "not an arithmetic expression"),
        ("tool call calculator", "expression is missing"),
        (
            "tool call calculator expression=1 expression=2",
            "expression is given twice: got expression=1 and expression=2",
        ),
        ("tool show calculator -o environment.x=1", "tool calculator has no options: got environment.x"),
        ("env show household size=tiny size=full", "size is given twice: got size=tiny and size=full"),
        ("env check household environment.options.size=tiny", "expected the option alone, such as size=5"),
        ("env validate household environment.tasks=a.jsonl", "--tasks FILE is for tasks"),
        ("env show household size=[1", "is not valid YAML: got did not find expected ',' or ']' at the end"),
        ("train quickstart agent.options={b:[}", "is not valid YAML: got found unexpected ':' in column 3"),
        ("tool show agentrl.env:EnvironmentSpec", "expected a __call__ method"),
        ("bench nothing --folder nowhere", "no folder nowhere"),
        ("init 1game", "not a valid package name"),
        (
            "init My-Game",
            "got 'My-Game', expected a lowercase letter, then lowercase letters, digits and underscores. For",
        ),
        ("init class", "got the Python keyword 'class'"),
        ("init json", "Python package already has this name"),
        ("train quickstart engine={a: 1}", "a value was split at its spaces"),
        ("train quickstart --gpus 8", "--gpus needs --dry-run"),
        (
            "train quickstart --dry-run agent.options.pages=3",
            "agent.options={} to remove the options of another loop",
        ),
        ("train trainer.steps", "trainer.steps has no value"),
        ("train .", ". is a folder, expected a YAML file"),
        (
            "train ./configs/quickstart.yaml --dry-run",
            "no config file ./configs/quickstart.yaml, expected a YAML file. A config of this name comes with agentrl: "
            "quickstart",
        ),
        ("train ../household/grpo.yaml", "A config of this name comes with agentrl: household/grpo"),
        ("eval ./quickstart --policy random", "A config of this name comes with agentrl: quickstart"),
        ("eval runs/none", "runs/none is not a run or config: got no such folder"),
        ("eval quickstart --policy expert --engine vllm", "the expert policy has no model: got --engine vllm"),
        ("eval quickstart --policy random --model a/b", "the random policy has no model: got --model a/b"),
        ("eval quickstart --policy expert --json .", "cannot write .: got a folder"),
        ("config show quickstart model.pth=x", "did you mean model.path?"),
    ],
)
def test_wrong_usage_is_one_message_and_exit_code_two(agentrl: Cli, workplace: Path, words: str, message: str) -> None:
    ended = agentrl(*words.split())
    assert ended.code == 2
    assert ended.err.startswith(("error: ", "settings: ")) or "run " in ended.err
    assert message in ended.err
    assert "Traceback" not in ended.err
    assert ended.err.count("error: ") == 1
    if words.startswith(("train", "sft")):
        assert not list(workplace.iterdir())


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["eval", "--policy", "random", "--prompts", ""], "--prompts is empty"),
        (["eval", "--policy", "random", "--prompts="], "--prompts is empty"),
        (["train", "--env", "guess_number", "--model", "", "--dry-run"], "--model is empty"),
        (["train", "", "trainer.steps=1"], "an argument is empty"),
    ],
)
def test_an_empty_word_never_means_the_current_folder(
    agentrl: Cli, workplace: Path, words: list[str], what: str
) -> None:
    (workplace / "rows.jsonl").write_text('{"prompt": "Say a"}\n')
    ended = agentrl(*words)
    assert ended.code == 2
    assert ended.err.startswith(f"error: {what}: got '', expected")
    assert os.listdir(workplace) == ["rows.jsonl"]


def test_a_deleted_current_folder_is_named(agentrl: Cli, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (workplace / "gone").mkdir()
    monkeypatch.chdir(workplace / "gone")
    monkeypatch.setenv("PWD", str(workplace / "gone"))
    (workplace / "gone").rmdir()
    ended = agentrl("env", "list")
    assert ended.code == 2
    assert ended.err.startswith(f"error: the current folder was deleted: got {workplace}/gone, expected a folder that")
    assert 'cd "$PWD"' in ended.err


READING = [name for name, entry in COMMANDS.items() if entry.reads]


@pytest.mark.parametrize("name", READING)
def test_a_missing_run_is_said_before_the_command_is_imported(
    agentrl: Cli, monkeypatch: pytest.MonkeyPatch, workplace: Path, name: str
) -> None:
    for run in ("old", "new"):
        RunDirectory.create(workplace / "runs", run).save_config("{}")
    os.utime(workplace / "runs" / "old" / "config.yaml", (0, 0))
    monkeypatch.setattr("agentrl.cli.application.build", lambda chosen: pytest.fail(chosen))
    ended = agentrl(name, "nosuch")
    assert ended.code == 2
    assert ended.err.startswith("error: nosuch is not a run")
    assert "got no such folder, expected the folder of a run: runs/new, runs/old" in ended.err


def test_commands_that_read_runs_check_them() -> None:
    expected = "view status diagnose report export-episodes rescore replay eval export trace"
    assert set(READING) == set(expected.split())


@pytest.mark.parametrize(
    "words",
    ["eval --env guess_number --tasks none", "eval --policy nobody", "train --no-such-option", "init", "bench a b"],
)
def test_what_the_parser_refuses_is_exit_code_two(agentrl: Cli, words: str) -> None:
    ended = agentrl(*words.split())
    assert ended.code == 2
    assert "Traceback" not in ended.err


def failing(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (TrainingError("gradients are not finite", got="nan"), 1, "error: gradients are not finite: got nan"),
        (UsageError("no such thing"), 2, "error: no such thing"),
        (ZeroDivisionError("division by zero"), 1, "error: ZeroDivisionError: division by zero"),
        (
            PermissionError(13, "Permission denied", "a.yaml"),
            2,
            "error: cannot open a.yaml: got Permission denied, exp",
        ),
        (PermissionError(1, "Operation not permitted"), 1, "error: PermissionError: [Errno 1] Operation not permitted"),
    ],
)
def test_exit_codes_by_kind_of_error(
    agentrl: Cli, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, message: str
) -> None:
    monkeypatch.setattr("agentrl.cli.config.shipped_configs", failing(error))
    ended = agentrl("config", "list")
    assert ended.code == code
    assert ended.err.startswith(message)
    assert "Traceback" not in ended.err
    with pytest.raises(type(error)):
        agentrl("config", "list", "--debug")


def test_a_folder_that_may_not_be_read_is_named(agentrl: Cli, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (workplace / "theirs").mkdir()
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may read everything
    ended = agentrl("report", "theirs")
    assert ended.code == 2
    assert ended.err.startswith("error: cannot open theirs: got Permission denied, expected a file or folder that this")


def test_an_interruption_is_exit_code_130(agentrl: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("agentrl.cli.config.shipped_configs", interrupted)
    assert agentrl("config", "list").code == 130


@pytest.mark.parametrize(
    ("word", "said"),
    [("--trainer.steps=3", "config keys have no dashes: trainer.steps=3"), ("--trainer.steps", "trainer.steps=VALUE")],
)
def test_a_config_key_with_dashes_is_told_without_them(agentrl, word, said):
    ended = agentrl("train", "quickstart", word)
    assert ended.code == 2
    assert said.lower() in ended.err.lower()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train quickstart --steps 5", "--steps is not an option. Config keys have no dashes: trainer.steps=VALUE"),
        ("train quickstart --num-generations=8", "algorithm.group_size=VALUE"),
        ("sft quickstart --epochs 3", "sft.epochs=VALUE"),
        ("sft quickstart --lr 1e-5", "sft.learning_rate=VALUE"),
        ("sft quickstart --dataset rows.jsonl", "--dataset is not an option. Did you mean --data?"),
        ("dpo --dataset rows.jsonl", "Did you mean --from?"),
        ("dpo --from rows.jsonl --beta 0.1", "preferences.loss_options.beta=VALUE"),
        ("dpo --from rows.jsonl --lr 0.1", "preferences.learning_rate=VALUE"),
        ("reward-model --from rows.jsonl --num_train_epochs=2", "preferences.epochs=VALUE"),
        ("eval quickstart --num-examples 5", "--num-examples is not an option. Did you mean --tasks?"),
        ("eval quickstart -n 5", "-n is not an option. Did you mean --tasks?"),
        ("eval quickstart -r3", "-r is not an option. Did you mean --samples?"),
        ("eval quickstart --epochs 3", "--epochs is not an option. Did you mean --samples?"),
        ("eval quickstart --base_url=http://127.0.0.1:1", "--base_url is not an option. Did you mean --url?"),
        ("eval quickstart --max-tokens 9", "agent.max_answer_tokens=VALUE"),
        ("eval quickstart --api-key k", "engine.api_key_variable=VALUE"),
        ("train quickstart --max-tokens 9", "agent.max_answer_tokens=VALUE"),
        ("train quickstart --resume-from-checkpoint x", "Did you mean --resume?"),
        ("train --config my.yaml", "--config is not an option. The config is an argument: agentrl train FILE.yaml"),
        ("train quickstart --modle x", "Possible options: --model"),
        ("env check guess_number --steps 5", "No such option: --steps"),
    ],
)
def test_an_unknown_option_is_matched_with_the_config_keys(agentrl, words, message):
    ended = agentrl(*words.split())
    assert ended.code == 2
    assert message in " ".join(ended.err.split())


def test_a_config_without_its_suffix_and_a_key_that_is_a_number_are_explained(agentrl, workplace):
    (workplace / "mine.yml").write_text("environment: guess_number\n1: 2\n")
    for name, message in (("mine", "Did you mean mine.yml?"), ("mine.yml", "line 2: unknown key 1: got 1, expected a")):
        ended = agentrl("train", name, "--dry-run")
        assert ended.code == 2
        assert message in ended.err


def test_an_environment_without_a_class_is_named(agentrl):
    ended = agentrl("train", "--env", "nothing_here:", "--model", "scratch", "--dry-run")
    assert ended.code == 2
    assert "nothing_here" in ended.err
    assert "problems in the config" not in ended.err


def test_an_option_that_has_none_of_its_values_names_them_and_the_nearest(agentrl: Cli) -> None:
    ended = agentrl("eval", "--env", "guess_number", "--policy", "exprt")
    assert ended.code == 2
    told = "error: unknown value of --policy: got 'exprt', expected engine, expert or random. Did you mean 'expert'?\n"
    assert ended.err == told
    ended = agentrl("eval", "--env", "guess_number", "--tasks", "x")
    message = (
        "error: --tasks is wrong: got 'x', expected a valid integer. For a file of tasks, set environment.tasks=FILE"
    )
    assert " ".join(ended.err.split()) == message
    ended = agentrl("train", "quickstart", "--dry-run", "--gpus=-1")
    assert ended.code == 2
    assert "--gpus is wrong" in ended.err
