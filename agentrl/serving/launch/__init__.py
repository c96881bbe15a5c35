"""Starting, watching and ending inference servers on this machine.

Launcher                    one per engine: ports, GPUs, logs, start, restart, close
└ ServerProcess             one per life of a server: ready, last lines of its log, exit code
  └ guard.py                a small program that ends the server's whole tree, also when this process is killed
    └ the server            in a session of its own
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
