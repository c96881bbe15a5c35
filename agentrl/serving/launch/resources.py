"""Resources of launched servers: free ports, GPUs, and virtual environments with inference engines."""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import EngineError, UnknownNameError, UsageError

FIRST_PORT = 20_000
LAST_PORT = 65_535
EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""Range of ports for outgoing connections, which a server must not listen on."""
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
QUERY = ("nvidia-smi", "--query-gpu=index", "--format=csv,noheader")
QUERY_LIMIT_S = 60.0
ENGINES_FOLDER = "AGENTRL_ENGINES"
"""Environment variable with the folder of the engines' virtual environments."""
DEFAULT_FOLDER = Path("~/.cache/agentrl/engines")
STAMP = ".installed"
ENGINES = ("vllm", "sglang")


@dataclass(frozen=True, slots=True)
class PortReservation:
    """Port that agentrl does not give to another server before its release or the end of this process."""

    port: int
    _mark: socket.socket

    def release(self) -> None:
        """Release the port; idempotent."""
        self._mark.close()


def reserve_port(candidates: Iterable[int] | None = None) -> PortReservation:
    """Return the first port that is neither in use nor reserved.

    Args:
        candidates: Ports to try; by default those from 20,000 that are not for outgoing connections, starting at a
            random one.
    """
    for port in _candidates() if candidates is None else candidates:
        if (reservation := _reserve(port)) is not None:
            return reservation
    raise EngineError("no port is free", expected="a port that is neither in use nor reserved")


def reserve_exactly(port: int) -> PortReservation:
    """Reserve the given port; raises `UsageError` if it is in use."""
    if (reservation := _reserve(port)) is None:
        hint = "choose another port, or end the program that uses it"
        raise UsageError(f"port {port} is in use", expected="a free port", hint=hint)
    return reservation


def is_free(port: int) -> bool:
    """Return True if a server could listen on the port, on any address of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


def _reserve(port: int) -> PortReservation | None:
    # names in the abstract namespace have the same scope as ports, and are released when the process exits
    mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        mark.bind(f"\0agentrl-port-{port}")
    except OSError:
        mark.close()
        return None
    if not is_free(port):
        mark.close()
        return None
    return PortReservation(port, mark)


def _candidates() -> list[int]:
    low, high = map(int, EPHEMERAL_PORTS.read_text().split())
    outside = [port for port in range(FIRST_PORT, LAST_PORT + 1) if not low <= port <= high]
    found = outside or list(range(FIRST_PORT, LAST_PORT + 1))
    first = random.SystemRandom().randrange(len(found))
    return found[first:] + found[:first]


def usable_gpus(environment: Mapping[str, str]) -> list[str]:
    """Return the GPUs that this process may use, named as in ``CUDA_VISIBLE_DEVICES``; none without a driver.

    Raises:
        EngineError: ``nvidia-smi`` failed.
    """
    if (visible := environment.get(VISIBLE_GPUS)) is not None:
        names = [name.strip() for name in visible.split(",") if name.strip()]
        return names[: names.index("-1")] if "-1" in names else names
    if shutil.which(QUERY[0]) is None:
        return []
    try:
        ended = subprocess.run(QUERY, capture_output=True, text=True, timeout=QUERY_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise EngineError("the GPUs of this machine cannot be listed", got=error, expected=" ".join(QUERY)) from error
    return ended.stdout.split()


def assign_gpus(
    replicas: int, tensor_parallel: int, usable: Sequence[str], chosen: Sequence[int] | None
) -> list[tuple[int, ...]]:
    """Return the GPU positions of each replica; empty tuples on a machine without GPUs.

    >>> assign_gpus(2, 2, ["0", "1", "2", "3"], None)
    [(0, 1), (2, 3)]

    `usable` are the names of the GPUs that this process may use; all are assigned unless positions are `chosen`.

    Raises:
        UsageError: there are too few GPUs, or a position does not exist.
    """
    if chosen is None and not usable:
        if tensor_parallel > 1:
            raise UsageError(
                "engine.tensor_parallel splits a server across GPUs, but this process cannot use any",
                got=tensor_parallel,
                expected="1",
                hint="run on a machine with GPUs; agentrl train … --dry-run --gpus 8 shows the placement on 8 GPUs",
            )
        return [()] * replicas
    positions = list(range(len(usable)) if chosen is None else chosen)
    if wrong := sorted({position for position in positions if not 0 <= position < len(usable)}):
        there = f"0 to {len(usable) - 1}" if usable else "none, as this process cannot use any GPU"
        raise UsageError("engine.gpus names a GPU that does not exist", got=wrong, expected=there)
    if len(set(positions)) < len(positions):
        raise UsageError("engine.gpus names a GPU twice", got=positions, expected="each GPU once")
    if replicas * tensor_parallel > len(positions):
        raise UsageError(
            "there are too few GPUs",
            got=f"{len(positions)} for {replicas} servers with {tensor_parallel} each",
            expected=f"{replicas * tensor_parallel}",
            hint="lower engine.replicas or engine.tensor_parallel, or add GPUs to engine.gpus",
        )
    return [tuple(positions[i * tensor_parallel : (i + 1) * tensor_parallel]) for i in range(replicas)]


def visible_devices(positions: Sequence[int], usable: Sequence[str]) -> dict[str, str]:
    """Return the environment variable that limits a server to its GPUs; empty for a server without GPUs."""
    return {VISIBLE_GPUS: ",".join(usable[position] for position in positions)} if positions else {}


def engines_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder of the engines' virtual environments."""
    return Path(environment.get(ENGINES_FOLDER) or DEFAULT_FOLDER).expanduser()


def find_interpreters(engine: str, folder: Path) -> list[Path]:
    """Return the interpreters of an engine's complete virtual environments, newest first."""
    stamps = sorted(folder.glob(f"{engine}*/{STAMP}"), key=lambda stamp: (stamp.stat().st_mtime, str(stamp)))
    return [python for stamp in reversed(stamps) if (python := stamp.parent / "bin" / "python").exists()]


def engine_python(engine: str, chosen: str | None) -> str:
    """Return the Python interpreter for an engine's servers.

    `chosen` is the user's ``engine.python``.

    Raises:
        UsageError: no interpreter with the engine is found; the hint says how to install one.
    """
    if engine not in ENGINES:
        raise UnknownNameError("servers of this engine cannot be launched", got=engine, expected=" or ".join(ENGINES))
    if chosen is not None:
        python = shutil.which(Path(chosen).expanduser())
        if python is None:
            expected = "the Python interpreter of a virtual environment"
            raise UsageError("engine.python is not a program", got=chosen, expected=expected)
        return str(python)
    folder = engines_folder(os.environ)
    if made := find_interpreters(engine, folder):
        return str(made[0])
    found = importlib.util.find_spec(engine)
    if found is not None and found.submodule_search_locations and found.origin:  # not a user's file vllm.py or folder
        return sys.executable
    raise UsageError(
        f"{engine} is not installed",
        got=f"neither in {folder} nor in the environment of {sys.executable}",
        hint=f"to install it: {how_to_make(engine, has_gpu=False)}; with a GPU: {how_to_make(engine, has_gpu=True)}",
    )


def how_to_make(engine: str, *, has_gpu: bool) -> str:
    """Return the shell commands that install an engine, in one line."""
    if not has_gpu:
        return "make engines, in a source checkout of agentrl"
    folder = DEFAULT_FOLDER / f"{engine}-gpu"
    return f"python3 -m venv {folder} && {folder}/bin/pip install {engine} && touch {folder / STAMP}"
