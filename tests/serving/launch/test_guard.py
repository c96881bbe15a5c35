"""Servers die with the process that started them, whatever ends it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.waiting import PATIENCE_S

PARENT = """
import asyncio, os, signal, sys, time
from pathlib import Path
from agentrl.serving.launch import LaunchCommand, Launcher

# Whoever runs the tests may have these ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
for number in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_DFL)
ends, program, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
numbers = iter(range(9))

def command(port, gpus):
    pids = folder / "pids" / str(next(numbers))
    pids.mkdir(parents=True)
    return LaunchCommand(argv=[sys.executable, program, str(pids), str(port)])

async def main():
    launcher = Launcher(command, gpus=[(), ()], logs=folder / "logs", start_timeout_s=60)
    await launcher.start()
    if ends == "keeps_the_pipe":
        heir = os.fork()
        if heir == 0:
            time.sleep(3600)  # a process that is forked and runs no program of its own inherits every descriptor
        Path(folder / "heir").write_text(str(heir))
    print("ready", flush=True)
    if ends == "returns":
        return
    if ends == "raises":
        raise ZeroDivisionError
    if ends == "exits":
        os._exit(3)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


@pytest.fixture
def parent(fakes, tmp_path):
    """A process that starts two servers, and then ends as the word says; or waits to be ended."""
    program = tmp_path / "parent.py"
    program.write_text(PARENT)
    processes = []

    def start(ends: str) -> subprocess.Popen:
        words = [sys.executable, str(program), ends, str(fakes.program), str(fakes.folder)]
        with (tmp_path / "parent.log").open("wb") as errors:
            process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, start_new_session=True)
        processes.append(process)
        with process.stdout as words:
            assert words.readline() == b"ready\n", (tmp_path / "parent.log").read_text()
        return process

    fakes.folder.mkdir()
    yield start
    for process in processes:
        process.kill()
        process.wait(PATIENCE_S)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_no_server_survives_a_signal_to_its_parent(parent, fakes, alive_of, all_gone, number):
    process = parent("waits")
    assert len(alive_of(fakes.pids())) == 6
    process.send_signal(number)
    assert process.wait(60) != 0
    assert all_gone(fakes.pids())


def test_no_server_survives_a_signal_to_its_parents_process_group(parent, fakes, all_gone):
    process = parent("waits")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(60)
    assert all_gone(fakes.pids())


@pytest.mark.parametrize(("ends", "code"), [("returns", 0), ("raises", 1), ("exits", 3)])
def test_no_server_survives_a_parent_that_ends_without_closing(parent, fakes, all_gone, ends, code):
    process = parent(ends)
    assert process.wait(60) == code
    assert all_gone(fakes.pids())


def test_no_server_survives_when_another_process_keeps_the_pipe_open(parent, fakes, alive_of, all_gone):
    process = parent("keeps_the_pipe")
    process.kill()
    process.wait(60)
    heir = int(Path(fakes.folder / "heir").read_text())
    assert alive_of({heir})
    try:
        assert all_gone(fakes.pids())
    finally:
        os.kill(heir, signal.SIGKILL)


def test_a_stopped_server_does_not_survive_either(parent, fakes, all_gone):
    process = parent("waits")
    for pid in fakes.pids():
        os.kill(pid, signal.SIGSTOP)
    process.kill()
    process.wait(60)
    assert all_gone(fakes.pids())


def test_the_guard_ends_with_its_server_and_says_why(parent, fakes, parent_of, all_gone):
    process = parent("waits")
    guards = {parent_of(pid) for pid in fakes.pids()}
    assert process.pid not in guards - fakes.pids()
    process.kill()
    process.wait(60)
    assert all_gone(fakes.pids() | guards)
    for log in (fakes.folder / "logs").iterdir():
        assert "the process that started this server has exited" in log.read_text()
