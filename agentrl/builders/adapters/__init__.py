"""Adapters of a run: one that is trained and sent to servers alone, or several for different roles.

lora.py    one adapter (``model.lora``): checks, and the transport that sends only adapters
roles.py   the adapter of each role (``adapters``, ``agent.roles``), and checks of runs with several adapters
parts.py   models, trainers, weights and engine of a run or evaluation with several adapters
"""

from agentrl.builders.adapters.lora import (
    adapter_transport,
    check_adapter_sync,
    check_adapters,
    refuse_adapters,
    sends_adapters,
)
from agentrl.builders.adapters.parts import build_adapters, open_adapters
from agentrl.builders.adapters.roles import check_role_adapters, refuse_role_adapters, trained_roles

__all__ = [
    "adapter_transport",
    "build_adapters",
    "check_adapter_sync",
    "check_adapters",
    "check_role_adapters",
    "open_adapters",
    "refuse_adapters",
    "refuse_role_adapters",
    "sends_adapters",
    "trained_roles",
]
