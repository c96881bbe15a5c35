"""A lost rank, engine or node, a cluster without room, and an interrupted run."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentrl.builders import cluster
from agentrl.builders.ray import actors
from agentrl.errors import RankLost, UsageError
from agentrl.observe.metrics import read_metrics
from agentrl.runs.rl import train

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
DEADLINE_S = 60
"""In which a run's processes must end after it; it takes a few seconds on an idle machine."""


STEPS = "trainer.steps=8"


def finished(run, story):
    """Train to the end; return the lines of all steps."""
    assert train(run, watcher=story).step == run.config.trainer.steps
    lines = read_metrics(run.folder.metrics_file)
    assert [line["step"] for line in lines] == list(range(1, run.config.trainer.steps + 1))
    assert all(line["sync/probe_difference"] < 1e-4 for line in lines)
    return lines


def test_a_killed_engine_is_replaced_and_the_run_goes_on(nodes, placed, tiny_run, story, send_signal, actor_processes):
    told = story(1, lambda: send_signal("LocalEngineActor"))
    finished(tiny_run(*placed, "trainer.processes=2", STEPS), told)
    assert any("server-0 was lost on node" in text and "It is being restarted" in text for text in told.said)
    assert any("serves again with weights of version" in text for text in told.said)
    assert actor_processes("RankActor") == actor_processes("LocalEngineActor") == []


def test_an_engine_of_a_lost_node_starts_on_another_one(placed, spare_node, tiny_run, story, remove_node_of):
    for _ in range(2):
        spare_node(doomed=1)
    removed = []
    told = story(1, lambda: removed.append(remove_node_of(told, "server-0")))
    finished(tiny_run(*placed, "cluster.engine={CPU: 1, doomed: 1}", STEPS), told)
    assert any(text.startswith("server-0 was lost on node") and removed[0] in text for text in told.said)
    (moved,) = [text for text in told.said if text.startswith("server-0 is on node") and text.endswith(" now")]
    assert removed[0] not in moved


@pytest.mark.timeout(400)
def test_a_stopped_engine_is_replaced(nodes, placed, tiny_run, story, send_signal, actor_processes, monkeypatch):
    monkeypatch.setattr(cluster, "ACTOR_PING_S", 2.0)
    told = story(1, lambda: send_signal("LocalEngineActor", signal.SIGSTOP))
    finished(tiny_run(*placed, STEPS), told)
    assert any("server-0 was lost" in text and "no answer in 2" in text for text in told.said)
    assert actor_processes("LocalEngineActor") == []


def test_a_killed_rank_restarts_the_run_from_its_checkpoint(nodes, placed, tiny_run, story, send_signal):
    told = story(3, lambda: send_signal("RankActor"))
    finished(tiny_run(*placed, "trainer.processes=2", "trainer.steps=6"), told)
    (text,) = [text for text in told.said if "restarts from its newest checkpoint" in text]
    assert "rank 1 of the trainer was lost on node" in text
    assert "(1 of 3: trainer.restarts)" in text


def test_a_stopped_rank_restarts_the_run(nodes, placed, tiny_run, story, send_signal, monkeypatch):
    monkeypatch.setattr(actors, "RANK_PING_EVERY_S", 0.5)
    monkeypatch.setattr(actors, "RANK_SILENCE_S", 3.0)
    told = story(3, lambda: send_signal("RankActor", signal.SIGSTOP))
    finished(tiny_run(*placed, "trainer.processes=2", "trainer.steps=6"), told)
    (text,) = [text for text in told.said if "restarts from its newest checkpoint" in text]
    assert "no answer in 3 s" in text


def test_a_rank_of_a_lost_node_restarts_on_another_one(nodes, spare_node, tiny_run, story, remove_node_of):
    """Both ranks and the engine have nodes of their own, the engine the second one; a fourth is left for the rank."""
    for _ in range(2):
        spare_node()
    removed = []
    told = story(3, lambda: removed.append(remove_node_of(told, "rank 1")))
    settings = f"address: '{nodes.address}', strategy: strict_spread, engine: {{CPU: 1, engine: 1}}, timeout_s: 120"
    finished(tiny_run(f"cluster={{{settings}}}", "trainer.processes=2", "trainer.steps=5"), told)
    assert any("restarts from its newest checkpoint" in text for text in told.said)
    assert f"({removed[0]})" not in told.places()["rank 1"]


@pytest.mark.parametrize("restarts", [0, 1])
def test_restarts_are_bounded(restarts, nodes, placed, tiny_run, story, send_signal):
    class Killer(story):
        """Kills a rank whenever the first step is done."""

        def on_step(self, step, metrics):
            if step == 1:
                send_signal("RankActor")

    told = Killer()
    run = tiny_run(*placed, "trainer.processes=2", f"trainer.restarts={restarts}", "checkpoint.every=50")
    with pytest.raises(RankLost, match=r"rank 1 of the trainer was lost on node \S+ \(\w+\): got ActorDied"):
        train(run, watcher=told)
    assert sum("restarts from its newest checkpoint" in text for text in told.said) == restarts


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
