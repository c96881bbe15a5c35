"""Receiver of a trainer's weights in vLLM's workers: broadcast over gloo or NCCL, or read from shared memory.

The protocol of vLLM's own NCCL engine requires vLLM on the trainer's side. This engine uses torch's process groups. It
is registered in vLLM as `BACKEND`, and the same requests drive it. The trainer's side is `agentrl.weights.collective`
and `agentrl.weights.tensors`.
"""

from __future__ import annotations

import base64
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

BACKEND = "agentrl"
c10d: Any = torch.distributed
"""Untyped, as its type stubs lack the classes of process groups."""


@dataclass
class GroupInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Process group to join; the trainer is rank 0, and this server's workers follow."""

    name: str
    address: str
    port: int
    size: int
    backend: str
    timeout_s: float


@dataclass
class RunInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Tensors of one data type in one run of bytes."""

    names: list[str]
    dtype: str
    shapes: list[list[int]]
    handle: dict[str, Any] | None = None
    """Memory handle of the run on this machine; ``None`` if it is broadcast."""


class WeightReceiver(WeightTransferEngine[GroupInfo, RunInfo]):  # type: ignore[misc]
    """Engine that receives or opens runs of bytes and loads their tensors as vLLM loads a checkpoint."""

    init_info_cls = GroupInfo
    update_info_cls = RunInfo
    _group: Any = None

    def init_transfer_engine(self, init_info: GroupInfo) -> None:
        """Join the trainer's process group."""
        self.shutdown()
        self._buffer_device = torch.device("cpu") if init_info.backend == "gloo" else self.device
        rank = 1 + self.parallel_config.data_parallel_index * self.parallel_config.world_size
        self._group = join(init_info, rank + self.parallel_config.rank)

    def start_weight_update(self) -> None:
        """Prepare to receive the weights of the whole model."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive a run and load it. Unlike vLLM's method, it does not require an accelerator."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: RunInfo) -> None:
        """Receive a run and load it."""
        dtype = getattr(torch, update_info.dtype)
        if update_info.handle is None:
            run = self._receive_broadcast(update_info, dtype)
        else:
            run = open_run(update_info.handle, self.device)
        self.model.load_weights(tensors_of(run, update_info.names, dtype, update_info.shapes))

    def _receive_broadcast(self, update_info: RunInfo, dtype: torch.dtype) -> torch.Tensor:
        """Receive a run by broadcast."""
        if self._group is None:
            raise RuntimeError("the worker has not joined a process group")
        count = sum(torch.Size(shape).numel() for shape in update_info.shapes)
        run = torch.empty(count * dtype.itemsize, dtype=torch.uint8, device=self._buffer_device)
        self._group.broadcast(run, 0).wait()
        return run

    def finish_weight_update(self) -> None:
        """Finish loading, so that the new weights are used."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Release the group."""
        self._group = None


def join(info: GroupInfo, rank: int) -> Any:
    """Join a process group; returns once all members have joined. Store keys are those of torch's own groups."""
    timeout = timedelta(seconds=info.timeout_s)
    store = c10d.TCPStore(info.address, info.port, info.size, False, timeout)
    named = c10d.PrefixStore(f"{info.name}/", c10d.PrefixStore(info.name, store))
    if info.backend == "nccl":
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return c10d.ProcessGroupNCCL(c10d.PrefixStore("cuda/", named), rank, info.size, options)
    gloo = c10d.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(hostname=address_towards(info.address, info.port))]
    return gloo(c10d.PrefixStore("cpu/", named), rank, info.size, options)


def address_towards(host: str, port: int) -> str:
    """Return the address of this machine that is used to reach a host; no data is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def open_run(handle: dict[str, Any], device: torch.device) -> torch.Tensor:
    """Open a run in the trainer's memory; it is released with the last tensor that views it.

    Args:
        handle: Handle from `agentrl.weights.tensors.open_handle`.
        device: Device of this worker.
    """
    storage: Any = torch.UntypedStorage
    if "gpu" not in handle:
        shared = storage._new_shared_filename_cpu(handle["manager"].encode(), handle["name"].encode(), handle["size"])
        return torch.empty(0, dtype=torch.uint8).set_(shared)
    own = str(torch.cuda.get_device_properties(device).uuid)
    if handle["gpu"] != own:
        raise RuntimeError(f"the weights are on GPU {handle['gpu']}, but this worker is on {own}")
    memory, counter, event = (base64.b64decode(handle[name]) for name in ("memory", "counter", "event"))
    shared = storage._new_shared_cuda(
        device.index,
        memory,
        handle["size"],
        handle["offset"],
        counter,
        handle["counter_offset"],
        event,
        handle["waits"],
    )
    return torch.empty(0, dtype=torch.uint8, device=device).set_(shared)


def tensors_of(
    run: torch.Tensor, names: list[str], dtype: torch.dtype, shapes: list[list[int]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and tensors in a run of bytes."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    for name, flat, shape in zip(names, torch.split(run.view(dtype), sizes), shapes, strict=True):
        yield name, flat.view(shape)


WeightTransferEngineFactory.register_engine(BACKEND, WeightReceiver)
