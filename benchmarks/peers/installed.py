"""Environments of the peers, which `make bench-peers` installs outside the checkout."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from agentrl.errors import UsageError

PEERS: Mapping[str, str] = {
    "trl": "trl-1.16.0",
    "verifiers": "verifiers-0.4.0",
    "verifiers_classic": "verifiers-0.3.1",
    "agentlightning": "agentlightning-0.3.0",
    "litellm": "litellm-1.106.12",
    "rllm": "rllm-model-gateway-0.1.0",
}
"""Names of the peers' folders; the Makefile installs the same versions."""
ROOT_VARIABLE = "AGENTRL_PEERS"


def find_python(peer: str) -> str:
    """Return the Python interpreter of a peer; agentrl has this one.

    Raises:
        UsageError: the peer is not installed.
    """
    if peer == "agentrl":
        return sys.executable
    root = Path(os.environ.get(ROOT_VARIABLE) or Path.home() / ".cache" / "agentrl" / "peers")
    folder = root / f"{PEERS[peer]}-py{sys.version_info.major}.{sys.version_info.minor}"
    if not (folder / ".installed").is_file():
        raise UsageError(
            f"the peer {peer} is not installed",
            got=str(folder),
            expected="its environment",
            hint=f"run make bench-peers, or set {ROOT_VARIABLE}",
        )
    return str(folder / "bin" / "python")


def version_of(peer: str) -> str:
    """Return the version of a peer.

    >>> version_of("trl")
    '1.16.0'
    """
    return PEERS[peer].rpartition("-")[2]


def conditions(peers: Iterable[str], rounds: int) -> dict[str, Any]:
    """Return what a reader must know about a measurement: date, machine, load and versions of the peers."""
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), ":")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "processor": cpu.partition(":")[2].strip(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "rounds": rounds,
        "versions": {name: version_of(name) for name in peers},
    }
