"""The status of real runs: while they live, hang, are suspended or killed, and after they have ended."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from support import waiting
from support.named_waits import status_text
from support.waiting import wait_until

from agentrl.cli.application import run as run_command
from agentrl.errors import TrainingError
from agentrl.message import Message, user
from agentrl.observe import run_status
from agentrl.observe.progress import RunningEpisode, RunStatus, RunWatcher
from agentrl.observe.run_status import Liveness, RunSnapshot, read_status, write_status
from agentrl.rollout.waits import WaitKind, WaitTracker
from agentrl.runs import status_writer
from agentrl.runs.diagnosis import diagnose_folder
from agentrl.runs.rl import train
from agentrl.runs.status_writer import MAX_EPISODES, MAX_TEXT_CHARS, StatusWriter
from agentrl.serving.local import LocalEngine
from agentrl.trajectory import Trajectory

HANG = """
import json, sys, time
from pathlib import Path
sys.path.insert(0, json.loads(sys.argv[1])["worlds"])
import letters
from agentrl.config import load_config
from agentrl.runs.rl import train
from agentrl.runs.start import start_run

real = letters.Letters.step
def step(self, action):
    if Path("runs/run/model").exists():  # not while episodes are played for the tokenizer
        Path("hanging").touch()
        time.sleep(1000)
    return real(self, action)
letters.Letters.step = step
train(start_run(load_config(None, json.loads(sys.argv[1])["overrides"]), kind="test"))
"""

IGNORING = """
import json, sys, time
from pathlib import Path
sys.path.insert(0, json.loads(sys.argv[1])["worlds"])
import letters
from agentrl.config import load_config
from agentrl.runs.rl import train
from agentrl.runs.start import start_run
from agentrl.runs.stop import forced_exit

real = letters.Letters.step
def step(self, action):
    while Path("runs/run/model").exists():
        Path("hanging").touch()
        try:
            time.sleep(1000)
        except BaseException:
            pass
    return real(self, action)
letters.Letters.step = step
with forced_exit(130):
    train(start_run(load_config(None, json.loads(sys.argv[1])["overrides"]), kind="test"))
"""


def status_command(capsys, *words):
    """Run `agentrl status`; return its exit code and what it printed."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        run_command(["status", *map(str, words)])
    return ended.value.code, capsys.readouterr().out


def test_a_finished_run_says_so(tiny_run, capsys, monkeypatch, tmp_path):
    run = tiny_run("trainer.steps=1")
    train(run)
    snapshot = read_status(run.folder.path)
    assert (snapshot.end, snapshot.step, snapshot.steps, snapshot.pid) == ("finished", 1, 1, os.getpid())
    assert snapshot.started <= snapshot.ended == snapshot.time
    code, printed = status_command(capsys, run.folder.path)
    assert code == 0
    assert "finished" in printed
    assert "step 1/1" in printed
    monkeypatch.chdir(tmp_path)
    code, printed = status_command(capsys, "--json")  # the newest run in runs
    found = json.loads(printed)
    assert (code, found["state"], found["end"], found["step"]) == (0, "finished", "finished", 1)
    assert found["run"].endswith("runs/run")


def test_a_failed_run_keeps_its_error(tiny_run, capsys, monkeypatch):
    async def fail(self, request):
        raise TrainingError("the engine is broken")

    class Kept(RunWatcher):
        def on_status(self, status):
            if status.episodes_running and not kept:
                kept.append(1)
                monkeypatch.setattr(LocalEngine, "generate", fail)

    kept = []
    run = tiny_run()
    (run.folder.checkpoints / "step-keep").mkdir(parents=True)  # so that the folder of the failed start is kept
    with pytest.raises(TrainingError):
        train(run, watcher=Kept())
    code, printed = status_command(capsys, run.folder.path)
    assert code == 1
    assert "failed" in printed
    assert "the engine is broken" in printed


def test_an_interrupted_run_is_stopped(tiny_run):
    class Stop(RunWatcher):
        def on_step(self, step, metrics):
            os.kill(os.getpid(), signal.SIGINT)

    run = tiny_run()
    assert train(run, watcher=Stop()).interrupted
    assert read_status(run.folder.path).end == "stopped"


