"""Whole runs on real servers through the command line, with a tiny model and the letters environment."""

import sys
from pathlib import Path

import pytest

from agentrl.config import load_config
from agentrl.observe.metrics import read_metrics
from agentrl.runs.rl import train
from agentrl.runs.start import start_run

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]
WORLDS = Path(__file__).parent.parent / "worlds"
RUN = (
    "environment={name: letters:Letters, isolation: inline}",
    "agent={loop: react_text, options: {format: plain, explain: false}, max_answer_tokens: 8, max_tokens: 256}",
    "model.scratch={layers: 1, hidden_size: 64, heads: 2, kv_heads: 1, vocab_size: 300, max_context: 256}",
    "model.scratch.initializer_range=0.2",
    "algorithm.group_size=4",
    "trainer={steps: 3, tasks_per_step: 4, learning_rate: 1e-2}",
)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.capability("{engine}", "training")
def test_a_run_on_real_servers(engine, vllm_python, sglang_python, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(WORLDS)
    python = {"vllm": vllm_python, "sglang": sglang_python}[engine]
    settings = [f"engine={{type: {engine}, python: {python}, max_num_seqs: 16}}", f"run.directory={tmp_path}"]
    run = start_run(load_config(None, [*RUN, *settings, "run.name=run"]), kind="test")
    result = train(run)
    sys.modules.pop("letters", None)
    assert (result.step, result.interrupted) == (3, False)
    lines = read_metrics(run.folder.metrics_file)
    assert [line["version"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert line["mismatch/prob_abs_mean"] < 1e-4
        assert line["sync/probe_difference"] < 1e-3
        assert line["train/grad_norm"] > 0
        assert line["staleness/max"] == 0
        assert line["episodes"] == 16
