"""Whole runs on two simulated nodes: ranks on one, an engine on the other."""

import pytest

from agentrl.observe.metrics import read_metrics
from agentrl.observe.progress import RunWatcher
from agentrl.orchestrator import train

pytestmark = pytest.mark.timeout(300)


class Listener(RunWatcher):
    """Remembers what a run says."""

    def __init__(self):
        self.said = []

    def on_message(self, text):
        self.said.append(text)


def test_ranks_on_one_node_train_and_an_engine_on_the_other_samples(nodes, placed, tiny_run):
    run, listener = tiny_run(*placed, "trainer.processes=2", "trainer.steps=2"), Listener()
    assert train(run, watcher=listener).step == 2
    lines = read_metrics(run.folder.metrics_file)
    assert [line["sync/servers"] for line in lines] == [1, 1]
    assert all(line["sync/probe_difference"] < 1e-4 for line in lines)
    assert all(line["train/grad_norm"] > 0 for line in lines)
    where = dict(text.partition(", with")[0].split(" is on ") for text in listener.said if " is on node " in text)
    assert where["rank 0"] == where["rank 1"] != where["server-0"]
    assert (run.folder.logs / "rank-1.log").is_file()
    assert not list(run.folder.path.glob(".cluster-*"))
