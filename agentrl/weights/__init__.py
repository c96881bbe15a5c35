"""Weights from the trainer to the engine, verified."""

from agentrl.weights.collective import CollectiveTransport as CollectiveTransport
from agentrl.weights.contract import PreparedWeights as PreparedWeights
from agentrl.weights.contract import ServerGroup as ServerGroup
from agentrl.weights.contract import SyncReport as SyncReport
from agentrl.weights.contract import Transport as Transport
from agentrl.weights.contract import WeightSource as WeightSource
from agentrl.weights.contract import WeightSync as WeightSync
from agentrl.weights.folder import AdapterTransport as AdapterTransport
from agentrl.weights.folder import FolderTransport as FolderTransport
from agentrl.weights.folder import memory_folder as memory_folder
from agentrl.weights.folder import write_served_model as write_served_model
from agentrl.weights.shared_memory import IpcTransport as IpcTransport
from agentrl.weights.shared_memory import TensorTransport as TensorTransport
from agentrl.weights.sync import InProcessSync as InProcessSync
from agentrl.weights.sync import RemoteSync as RemoteSync
from agentrl.weights.tensors import CheckpointSource as CheckpointSource
from agentrl.weights.verify import TOLERANCE as TOLERANCE
from agentrl.weights.verify import Probe as Probe

__all__ = [
    "TOLERANCE",
    "AdapterTransport",
    "CheckpointSource",
    "CollectiveTransport",
    "FolderTransport",
    "InProcessSync",
    "IpcTransport",
    "PreparedWeights",
    "Probe",
    "RemoteSync",
    "ServerGroup",
    "SyncReport",
    "TensorTransport",
    "Transport",
    "WeightSource",
    "WeightSync",
    "memory_folder",
    "write_served_model",
]
