"""Real servers as actors on another simulated node than the trainer's; skipped without Ray.

make test-engines-cluster
"""

import sys
from pathlib import Path

import pytest

from agentrl.config import load_config
from agentrl.observe.metrics import read_metrics
from agentrl.runs.rl import train
from agentrl.runs.start import start_run

ray_cluster = pytest.importorskip("ray.cluster_utils", reason="Ray is not installed: make ray")
pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]
WORLDS = Path(__file__).parent.parent / "worlds"
RUN = (
    "environment={name: letters:Letters, isolation: inline}",
    "agent={loop: react_text, options: {format: plain, explain: false}, max_answer_tokens: 8, max_tokens: 256}",
    "model.scratch={layers: 1, hidden_size: 64, heads: 2, kv_heads: 1, vocab_size: 300, max_context: 256}",
    "model.scratch.initializer_range=0.2",
    "algorithm.group_size=4",
    "trainer={steps: 2, tasks_per_step: 4, learning_rate: 1e-2}",
    "run.name=run",
)


@pytest.fixture(scope="module")
def address():
    """Of a cluster of two nodes."""
    trainer, engine = ({"num_cpus": 2, "resources": {name: 2}} for name in ("trainer", "engine"))
    cluster = ray_cluster.Cluster(initialize_head=True, head_node_args={**trainer, "include_dashboard": False})
    cluster.add_node(**engine)
    yield cluster.address
    cluster.shutdown()


@pytest.mark.parametrize(
    ("engine", "transport"), [("vllm", "collective"), ("vllm", "shared_memory"), ("sglang", "collective")]
)
def test_a_server_on_another_node(engine, transport, address, vllm_python, sglang_python, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(WORLDS)
    python = {"vllm": vllm_python, "sglang": sglang_python}[engine]
    settings = (
        f"engine={{type: {engine}, python: {python}, max_num_seqs: 16, transport: {transport}}}",
        f"cluster={{address: '{address}', rank: {{trainer: 1}}, engine: {{CPU: 1, engine: 1}}}}",
        f"run.directory={tmp_path}",
    )
    run = start_run(load_config(None, [*RUN, *settings]), kind="test")
    result = train(run)
    sys.modules.pop("letters", None)
    assert (result.step, result.interrupted) == (2, False)
    for line in read_metrics(run.folder.metrics_file):
        assert line["mismatch/prob_abs_mean"] < 1e-4
        assert line["sync/probe_difference"] < 1e-3
    assert (run.folder.logs / "server-0.log").is_file()
