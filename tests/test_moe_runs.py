"""Runs that train a model with routed experts: these go from the engine over the ledger to the trainer's routers."""

import pytest
from support.models import tiny_model
from support.tokenizers import build_tokenizer

from agentrl.errors import ConfigError, Outcome
from agentrl.observe.metrics import read_metrics
from agentrl.observe.trajectory_store import read_trajectories
from agentrl.runs.rl import train
from agentrl.runs.start import resume_run


@pytest.fixture
def moe_run(tiny_run, tmp_path):
    """A tiny run of an MoE model with random weights."""
    tokenizer = build_tokenizer("qwen3")
    model = tiny_model("qwen3_moe", vocab_size=len(tokenizer), max_context=256)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")

    def start(*overrides):
        model = ["model.scratch=null", f"model.path={tmp_path / 'model'}"]
        return tiny_run(*model, "trainer.moe.router_replay=true", "trainer.steps=2", *overrides)

    return start


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.slow
def test_a_run_replays_what_the_engine_did(moe_run, staleness):
    run = moe_run(f"rollout.max_staleness={staleness}")
    assert train(run).step == 2
    for line in read_metrics(run.folder.metrics_file):
        assert line["mismatch/routed_experts_known"] == 1
        assert line["mismatch/routed_experts"] < (1 if staleness else 0.02)
        assert line["train/grad_norm"] > 0
    for stored in read_trajectories(run.folder.trajectories):
        for sequence in stored.trajectory.sequences:
            if sequence.routes.experts is None:  # cancelled at the end of the run, before its first answer
                assert stored.trajectory.outcome is Outcome.CANCELLED
                continue
            assert (
                sequence.routes.experts.shape == (len(sequence) - 1, 2 * 2) or len(sequence.routes) < len(sequence) - 1
            )
            assert len(sequence.routes) >= max((turn.end for turn in sequence.turns), default=0) - 1


@pytest.mark.slow
def test_a_run_from_before_keys_were_renamed_resumes_once_its_config_names_the_new_ones(moe_run):
    run = moe_run()
    train(run)
    config = run.folder.path / "config.yaml"
    config.write_text(config.read_text().replace("  moe:", "  mixture:").replace("router_replay:", "replay:"))
    with pytest.raises(ConfigError, match=r"config.yaml line \d+: renamed key: trainer.mixture is now trainer.moe; .*"):
        resume_run(run.folder.path, ["trainer.steps=3"])
    config.write_text(config.read_text().replace("  mixture:", "  moe:").replace("replay:", "router_replay:"))
    assert train(resume_run(run.folder.path, ["trainer.steps=3"])).step == 3


def test_servers_without_a_gpu_do_not_tell(moe_run, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match=r"vLLM and SGLang do on GPUs only: got engine sglang without a GPU"):
        train(moe_run("engine={type: sglang}"))
