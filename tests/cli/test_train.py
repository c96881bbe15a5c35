"""Training from the command line: dry runs, runs, resuming, interruption."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from support.forks import AGENTRL, ForkedProgram

from agentrl.cli import train
from agentrl.cli.reports import updated_curve, write_run_report
from agentrl.config import load_config
from agentrl.runs.start import RunResult

Cli = Callable[..., Any]


def config_after(plan: str) -> Any:
    """The config that a dry run prints after its plan."""
    _, start, text = plan.partition("\n\nrun:\n")
    return yaml.safe_load(start + text)


def test_a_dry_run_prints_its_size_and_estimates_first_and_makes_nothing(agentrl: Cli, workplace: Path) -> None:
    words = ("train", "quickstart", "trainer.steps=7", "trainer.tasks_per_step=3", "--dry-run")
    ended = agentrl(*words)
    assert ended.code == 0
    assert ended.out.startswith("7 steps of 24 episodes (3 tasks x 8): ")
    assert "tasks_per_step: 3" not in ended.out, "the config is long, and was asked for by nobody"
    arithmetic = ended.out.partition("\nquantity ")[2]
    shown = agentrl(*words, "--show-config")
    assert shown.out.startswith(ended.out)
    assert config_after(shown.out)["trainer"]["steps"] == 7
    refused = agentrl(*words[:-1], "--show-config")
    assert "--show-config needs --dry-run" in refused.err
    assert "episodes in total" in arithmetic
    assert f"{3 * 8 * 7}" in arithmetic
    assert list(workplace.iterdir()) == []


def test_a_dry_run_plans_with_the_turns_of_the_tasks(agentrl: Cli, workplace: Path) -> None:
    (workplace / "tasks.jsonl").write_text('{"seed": 1, "max_turns": 2}\n{"seed": 2, "max_turns": 1}\n' * 40)
    words = ("train", "--env", "guess_number", "--tasks", "tasks.jsonl", "agent.max_answer_tokens=5", "--dry-run")
    ended = agentrl(*words, "--show-config")
    assert "of at most 2 turns x 5 tokens" in ended.out.partition("\n")[0]
    assert "2 turns x 5," in ended.out, "a column of the plan"
    assert config_after(ended.out)["agent"]["max_turns"] > 2, "the run's own limit is as it was"


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (("--engine", "sglang"), "engine.type", "sglang"),
        (("--engine", "vllm"), "engine.type", "vllm"),
        (("--env", "frozen_lake/valid"), "environment.name", "frozen_lake"),
        (("--model", "scratch"), "model.path", "scratch"),
        (("--tasks", "tasks.jsonl"), "environment.tasks", "tasks.jsonl"),
        (("--reward", "environment=0.5"), "agent.reward", [{"name": "environment", "weight": 0.5}]),
    ],
)
def test_every_option_of_a_run_shows_in_its_config(
    words: tuple[str, ...], key: str, value: object, agentrl: Cli, workplace: Path
) -> None:
    (workplace / "tasks.jsonl").write_text('{"id": "a"}\n')
    ended = agentrl("train", "--env", "guess_number", *words, "--dry-run", "--show-config")
    assert ended.code == 0, ended.err
    found = config_after(ended.out)
    for part in key.split("."):
        found = found[part]
    assert found == value


def test_an_override_that_is_given_twice_is_told(
    agentrl: Cli, workplace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ended = agentrl("train", "quickstart", "trainer.steps=5", "trainer.steps=7", "--dry-run")
    assert ended.out.startswith("7 steps of ")
    assert "trainer.steps is given twice: trainer.steps=5, and then trainer.steps=7, which counts" in caplog.messages


@pytest.mark.slow
def test_a_run_tells_its_size_first(agentrl: Cli, workplace: Path, small: tuple[str, ...]) -> None:
    ended = agentrl("train", "--env", "guess_number", "trainer.steps=1", "run.directory=my runs", *small)
    assert ended.code == 0, ended.err
    size = "1 step of 4 episodes (2 tasks x 2): 4 episodes of at most 3 turns x 12 tokens, up to 144 sampled tokens"
    assert ended.err.index(size) < ended.err.index("step 1/1")
    assert re.search(r"agentrl eval --model '.*my runs.*'\n", ended.err)


def test_a_dry_run_looks_at_tools_and_their_sandbox(agentrl: Cli, workplace: Path) -> None:
    words = ["agent.loop=tool_calling", "agent.tools=[bash]", "agent.sandbox={type: local, limits: {second: 3}}"]
    ended = agentrl("train", "quickstart", *words, "--dry-run")
    assert ended.code != 0
    assert "Did you mean 'seconds'?" in " ".join(ended.err.split())


def test_the_printed_config_runs_again(agentrl: Cli, workplace: Path) -> None:
    shown = agentrl("config", "show", "quickstart", "trainer.steps=7")
    (workplace / "again.yaml").write_text(shown.out)
    assert agentrl("config", "show", "again.yaml").out == shown.out


def test_a_run_leaves_a_folder_with_everything(trained_run: Path) -> None:
    expected = {"config.yaml", "metrics.jsonl", "trajectories", "checkpoints", "model"}
    report = {"report.md", "report.html", "learning_curve.png"}
    assert expected | report <= {path.name for path in trained_run.iterdir()}
    assert (trained_run / "report.html").read_text().count('class="sampled')
    assert "2 training steps" in (trained_run / "report.md").read_text()
    lines = [json.loads(line) for line in (trained_run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["mismatch/prob_abs_mean"] < 1e-4 for line in lines)


@pytest.mark.slow
def test_a_report_shows_the_newest_step_and_no_copies_of_files(trained_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained_run, tmp_path / "run", symlinks=True))
    store = run / "trajectories"
    report = write_run_report(run).html.read_text()
    (store / "step-000001.jsonl").replace(store / "step-000009-keep.jsonl")
    assert write_run_report(run).html.read_text() == report


def test_the_learning_curve_of_a_run_that_goes_on_is_drawn(trained_run: Path, tmp_path: Path) -> None:
    shutil.copy(trained_run / "metrics.jsonl", tmp_path)
    with updated_curve(tmp_path):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "learning_curve.png"}


@pytest.mark.slow
def test_progress_is_plain_lines_where_there_is_no_terminal(
    agentrl: Cli, workplace: Path, small: tuple[str, ...]
) -> None:
    ended = agentrl("train", "--env", "guess_number", "--model", "scratch", "trainer.steps=1", *small)
    assert ended.code == 0, ended.err
    assert ended.out == ""
    (line,) = [line for line in ended.err.splitlines() if line.startswith("step 1/1")]
    shown = ("reward", "groups that differ", "loss", "KL", "entropy", "gradient norm", "tokens/s", "staleness 0.00")
    for title in (*shown, "waiting for episodes"):
        assert title in line
    assert "agentrl eval --model runs/" in ended.err
    assert (workplace / "runs" / "latest").exists()

    resumed = agentrl("train", "--resume", "runs/latest", "trainer.steps=2")
    assert resumed.code == 0, resumed.err
    assert "step 2/2" in resumed.err
    assert "step 1/2" not in resumed.err


@pytest.mark.slow
def test_a_run_that_learns_nothing_says_so(agentrl: Cli, workplace: Path, small: tuple[str, ...]) -> None:
    words = ("--env", "guess_number", "--model", "scratch", *small, "trainer.steps=3", "agent.max_answer_tokens=1")
    ended = agentrl("train", *words, "agent.max_turns=1")
    assert ended.code == 0, ended.err
    assert ended.err.count("step 3: nothing is being learned: in the last 3 steps") == 1
    assert "done after step 3, but nothing was learned in 3 of 3 steps" in ended.err
    assert "no episode was better than another. 12 of 12 answers were cut off before their end" in ended.err
    assert "In 3 of the steps nothing was learned" in (workplace / "runs" / "latest" / "report.md").read_text()


def test_a_run_is_not_resumed_with_another_environment(agentrl: Cli, trained_run: Path) -> None:
    ended = agentrl("train", "--resume", str(trained_run), "--env", "household")
    assert ended.code == 2
    assert "its own config" in ended.err


@pytest.mark.slow
def test_control_c_saves_and_says_how_to_go_on(
    tmp_path: Path, small: tuple[str, ...], start_python: Callable[..., ForkedProgram]
) -> None:
    words = ["train", "--env", "guess_number", "--model", "scratch", "trainer.steps=500", *small]
    program = start_python(*AGENTRL, *words, folder=tmp_path)
    for line in program.stderr:
        if line.startswith("step 1/"):
            break
    program.send_signal(signal.SIGINT)
    code, _, rest = program.wait()
    assert code == 130, rest
    assert "resume with: agentrl train --resume" in rest
    assert (tmp_path / "runs" / "latest" / "report.html").is_file()
    assert "Traceback" not in rest
    assert list((tmp_path / "runs" / "latest" / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("interrupted", [False, True])
@pytest.mark.slow
def test_an_interrupted_run_with_many_episodes_does_not_read_them_all(
    trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: bool
) -> None:
    run = Path(shutil.copytree(trained_run, tmp_path / "run", symlinks=True))
    (run / "report.html").unlink()
    monkeypatch.setattr(train, "MAX_BYTES_AFTER_STOP", 100)
    result = RunResult(folder=run, step=2, checkpoint="", metrics={}, interrupted=interrupted)
    with pytest.raises(typer.Exit) if interrupted else nullcontext():
        train.print_run(result, load_config(run / "config.yaml"))
    assert (run / "report.html").exists() != interrupted


@pytest.mark.parametrize("command", ["train", "sft"])
def test_a_crowded_folder_is_not_overwritten(
    agentrl: Cli, workplace: Path, command: str, small: tuple[str, ...]
) -> None:
    (workplace / "runs" / "mine").mkdir(parents=True)
    (workplace / "runs" / "mine" / "notes.txt").write_text("keep me")
    ended = agentrl(command, "--env", "household", "--model", "scratch", "run.name=mine", *small)
    assert ended.code == 2
    assert "already exists" in ended.err
    assert (workplace / "runs" / "mine" / "notes.txt").read_text() == "keep me"


LEAVING = """
import asyncio, itertools, sys
import agentrl

