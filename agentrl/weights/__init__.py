"""Weight sync: sending weights from the trainer to the engine, and verifying them."""

from agentrl.weights.adapters import AdaptersProbe, AdaptersSync, AdaptersTransport
from agentrl.weights.collective import CollectiveTransport
from agentrl.weights.contract import SyncReport, Transport, WeightSource, WeightSync
from agentrl.weights.folder import AdapterTransport, FolderTransport, memory_folder, write_served_model
from agentrl.weights.shared_memory import IpcTransport, TensorTransport
from agentrl.weights.sync import InProcessSync, RemoteSync
from agentrl.weights.tensors import CheckpointSource
from agentrl.weights.verify import TOLERANCE, Probe

__all__ = [
    "TOLERANCE",
    "AdapterTransport",
    "AdaptersProbe",
    "AdaptersSync",
    "AdaptersTransport",
    "CheckpointSource",
    "CollectiveTransport",
    "FolderTransport",
    "InProcessSync",
    "IpcTransport",
    "Probe",
    "RemoteSync",
    "SyncReport",
    "TensorTransport",
    "Transport",
    "WeightSource",
    "WeightSync",
    "memory_folder",
    "write_served_model",
]
