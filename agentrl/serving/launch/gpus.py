"""Which GPUs a launched server gets.

A GPU is named by its position among those that this process may use, as torch numbers them: where
``CUDA_VISIBLE_DEVICES`` is set, position 0 is the first that it names.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence

from agentrl.errors import EngineError, UsageError

VARIABLE = "CUDA_VISIBLE_DEVICES"
QUERY = ("nvidia-smi", "--query-gpu=index", "--format=csv,noheader")
QUERY_LIMIT_S = 60.0


def usable_gpus(environment: Mapping[str, str]) -> list[str]:
    """The names of the GPUs that this process may use, as ``CUDA_VISIBLE_DEVICES`` takes them; none without a driver.

    Raises:
        EngineError: the driver's own program does not tell them.
    """
    if (told := environment.get(VARIABLE)) is not None:
        names = [name.strip() for name in told.split(",") if name.strip()]
        return names[: names.index("-1")] if "-1" in names else names
    if shutil.which(QUERY[0]) is None:
        return []
    try:
        ended = subprocess.run(QUERY, capture_output=True, text=True, timeout=QUERY_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise EngineError("the GPUs of this machine cannot be told", got=error, expected=" ".join(QUERY)) from error
    return ended.stdout.split()


def assign_gpus(
    replicas: int, tensor_parallel: int, usable: Sequence[str], chosen: Sequence[int] | None
) -> list[tuple[int, ...]]:
    """The positions of each replica's GPUs, in turn; all empty on a machine without one.

    >>> assign_gpus(2, 2, ["0", "1", "2", "3"], None)
    [(0, 1), (2, 3)]

    Args:
        replicas: Servers.
        tensor_parallel: GPUs of each.
        usable: Names of the GPUs that this process may use.
        chosen: Positions to take from; all when left out.

    Raises:
        UsageError: there are too few, or none for servers that are divided among several, or one is named that is not
            there.
    """
    if chosen is None and not usable:
        if tensor_parallel > 1:
            raise UsageError(
                "engine.tensor_parallel divides a server among GPUs, and this process can use none",
                got=tensor_parallel,
                expected="1",
                hint="run it on a machine with GPUs; agentrl train … --dry-run --gpus 8 shows the placement on one",
            )
        return [()] * replicas
    positions = list(range(len(usable)) if chosen is None else chosen)
    if wrong := sorted({position for position in positions if not 0 <= position < len(usable)}):
        there = f"0 to {len(usable) - 1}" if usable else "none, as this process may use no GPU"
        raise UsageError("engine.gpus names a GPU that is not there", got=wrong, expected=there)
    if len(set(positions)) < len(positions):
        raise UsageError("engine.gpus names a GPU twice", got=positions, expected="each GPU once")
    if replicas * tensor_parallel > len(positions):
        raise UsageError(
            "there are too few GPUs",
            got=f"{len(positions)} for {replicas} servers with {tensor_parallel} each",
            expected=f"{replicas * tensor_parallel}",
            hint="lower engine.replicas or engine.tensor_parallel, or name more in engine.gpus",
        )
    return [tuple(positions[i * tensor_parallel : (i + 1) * tensor_parallel]) for i in range(replicas)]


def visible_devices(positions: Sequence[int], usable: Sequence[str]) -> dict[str, str]:
    """The variable that shows a server its own GPUs; nothing where it has none."""
    return {VARIABLE: ",".join(usable[position] for position in positions)} if positions else {}
