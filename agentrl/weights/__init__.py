"""Weights from the trainer to the engine, verified."""

from agentrl.weights.checkpoint_names import CheckpointSource as CheckpointSource
from agentrl.weights.collective_transport import CollectiveTransport as CollectiveTransport
from agentrl.weights.folder_transport import AdapterTransport as AdapterTransport
from agentrl.weights.folder_transport import FolderTransport as FolderTransport
from agentrl.weights.folder_transport import memory_folder as memory_folder
from agentrl.weights.in_process import InProcessSync as InProcessSync
from agentrl.weights.ipc_transport import IpcTransport as IpcTransport
from agentrl.weights.probe import TOLERANCE as TOLERANCE
from agentrl.weights.probe import Probe as Probe
from agentrl.weights.remote_sync import RemoteSync as RemoteSync
from agentrl.weights.served_model import write_served_model as write_served_model
from agentrl.weights.server_group import ServerGroup as ServerGroup
from agentrl.weights.sync import SyncReport as SyncReport
from agentrl.weights.sync import WeightSource as WeightSource
from agentrl.weights.sync import WeightSync as WeightSync
from agentrl.weights.tensor_transport import TensorTransport as TensorTransport
from agentrl.weights.transport import PreparedWeights as PreparedWeights
from agentrl.weights.transport import Transport as Transport

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
