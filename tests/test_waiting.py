"""Waits of tests end with a message, before pytest's time limit ends the process with all tests that are left."""

import threading
import time

import pytest
from support.waiting import PATIENCE_S, join, wait_until


def test_a_condition_that_never_holds_is_named(pytestconfig):
    with pytest.raises(AssertionError, match=r"waited 0\.05 s in vain for a miracle"):
        wait_until(lambda: None, "a miracle", within_s=0.05)
    assert wait_until(iter([0, "", "found"]).__next__, "a text") == "found"
    assert float(pytestconfig.getini("timeout")) > PATIENCE_S


def test_a_thread_that_does_not_end_is_named():
    release = threading.Event()
    thread = threading.Thread(target=release.wait, args=(60,), name="worker", daemon=True)
    thread.start()
    with pytest.raises(AssertionError, match=r"waited 0\.05 s in vain for the end of worker"):
        join(thread, within_s=0.05)
    release.set()
    join(thread)


ENDLESS = "import sys, time; print('begun', flush=True); print('fear', file=sys.stderr, flush=True); time.sleep(600)"


def test_a_program_that_does_not_end_is_ended_and_quoted(start_python):
    program, began = start_python("-c", ENDLESS), time.monotonic()
    with pytest.raises(AssertionError, match=r"in vain for the end of program \d+; it wrote: .*begun.*fear"):
        program.wait(within_s=0.5)
    assert program.kill() == -9
    assert time.monotonic() - began < 60


def test_a_program_may_write_more_errors_than_a_pipe_holds(start_python):
    """Whoever reads one pipe to its end before the other waits for ever."""
    code, out, err = start_python("-c", "import sys; sys.stderr.write('x' * 300_000); print('done')").wait(within_s=60)
    assert (code, out, len(err)) == (0, "done\n", 300_000)
