"""Environments that block, exit, print or return what no run accepts: the check says so, and ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.waiting import wait_until

from agentrl.testing import check_env
from agentrl.testing.env_subject import EFFORTS
from agentrl.testing.report import CheckReport, CheckStatus

WORLDS = Path(__file__).parent.parent / "worlds"
PATIENCE_S = 60
FAILED, WARNED, SKIPPED = CheckStatus.FAILED, CheckStatus.WARNED, CheckStatus.SKIPPED
PLAYS = "plays an episode"
HERE = "is the same everywhere"
CLEAN = "keeps standard output clean"


@pytest.fixture(autouse=True)
def _worlds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(WORLDS)
    yield
    sys.modules.pop("broken_worlds", None)


def check(name: str, **settings: Any) -> CheckReport:
    return check_env(f"broken_worlds:{name}", **{"call_timeout_s": PATIENCE_S, **settings})


def complaints(report: CheckReport) -> dict[str, str]:
    wrong = (*report.with_status(FAILED), *report.with_status(WARNED))
    return {row.check: f"{row.status}: {row.detail}" for row in wrong}


BROKEN = [
    ("Surrogate", "returns valid values", "failed: observation of step .* text without lone surrogates"),
    (
        "Lines",
        "returns valid values",
        "failed: observation of reset is invalid: got tuple .* expected text, or a tuple",
    ),
    ("WordOfSuccess", "returns valid values", "failed: success of info .* got str 'yes', expected True or False"),
    (
        "WordOfReward",
        "returns valid values",
        "failed: final_reward is invalid: got str 'good', expected a finite number",
    ),
    ("PaidForNothing", "doing nothing does not pay", "failed: final_reward returns 1 and a success before the first"),
    ("Endless", "ends properly", "warned: no episode ended within 100 steps, and no limit is stated"),
    ("HelplessExpert", "is solved by its expert", "warned: the expert solves nothing: 0 of 8 solved"),
    ("EasyExpert", "is solved by its expert", "warned: the expert is not better than random play"),
    ("Easy", "has a random score", "warned: random play solves everything"),
    ("Unrewarded", "rewards success", "warned: [1-8] of 8 episodes are successes, and all return 0"),
    ("CountedKey", "has stable state keys", "failed: state_key.. returns another key in a second call"),
    ("InstanceKey", "has stable state keys", "failed: state_key.. differs between two environments"),
    ("ListedKey", "has stable state keys", "failed: state_key.. gave a list, expected text"),
    ("Printing", CLEAN, "warned: playing writes 'debug .* to standard output"),
    ("Writing", CLEAN, "warned: playing writes 'debug' to standard output"),
    ("Nothing", "accepts admissible actions", "failed: admissible_actions.. is empty before the episode has ended"),
    ("Deaf", "accepts admissible actions", "failed: 'fly' is listed as admissible but not accepted"),
    (
        "NoExpert",
        "is solved by its expert",
        "failed: expert is invalid: got int 1, expected an object with a method",
    ),
    ("NumberedSnapshot", "restores snapshots", "failed: snapshot is invalid: got int 1, expected a method"),
    ("Rarely", HERE, "failed: ZeroDivisionError: rare"),
]


@pytest.mark.parametrize(("name", "rule", "words"), BROKEN, ids=[f"{name}-{rule}" for name, rule, _ in BROKEN])
def test_a_fault_is_found_where_it_is(name: str, rule: str, words: str) -> None:
    (row,) = check(name, only=(rule,)).rows
    assert row.check == rule
    found = f"{row.status}: {row.detail}"
    assert re.match(words, found), found


@pytest.mark.parametrize("name", ["ArrayReward", "JudgedPlace", "Numpy", "Passing", "Sound"])
@pytest.mark.slow
def test_sound_environments_have_no_fault(name: str) -> None:
    assert complaints(check(name)) == {}


@pytest.mark.parametrize(
    ("name", "words"), [("Doubled", "changes torch.set_default_dtype for"), ("Moved", "changes the current folder for")]
)
def test_changed_settings_of_the_process_are_recommended_to_stay_in_one(
    name: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path.cwd())  # and back
    before = torch.get_default_dtype()
    try:
        (row,) = check(name, only=("is isolated enough",)).rows
    finally:
        torch.set_default_dtype(before)
    assert (row.status, words in row.detail) == (WARNED, True), row


def test_a_list_that_is_none_is_named() -> None:
    (row,) = check("NoList", only=("accepts admissible actions",)).rows
    assert (row.status, row.detail) == (SKIPPED, "admissible_actions() returns None")


UNPLAYABLE = [
    ("Exiting", "step ended the process (SystemExit)"),
    ("Interrupting", "step ended the process (KeyboardInterrupt)"),
    ("Raising", "step raised ValueError: boom"),
    ("Alarming", "step raised ValueError: signal only works in main thread of the main interpreter (this code runs in"),
    ("NoSeed", "reset does not take its arguments: got reset() -> Any, expected reset(self, *, seed"),
    ("TwoRewards", "reward is invalid: got ndarray array([0., 0.]), expected a finite number"),
    ("FourValues", "step returned 4 values, expected 5: observation, reward, terminated, truncated, info"),
    ("NoInfo", "reset is invalid: got str 'Room"),
    ("Worded", "admissible_actions is invalid: got str 'look', expected a list of texts"),
    ("Functions", "a tool of the environment is invalid: got builtin_function_or_method"),
    ("HintMethod", "action_hint of the environment is invalid: got method"),
    ("WrittenKey", "state_key is invalid: got str 'key', expected a method"),
    ("number", "the created environment is invalid: got int 7, expected an object with reset, step and close"),
]


@pytest.mark.parametrize(("name", "words"), UNPLAYABLE)
@pytest.mark.parametrize("only", [("has tasks", "is deterministic"), ("plays an episode", "has tasks", HERE)])
def test_without_an_episode_one_row_says_why(name: str, words: str, only: tuple[str, ...]) -> None:
    first, *rest = check(name, only=only).rows
    assert (first.check, first.status) == (PLAYS, FAILED)
    assert first.detail.startswith(words), first
    assert {(row.status, row.detail) for row in rest} == {(SKIPPED, "no episode can be played")}
    assert len(rest) == 2


def test_an_environment_that_ends_its_process_does_not_end_the_check() -> None:
    first, *rest = check("Dying", only=(PLAYS, HERE)).rows
    assert first.detail == "the environment ended its process (exit code 5)"
    assert [row.status for row in rest] == [SKIPPED]


@pytest.mark.parametrize(("name", "call"), [("Blocking", "step"), ("BlockingReset", "reset")])
@pytest.mark.parametrize("only", [(PLAYS, "has tasks"), (PLAYS, HERE)], ids=["here", "elsewhere"])
def test_a_call_that_does_not_return_ends_the_check(name: str, call: str, only: tuple[str, ...]) -> None:
    report = check(name, only=only, call_timeout_s=0.5)
    assert complaints(report) == {PLAYS: f"failed: {call} did not return within 0.5 s"}
    assert [row.status for row in report.rows] == [FAILED, SKIPPED]


def test_a_full_check_is_more_patient() -> None:
    assert [effort.call_s for effort in EFFORTS.values()] == [10, 30]


def start(*words: str, folder: Path = WORLDS) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(WORLDS), str(folder), *sys.path])
    # who started the tests may have Ctrl-C ignored, as a shell does in the background
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); import agentrl.cli as it; it.main()"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program, "env", "check", *words],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def outcome(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code and outputs of a command; nothing of its session may be left."""
    told, complained = process.communicate(timeout=PATIENCE_S)
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    return process.returncode, told, complained


