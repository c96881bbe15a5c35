"""A run that hangs says where, also while its event loop is blocked."""

import asyncio
import functools
import inspect
import threading
import time

import pytest
from agentrl.agent_loops.react_text import ReactText

from agentrl.builders.group_extras import GroupExtras
from agentrl.observe.checkpoints import Checkpoints
from agentrl.observe.metrics import MetricsFile
from agentrl.observe.progress import Phase, RunWatcher
from agentrl.observe.run_status import Liveness, read_status
from agentrl.observe.trajectory_store import TrajectoryStore
from agentrl.runs.rl import train
from agentrl.serving.local import LocalEngine
from agentrl.training.trainer import Trainer
from agentrl.weights import InProcessSync


class StallWatcher(RunWatcher):
    """Watcher that ends the hang as soon as a report has the expected row."""

    def __init__(self, expected):
        self.expected, self.messages, self.is_reported = expected, [], threading.Event()
        self.phase, self.folder, self.status = Phase.PREPARE, None, None

    def on_start(self, folder, status):
        self.folder = folder

    def on_status(self, status):
        self.phase = status.phase

    def on_message(self, text):
        self.messages.append(text)
        if self.expected in text and not self.is_reported.is_set():
            self.status = self.read_named_status()
            self.is_reported.set()

    def read_named_status(self):
        """Return a status, taken while the run hangs, that names what it waits for; the last one if none does."""
        until = time.monotonic() + 30
        while True:
            status = read_status(self.folder)
            named = status is not None and any(f"{one.kind:<12} {one.what}" == self.expected for one in status.waits)
            if named or time.monotonic() > until:
                return status
            time.sleep(0.05)


def hang(monkeypatch, owner, method, watcher):
    """Let a method hang until the stall is reported, once the model is made, for which episodes are played."""
    is_reported = watcher.is_reported

    def hangs():
        return not is_reported.is_set() and (watcher.phase is not Phase.PREPARE or owner is InProcessSync)

    real = getattr(owner, method)

    if inspect.iscoroutinefunction(real):

        @functools.wraps(real)
        async def slow(*arguments, **options):
            if hangs():
                await asyncio.to_thread(is_reported.wait, 60)
            return await real(*arguments, **options)
    else:

        @functools.wraps(real)
        def slow(*arguments, **options):
            if hangs():
                is_reported.wait(60)
            return real(*arguments, **options)

    monkeypatch.setattr(owner, method, slow)


HANGS = [
    (Trainer, "step", "trainer      trainer.step", 0),
    (Trainer, "step", "trainer      trainer.step", 1),
    (InProcessSync, "sync", "sync         the weight sync", 0),
    (InProcessSync, "verify", "sync         the engine's start and the check of its weights", 0),
    (Checkpoints, "save", "disk         the checkpoint of step 1", 0),
    (TrajectoryStore, "turn", "disk         a write to the trajectory store", 0),
    (TrajectoryStore, "rotate", "disk         the trajectory store", 0),
    (MetricsFile, "append_step", "disk         metrics.jsonl", 0),
    (GroupExtras, "for_step", "extras       extra rollouts and a served teacher", 0),
    (ReactText, "run", "loop         ReactText", 0),
    (LocalEngine, "generate", "engine       an answer", 0),
    (LocalEngine, "end_session", "end_session  the end of its sessions in the engine", 0),
]


@pytest.mark.parametrize(("owner", "method", "expected", "staleness"), HANGS)
def test_a_hang_is_named(tiny_run, monkeypatch, owner, method, expected, staleness):
    watcher = StallWatcher(expected)
    hang(monkeypatch, owner, method, watcher)
    run = tiny_run(
        "trainer.steps=1", "checkpoint.every=1", "rollout.stall_report_s=0.3", f"rollout.max_staleness={staleness}"
    )
    assert train(run, watcher=watcher).step == 1
    assert watcher.is_reported.is_set(), watcher.messages
    report = next(text for text in watcher.messages if expected in text)
    assert "; unblocked by " in report
    blocks = not inspect.iscoroutinefunction(getattr(owner, method)) and not staleness
    assert report.startswith("the event loop has been blocked for ") == blocks, report
    assert f"agentrl status {run.folder.path}" in report
    wait = next(one for one in watcher.status.waits if f"{one.kind:<12} {one.what}" == expected)
    assert wait.unblocks
    assert wait.since < watcher.status.time
    assert watcher.status.liveness(watcher.status.time) is Liveness.RUNNING
    last = read_status(run.folder.path)
    assert (last.end, last.step, last.in_flight) == ("finished", 1, [])
