"""Tensors for transports: named as in the model's checkpoints and packed into buckets of bounded size.

Servers on the trainer's machine map the buckets from its memory, or receive them in request bodies (SGLang).
"""

from __future__ import annotations

import base64
import io
import pickle
import time
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.multiprocessing import reductions
from transformers import PreTrainedModel

from agentrl.engine import InferenceServer, SharedTensors, TensorLayout
from agentrl.errors import TrainingError, UsageError
from agentrl.errors.foreign import run_in_own_thread
from agentrl.weights.contract import PreparedWeights, Transport, WeightSource

CPU = torch.device("cpu")
REDUCTIONS: Any = reductions
"""Untyped alias of a module without types."""
DEVICE_ARGUMENT = 6
"""Index of the GPU among the arguments of torch's `rebuild_cuda_tensor`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Tensors of one data type in consecutive memory."""

    run: Tensor
    """Bytes of the tensors: uint8 [bytes]."""
    layout: TensorLayout

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and tensors, which are views of the bytes."""
        dtype: torch.dtype = getattr(torch, self.layout.dtype)
        sizes = [torch.Size(shape).numel() for shape in self.layout.shapes]
        flats = torch.split(self.run.view(dtype), sizes)
        for name, flat, shape in zip(self.layout.names, flats, self.layout.shapes, strict=True):
            yield name, flat.view(tuple(shape))

    def encode(self) -> str:
        """Pickle the list of names and tensors, and encode it as base64."""
        # a pickled view would contain the whole underlying memory
        named = [(name, tensor.clone()) for name, tensor in self.tensors()]
        return base64.b64encode(pickle.dumps(named, protocol=pickle.HIGHEST_PROTOCOL)).decode("ascii")


def unpack(buckets: Sequence[Bucket]) -> dict[str, Tensor]:
    """Return all tensors in some buckets, by name."""
    return {name: tensor for bucket in buckets for name, tensor in bucket.tensors()}


Give: TypeAlias = Callable[[InferenceServer, Sequence[Bucket], int], Awaitable[None]]


class PreparedBuckets(PreparedWeights):
    """Weights in buckets.

    Args:
        buckets: At least one bucket.
        give: Function that sends the buckets of a version to a paused server.
    """

    def __init__(self, buckets: Sequence[Bucket], give: Give, *, version: int, seconds: float) -> None:
        super().__init__(version=version, size=sum(bucket.run.nbytes for bucket in buckets), seconds=seconds)
        self._buckets = buckets
        self._give = give

    async def give_to(self, server: InferenceServer) -> None:
        """Send the buckets to a paused server."""
        await self._give(server, self._buckets, self.version)

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the tensors in the buckets."""
        return unpack(self._buckets)


def pack(weights: Mapping[str, Tensor], *, bucket_bytes: int, device: torch.device = CPU) -> list[Bucket]:
    """Copy tensors to buckets of one tensor or at most `bucket_bytes`; shared memory is copied for each name."""
    return [_pack_bucket(tensors, device) for tensors in split_by_bytes(weights, bucket_bytes, lambda t: t.dtype)]


def split_by_bytes(
    weights: Mapping[str, Tensor], most: int, key: Callable[[Tensor], Hashable] = lambda tensor: None
) -> Iterator[dict[str, Tensor]]:
    """Split tensors into parts of one tensor or at most `most` bytes; all tensors of a part have the same `key`."""
    filling: dict[Hashable, tuple[dict[str, Tensor], int]] = {}
    for name, tensor in weights.items():
        part, size = filling.get(key(tensor), ({}, 0))
        if part and size + tensor.nbytes > most:
            yield part
            part, size = {}, 0
        part[name] = tensor
        filling[key(tensor)] = part, size + tensor.nbytes
    yield from (part for part, _ in filling.values())


def _pack_bucket(tensors: Mapping[str, Tensor], device: torch.device) -> Bucket:
    values = list(tensors.values())
    run = torch.empty(sum(tensor.numel() for tensor in values), dtype=values[0].dtype, device=device)
    for part, tensor in zip(torch.split(run, [tensor.numel() for tensor in values]), values, strict=True):
        part.copy_(tensor.detach().reshape(-1))
    layout = TensorLayout(
        names=list(tensors),
        dtype=str(run.dtype).removeprefix("torch."),
        shapes=[list(tensor.shape) for tensor in values],
    )
    return Bucket(run=run.view(torch.uint8), layout=layout)


