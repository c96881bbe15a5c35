"""Weights from the trainer to the engine, verified."""

from agentrl.weights.in_process import InProcessSync as InProcessSync
from agentrl.weights.probe import TOLERANCE as TOLERANCE
from agentrl.weights.probe import Probe as Probe
from agentrl.weights.sync import SyncReport as SyncReport
from agentrl.weights.sync import WeightSource as WeightSource
from agentrl.weights.sync import WeightSync as WeightSync

__all__ = ["TOLERANCE", "InProcessSync", "Probe", "SyncReport", "WeightSource", "WeightSync"]
