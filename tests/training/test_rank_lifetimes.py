"""A rank ends with the process that started it, also while it imports torch."""

import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from agentrl.errors import UsageError
from agentrl.training.distributed.group import join, leave
from agentrl.training.distributed.launch import START, RankProcesses

PARENT = """
import os, subprocess, sys, time
start, pipe = sys.argv[1:]
with open(pipe, "wb") as output:
    rank = subprocess.Popen([sys.executable, "-P", "-c", start, str(os.getpid()), "slow_rank"], stdout=output)
print(rank.pid, flush=True)
time.sleep(1000)
"""
SLOW_RANK = "import time; print('imports', flush=True); time.sleep(1000)"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills children with their parent")
@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_rank_that_still_imports_ends_with_a_killed_trainer(tmp_path, is_stopped):
    (tmp_path / "slow_rank.py").write_text(SLOW_RANK)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with (
        subprocess.Popen(
            [sys.executable, "-c", PARENT, START, str(pipe)], env=environment, stdout=subprocess.PIPE
        ) as parent,
        ThreadPoolExecutor() as threads,
        pipe.open("rb") as output,
    ):
        assert output.readline() == b"imports\n"
        rank = int(parent.stdout.readline())
        if is_stopped:
            os.kill(rank, signal.SIGSTOP)
        parent.kill()
        assert threads.submit(output.read).result(timeout=60) == b""


def test_a_rank_whose_starter_is_gone_does_not_start():
    command = [sys.executable, "-P", "-c", START, str(os.getppid()), "agentrl.no_such_module"]
    assert subprocess.run(command, capture_output=True).returncode == 1
    command[4] = str(os.getpid())
    found = subprocess.run(command, capture_output=True, text=True)
    assert "agentrl.no_such_module" in found.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_stopped_rank_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("agentrl.training.distributed.launch.PROGRAM", "slow_rank")
    (tmp_path / "slow_rank.py").write_text(SLOW_RANK)
    monkeypatch.syspath_prepend(tmp_path)
    ranks = RankProcesses(2, logs=tmp_path)
    ranks.explain_s = 0.0
    ranks._start_rank(1, port=0)
    try:
        assert ranks.explain() is None
        os.kill(ranks.pids[1], signal.SIGSTOP)
        os.waitid(os.P_PID, ranks.pids[1], os.WSTOPPED | os.WNOWAIT)
        assert re.match(r"rank 1 of the trainer does not answer \(process \d+\): got .* stopped", str(ranks.explain()))
    finally:
        ranks.close(at_once=True)
    assert ranks.find_lost() is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_network_interface_that_this_machine_lacks_is_named(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,no-such-interface")
    with pytest.raises(UsageError, match=r"GLOO_SOCKET_IFNAME .* got no-such-interface, expected .*\blo\b"):
        join(None, rank=0, count=1)


def test_ranks_share_the_cores_of_the_trainer(tmp_path, monkeypatch):
    monkeypatch.setattr("agentrl.training.distributed.launch.PROGRAM", "slow_rank")
    (tmp_path / "slow_rank.py").write_text(SLOW_RANK)
    monkeypatch.syspath_prepend(tmp_path)
    cores = sorted(os.sched_getaffinity(0))
    ranks = RankProcesses(2, logs=tmp_path, cpus=[*cores, *cores][:2])
    try:
        ranks._start_rank(1, port=0)
        assert os.sched_getaffinity(ranks.pids[1]) == {[*cores, *cores][1]}
    finally:
        ranks.close(at_once=True)
    assert os.sched_getaffinity(0) == set(cores)


JOINING_RANK = (
    "import time; from agentrl.training.distributed.launch import join_starter; join_starter(); time.sleep(1000)"
)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
def test_a_collective_with_a_stopped_rank_fails_once_its_connections_are_shut_down(tmp_path, monkeypatch):
    """As after the loss of a machine that hangs: its ranks cannot be killed, and their connections stay open."""
    monkeypatch.setattr("agentrl.training.distributed.launch.PROGRAM", "joining_rank")
    (tmp_path / "joining_rank.py").write_text(JOINING_RANK)
    monkeypatch.syspath_prepend(tmp_path)
    processes = RankProcesses(2, logs=tmp_path)
    try:
        ranks = processes.start()
        os.kill(processes.pids[1], signal.SIGSTOP)
        with ThreadPoolExecutor() as threads:
            waiting = threads.submit(ranks.collect, ["own"])
            with pytest.raises(TimeoutError):
                waiting.result(timeout=0.5)
            ranks.connections.shut_down()
            with pytest.raises(RuntimeError, match=r"[Cc]onnection"):
                waiting.result(timeout=60)
    finally:
        processes.close(at_once=True)
        leave()
