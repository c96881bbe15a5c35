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


RELEASED = """
from agentrl.models.memory import FreedMemory, keep_freed_memory, resident_bytes
keep_freed_memory()
freed = FreedMemory(most=64 << 20)
freed.release()
blocks = [bytearray(16 << 20) for _ in range(20)]
last = bytearray(1000)
del blocks
kept = resident_bytes()
freed.release()
print(kept - resident_bytes())
del last
"""


def test_memory_of_freed_tensors_is_released_between_steps():
    found = subprocess.run([sys.executable, "-c", RELEASED], capture_output=True, text=True, check=True)
    assert int(found.stdout) > 300 << 20


def test_little_growth_is_not_released(monkeypatch):
    sizes = iter([10, 12, 15, 15, 12])
    monkeypatch.setattr(memory, "resident_bytes", lambda: next(sizes))
    freed = memory.FreedMemory(most=4)
    freed.release()  # 10, then 12 after it
    freed.release()  # 15 is little more
    assert list(sizes) == [15, 12], "nothing was read after a release"


def test_the_limit_is_that_of_the_container(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "CGROUP_LIMIT", tmp_path / "memory.max")
    physical = memory.memory_limit()
    memory.CGROUP_LIMIT.write_text("max\n")
    assert memory.memory_limit() == physical > 2**20
    memory.CGROUP_LIMIT.write_text(f"{2**20}\n")
    assert memory.memory_limit() == 2**20
