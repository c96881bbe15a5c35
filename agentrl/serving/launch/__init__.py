"""Starting, watching and ending inference servers on this machine."""

from agentrl.serving.launch.command import LaunchCommand

__all__ = ["LaunchCommand"]
