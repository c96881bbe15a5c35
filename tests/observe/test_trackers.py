import logging
import signal
import sys
import threading
import time
import types

import pytest
from support import SLACK

from agentrl.errors import UnknownNameError, UsageError
from agentrl.observe.run_folder import logging_to
from agentrl.observe.trackers import Tracker, Trackers, check_trackers, tracker_states
from agentrl.registry import Kind, register, unregister


class Broken(Tracker):
    def __init__(self, folder, name, config):
        self.calls = 0

    def log(self, step, metrics):
        self.calls += 1
        raise RuntimeError("service is down")

    def close(self):
        raise AssertionError("a tracker that is off is not closed")


class Exiting(Broken):
    def log(self, step, metrics):
        raise SystemExit(3)


class Blocking(Tracker):
    sites = frozenset()
    released = threading.Event()

    def __init__(self, folder, name, config):
        self.steps = []
        if "start" in self.sites:
            self.released.wait(60)

    def log(self, step, metrics):
        self.steps.append(step)
        if "log" in self.sites:
            self.released.wait(60)

    def close(self):
        if "close" in self.sites:
            self.released.wait(60)


class Unavailable(Broken):
    package = "no_such_package"


class Unimportable(Broken):
    def __init__(self, folder, name, config):
        raise ImportError("no module named tracker")


@pytest.fixture
def registered():
    made = {
        "broken": Broken,
        "exiting": Exiting,
        "blocking": Blocking,
        "unavailable": Unavailable,
        "unimportable": Unimportable,
        "dict": dict,
    }
    for name, tracker in made.items():
        register(Kind.TRACKER, name, tracker)
    yield
    for name in made:
        unregister(Kind.TRACKER, name)


class Remembering(Tracker):
    def __init__(self, folder, name, config):
        type(self).config = config

    def log(self, step, metrics):
        pass

    def close(self):
        pass


def test_trackers_get_no_secrets(registered, tmp_path):
    register(Kind.TRACKER, "remembering", Remembering)
    arguments = ["--api-key", "abc", "--hf-token=abc", "--port", "80"]
    given = {
        "engine": {"url": "https://me:abc@host/v1", "arguments": arguments, "api_key_variable": "MY_KEY"},
        "environment": {"options": {"password": "abc", "headers": {"Authorization": "Bearer abc"}, "stop_token": "x"}},
        "agent": {"options": {"command": f"run --token abc --model sk-{'abc' * 8} --max_tokens 5"}, "max_tokens": 5},
    }
    try:
        Trackers(["remembering"], folder=tmp_path, name="run", config=given).close()
    finally:
        unregister(Kind.TRACKER, "remembering")
    config = Remembering.config
    assert "abc" not in repr(config)
    assert config["engine"]["arguments"] == ["--api-key", "(hidden)", "--hf-token=(hidden)", "--port", "80"]
    assert config["engine"]["api_key_variable"] == "MY_KEY"
    assert config["environment"]["options"]["stop_token"] == "x"
    assert config["agent"] == {
        "options": {"command": "run --token (hidden) --model (hidden) --max_tokens 5"},
        "max_tokens": 5,
    }
    assert given["engine"]["arguments"] is arguments, "the run's own config is unchanged"
    assert "abc" in arguments


@pytest.mark.parametrize(("kind", "error"), [("broken", "RuntimeError: service is down"), ("exiting", "SystemExit: 3")])
def test_a_failing_tracker_is_reported_once_and_the_run_continues(tmp_path, caplog, registered, kind, error):
    said = []
    with caplog.at_level(logging.WARNING), logging_to(tmp_path / "agentrl.log", said.append):
        trackers = Trackers([kind], folder=tmp_path, name="run", config={})
        for step in range(3):
            trackers.log(step, {"a": 1.0})
        trackers.close()
    assert said == [f"tracker {kind} failed; the run continues without it: {error}"]


@pytest.mark.parametrize(
    ("error", "calls"),
    [
        (None, ["log", "close"]),
        (KeyboardInterrupt(), ["log", "close"]),
        (RuntimeError("out of memory"), ["log", "RuntimeError: out of memory", "close"]),
    ],
)
def test_a_tracker_hears_of_a_failure_before_it_is_closed(tmp_path, registered, monkeypatch, error, calls):
    heard = []
    monkeypatch.setattr(Blocking, "log", lambda self, step, metrics: heard.append("log"))
    monkeypatch.setattr(Blocking, "fail", lambda self, reason: heard.append(reason))
    monkeypatch.setattr(Blocking, "close", lambda self: heard.append("close"))
    trackers = Trackers(["blocking"], folder=tmp_path, name="run", config={})
    trackers.log(1, {"a": 1.0})
    trackers.close(error)
    assert heard == calls


