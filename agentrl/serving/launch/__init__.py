"""Launcher of inference servers on this machine.

Launcher                    one per engine: ports, GPUs, logs, start, restart, close
└ ServerProcess             one per start of a server: readiness, last lines of its log, exit code
  └ guard.py                a small program that ends the server's process tree, even if this process is killed
    └ the server            in its own session
"""

from agentrl.serving.launch.process import (
    CommandMaker,
    LaunchCommand,
    Launcher,
    ServerExited,
    ServerProcess,
    StartProgress,
)
from agentrl.serving.launch.resources import assign_gpus, engine_python, usable_gpus

__all__ = [
    "CommandMaker",
    "LaunchCommand",
    "Launcher",
    "ServerExited",
    "ServerProcess",
    "StartProgress",
    "assign_gpus",
    "engine_python",
    "usable_gpus",
]
