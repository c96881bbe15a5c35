"""Checkpoints written by a thread: one at a time, and errors are raised."""

import logging
import threading

import pytest

from agentrl.errors import UsageError
from agentrl.observe.checkpoints import Checkpoints, CheckpointWriter

PATIENCE_S = 30


@pytest.fixture
def writer(tmp_path):
    saved = []
    writer = CheckpointWriter(Checkpoints(tmp_path, keep=5), background=True, on_saved=saved.append)
    writer.steps = lambda: [checkpoint.step for checkpoint in saved]
    yield writer
    writer.close()


def test_the_caller_goes_on_while_a_checkpoint_is_written(writer, tmp_path):
    go_on = threading.Event()

    def write(folder):
        assert go_on.wait(PATIENCE_S)
        (folder / "file").write_text("1")

    writer.save(1, write)
    writer.poll()
    assert writer.steps() == []
    assert Checkpoints(tmp_path, keep=5).present() == []
    go_on.set()
    writer.wait()
    assert writer.steps() == [1]
    assert Checkpoints(tmp_path, keep=5).newest().step == 1


def test_the_next_one_waits_for_the_one_before(writer):
    begun, running = [], []

    def write(folder):
        running.append(folder)
        begun.append(len(running))
        (folder / "file").write_text("1")
        running.pop()

    for step in (1, 2, 3):
        writer.save(step, write)
    writer.wait()
    assert begun == [1, 1, 1]
    assert writer.steps() == [1, 2, 3]


def test_a_full_disk_comes_to_light_at_the_next_look_and_once(writer, tmp_path):
    ended = threading.Event()

    def fail(folder):
        ended.set()
        raise OSError(28, "no space")

    writer.save(1, fail)
    assert ended.wait(PATIENCE_S)
    with pytest.raises(UsageError, match="no space left"):
        writer.wait()
    writer.poll()
    assert list(tmp_path.iterdir()) == []


def test_at_the_end_an_error_beside_another_one_is_logged(writer, caplog):
    writer.save(1, lambda folder: (folder / "no" / "file").write_text(""))
    with caplog.at_level(logging.ERROR):
        writer.close()
    assert "a checkpoint could not be written" in caplog.text


def test_at_once_means_in_the_callers_thread(tmp_path):
    saved, threads = [], []
    writer = CheckpointWriter(Checkpoints(tmp_path, keep=1), background=False, on_saved=saved.append)
    writer.save(7, lambda folder: threads.append(threading.current_thread()))
    assert threads == [threading.current_thread()]
    assert [checkpoint.step for checkpoint in saved] == [7]
    writer.close()