@pytest.mark.slow
def test_the_command_ends_though_a_thread_does_not_and_prints_nothing_but_json() -> None:
    rules = [word for rule in (PLAYS, HERE, CLEAN) for word in ("--only", rule)]
    code, told, _ = outcome(start("broken_worlds:Threaded", "--quick", "--json", "-", *rules))
    assert code == 0
    assert [row["status"] for row in json.loads(told)["rows"]] == ["passed"] * 3


@pytest.mark.slow
def test_what_an_environment_writes_does_not_spoil_json() -> None:
    code, told, _ = outcome(start("broken_worlds:Writing", "--quick", "--json", "-", "--only", CLEAN))
    assert code == 0
    assert [row["status"] for row in json.loads(told)["rows"]] == ["warned"]


@pytest.mark.slow
def test_the_command_reports_a_call_that_does_not_return() -> None:
    words = ("--quick", "--only", "has tasks", "--call-timeout", "0.5")
    code, told, complained = outcome(start("broken_worlds:Blocking", *words))
    assert code == 1
    assert "step did not return within 0.5 s" in " ".join(told.split())
    assert "breaks rules: got plays an episode" in " ".join(complained.split())


@pytest.mark.slow
def test_ctrl_c_still_ends_the_check(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    (tmp_path / "waiting_world.py").write_text(
        "import pathlib, threading, broken_worlds\n"
        "class Waiting(broken_worlds.Sound):\n"
        "    def step(self, action):\n"
        f"        pathlib.Path({str(begun)!r}).touch()\n"
        "        threading.Event().wait()\n"
    )
    process = start("waiting_world:Waiting", "--only", HERE, folder=tmp_path)
    wait_until(lambda: begun.exists() or process.poll() is not None, "a step that waits")
    os.kill(process.pid, signal.SIGINT)
    code, told, complained = outcome(process)
    assert (code, told) == (130, "")
    assert "interrupted" in complained