@pytest.mark.parametrize(
    ("site", "says"),
    [
        ("start", "it is not closed"),
        ("log", "a call takes longer than 0.1 s"),
        ("close", "it is not closed"),
    ],
)
def test_a_tracker_that_blocks_is_given_up(tmp_path, caplog, registered, monkeypatch, site, says):
    monkeypatch.setattr(Blocking, "sites", frozenset({site}))
    monkeypatch.setattr("agentrl.observe.trackers.TRACKER_CALL_S", 0.1)
    Blocking.released.clear()
    trackers = Trackers(["blocking"], folder=tmp_path, name="run", config={})
    began = time.monotonic()
    for step in range(3):
        trackers.log(step, {"a": 1.0})
        time.sleep(0.2)
    trackers.close(within_s=0.1)
    Blocking.released.set()
    assert time.monotonic() - began < 10 * SLACK
    assert caplog.text.count("tracker blocking failed; the run continues without it") == caplog.text.count(says) == 1


def test_a_tracker_that_starts_slowly_gets_all_steps(tmp_path, caplog, registered, monkeypatch):
    made = []

    class Slow(Blocking):
        def __init__(self, folder, name, config):
            super().__init__(folder, name, config)
            made.append(self)

    register(Kind.TRACKER, "slow", Slow)
    monkeypatch.setattr(Blocking, "sites", frozenset({"start"}))
    monkeypatch.setattr("agentrl.observe.trackers.TRACKER_CALL_S", 0.1)
    Blocking.released.clear()
    try:
        trackers = Trackers(["slow"], folder=tmp_path, name="run", config={})
        trackers.log(1, {"a": 1.0})
        assert not made
        Blocking.released.set()
        trackers.log(2, {"a": 1.0})
        trackers.close()
    finally:
        unregister(Kind.TRACKER, "slow")
    assert made[0].steps == [1, 2]
    assert "tracker slow has not started after 0.1 s; it gets the steps once it has" in caplog.text


def test_a_tracker_without_its_package_is_an_error_with_how_to_install_it(registered):
    with pytest.raises(UsageError, match="pip install no_such_package"):
        check_trackers(["tensorboard", "unavailable"])
    assert tracker_states()["unavailable"] == "missing; to install it: pip install no_such_package"
    assert tracker_states()["tensorboard"] == "present"


@pytest.mark.parametrize(
    ("name", "message"), [("unimportable", "cannot be imported: got no module named"), ("dict", "is not a tracker")]
)
def test_what_cannot_be_made_is_an_error(tmp_path, registered, name, message):
    with pytest.raises(UsageError, match=message):
        Trackers([name], folder=tmp_path, name="run", config={})


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


def test_tensorboard_shows_the_newest_values_of_repeated_steps(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for part, steps in enumerate([(1, 2, 3), (2, 3, 4)]):
        trackers = Trackers(["tensorboard"], folder=tmp_path, name="run", config={})
        for step in steps:
            trackers.log(step, {"reward/mean": step + part / 4})
        trackers.close()
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("reward/mean")] == [
        (1, 1.0),
        (2, 2.25),
        (3, 3.25),
        (4, 4.25),
    ]


def test_a_resumed_run_goes_on_in_the_same_wandb_history(tmp_path, monkeypatch):
    class History:
        def __init__(self, **settings):
            self.settings, self.rows, self.finished = settings, [], False
            histories.append(self)

        def define_metric(self, name, step_metric=None):
            self.steps = step_metric

        def log(self, metrics):
            self.rows.append(metrics)

        def finish(self, exit_code):
            self.finished = exit_code == 0

    histories = []
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=History, Table=list))
    for run, step in (("a", 1), ("a", 2), ("b", 1)):
        trackers = Trackers(["wandb"], folder=tmp_path / run, name=run, config={"seed": 3})
        trackers.log(step, {"loss": 0.5})
        trackers.close()
    first, resumed, other = histories
    assert first.settings == resumed.settings
    assert first.settings["id"] != other.settings["id"]
    assert (first.settings["resume"], first.settings["name"], first.settings["config"]) == ("allow", "a", {"seed": 3})
    assert [history.rows for history in histories] == [[{"loss": 0.5, "step": step}] for step in (1, 2, 1)]
    assert {history.steps for history in histories} == {"step"}, "rows with an old step are not dropped"
    assert all(history.finished for history in histories)


class Hijacking(Broken):
    """A tracker that takes over Ctrl-C, as SwanLab does where it can."""

    def __init__(self, folder, name, config):
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def test_a_tracker_cannot_replace_the_handler_of_interrupts(tmp_path, caplog):
    before = signal.getsignal(signal.SIGINT)
    register(Kind.TRACKER, "hijacking", Hijacking)
    try:
        Trackers(["hijacking"], folder=tmp_path, name="run", config={}).close()
    finally:
        unregister(Kind.TRACKER, "hijacking")
    assert signal.getsignal(signal.SIGINT) is before
    assert "tracker hijacking failed" in caplog.text