@pytest.mark.slow
def test_a_run_that_hangs_is_suspended_and_killed(tiny_words, start_python, tmp_path, capsys):
    words = tiny_words("run.directory=runs", "run.name=run", "environment.isolation=thread")
    program = start_python("-c", HANG, json.dumps(words), folder=tmp_path)
    folder = tmp_path / "runs" / "run"
    wait_until((tmp_path / "hanging").exists, "a hanging step")
    wait_until(lambda: "environment  step of" in status_text(folder), "a status that names the step")

    def all_hang() -> bool:
        found = read_status(folder)
        return found.episodes["environment"] == len(found.in_flight) > 0

    wait_until(all_hang, "a status in which all episodes hang")
    code, printed = status_command(capsys, folder)
    assert code == 0
    assert "running (process" in printed
    assert "phase rollout" in printed
    snapshot = read_status(folder)
    one = snapshot.in_flight[0]
    assert one.state == "environment"
    assert [turn.role for turn in one.turns][-1] == "assistant"
    assert snapshot.memory_bytes > 0
    assert snapshot.engines[0].name == "engine"
    assert snapshot.waits[-1].deadline > snapshot.waits[-1].since

    os.kill(snapshot.pid, signal.SIGSTOP)
    wait_until(lambda: read_status(folder).liveness(time.time()) is Liveness.SUSPENDED, "a suspended run")
    code, printed = status_command(capsys, folder)
    assert code == 1
    assert f"kill -CONT {snapshot.pid}" in printed
    os.kill(snapshot.pid, signal.SIGCONT)
    os.kill(snapshot.pid, signal.SIGKILL)
    program.wait()
    code, printed = status_command(capsys, folder)
    assert code == 1
    assert "CRASHED" in printed
    assert "environment  step of" in printed
    assert read_status(folder).in_flight


@pytest.mark.slow
def test_a_run_that_two_interruptions_end_by_force_was_interrupted(tiny_words, start_python, tmp_path, capsys):
    words = tiny_words("run.directory=runs", "run.name=run")
    program = start_python("-c", IGNORING, json.dumps(words), folder=tmp_path)
    wait_until((tmp_path / "hanging").exists, "a hanging step")
    folder = tmp_path / "runs" / "run"
    pid = read_status(folder).pid
    for count in (1, 2):
        os.kill(pid, signal.SIGINT)
        wait_until(lambda: read_status(folder).stopping or program.poll() is not None, "a run that stops")
        assert program.poll() is None, count
    assert program.wait().code == 130
    assert read_status(folder).end is None, "the process ended without a last status"
    code, printed = status_command(capsys, folder)
    assert code == 0
    assert printed.startswith("interrupted ")
    assert f"resume it with: agentrl train --resume {folder}" in printed.replace("\n", "")
    assert diagnose_folder(folder).ending == "interrupted after step 0 of 4"


def test_a_process_that_writes_no_status_is_hung(tmp_path, monkeypatch):
    snapshot = StatusWriter(tmp_path, RunStatus()).snapshot()
    assert snapshot.liveness(snapshot.time) is Liveness.RUNNING
    assert snapshot.liveness(snapshot.time + 60) is Liveness.HUNG
    write_status(tmp_path, snapshot)
    monkeypatch.setattr(time, "time", lambda: snapshot.time + 60)
    assert "HUNG" in status_text(tmp_path)
    assert "for 60 s" in status_text(tmp_path)


def test_another_process_with_the_same_number_is_not_the_run(tmp_path):
    snapshot = StatusWriter(tmp_path, RunStatus()).snapshot()
    other = RunSnapshot(
        pid=snapshot.pid, host=snapshot.host, time=snapshot.time, process_started=snapshot.process_started - 1
    )
    assert other.liveness(snapshot.time) is Liveness.CRASHED
    elsewhere = RunSnapshot(pid=snapshot.pid, host="another machine", time=snapshot.time)
    assert elsewhere.liveness(snapshot.time) is Liveness.RUNNING
    assert elsewhere.liveness(snapshot.time + 60) is Liveness.HUNG


OWN_NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc")
WRITE_STATUS = """
import sys
from pathlib import Path
from agentrl.observe.progress import RunStatus
from agentrl.observe.run_status import write_status
from agentrl.runs.status_writer import StatusWriter
write_status(Path(sys.argv[1]), StatusWriter(Path(sys.argv[1]), RunStatus()).snapshot())
"""


@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run([*OWN_NAMESPACE, "true"], capture_output=True).returncode != 0,
    reason="needs unshare and the right to make a PID namespace",
)
def test_a_run_in_a_container_with_the_machines_name_has_not_crashed(tmp_path, monkeypatch):
    subprocess.run([*OWN_NAMESPACE, sys.executable, "-c", WRITE_STATUS, str(tmp_path)], check=True)
    snapshot = read_status(tmp_path)
    assert (snapshot.host, snapshot.pid < os.getpid()) == (socket.gethostname(), True)
    assert snapshot.liveness(snapshot.time + 1) is Liveness.RUNNING
    assert snapshot.liveness(snapshot.time + 60) is Liveness.HUNG
    monkeypatch.setattr(time, "time", lambda: snapshot.time + 60)
    assert "NO STATUS for 60 s" in status_text(tmp_path)


@pytest.mark.slow
def test_a_blocked_event_loop_is_named(tmp_path):
    def blocked_status():
        """Return the status once it names the waiting function: what reads the status blocks the loop, too."""
        found, place = read_status(tmp_path), f"{waiting.__file__} line"
        return found and found.blocked and place in found.blocked.by and found

    async def block():
        waits = WaitTracker()
        writer = StatusWriter(tmp_path, RunStatus(), waits)
        blocking = waits.on(WaitKind.ENVIRONMENT, "0-x/0.0", "a step of blocking code")
        with waits.report_stalls(60.0, lambda text: None) as writer.watch, writer, blocking:
            return wait_until(blocked_status, "a status of the blocked loop")

    snapshot = asyncio.run(block())
    assert "a step of blocking code" in snapshot.blocked.by
    assert snapshot.time - snapshot.blocked.since >= 2


