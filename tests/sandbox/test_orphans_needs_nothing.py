"""Programs with a killed trainer's mark end, whatever they do; others live on."""

import os
import signal
import subprocess
import sys

import pytest
from support.waiting import PATIENCE_S

from agentrl.sandbox import orphan_guard
from agentrl.sandbox.orphan_guard import VARIABLE, OrphanGuard, end_marked, marked_processes, without_mark

MARK = f"test-{os.getpid()}"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(1000)"


def program(code: str = "print(1, flush=True); import time; time.sleep(1000)", **variables: str):
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_marked_programs_end_and_others_live_on(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(orphan_guard, "ORPHAN_GRACE_S", 0.5)
    plain, stopped = program(**{VARIABLE: MARK}), program(**{VARIABLE: MARK})
    stubborn = program(STUBBORN, **{VARIABLE: MARK})
    other = program(**{VARIABLE: f"{MARK}-other"})
    os.kill(stopped.pid, signal.SIGSTOP)
    try:
        assert set(marked_processes(MARK)) == {plain.pid, stopped.pid, stubborn.pid}
        end_marked(MARK)
        codes = [process.wait(30) for process in (plain, stopped, stubborn)]
        assert codes == [-signal.SIGTERM, -signal.SIGTERM, -signal.SIGKILL]
        assert other.poll() is None
    finally:
        for process in (plain, stopped, stubborn, other):
            process.kill()
            process.communicate(timeout=PATIENCE_S)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_guard_that_is_closed_leaves_programs_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    guard = OrphanGuard()
    guard.start()
    guard.start()
    assert guard._process is not None
    mark = os.environ[VARIABLE]
    child = program()
    assert marked_processes(mark) == [child.pid], "the guard itself has no mark"
    guard.close()
    guard.close()
    assert child.poll() is None
    child.kill()
    child.communicate(timeout=PATIENCE_S)
    assert VARIABLE not in without_mark(os.environ)