class Leaving(agentrl.AsyncEnv):
    count = itertools.count(1)

    async def reset(self, *, seed=None, options=None):
        return "Say something.", {}

    async def step(self, action):
        number = next(Leaving.count)
        if number % 9 in (1, 3):
            sys.exit(0)
        if number % 9 in (2, 4):
            own = asyncio.create_task(asyncio.sleep(3600))
            own.cancel()
            await own
        return "Thanks.", float(len(action)), True, False, {}

    def admissible_actions(self):
        return ["yes", "no"]

class Always(Leaving):
    async def step(self, action):
        sys.exit(0)
"""


@pytest.fixture
def leaving(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module whose environments want to end the program."""
    (workplace / "leaving.py").write_text(LEAVING)
    monkeypatch.syspath_prepend(workplace)
    yield "leaving"
    sys.modules.pop("leaving", None)


@pytest.mark.slow
def test_a_run_goes_on_when_an_environment_exits_or_is_cancelled(
    agentrl: Cli, leaving: str, small: tuple[str, ...]
) -> None:
    plain = ["agent.options={format: plain, explain: false}", "environment.isolation=inline"]
    words = ["trainer.steps=2", "run.name=r", *plain, *small]
    ended = agentrl("train", "--env", f"{leaving}:Leaving", "--model", "scratch", *words)
    assert ended.code == 0, ended.err
    assert "done after step 2" in ended.err
    assert "an episode for the new model's vocabulary failed; others follow: step of environment" in ended.err
    lines = [json.loads(line) for line in Path("runs/r/metrics.jsonl").read_text().splitlines()]
    assert sum(line["rollout/retries"] for line in lines) > 0
    measured = agentrl("eval", "--model", "runs/r", "--tasks", "5")
    assert measured.code == 0, measured.err


