"""Weight sync: transfer of weights from the trainer to the engine, and their verification."""

from agentrl.weights.adapters import AdapterTransport, MultiAdapterProbe, MultiAdapterSync, MultiAdapterTransport
from agentrl.weights.collective import CollectiveTransport, GroupMember, address_towards
from agentrl.weights.contract import SyncReport, Transport, WeightSync
from agentrl.weights.folder import MEMORY, FolderTransport, memory_folder, write_served_model
from agentrl.weights.sync import InProcessSync, RemoteSync
from agentrl.weights.tensors import CheckpointSource, IpcTransport, TensorTransport
from agentrl.weights.verify import TOLERANCE, Probe

__all__ = [
    "MEMORY",
    "TOLERANCE",
    "AdapterTransport",
    "CheckpointSource",
    "CollectiveTransport",
    "FolderTransport",
    "GroupMember",
    "InProcessSync",
    "IpcTransport",
    "MultiAdapterProbe",
    "MultiAdapterSync",
    "MultiAdapterTransport",
    "Probe",
    "RemoteSync",
    "SyncReport",
    "TensorTransport",
    "Transport",
    "WeightSync",
    "address_towards",
    "memory_folder",
    "write_served_model",
]
