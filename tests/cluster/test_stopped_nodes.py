"""Nodes that fall silent, as if their machines hung: their parts of a run move to another node."""

import pytest

from agentrl.observe.metrics import read_metrics
from agentrl.runs.rl import train

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
ON_HEAD = "rank: {CPU: 1, trainer: 1}"
ON_SECOND = "engine: {CPU: 1, engine: 1}"


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("server-0", f"{ON_HEAD}, engine: {{CPU: 1, spare: 1}}"),
        ("environments-0", f"{ON_HEAD}, {ON_SECOND}, environments: 1, environment: {{CPU: 1, spare: 1}}"),
        ("rank 1", f"strategy: strict_spread, {ON_SECOND}"),
    ],
    ids=["engine", "environments", "rank"],
)
def test_a_run_survives_a_stopped_node(name, settings, nodes, spare_node, stop_node_of, tiny_run, story):
    for _ in range(2):
        spare_node(spare=1)
    stopped = []
    told = story(2, lambda: stopped.append(stop_node_of(told, name)))
    run = tiny_run(
        f"cluster={{address: '{nodes.address}', {settings}, timeout_s: 180}}",
        "environment.isolation=process",
        f"trainer.processes={2 if name == 'rank 1' else 1}",
        "trainer.steps=6",
    )
    assert train(run, watcher=told).step == 6
    assert [line["step"] for line in read_metrics(run.folder.metrics_file)] == list(range(1, 7))
    lost = [text for text in told.said if f"({stopped[0]})" in text and "was lost on node" in text]
    assert name in lost[0]
    assert any(name in text and " is on node" in text and stopped[0] not in text for text in told.said)
