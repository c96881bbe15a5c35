"""`agentrl env validate` and `agentrl env probe`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import gymnasium
import pytest

from agentrl.cli.arguments import option_pairs
from agentrl.cli.env_tasks import DifficultyReport, _write_band
from agentrl.config import load_config
from agentrl.env import EnvironmentSpec
from agentrl.env.lookup import resolve_environment
from agentrl.errors import AgentRLError
from agentrl.evaluation.comparison import TaskScore
from agentrl.rollout.task_source import read_tasks
from agentrl.task import SeedTasks
from agentrl.testing.task_validation import TaskStatus, validate_tasks

Cli = Callable[..., Any]

DOORS = """
import time

import gymnasium

from agentrl.env import EnvironmentSpec
from agentrl.task import Task

PLAYS = []


class Doors(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Text(20)

    def reset(self, *, seed=None, options=None):
        self.kind = (options or {}).get("kind", "good")
        PLAYS.append(self.kind)
        self.said = ""
        if self.kind == "broken":
            raise ValueError("the door is stuck")
        number = len(PLAYS) if self.kind == "moving" else 1
        return f"Door {number}", {}

    def step(self, action):
        if self.kind == "hanging":
            time.sleep(60)
        solved = action == {"wrong": "push"}.get(self.kind, "pull") or self.kind == "open"
        solved = solved and not (self.kind == "flaky" and len(PLAYS) % 2)
        return f"after {len(PLAYS)}" if self.kind == "noisy" else "", float(solved), True, False, {"success": solved}

    def expert(self):
        return self

    def act(self, observation):
        return "pull"


def tasks(split, **_):
    kinds = KINDS
    return [Task(id=f"{split}-{kind}", environment="doors", seed=1, options={"kind": kind}) for kind in kinds]


KINDS = ("good", "wrong", "open", "moving", "broken", "flaky", "noisy", "hanging", "fine")
SPEC = EnvironmentSpec(name="doors", make=Doors, tasks=tasks, splits=("train",), max_turns=2, reward_range=(0.0, 1.0))
"""
FOUND = {
    "good": "",
    "wrong": "the solution does not solve it: return 0 after 1 steps",
    "open": "doing nothing solves it: its return is 1",
    "moving": "two resets give different observations",
    "broken": "reset raised ValueError: the door is stuck",
    "flaky": "the solution has a return",
    "noisy": "",
    "hanging": "step did not return within 0.5 s",
    "fine": "",
}


@pytest.fixture
def doors(workplace: Path) -> Path:
    file = workplace / "doors.py"
    file.write_text(DOORS)
    return file


@pytest.mark.slow
def test_each_fault_of_a_task_is_named_and_a_second_command_plays_only_what_changed(
    agentrl: Cli, doors: Path, workplace: Path
) -> None:
    words = (
        "env",
        "validate",
        "./doors.py:SPEC",
        "--call-timeout",
        "0.5",
        "--records",
        "r.jsonl",
        "--json",
        "out.json",
    )
    ended = agentrl(*words, "--limit", "4")
    assert ended.code == 1
    assert "4 tasks of doors are invalid: got train-wrong, train-open, train-moving" in ended.err.replace("\n", " ")
    ended = agentrl(*words)
    report = json.loads((workplace / "out.json").read_text())
    assert (report["valid"], report["invalid"], report["unknown"], report["reused"]) == (3, 6, 0, 4)
    for result in report["results"]:
        kind = result["task_id"].partition("-")[2]
        assert FOUND[kind] in "; ".join(result["problems"]), result
        assert (result["status"] == "valid") == (not FOUND[kind])
    assert report["results"][6]["remarks"] == ["1 of 1 observations differ the second time, the first one after step 1"]
    doors.write_text(DOORS.replace('"wrong": "push"', '"wrong": "pull"'))
    agentrl(*words)
    report = json.loads((workplace / "out.json").read_text())
    assert report["reused"] == 0, "the code changed"


@pytest.mark.slow
def test_a_longer_deadline_plays_tasks_again_that_missed_it(agentrl: Cli, workplace: Path) -> None:
    late = DOORS.replace("time.sleep(60)", "time.sleep(0.3)").replace("KINDS = (", 'KINDS = ("hanging",) or (')
    (workplace / "late_doors.py").write_text(late)
    words = ("env", "validate", "./late_doors.py:SPEC", "--records", "r.jsonl", "--json", "out.json")
    assert agentrl(*words, "--call-timeout", "0.1").code == 1
    assert agentrl(*words, "--call-timeout", "0.1").code == 1
    assert json.loads((workplace / "out.json").read_text())["reused"] == 1
    assert agentrl(*words, "--call-timeout", "20").code == 0
    report = json.loads((workplace / "out.json").read_text())
    assert (report["valid"], report["reused"]) == (1, 0)


class Stuck(gymnasium.Env[str, str]):
    """Cannot be made, or cannot be closed."""

    def __init__(self, fails: str) -> None:
        self.fails = fails
        if fails == "making the environment":
            raise OSError("no data")

    def close(self) -> None:
        raise OSError("no data")


@pytest.mark.parametrize("call", ["making the environment", "close"])
def test_an_environment_that_cannot_be_made_or_closed_is_named(call: str) -> None:
    spec = EnvironmentSpec(name="stuck", make=Stuck, tasks=SeedTasks)
    with pytest.raises(AgentRLError, match=f"stuck cannot be used: got {call} raised OSError: no data"):
        list(validate_tasks(spec, {"fails": call}, []))


def test_files_that_cannot_be_written_are_errors_before_anything_is_played(agentrl: Cli, workplace: Path) -> None:
    for option in ("--json", "--records"):
        ended = agentrl("env", "validate", "guess_number/valid", "--limit", "1", option, str(workplace))
        assert (ended.code, "cannot write" in ended.err, "1 tasks" in ended.out) == (2, True, False)


def test_tasks_are_validated_by_several_threads_and_only_once() -> None:
    spec = resolve_environment("guess_number")
    source = spec.tasks("train")
    found = list(validate_tasks(spec, spec.options, [source[n] for n in range(20)], concurrency=3))
    assert sorted(one.task_id for one in found) == sorted(source[n].id for n in range(20))
    assert {one.status for one in found} == {TaskStatus.VALID}


def test_an_answer_is_the_solution_without_an_expert_and_without_both_nothing_is_known(
    agentrl: Cli, workplace: Path
) -> None:
    (workplace / "t.jsonl").write_text('{"id": "a", "prompt": "1 + 1?", "ground_truth": "2"}\n')
    ended = agentrl("env", "validate", "prompts", "--tasks", "t.jsonl", "--json", "-")
    assert ended.code == 1
    assert json.loads(ended.out)["results"][0]["status"] == "unknown"
    assert "no task of prompts can be validated" in ended.err
    ended = agentrl("env", "validate", "guess_number/test", "--tasks", "t.jsonl")
    assert ended.code == 2
    assert "two sources of tasks" in ended.err


@pytest.mark.slow
def test_tasks_in_a_band_of_success_rates_become_a_task_file(agentrl: Cli, workplace: Path) -> None:
    words = ("env", "probe", "guess_number/test", "--policy", "random", "--limit", "12", "--attempts", "6")
    ended = agentrl(*words, "--band", "0.1:0.9", "--output", "t.jsonl", "--json", "rates.json")
    assert ended.code == 0, ended.err
    rates = json.loads((workplace / "rates.json").read_text())
    inside = {row["id"] for row in rates["tasks"] if 0.1 <= row["success_rate"] <= 0.9}
    assert 0 < len(inside) < 12
    assert rates["in_band"] == len(inside)
    assert {row["episodes"] for row in rates["tasks"]} == {6}
    tasks = read_tasks(workplace / "t.jsonl", environment="guess_number")
    assert {task.id for task in tasks} == inside
    again = agentrl("env", "probe", "guess_number", "--policy", "expert", "--tasks", "t.jsonl", "--attempts", "1")
    assert f"{len(inside)} tasks, 1 attempts each, panel" in again.out
    assert "always solved" in again.out
    nothing = agentrl(*words, "--band", "0.999:0.9999", "--output", "u.jsonl")
    assert nothing.code == 1
    assert "no task is within the band" in nothing.err
    assert agentrl(*words, "--band", "0.9:0.1").code == 2


def test_the_command_after_a_probe_trains_the_probed_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    task = resolve_environment("guess_number").tasks("train")[0]
    rates = {task.id: TaskScore(reward=0.5, success=0.5, episodes=2)}
    report = DifficultyReport(finished=cast(Any, None), low=0.1, high=0.9, rates=rates, tasks=[task])
    _write_band(report, "guess_number", "runs/latest", Path("t.jsonl"))
    said = " ".join(capsys.readouterr().err.split())
    assert "agentrl train --env guess_number --model runs/latest --tasks t.jsonl" in said


@pytest.mark.parametrize("text", ["1e-3", "[mug, sink]", "{turns: 3}", "010", "off", "", '"12"', "a#b"])
def test_options_of_commands_are_read_as_options_in_a_config(text: str) -> None:
    config = load_config("quickstart", ["environment.options={}", f"environment.options.size={text}"])
    assert option_pairs([f"size={text}"]) == dict(config.sole_environment.options)


def test_an_option_that_is_not_valid_yaml_is_named(agentrl: Cli) -> None:
    ended = agentrl("env", "check", "household", "rooms=[1, 2")
    assert ended.code == 2
    assert "the value of option rooms=[1, 2 is not valid YAML" in ended.err


def test_a_class_whose_reset_needs_options_is_checked_on_a_file_of_tasks(agentrl: Cli, workplace: Path) -> None:
    (workplace / "oven.py").write_text(
        "class Oven:\n    def reset(self, wanted, **row):\n        self.now, self.wanted = 0, wanted\n"
        "        return f'Reach {wanted}.'\n\n"
        "    def heat(self) -> str:\n        'Heat.'\n        self.now += 1\n        return str(self.now)\n\n"
        "    def get_reward(self):\n        return float(self.now == self.wanted)\n"
    )
    (workplace / "rows.jsonl").write_text('{"prompt": "Heat.", "wanted": 2}\n{"prompt": "Heat.", "wanted": 3}\n')
    without = agentrl("env", "check", "oven:Oven", "--quick")
    assert (without.code, "--tasks FILE for env check" in " ".join(without.err.split())) == (2, True), without.err
    with_file = agentrl("env", "check", "oven:Oven", "--tasks", "rows.jsonl", "--quick", "--json", "-")
    assert with_file.code == 0, with_file.err
    rows = {row["check"]: row for row in json.loads(with_file.out)["rows"]}
    assert rows["has tasks"]["detail"] == "train 2"
    assert rows["keeps gymnasium rules"]["status"] == "passed"
    for words, message in (
        (("environment.tasks=rows.jsonl",), "--tasks FILE is for tasks"),
        (("environment.options.size=3",), "emove 'environment.options.'"),
        (("--tasks", "nowhere.jsonl"), "cannot read task file nowhere.jsonl"),
    ):
        ended = agentrl("env", "check", "oven:Oven", *words)
        assert (ended.code, message in " ".join(ended.err.split())) == (2, True), ended.err
    every = agentrl("env", "check", "--all", "--tasks", "rows.jsonl")
    assert (every.code, "--tasks and --all exclude each other" in every.err) == (2, True)


def test_a_role_that_a_model_plays_cannot_be_validated(agentrl: Cli) -> None:
    ended = agentrl("env", "validate", "retail", "customer=role", "--limit", "2")
    assert ended.code == 2
    assert "cannot be validated with a role that a model plays: got the roles user" in ended.err.replace("\n", " ")
    assert agentrl("env", "validate", "retail", "--limit", "2").code == 0
