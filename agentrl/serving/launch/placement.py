"""Placement of a run on one machine: GPUs and cores of the trainer's processes and the launched servers, and memory.

Process k of the trainer uses GPU k. Servers get the following GPUs, unless ``engine.gpus`` names others or too few
are left; then servers share the trainer's GPUs. A cluster places processes and servers itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.config.config import Config
from agentrl.config.engines import LocalEngineConfig, ServerEngineConfig
from agentrl.config.estimate import EstimateRow, derive, shown_bytes
from agentrl.errors import ConfigError
from agentrl.models.cores import usable_cores
from agentrl.models.load import accelerators
from agentrl.models.memory import memory_limit
from agentrl.serving.launch.resources import assign_gpus, usable_gpus

TRAINER_CORES, ENGINE_CORES = "trainer.cpus", "engine.cpus"


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
    """Place a training run on one machine with `count` GPUs.

    `torch_count` is the number of GPUs that torch can use in this process, if different: a CPU build can use none.

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
    """Return the GPUs of each launched server, on a machine with `count` GPUs.

    Servers avoid the trainer's GPUs if enough others are left, unless the transport is ``cuda_ipc``, which needs them.

    Raises:
        UsageError: there are too few GPUs, or ``engine.gpus`` names one that does not exist.
    """
    chosen, names = section.gpus, [str(position) for position in range(count)]
    free = [position for position in range(count) if position not in trainer]
    if chosen is None and section.transport != "cuda_ipc" and len(free) >= section.replicas * section.tensor_parallel:
        chosen = free if count else None
    return assign_gpus(section.replicas, section.tensor_parallel, names, chosen)


def check_cores(config: Config) -> None:
    """Check that engine and trainer can be pinned to the cores that the config names; see `check_cores_exist`.

    Raises:
        ConfigError: the cores overlap or are too few, or the run would not use them.
    """
    chosen = _chosen_cores(config)
    if not chosen:
        return
    for key in chosen:
        if reason := _reason_against_cores(config, key):
            raise ConfigError(f"{key} has no effect", got=reason, hint=f"remove {key}")
    if config.rollout.is_synchronous:
        raise ConfigError(
            f"{next(iter(chosen))} needs asynchronous training",
            got="rollout.max_staleness 0, with which engine and trainer take turns and can use the same cores",
            expected="rollout.max_staleness of at least 1",
        )
    if isinstance(config.engine, LocalEngineConfig) and chosen.keys() == {ENGINE_CORES}:
        raise ConfigError(
            "engine.cpus of a local engine needs trainer.cpus",
            got="a trainer in the same process without cores of its own",
            expected="trainer.cpus: [other cores]",
        )
    everything = [core for cores in chosen.values() for core in cores]
    if repeated := sorted({core for core in everything if everything.count(core) > 1}):
        raise ConfigError(f"{' and '.join(chosen)} name cores twice", got=repeated, expected="different cores")
    replicas = config.engine.replicas if isinstance(config.engine, ServerEngineConfig) else 1
    counts = {
        TRAINER_CORES: ("trainer.processes", config.trainer.processes),
        ENGINE_CORES: ("engine.replicas", replicas),
    }
    for key, cores in chosen.items():
        name, count = counts[key]
        if len(cores) < count:
            raise ConfigError(
                f"{key} names too few cores", got=cores, expected=f"at least {count}, as {name} is {count}"
            )


def check_cores_exist(config: Config) -> None:
    """Check that this process may use the cores that the config names.

    Raises:
        ConfigError: it may not, or the system cannot pin threads to cores.
    """
    usable = usable_cores()
    for key, cores in _chosen_cores(config).items():
        if not hasattr(os, "sched_setaffinity"):
            raise ConfigError(f"{key} needs Linux", got=sys.platform, hint=f"remove {key}")
        if missing := sorted(set(cores) - usable):
            raise ConfigError(
                f"{key} names cores that this process cannot use",
                got=_format_positions(missing),
                expected=f"cores among {_format_positions(sorted(usable))}",
            )


def _chosen_cores(config: Config) -> dict[str, list[int]]:
    """Return the cores of trainer and engine that the config names, by key."""
    engine = config.engine
    cores = engine.cpus if isinstance(engine, LocalEngineConfig | ServerEngineConfig) else None
    chosen = {TRAINER_CORES: config.trainer.cpus, ENGINE_CORES: cores}
    return {key: cores for key, cores in chosen.items() if cores is not None}


def _reason_against_cores(config: Config, key: str) -> str | None:
    """Return the reason why a run cannot pin its processes to cores."""
    if config.cluster is not None:
        return "cluster, whose bundles reserve cores: cluster.rank and cluster.engine"
    if config.trainer.episodes is not None:
        return "training on stored episodes, without an engine"
    if key == TRAINER_CORES and "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun, which starts the ranks"
    return None


def core_warnings(config: Config) -> list[str]:
    """Return a warning if the trainer has more processes than this machine has CPU cores."""
    cores = len(usable_cores())
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
    check_cores_exist(config)
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
    rows += [
        (f"{key.partition('.')[0]} cores", _format_positions(cores), key)
        for key, cores in _chosen_cores(config).items()
    ]
    if placed.shared:
        rows.append(("shared GPUs", _format_positions(placed.shared), _sharing(config)))
    used = {*placed.trainer, *(position for server in placed.servers for position in server)}
    if idle := [position for position in range(count) if position not in used]:
        rows.append(("idle GPUs", _format_positions(idle), "raise trainer.processes or engine.replicas to use them"))
    return rows


def _sharing(config: Config) -> str:
    """Describe how trainer and servers share GPU memory, or the setting to change."""
    engine = config.engine
    if isinstance(engine, ServerEngineConfig) and engine.sleep:
        return "engine.sleep: servers release their memory during training"
    return "set engine.sleep=true, or limit the servers' memory in engine.arguments"


def _format_positions(positions: Sequence[int]) -> str:
    """Format positions as ``0``, ``0 to 3``, or ``0, 2``."""
    if len(positions) > 2 and list(positions) == list(range(positions[0], positions[-1] + 1)):
        return f"{positions[0]} to {positions[-1]}"
    return ", ".join(map(str, positions))