def running(number, *messages):
    trajectory = Trajectory(
        id=f"0-e-t/{number}.0", task_id="t", environment="e", seed=0, group_id="0-e-t", conversations=[list(messages)]
    )
    return RunningEpisode(trajectory, time.time())


def test_a_status_is_bounded(tmp_path):
    texts = [user(f"{number} \ud83d{'x' * 5000}") for number in range(9)]
    texts.append(Message(role="assistant", content="end", reasoning="why"))
    episodes = [running(number, *texts) for number in range(300)]
    status = RunStatus(in_flight={one.trajectory.id: one for one in episodes})
    snapshot = StatusWriter(tmp_path, status).snapshot()
    write_status(tmp_path, snapshot)
    assert len(snapshot.in_flight) == MAX_EPISODES
    assert snapshot.episodes["loop"] == 300
    turns = snapshot.in_flight[0].turns
    assert [turn.role for turn in turns] == ["user", "user", "user", "assistant"]
    assert all(len(turn.text) <= MAX_TEXT_CHARS for turn in turns)
    assert turns[-1].text == "<think>why</think>\nend"
    assert read_status(tmp_path).in_flight[0].turns[0].text == turns[0].text


def test_the_states_of_episodes_come_from_their_latest_waits(tmp_path):
    waits, status = WaitTracker(), RunStatus()
    for number in range(5):
        one = running(number)
        status.in_flight[one.trajectory.id] = one
    kinds = (WaitKind.LOOP, WaitKind.TOOL, WaitKind.ENGINE)  # a tool that asks the engine
    for number, own in enumerate([kinds[:1], kinds[:2], kinds, (WaitKind.ENVIRONMENT,), ()]):
        for kind in own:
            waits.on(kind, f"0-e-t/{number}.0", str(kind)).__enter__()
    waits.on(WaitKind.CAPACITY, "1-e-t/0", "a free slot for an episode").__enter__()
    snapshot = StatusWriter(tmp_path, status, waits).snapshot()
    assert [one.state for one in snapshot.in_flight] == ["loop", "tool", "generating", "environment", "loop"]
    assert snapshot.episodes == {
        "waiting": 1, "generating": 1, "tool": 1, "environment": 1, "scoring": 0, "loop": 2,
    }  # fmt: skip
    with waits.on(WaitKind.GROUP_SCORER, "0-e-t", "Together"):
        assert StatusWriter(tmp_path, status, waits).snapshot().in_flight[4].state == "scoring"


def test_the_time_left_follows_the_last_steps(tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(status_writer.time, "monotonic", lambda: now[0])
    status = RunStatus(steps=10)
    writer = StatusWriter(tmp_path, status)
    found = []
    for step, seconds in ((0, 100), (1, 20), (2, 20), (3, 20)):
        status.step, now[0] = step, now[0] + seconds
        found.append(writer.snapshot().seconds_left)
    assert found == [None, None, 160.0, 140.0]
    now[0] += 5
    assert writer.snapshot().seconds_left == 135.0


def test_a_full_disk_costs_a_warning_and_not_the_run(tiny_run, monkeypatch, caplog):
    def fail(run, snapshot):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(status_writer, "write_status", fail)
    assert train(tiny_run("trainer.steps=1")).step == 1
    assert sum("status could not be written" in record.getMessage() for record in caplog.records) == 1


def test_a_hanging_disk_does_not_keep_a_run_from_ending(tmp_path, monkeypatch):
    released = threading.Event()
    monkeypatch.setattr(status_writer, "write_status", lambda run, snapshot: released.wait(60))
    monkeypatch.setattr(status_writer, "LAST_STATUS_S", 0.1)
    began = time.monotonic()
    with StatusWriter(tmp_path, RunStatus()):
        pass
    released.set()
    assert time.monotonic() - began < 30


def test_what_cannot_be_read_is_no_status(tmp_path, capsys):
    assert read_status(tmp_path) is None
    (tmp_path / run_status.STATUS_FILE).write_text("{")
    assert read_status(tmp_path) is None
    (tmp_path / run_status.STATUS_FILE).write_text('{"pid": 1, "phase": "train", "added_later": 3}')
    assert read_status(tmp_path).phase == "train"
    code, _ = status_command(capsys, tmp_path / "nothing")
    assert code == 2
    (tmp_path / "config.yaml").write_text("")
    (tmp_path / run_status.STATUS_FILE).unlink()
    code, _ = status_command(capsys, tmp_path)
    assert code == 2


def test_watching_ends_with_the_run(tiny_run, capsys):
    run = tiny_run("trainer.steps=1")
    train(run)
    code, printed = status_command(capsys, run.folder.path, "--watch")
    assert code == 0
    assert "finished" in printed
    code, printed = status_command(capsys, run.folder.path, "--watch", "--json")
    assert json.loads(printed)["state"] == "finished"
