"""A lost rank, engine or node, a cluster without room, and an interrupted run."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from agentrl.errors import TrainingError, UsageError
from agentrl.observe.metrics import read_metrics
from agentrl.observe.progress import RunWatcher
from agentrl.runs.rl import train

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
DEADLINE_S = 60
"""In which a run must notice a loss; it takes a few seconds on an idle machine."""


class AfterStep(RunWatcher):
    """Does something once, after a step."""

    def __init__(self, step, action):
        self.step, self.action, self.at = step, action, None

    def on_step(self, step, metrics):
        if step == self.step:
            self.at = time.monotonic()
            threading.Thread(target=self.action).start()


def pids_of(kind):
    """The processes of actors of one class, below this machine's nodes."""
    found = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            title = line.read_bytes().replace(b"\0", b" ").decode()
        except (OSError, UnicodeDecodeError):
            continue
        if title.startswith(f"ray::{kind}"):
            found.append(int(line.parent.name))
    return found


def kill_actor(kind):
    (pid,) = pids_of(kind)
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(("kind", "name"), [("RankActor", "rank 1 of the trainer"), ("LocalEngineActor", "server-0")])
def test_a_killed_actor_ends_the_run_with_its_name_and_node(kind, name, nodes, placed, tiny_run):
    watcher = AfterStep(1, lambda: kill_actor(kind))
    run = tiny_run(*placed, "trainer.processes=2", "trainer.steps=50")
    with pytest.raises(TrainingError, match=rf"{name} was lost on node \S+ \(\w+\): got ActorDied"):
        train(run, watcher=watcher)
    assert time.monotonic() - watcher.at < DEADLINE_S
    assert pids_of("RankActor") == pids_of("LocalEngineActor") == []


def test_a_lost_node_ends_the_run_with_its_name(nodes, placed, tiny_run):
    doomed = nodes.add_node(num_cpus=1, resources={"doomed": 1})
    watcher = AfterStep(1, lambda: nodes.remove_node(doomed, allow_graceful=False))
    run = tiny_run(*placed, "cluster.engine={CPU: 1, doomed: 1}", "trainer.steps=50")
    said = rf"server-0 was lost on node \S+ \({doomed.node_id[:8]}\)"
    with pytest.raises(TrainingError, match=said):
        train(run, watcher=watcher)
    assert time.monotonic() - watcher.at < DEADLINE_S


def test_no_room_is_told_with_what_there_is(nodes, placed, tiny_run):
    run = tiny_run(*placed, "cluster.engine={CPU: 1, tpu: 1}", "cluster.timeout_s=1")
    with pytest.raises(
        UsageError, match=r"(?s)the resources for the run: got node .*CPU 4, trainer 4.*server-0: CPU 1, tpu 1"
    ):
        train(run)


def test_no_cluster_at_the_address(tiny_run):
    run = tiny_run("cluster.address='127.0.0.1:1'")
    with pytest.raises(UsageError, match=r"(?s)cannot connect to the cluster.*a running one at 127\.0\.0\.1:1"):
        train(run)


def ray_processes(mark):
    """Processes that carry a mark in their environment."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in environment.read_bytes():
                found.append(int(environment.parent.name))
        except OSError:
            continue
    return found


STOPPED_RUN = """
import sys
sys.path.insert(0, {worlds!r})
from agentrl.runs.start import start_run
from agentrl.config import load_config
from agentrl.observe.progress import RunWatcher
from agentrl.runs.rl import train

class Teller(RunWatcher):
    def on_step(self, step, metrics):
        print(step, flush=True)

print(train(start_run(load_config(None, {overrides!r}), kind="test"), watcher=Teller()).interrupted)
"""


def test_ctrl_c_leaves_nothing_of_a_cluster_that_was_started_here(tmp_path, tiny_words):
    mark = f"AGENTRL_TEST_MARK={tmp_path.name}-{os.getpid()}"
    words = tiny_words(
        f"run.directory={tmp_path}", "run.name=run", "cluster=ray", "trainer.processes=2", "trainer.steps=500"
    )
    name, _, value = mark.partition("=")
    run = subprocess.Popen(
        [sys.executable, "-c", STOPPED_RUN.format(**words)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, name: value},
        start_new_session=True,
    )
    with run, run.stdout:
        assert run.stdout.readline() == "1\n"
        assert len(ray_processes(mark)) > 3
        os.killpg(run.pid, signal.SIGINT)  # as a terminal does
        assert run.stdout.read().splitlines()[-1] == "True"
    assert run.returncode == 0
    until = time.monotonic() + DEADLINE_S
    while ray_processes(mark) and time.monotonic() < until:
        time.sleep(0.1)
    assert ray_processes(mark) == []
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert list((tmp_path / "run" / "checkpoints").iterdir())


def test_a_stopped_engine_ends_the_run_with_its_name(nodes, placed, tiny_run):
    def stop():
        (pid,) = pids_of("LocalEngineActor")
        os.kill(pid, signal.SIGSTOP)

    watcher = AfterStep(1, stop)
    run = tiny_run(*placed, "trainer.steps=50")
    with pytest.raises(TrainingError, match=r"server-0 was lost on node \S+ \(\w+\): got .*no answer in 30"):
        train(run, watcher=watcher)
    assert time.monotonic() - watcher.at < 4 * DEADLINE_S  # two deadlines of 30 s, and the end of the run
    assert pids_of("LocalEngineActor") == []
