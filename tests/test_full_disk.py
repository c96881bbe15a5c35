"""A full disk stops the run with one clear message, and the run resumes once there is space."""

import logging
import resource
from contextlib import contextmanager

import pytest

from agentrl.errors import UsageError
from agentrl.observe.metrics import read_metrics
from agentrl.observe.run_folder import logging_to
from agentrl.runs.rl import train
from agentrl.runs.start import resume_run


@contextmanager
def file_size_limit(size):
    """Stands in for a full disk: the kernel refuses the same call with the same kind of error."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("limit", "tasks", "place"),
    [
        (10_000, 2, "model"),
        (110_000, 2, "checkpoints/step-000002"),
        (110_000, 32, "trajectories/step-000001.jsonl"),
    ],
)
def test_a_full_disk_anywhere(tiny_run, limit, tasks, place):
    """Weights have 86 kB, the optimizer's state 180 kB, the episodes of a step about 8 kB per task."""
    run = tiny_run("trainer.steps=3", f"trainer.tasks_per_step={tasks}")
    with pytest.raises(UsageError) as caught, file_size_limit(limit):
        train(run)
    assert str(caught.value).startswith(f"cannot write {run.folder.path / place}: got no space left")
    assert "--resume" in str(caught.value)
    if not place.startswith("checkpoints"):  # nothing was finished: the same command can begin again
        assert not run.folder.path.exists()
        return
    assert train(resume_run(run.folder.path)).step == 3
    assert [line["step"] for line in read_metrics(run.folder.metrics_file)] == [1, 2, 3]


def test_the_log_of_a_run_does_not_hide_the_error_of_a_full_disk(tmp_path, capfd):
    def fail():
        with file_size_limit(10), logging_to(tmp_path / "log", print):
            logging.getLogger("agentrl.runs").warning("a record that does not fit")
            raise UsageError("cannot write metrics.jsonl")

    with pytest.raises(UsageError, match="cannot write"):
        fail()
    assert capfd.readouterr().err == ""