def test_an_environment_that_always_exits_ends_the_command_with_a_reason(
    agentrl: Cli, leaving: str, small: tuple[str, ...]
) -> None:
    plain = ["agent.options={format: plain, explain: false}", "environment.isolation=inline"]
    words = ["trainer.steps=2", *plain, *small]
    ended = agentrl("train", "--env", f"{leaving}:Always", "--model", "scratch", *words)
    assert ended.code == 1, ended.err
    assert "groups in a row have no episode to train on" in ended.err
    assert "SystemExit: 0" in ended.err


def test_a_reward_function_that_always_fails_is_told_once_with_its_cause_and_counts(
    agentrl: Cli, workplace: Path, small: tuple[str, ...]
) -> None:
    (workplace / "broken.py").write_text('def reward(trajectory, task) -> float:\n    return {}["missing"]\n')
    words = ["--env", "guess_number", "--reward", "./broken.py:reward", "--model", "scratch", "trainer.steps=2"]
    ended = agentrl("train", *words, "rollout.retries=0", *small)
    assert ended.code == 1, ended.err
    assert ended.err.count("KeyError: 'missing'") == 1
    last = ended.err.splitlines()[-1]
    assert re.match(r"error: reward function \./broken\.py:reward failed in \d+ of \d+ attempts: got KeyError", last)
    assert "broken.py line 2)" in last
    assert "4 groups in a row have no episode to train on; fix the reported error" in last


