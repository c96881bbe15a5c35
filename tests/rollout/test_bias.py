"""What trains against what was started: by hand, with its margin, over a window, and after a resumption."""

import json
import math
import random
from statistics import fmean

import pytest

from agentrl.errors import Outcome
from agentrl.rollout.group_metrics import WINDOW, BiasMeter, Sums
from agentrl.trajectory import TokenSequence, Trajectory, Turn


def episode(turns, *, seconds=1.0, reward=1.0, success=None, outcome=Outcome.FINISHED):
    trajectory = Trajectory(id="t", task_id="t", environment="w", seed=0, group_id="g")
    sequence = TokenSequence()
    sequence.turns.extend(Turn(index=index, start=0, end=0) for index in range(turns))
    trajectory.sequences.append(sequence)
    trajectory.outcome, trajectory.reward, trajectory.success = outcome, reward, success
    trajectory.metrics["seconds"] = seconds
    return trajectory


def test_a_dropped_group_counts_as_started():
    meter = BiasMeter([""])
    meter.add(0, "", [episode(2, reward=-1.0, success=True), episode(4, reward=-1.0, success=True)], trained=True)
    meter.add(1, "", [episode(8, seconds=5.0, reward=1.0, success=False)] * 2, trained=False)
    meter.end_step()
    metrics = meter.metrics()
    assert metrics["bias/turns"] == pytest.approx(3 / 5.5 - 1)
    assert metrics["time/bias/seconds"] == pytest.approx(1 / 3 - 1)
    assert metrics["bias/success"] == pytest.approx(1)
    assert metrics["bias/reward"] == pytest.approx(-1), "-1 against a mean of 0, relative to a mean size of 1"
    variance = (3.5**2 + 1.5**2 + 2 * 2.5**2) / 3
    assert metrics["bias/turns_margin"] == pytest.approx(1.96 * math.sqrt(variance * 2 / (2 * 2)) / 5.5)


def test_failed_episodes_count_only_in_the_shares_of_environments():
    failed = episode(1, outcome=Outcome.ENGINE_ERROR, reward=None)
    meter = BiasMeter(["a", "b"])
    meter.add(0, "a", [episode(3), episode(3)], trained=True)
    meter.add(1, "b", [episode(3), failed], trained=True)
    meter.end_step()
    metrics = meter.metrics()
    assert metrics["bias/turns"] == metrics["bias/turns_margin"] == 0.0
    assert metrics["bias/env/a"] == pytest.approx((2 / 3) / 0.5 - 1)
    assert metrics["bias/env/b"] == pytest.approx((1 / 3) / 0.5 - 1)
    assert "bias/success" not in metrics


def test_nothing_is_measured_before_something_trains():
    meter = BiasMeter([""])
    meter.add(0, "", [episode(3)], trained=False)
    assert meter.metrics() == {}
    meter.end_step()
    assert meter.metrics() == {}


def test_old_steps_leave_the_window():
    meter = BiasMeter([""])
    meter.add(0, "", [episode(2)], trained=True)
    meter.add(1, "", [episode(4)], trained=False)
    for position in range(WINDOW):
        meter.end_step()
        assert meter.metrics()["bias/turns"] < 0
        meter.add(2 + position, "", [episode(2)], trained=True)
    meter.end_step()
    assert meter.metrics()["bias/turns"] == 0.0


def test_a_restored_meter_goes_on():
    meter, restored = BiasMeter([""]), BiasMeter([""])
    meter.add(7, "", [episode(2, seconds=0.1)], trained=True)
    meter.end_step()
    meter.add(9, "", [episode(3, seconds=0.2)], trained=False)
    restored.load_state_dict(json.loads(json.dumps(meter.state_dict())))
    for each in (meter, restored):
        each.add(8, "", [episode(4, seconds=0.3)], trained=True)
        each.end_step()
    assert restored.metrics() == meter.metrics()
    assert restored.state_dict() == meter.state_dict()


def test_the_margin_holds_for_19_of_20_random_choices():
    generator = random.Random(0)
    outside = 0
    for _ in range(1000):
        values = [generator.expovariate(0.1) for _ in range(60)]
        kept = [generator.random() < 0.8 for _ in values]
        sums = Sums.add_up([sums_of([value], trains) for value, trains in zip(values, kept, strict=True)])
        outside += abs(sums.bias) > sums.margin
    assert 20 <= outside <= 80
    assert fmean(values) == pytest.approx(sums.total / 60)


def sums_of(values, trains):
    return Sums(
        groups=1,
        episodes=len(values),
        total=sum(values),
        size=sum(map(abs, values)),
        squares=sum(value**2 for value in values),
        trained=trains * len(values),
        trained_total=trains * sum(values),
    )
