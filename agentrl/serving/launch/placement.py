"""Placement of a run on one machine: GPUs for the trainer's processes and the launched servers, and memory.

Process k of the trainer uses GPU k. Servers get the following GPUs, unless ``engine.gpus`` names others or too few
are left; then servers share the trainer's GPUs. A cluster places processes and servers itself.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.config.config import Config
from agentrl.config.engines import ServerEngineConfig
from agentrl.config.estimate import EstimateRow, derive, shown_bytes
from agentrl.errors import ConfigError
from agentrl.models.load import accelerators
from agentrl.models.memory import memory_limit
from agentrl.serving.launch.resources import assign_gpus, usable_gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class GPUPlacement:
    """Positions of GPUs among those that this process may use; empty on a machine without GPUs."""

    trainer: tuple[int, ...]
    """GPU of each trainer process."""
    servers: list[tuple[int, ...]]
    """GPUs of each launched server, ``engine.tensor_parallel`` each."""

    @property
    def shared(self) -> list[int]:
        """GPUs that are used by both a trainer process and a server."""
        return sorted(set(self.trainer) & {position for server in self.servers for position in server})


def place_on_gpus(config: Config, count: int, *, torch_count: int | None = None) -> GPUPlacement:
    """Place a training run on one machine.

    Args:
        config: Config of the run.
        count: Number of GPUs of the machine.
        torch_count: Number of GPUs that torch can use in this process, if different: a CPU build of torch can use none.

    Raises:
        ConfigError: there are fewer GPUs than trainer processes.
        UsageError: there are too few GPUs for the servers, or ``engine.gpus`` names one that does not exist.
    """
    trainer = trainer_gpus(config, count if torch_count is None else torch_count)
    if not isinstance(config.engine, ServerEngineConfig) or config.engine.servers != "launch":
        return GPUPlacement(trainer=trainer, servers=[])
    return GPUPlacement(trainer=trainer, servers=server_gpus(config.engine, count, trainer))


def trainer_gpus(config: Config, count: int) -> tuple[int, ...]:
    """Return the GPU of each trainer process; empty on the CPU.

    Raises:
        ConfigError: there are fewer GPUs than processes, or no GPU with the number in ``model.device``.
    """
    device, processes = config.model.device, config.trainer.processes
    if device.startswith("cuda:"):
        number = device.removeprefix("cuda:")
        if not number.isdigit() or int(number) >= count:
            there = f"cuda:0 to cuda:{count - 1}" if count else "model.device=cpu or auto: torch cannot use a GPU here"
            raise ConfigError("model.device names a GPU that does not exist", got=device, expected=there)
        return (int(number),)
    if device == "cuda" and not count:
        raise ConfigError(
            "model.device is cuda, but torch cannot use a GPU here",
            expected="model.device=auto or cpu",
            hint="agentrl doctor shows which devices torch supports",
        )
    if device == "cpu" or not count:
        return ()
    if processes > count:
        raise ConfigError(
            "the trainer has more processes than there are GPUs",
            got=f"trainer.processes {processes} and {count} GPUs",
            expected=f"trainer.processes of at most {count}",
        )
    return tuple(range(processes))


def server_gpus(section: ServerEngineConfig, count: int, trainer: Sequence[int] = ()) -> list[tuple[int, ...]]:
    """Return the GPUs of each launched server.

    Args:
        section: Engine section of the config.
        count: Number of GPUs of the machine.
        trainer: GPUs of the trainer. Servers avoid them if enough others are left, unless the transport is
            ``cuda_ipc``, which needs the trainer's GPUs.

    Raises:
        UsageError: there are too few GPUs, or ``engine.gpus`` names one that does not exist.
    """
    chosen, names = section.gpus, [str(position) for position in range(count)]
    free = [position for position in range(count) if position not in trainer]
    if chosen is None and section.transport != "cuda_ipc" and len(free) >= section.replicas * section.tensor_parallel:
        chosen = free if count else None
    return assign_gpus(section.replicas, section.tensor_parallel, names, chosen)


def core_warnings(config: Config) -> list[str]:
    """Return a warning if the trainer has more processes than this machine has CPU cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = int(os.environ.get("LOCAL_WORLD_SIZE", config.trainer.processes))  # torchrun may use several machines
    if config.cluster is not None or count <= cores:
        return []
    return [
        f"trainer.processes is {count}, but this machine has {cores} CPU cores for them: each process loads torch and "
        f"its part of the model, and they wait for each other; set trainer.processes to {cores} or less"
    ]


def check_machine(config: Config) -> None:
    """Check that this machine has the GPUs and the minimum memory for a training run with an engine.

    Raises:
        ConfigError: as `place_on_gpus`; or the trainer's weights, gradients and moments do not fit into memory.
        UsageError: as `place_on_gpus`.
    """
    if config.cluster is not None or config.trainer.episodes is not None:
        return
    gpus = accelerators()
    placed = place_on_gpus(config, len(usable_gpus(os.environ)), torch_count=len(gpus))
    memory = derive(config).memory
    if memory is None:
        return
    on_gpus = sum(gpus[position].memory_bytes for position in placed.trainer)
    offloaded = config.trainer.fsdp.offload or not placed.trainer
    available = memory_limit() + on_gpus if offloaded else on_gpus
    if memory.training_state > available:
        raise ConfigError(
            "the model does not fit into this machine's memory",
            got=f"{shown_bytes(memory.training_state)} of weights, gradients and optimizer moments",
            expected=f"at most {shown_bytes(available)}",
            hint="use a smaller model, train adapters (model.lora), or see agentrl plan",
        )


def gpu_rows(config: Config, count: int) -> list[EstimateRow]:
    """Describe the placement on one machine, for a dry run; empty if a cluster places the run.

    Raises:
        ConfigError: as `place_on_gpus`.
        UsageError: as `place_on_gpus`.
    """
    if config.cluster is not None:
        return []
    placed = place_on_gpus(config, count)
    rows = [("GPUs", f"{count:,}", "this machine, or --gpus")]
    where = f"GPU {_format_positions(placed.trainer)}" if placed.trainer else "CPU"
    processes = config.trainer.processes
    rows.append(
        (
            "trainer",
            f"{processes} {'process' if processes == 1 else 'processes'} on {where}",
            "trainer.processes, model.device",
        )
    )
    rows += [
        (
            f"server-{number}",
            f"GPU {_format_positions(gpus)}" if gpus else "CPU",
            "engine.replicas, engine.tensor_parallel",
        )
        for number, gpus in enumerate(placed.servers)
    ]
    if placed.shared:
        rows.append(("shared GPUs", _format_positions(placed.shared), _sharing(config)))
    used = {*placed.trainer, *(position for server in placed.servers for position in server)}
    if idle := [position for position in range(count) if position not in used]:
        rows.append(("idle GPUs", _format_positions(idle), "raise trainer.processes or engine.replicas to use them"))
    return rows


def _sharing(config: Config) -> str:
    """Describe how trainer and servers share GPU memory, or which setting to change."""
    engine = config.engine
    if isinstance(engine, ServerEngineConfig) and engine.sleep:
        return "engine.sleep: servers release their memory during training"
    return "set engine.sleep=true, or limit the servers' memory in engine.arguments"


def _format_positions(positions: Sequence[int]) -> str:
    """Format positions as ``0``, ``0 to 3``, or ``0, 2``."""
    if len(positions) > 2 and list(positions) == list(range(positions[0], positions[-1] + 1)):
        return f"{positions[0]} to {positions[-1]}"
    return ", ".join(map(str, positions))