def test_a_reward_that_is_always_wrong_is_told_with_what_was_expected(
    agentrl: Cli, workplace: Path, small: tuple[str, ...]
) -> None:
    (workplace / "empty.py").write_text("def reward(trajectory, task) -> float:\n    return None\n")
    words = ["--env", "guess_number", "--reward", "./empty.py:reward", "--model", "scratch", "trainer.steps=2"]
    ended = agentrl("train", *words, "rollout.retries=0", *small)
    assert "attempts: got NoneType None, expected a finite number" in ended.err.splitlines()[-1]


def test_rewards_that_never_apply_are_named_as_the_cause(agentrl: Cli, workplace: Path, small: tuple[str, ...]) -> None:
    (workplace / "never.py").write_text("def reward(trajectory, task) -> float | None:\n    return None\n")
    words = ["--env", "guess_number", "--reward", "./never.py:reward", "--model", "scratch", "trainer.steps=2"]
    ended = agentrl("train", *words, *small)
    assert ended.code == 1
    assert "got None from every reward function for" in ended.err.splitlines()[-1]


def test_a_dry_run_refuses_staleness_that_drops_allowed_episodes(agentrl: Cli, workplace: Path) -> None:
    words = ["agent.max_seconds=300", "rollout={max_staleness: 1, batch_order: greedy}", "--dry-run"]
    ended = agentrl("train", "quickstart", *words, "--step-seconds", "60")
    assert ended.code != 0
    assert "rollout.max_staleness contradicts agent.max_seconds" in " ".join(ended.err.split())
    shown = agentrl("train", "quickstart", *words, "--step-seconds", "200")
    assert re.search(r"2 steps +400 s", shown.out)
    missing = agentrl("train", "quickstart", "--step-seconds", "60")
    assert "--step-seconds needs --dry-run" in missing.err


def test_a_dry_run_of_a_resumed_run_uses_its_measured_steps(agentrl: Cli, trained_run: Path) -> None:
    before = (trained_run / "metrics.jsonl").read_bytes()
    shown = agentrl("train", "--resume", str(trained_run), "trainer.steps=99", "--dry-run")
    assert shown.code == 0, shown.err
    words = " ".join(shown.out.split())  # lines are broken at the width of the screen
    assert re.search(r" step [\d.e-]+ s rollout.max_staleness \+ 1, of [\d.e-]+ s each ", words)
    assert (trained_run / "metrics.jsonl").read_bytes() == before
