"""Accounting of whole runs: how the engine's seconds of a step were used, and what an episode and a success cost."""

import pytest

from agentrl.errors import Outcome
from agentrl.observe.metrics import read_metrics
from agentrl.runs.record import unit_costs
from agentrl.runs.rl import train
from agentrl.trajectory import Trajectory

LOST = ("retries", "discarded", "tools", "tails", "trainer", "syncs")


def lines_of(run):
    train(run)
    return read_metrics(run.folder.metrics_file)


def seconds_of(line):
    return {
        "useful": line["time/engine/useful_s"],
        **{name: line[f"time/engine/lost/{name}_s"] for name in LOST},
    }


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.slow
def test_useful_and_lost_seconds_add_up_to_the_step(tiny_run, staleness):
    for line in lines_of(tiny_run(f"rollout.max_staleness={staleness}")):
        seconds = seconds_of(line)
        phases = sum(line[f"time/{name}_s"] for name in ("rollout", "train", "sync"))
        assert sum(seconds.values()) == pytest.approx(phases, abs=1e-6)
        assert min(seconds.values()) >= -1e-9
        assert seconds["useful"] > 0
        assert seconds["syncs"] == pytest.approx(line["time/sync_s"], rel=1e-3, abs=1e-3)
        assert seconds["retries"] == seconds["discarded"] == 0
        if not staleness:
            assert seconds["trainer"] == pytest.approx(line["time/train_s"], rel=1e-2, abs=1e-2)


def test_costs_by_hand():
    def ended(success, reward=0.0):
        found = Trajectory(id="t", task_id="t", environment="e", seed=0, group_id="g", outcome=Outcome.FINISHED)
        found.reward, found.success = reward, success
        return found

    several = [ended(True), ended(True), ended(False), ended(None), ended(True, reward=None)]
    assert unit_costs(several, 36.0, 100.0) == pytest.approx(
        {"per_episode_s": 9, "per_success_s": 18, "cost/step": 1, "cost/per_episode": 0.25, "cost/per_success": 0.5}
    )
    assert unit_costs(several[2:], 10.0, None) == {"per_episode_s": 5.0}
    assert unit_costs([], 10.0, 3600.0) == {"cost/step": 10.0}


def test_a_run_with_a_price_reports_its_cost(tiny_run):
    for line in lines_of(tiny_run("run.price_per_hour=7.2", "trainer.steps=2")):
        assert line["time/cost/step"] == pytest.approx(line["time/step_s"] * 0.002)
        assert line["time/cost/per_episode"] == pytest.approx(line["time/per_episode_s"] * 0.002)
        assert line["time/per_episode_s"] == pytest.approx(line["time/step_s"] / 6)
