"""Freed memory is reused, and the container's memory limit counts."""

import subprocess
import sys

from agentrl.models import memory

ROUNDS = 20
FAULTS = f"""
import resource, sys
if sys.argv[1] == "kept":
    from agentrl.models.memory import keep_freed_memory
    keep_freed_memory()
def work():
    for _ in range({ROUNDS}):
        blocks = [bytearray(16 << 20) for _ in range(6)]
work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _faults(how):
    command = [sys.executable, "-c", FAULTS, how]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_large_blocks_are_not_fetched_anew_from_the_kernel():
    assert _faults("kept") * 10 < _faults("as it is")


def test_the_limit_is_that_of_the_container(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "CGROUP_LIMIT", tmp_path / "memory.max")
    physical = memory.memory_limit()
    memory.CGROUP_LIMIT.write_text("max\n")
    assert memory.memory_limit() == physical > 2**20
    memory.CGROUP_LIMIT.write_text(f"{2**20}\n")
    assert memory.memory_limit() == 2**20