try:
    from transformers.core_model_loading import revert_weight_conversion
except ImportError:

    def revert_weight_conversion(model: PreTrainedModel, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Do nothing, because models and checkpoints have the same tensors in transformers 4."""
        return state_dict


class CheckpointNames:
    """Mapping from a model's tensors to those that transformers saves; the model may be sharded or have adapters.

    Raises:
        UsageError: a tensor of the checkpoint combines several of the model's tensors.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        own = {
            name.replace(".base_layer.", "."): torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for name, tensor in model.state_dict().items()
        }
        found = {name: tuple(self.convert(name, tensor)) for name, tensor in own.items()}
        together = revert_weight_conversion(model, own)
        if {part for parts in found.values() for part in parts} != set(together):
            raise UsageError(
                "the model cannot be served",
                got=f"{type(model).__name__}, whose checkpoints join tensors of the model",
                expected="a model whose tensors are saved separately",
                hint="set engine=local",
            )
        self.parts: dict[str, tuple[str, ...]] = {name: parts for name, parts in found.items() if parts != (name,)}
        """Checkpoint names of each tensor that is saved under other names."""

    def convert(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return the checkpoint's tensors for a tensor of the model, by name."""
        saved: dict[str, Tensor] = revert_weight_conversion(self._model, {name: tensor})
        return saved

    def apply(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the checkpoint's tensors, in the order of `weights`; each is converted when it is read."""
        return CheckpointWeights(weights, self) if self.parts else weights


class CheckpointWeights(Mapping[str, Tensor]):
    """Checkpoint tensors of a model. If they are read in order, each tensor of the model is read once."""

    def __init__(self, weights: Mapping[str, Tensor], names: CheckpointNames) -> None:
        self._weights, self._names = weights, names
        self._sources = {part: name for name in weights for part in names.parts.get(name, (name,))}
        self._latest = ""
        self._converted: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        source = self._sources[name]
        if source not in self._names.parts:
            return self._weights[source]
        if source != self._latest:
            self._converted.clear()  # before the next is gathered
            self._latest, self._converted = source, self._names.convert(source, self._weights[source])
        return self._converted[name]

    def __contains__(self, name: object) -> bool:
        return name in self._sources

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


class CheckpointSource:
    """A `WeightSource` for servers, from a trainer's source and model."""

    def __init__(self, source: WeightSource, model: PreTrainedModel) -> None:
        self._source, self._names = source, CheckpointNames(model)

    def weights(self) -> Mapping[str, Tensor]:
        """Return the current tensors, by the names of a checkpoint."""
        return self._names.apply(self._source.weights())

    def token_logprobs(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> list[float]:
        """Score an answer; see `WeightSource.token_logprobs`."""
        return self._source.token_logprobs(prompt_ids, answer_ids)


def share(run: Tensor) -> None:
    """Move CPU memory to shared memory; GPU memory is always shareable."""
    if not run.is_cuda:
        _share(run.untyped_storage())


def _share(storage: Any) -> tuple[bytes, bytes, int]:
    """Share a storage by a file; return the handle of torch's manager, the file's name, and its size."""
    manager, name, size = storage._share_filename_cpu_()
    return manager, name, size


def open_handle(run: Tensor) -> dict[str, Any]:
    """Create a JSON handle (bytes in base64) to open `run`, uint8 [bytes] with its own storage, in another process."""
    storage: Any = run.untyped_storage()
    if not run.is_cuda:
        manager, name, size = _share(storage)
        return {"manager": manager.decode(), "name": name.decode(), "size": size}
    _, memory, size, offset, counter, counter_offset, event, waits = storage._share_cuda_()
    return {
        "gpu": gpu_uuid(run),
        "memory": _base64(memory),
        "size": size,
        "offset": offset,
        "counter": _base64(counter),
        "counter_offset": counter_offset,
        "event": _base64(event),
        "waits": waits,
    }


def gpu_uuid(tensor: Tensor) -> str:
    """Return the UUID of the GPU that holds a tensor; GPU numbers may differ between processes."""
    return str(torch.cuda.get_device_properties(tensor.device).uuid)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def pickle_handles(bucket: Bucket) -> str:
    """Pickle a list of names and handles of tensors in SGLang's format, and encode it as base64.

    A server must open it exactly once; otherwise its memory is not freed (on the CPU, until this process ends).
    """
    stream = io.BytesIO()
    _HandlePickler(stream).dump(list(bucket.tensors()))
    return _base64(stream.getvalue())


class _HandlePickler(ForkingPickler):
    """Pickler that identifies a GPU by its UUID, like SGLang, and memory by a file name.

    Torch's default, a file descriptor, works only for child processes.
    """

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_cuda:
            rebuild, arguments = REDUCTIONS.reduce_tensor(value)
            return rebuild, (*arguments[:DEVICE_ARGUMENT], gpu_uuid(value), *arguments[DEVICE_ARGUMENT + 1 :])
        if isinstance(value, torch.UntypedStorage):
            storage: Any = value
            handle = _share(storage)
            storage._shared_incref()  # the reference of the process that opens it
            return REDUCTIONS.rebuild_storage_filename, (torch.UntypedStorage, *handle)
        return NotImplemented


class IpcTransport(Transport):
    """Transport through shared memory: tensors are copied to buckets on their device, which servers open.

    GPU tensors stay on the GPU, which holds one copy between syncs, for returning servers, and two during a sync. A
    bucket that a server did not open, or had open when it died, is not freed. On the CPU, buckets are in shared memory.

    Args:
        bucket_bytes: Maximum number of bytes of the tensors in a request; a server may keep several buckets open until
            its update ends.
    """

    def __init__(self, *, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes

    async def prepare(self, weights: Mapping[str, Tensor], version: int) -> PreparedWeights:
        """Copy the tensors in a thread."""
        began = time.perf_counter()
        try:
            buckets = await run_in_own_thread(self._make_shared, weights)
        except RuntimeError as error:
            raise TrainingError(
                "the weights cannot be copied for the servers",
                got=str(error)[:200],
                expected="memory for two copies in addition to the trainer's weights",
                hint="free memory, or set engine.transport=shared_memory",
            ) from error
        return PreparedBuckets(buckets, _open_at, version=version, seconds=time.perf_counter() - began)

    def _make_shared(self, weights: Mapping[str, Tensor]) -> list[Bucket]:
        device = next(iter(weights.values())).device
        buckets = pack(weights, bucket_bytes=self._bucket_bytes, device=device)
        for bucket in buckets:
            share(bucket.run)
        return buckets


async def _open_at(server: InferenceServer, buckets: Sequence[Bucket], version: int) -> None:
    """Let a server open the buckets, one at a time."""
    if buckets[0].run.is_cuda:
        await run_in_own_thread(torch.cuda.synchronize, buckets[0].run.device)
    shared = [
        SharedTensors(
            layout=bucket.layout,
            handle=partial(open_handle, bucket.run),
            part=partial(run_in_own_thread, pickle_handles, bucket),
        )
        for bucket in buckets
    ]
    await server.open_weights(shared, version)


class TensorTransport(Transport):
    """Transport in request bodies, each with at most `bucket_bytes` of tensors."""

    def __init__(self, *, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes

    async def prepare(self, weights: Mapping[str, Tensor], version: int) -> PreparedWeights:
        """Copy the tensors in a thread."""
        began = time.perf_counter()
        buckets = await run_in_own_thread(pack, weights, bucket_bytes=self._bucket_bytes)
        return PreparedBuckets(buckets, _send_to, version=version, seconds=time.perf_counter() - began)


async def _send_to(server: InferenceServer, buckets: Sequence[Bucket], version: int) -> None:
    """Encode and send one bucket at a time, so that only one request is in memory."""
    parts = [partial(run_in_own_thread, bucket.encode) for bucket in buckets]
    await server.load_tensors(parts, version)
