"""The command line."""

from agentrl.cli.application import main

__all__ = ["main"]
