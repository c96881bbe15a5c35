"""`agentrl doctor`: hardware and software of this machine, and next steps."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.table import Table

from agentrl.cli.help_pages import examples
from agentrl.config.number_format import AUTO, fastest_format
from agentrl.models.load import Accelerator, accelerators, torch_build
from agentrl.models.memory import memory_limit
from agentrl.observe.console import out
from agentrl.observe.trackers import tracker_states
from agentrl.registry import Kind, names
from agentrl.sandbox.docker import describe_daemon
from agentrl.serving.launch.resources import ENGINES, engines_folder, find_interpreters, how_to_make

app = typer.Typer()

GIB = 2**30
LIBRARIES = ("agentrl", "transformers", "tokenizers", "gymnasium", "pydantic", "pyarrow")
EXTRAS = {
    "vllm": "vllm",
    "sglang": "sglang",
    "ray": "ray",
    "docker": "docker",
    "mcp": "mcp",
    "alfworld": "alfworld",
    "gpu": "liger_kernel",
    "docs": "material",
    "dev": "pytest",
}
"""Extras, each with a module that it installs."""
NO_BUBBLEWRAP = "no bubblewrap; to install: apt-get install bubblewrap, or your system's package"
MIN_MEMORY_BYTES = 4 * GIB
MIN_DISK_BYTES = 2 * GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Resources of this machine that determine the advice."""

    cores: int
    memory_bytes: int
    free_disk_bytes: int
    gpus: list[Accelerator]
    has_nvidia_driver: bool


@app.command(epilog=examples("agentrl doctor"))
def doctor() -> None:
    """Show versions, cores, memory, GPUs, extras and engines, and next steps."""
    machine = examine()
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("python", platform.python_version())
    for library in LIBRARIES:
        table.add_row(library, importlib.metadata.version(library))
    table.add_row("torch", torch_build())
    table.add_row("cores", str(machine.cores))
    table.add_row("memory", f"{machine.memory_bytes / GIB:.1f} GiB")
    table.add_row("free disk space", f"{machine.free_disk_bytes / GIB:.1f} GiB")
    table.add_row("fastest format", f"{fastest_format(AUTO)} (model.dtype=auto)")
    table.add_row("GPUs", ", ".join(f"{g.name} ({g.memory_bytes / GIB:.0f} GiB)" for g in machine.gpus) or "none")
    for engine in ENGINES:
        table.add_row(f"{engine} servers", servers_from(engine, has_gpu=bool(machine.gpus)))
    table.add_row("local sandboxes", shutil.which("bwrap") or NO_BUBBLEWRAP)
    table.add_row("docker sandboxes", describe_daemon())
    for tracker, state in tracker_states().items():
        table.add_row(f"tracker {tracker}", state)
    table.add_row("environments", ", ".join(names(Kind.ENVIRONMENT)) or "none")
    table.add_row("extras installed", ", ".join(installed_extras()) or "none")
    out.print(table)
    out.print()
    for line in advice(machine):
        out.print(f"→ {line}")


def examine() -> Machine:
    """Measure the resources of this machine."""
    return Machine(
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=memory_limit(),
        free_disk_bytes=shutil.disk_usage(Path.cwd()).free,
        gpus=accelerators(),
        has_nvidia_driver=shutil.which("nvidia-smi") is not None,
    )


def advice(machine: Machine) -> list[str]:
    """Return recommended next steps, most urgent first."""
    lines = []
    if machine.has_nvidia_driver and not machine.gpus:
        lines.append("torch cannot use the NVIDIA driver: install torch for CUDA (docs/gpu.md)")
    if machine.memory_bytes < MIN_MEMORY_BYTES:
        lines.append("less than 4 GiB of memory: use scratch models, and lower trainer.tokens_per_micro_batch")
    if machine.free_disk_bytes < MIN_DISK_BYTES:
        lines.append("less than 2 GiB of free disk space: set run.directory to a larger disk")
    if machine.gpus:
        lines.append("train a real model: agentrl train configs/household/grpo_qwen2.5-1.5b.yaml --dry-run")
    else:
        lines.append("no GPU is needed to start: agentrl demo")
    lines.append("your own environment: agentrl init my_game")
    return lines


def servers_from(engine: str, *, has_gpu: bool) -> str:
    """Return the interpreters that can launch `engine` servers, the default first; or how to install the engine."""
    found = [str(python) for python in find_interpreters(engine, engines_folder(os.environ))]
    if importlib.util.find_spec(engine) is not None:
        found.append(sys.executable)
    return "\n".join(found) or f"not installed; to install: {how_to_make(engine, has_gpu=has_gpu)}"


def installed_extras() -> list[str]:
    """Return the extras whose main module can be found."""
    return [extra for extra, module in EXTRAS.items() if importlib.util.find_spec(module) is not None]
