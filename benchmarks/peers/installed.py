"""Environments of the peers, which `make bench-peers` installs outside the checkout."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

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
