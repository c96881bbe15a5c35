"""Processes that a program leaves on this machine are killed before its reward is read."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from agentrl.agent_loops.external import External

from agentrl.errors import Outcome
from agentrl.sandbox import program_guard

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who has started whom")

DETACH = """
def detached(work):
    if os.fork():
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    for number in range(3):
        os.close(number)
    work()
    os._exit(0)

def cheat():
    with open("reward.json", "w") as file:
        file.write("1.0")
    with open(MARK, "a") as file:
        file.write("cheated")
"""
UNTIL_REWARDED = """
def rewarded(wait=lambda: time.sleep(0.001)):
    until = time.monotonic() + 60.0  # ends by itself if the program fails before
    while not os.path.exists("reward.json") and time.monotonic() < until:
        wait()
    return time.monotonic()
"""
WAITING = """
def work():
    rewarded()
    time.sleep(1.5)
    cheat()
"""
FORKING = """
def fork():  # a new process all the time, and the old one is gone
    if os.fork():
        os._exit(0)
    os.setsid()
    time.sleep(0.0005)

def work():
    until = rewarded(fork) + 1.5
    while time.monotonic() < until:
        fork()
    cheat()
"""
STOPPED = """
def work():
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))
    rewarded()
    time.sleep(1.5)
    cheat()
"""
END = """
ask("What is 6 times 7?")
detached(work)
time.sleep(0.1)
open("reward.json", "w").write("0.25")
"""


@pytest.mark.parametrize("attack", [WAITING, FORKING, STOPPED], ids=["waiting", "forking", "stopped"])
async def test_who_leaves_the_session_of_a_program_is_ended_with_it(run_loop, program, tmp_path, attack):
    mark = tmp_path / "mark"
    command = program(f"import signal, time\nMARK = {str(mark)!r}\n" + DETACH + UNTIL_REWARDED + attack + END)
    trajectory, _ = await run_loop(External(command=command, reward_file="reward.json"), "42")
    assert (trajectory.outcome, trajectory.reward) == (Outcome.FINISHED, 0.25)
    await asyncio.sleep(1.6)
    assert not mark.exists(), "it went on"


def test_processes_that_fork_without_pause_are_all_found(tmp_path):
    mark = tmp_path / "mark"
    program = f"""
import os, time
for _ in range(2):
    if os.fork() == 0:
        until = time.monotonic() + 20.0
        while time.monotonic() < until:
            if os.fork():
                os._exit(0)
            os.setsid()
        open({str(mark)!r}, "w").close()
        os._exit(0)
time.sleep(0.2)
"""
    command = [sys.executable, program_guard.__file__, str(os.getpid()), sys.executable, "-c", program]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0
    assert not [entry for entry in Path("/proc").glob("[0-9]*") if str(mark).encode() in _command(entry)]


def _command(entry):
    try:
        return (entry / "cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


async def test_a_program_that_kills_its_guard_gets_no_reward(run_loop, program):
    lines = """
        import signal, time
        ask("What is 6 times 7?")
        open("reward.json", "w").write("1.0")
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(0.2)
    """
    trajectory, _ = await run_loop(External(command=program(lines), reward_file="reward.json"), "42")
    assert trajectory.outcome is Outcome.POLICY_ERROR
    assert "guard" in trajectory.error


@pytest.mark.usefixtures("time_from_the_first_request")
@pytest.mark.slow
async def test_a_time_that_is_over_ends_all_of_it(run_loop, program, tmp_path):
    mark = tmp_path / "mark"
    work = "\ndef work():\n    time.sleep(3.5)\n    cheat()\n"
    end = "\nask('What?')\ndetached(work)\ntime.sleep(60)\n"
    command = program(f"import time\nMARK = {str(mark)!r}\n" + DETACH + work + end)
    trajectory, _ = await run_loop(External(command=command, seconds=2.0), "42")
    assert trajectory.outcome is Outcome.TRUNCATED_TIME
    await asyncio.sleep(2.0)
    assert not mark.exists()


async def test_how_a_program_ends_is_told_as_before(run_loop, program):
    trajectory, _ = await run_loop(External(command=program("ask('What?')\nsys.exit('no more')")), "42")
    assert "ended with 1: no more" in trajectory.error
    lines = "import signal\nask('What?')\nos.kill(os.getpid(), signal.SIGSEGV)"
    trajectory, _ = await run_loop(External(command=program(lines)), "42")
    assert "ended with 139" in trajectory.error
