"""Record of the start of a run: its command, folder, machine and versions, for reports and for resuming."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from agentrl.models.load import accelerators, torch_build
from agentrl.models.memory import memory_limit
from agentrl.observe.files import UNREADABLE, replace_file
from agentrl.observe.run_folder import RunDirectory

START_FILE = "start.json"
_GIB = 2**30


def write_start_record(run: RunDirectory, *, resumed_by: str, base: Sequence[str] = ()) -> None:
    """Write the command, the working folder, the machine and the versions of a run that starts.

    `resumed_by` is the command that resumes the run; `base` identifies the weights below its adapters.

    Raises:
        UsageError: the disk is full.
    """
    gpus = [f"{gpu.name} ({gpu.memory_bytes / _GIB:.0f} GiB)" for gpu in accelerators()]
    record = {
        "command": shlex.join([Path(sys.argv[0]).name or "python", *sys.argv[1:]]),
        "resumed_by": resumed_by,
        "folder": _working_folder(run),
        "time": time.time(),
        "base": list(base),
        "machine": {
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            "memory": f"{memory_limit() / _GIB:.1f} GiB",
            "GPUs": ", ".join(gpus) or "none",
            "system": platform.platform(),
        },
        "versions": {
            "agentrl": importlib.metadata.version("agentrl"),
            "python": platform.python_version(),
            "torch": torch_build(),
            "transformers": importlib.metadata.version("transformers"),
        },
    }
    replace_file(run.path / START_FILE, orjson.dumps(record, option=orjson.OPT_INDENT_2))


def _working_folder(run: RunDirectory) -> str:
    """Return the working folder, relative to a run in it, so that both may be moved together; otherwise absolute."""
    here, path = Path.cwd().resolve(), run.path.resolve()
    return os.path.relpath(here, path) if path.is_relative_to(here) else str(here)


def start_folder(run: RunDirectory) -> Path | None:
    """Return the working folder in which a run was started; ``None`` if it is unknown or does not exist here."""
    folder = read_start_record(run).get("folder")
    found = (run.path.resolve() / folder).resolve() if isinstance(folder, str) else None
    return found if found is not None and found.is_dir() else None


def _processor() -> str:
    """Return the name of the processor, as Linux reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), platform.machine())


def read_start_record(run: RunDirectory) -> Mapping[str, Any]:
    """Read what `write_start_record` wrote; empty for a run of an earlier version, or a damaged file."""
    try:
        record = orjson.loads((run.path / START_FILE).read_bytes())
        return record if isinstance(record.get("machine"), dict) and isinstance(record.get("versions"), dict) else {}
    except (OSError, *UNREADABLE):
        return {}
