import logging

import pytest

from agentrl.errors import UnknownNameError
from agentrl.observe.trackers import Tracker, Trackers
from agentrl.registry import Kind, register, unregister


class Broken(Tracker):
    def __init__(self, folder, name, config):
        self.calls = 0

    def log(self, step, metrics):
        self.calls += 1
        raise RuntimeError("service is down")

    def close(self):
        raise AssertionError("a tracker that is off is not closed")


class Unavailable(Broken):
    def __init__(self, folder, name, config):
        raise ImportError("no module named tracker")


@pytest.fixture
def registered():
    register(Kind.TRACKER, "broken", Broken)
    register(Kind.TRACKER, "unavailable", Unavailable)
    yield
    unregister(Kind.TRACKER, "broken")
    unregister(Kind.TRACKER, "unavailable")


def test_failures_warn_once_and_the_run_goes_on(tmp_path, caplog, registered):
    with caplog.at_level(logging.WARNING):
        trackers = Trackers(["broken", "unavailable"], folder=tmp_path, name="run", config={})
        for step in range(3):
            trackers.log(step, {"a": 1.0})
        trackers.close()
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "tracker unavailable is off",
        "tracker broken is off",
    ]
    assert "agentrl[trackers]" in caplog.records[0].getMessage()


def test_an_unknown_tracker_is_an_error_before_the_run(tmp_path):
    with pytest.raises(UnknownNameError, match="Did you mean 'tensorboard'"):
        Trackers(["tensorbord"], folder=tmp_path, name="run", config={})


def test_tensorboard_can_read_what_was_logged(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    trackers = Trackers(["tensorboard"], folder=tmp_path, name="run", config={})
    trackers.log(3, {"reward/mean": 0.25, "turns": 4})
    trackers.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    events = [event for event in EventFileLoader(str(file)).Load() if event.summary.value]
    assert [(event.step, {v.tag for v in event.summary.value}) for event in events] == [(3, {"reward/mean", "turns"})]
