"""Protocol buffer messages of forward and backward passes and of samples, as the client's version 0.38 defines them.

Messages with unknown fields are rejected, because training would otherwise ignore a part of the request.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from agentrl.errors import UsageError, shorten
from agentrl.registry import Extra

TINKER = Extra(name="training-service", module="tinker")
MEDIA_TYPE = "application/x-protobuf"
FLOAT32 = 1
DTYPES: Mapping[int, str] = {FLOAT32: "<f4", 2: "<i8", 3: "<i4"}
MAX_ENTRIES = 1 << 25
"""Maximum number of entries of all tensors of a request."""
STOPPED, LENGTH = 0, 1
"""Stop reasons of a sample."""
NO_TOKEN = -99999.0
"""Log-probability of an empty entry among the top tokens."""

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """One sequence with the inputs of its loss.

    To train on the tokens 6 and 8 of ``[5, 6, 8]``, `tokens` is ``[5, 6]`` and ``target_tokens`` in `inputs` is
    ``[6, 8]``: the target of each position is the next token.
    """

    tokens: npt.NDArray[np.int64]
    """Input tokens, [N]."""
    inputs: Mapping[str, Array]
    """Loss inputs by name: float32 or int64, [N] or [N, K]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRequest:
    """A forward pass over data, with or without a backward pass."""

    data: Sequence[Datum]
    loss: str
    options: Mapping[str, float] = field(default_factory=dict)
    forward_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TopTokenTable:
    """The most probable tokens of each position and their log-probabilities, both [positions, k]."""

    ids: Array
    logprobs: Array

    def message(self) -> Any:
        """Return the table as a message."""
        length, k = self.ids.shape
        return _messages().TopkLogprobs(
            token_ids=self.ids.astype("<i4").tobytes(),
            logprobs=self.logprobs.astype("<f4").tobytes(),
            k=k,
            length=length,
        )


@functools.cache
def _messages() -> Any:
    """Return the client's module of message classes."""
    return TINKER.load("tinker.proto.tinker_public_pb2")


def parse_pass(raw: bytes) -> Any:
    """Parse the bytes of a request for a pass; the message has a `model_id` and a `seq_id`.

    Raises:
        UsageError: the bytes are malformed, or `model_id` or `seq_id` is missing.
    """
    message = _messages().ForwardBackwardRequest()
    try:
        message.ParseFromString(raw)
    except Exception as error:  # each implementation of the library has its own errors
        raise UsageError(
            "the request is not a protocol buffer of the tinker client", got=shorten(str(error)), hint="update tinker"
        ) from error
    if not message.model_id or message.seq_id < 1:
        raise UsageError(
            "the request has no model_id or no seq_id",
            got=f"model_id {shorten(message.model_id)}, seq_id {message.seq_id}",
            expected="both, and a seq_id of 1 or more",
        )
    return message


def read_pass(message: Any) -> PassRequest:
    """Read the data of a request.

    Raises:
        UsageError: a field is invalid or not supported; the message names it.
    """
    _refuse_unknown(message, "forward_backward")
    if not message.data:
        raise UsageError("data is empty", expected="at least one datum")
    _check_size(message)
    options = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            raise UsageError(f"loss_fn_config.{name} is not a number", got=shorten(value.text))
        options[name] = value.number
    return PassRequest(
        data=[_read_datum(own, f"data[{number}]") for number, own in enumerate(message.data)],
        loss=message.loss_fn,
        options=options,
        forward_only=message.forward_only,
    )


def _check_size(message: Any) -> None:
    """Reject tensors that are too large when dense: a small sparse tensor may declare any shape."""
    shapes = [tensor.shape for datum in message.data for tensor in datum.loss_fn_inputs.values()]
    if any(length < 0 for shape in shapes for length in shape):
        raise UsageError("a tensor of loss_fn_inputs has a negative length")
    entries = sum(math.prod(shape) for shape in shapes)
    if entries > MAX_ENTRIES:
        raise UsageError(
            "loss_fn_inputs are too large", got=f"{shorten(entries)} entries", expected=f"at most {MAX_ENTRIES:,}"
        )


def _refuse_unknown(message: Any, where: str) -> None:
    unknown = TINKER.load("google.protobuf.unknown_fields").UnknownFieldSet(message)
    if len(unknown):
        numbers = sorted({field.field_number for field in unknown})
        raise UsageError(
            f"{where} has unknown fields",
            got=f"field {', '.join(map(str, numbers))}",
            expected="the fields of tinker 0.38",
        )


def _read_datum(message: Any, where: str) -> Datum:
    _refuse_unknown(message, where)  # provenance spans state the source of each token; only stable_reinforce reads them
    tokens = [_read_tokens(chunk, f"{where}.model_input[{k}]") for k, chunk in enumerate(message.model_input)]
    inputs = {name: _read_tensor(tensor, f"{where}.{name}") for name, tensor in message.loss_fn_inputs.items()}
    ids = np.concatenate(tokens) if tokens else np.zeros(0, dtype=np.int64)
    return Datum(tokens=ids, inputs=inputs)


def _read_tokens(chunk: Any, where: str) -> npt.NDArray[np.int64]:
    kind = chunk.WhichOneof("chunk")
    if kind != "encoded_text":
        raise UsageError(f"{where} is not supported", got=f"{kind or 'unknown'} chunk", expected="tokens only")
    return _numbers(chunk.encoded_text.tokens, "<i4", where).astype(np.int64)


def _numbers(data: bytes, dtype: str, where: str) -> Array:
    width = np.dtype(dtype).itemsize
    if len(data) % width:
        raise UsageError(f"{where} is truncated", got=f"{len(data)} bytes", expected=f"a multiple of {width}")
    return np.frombuffer(data, dtype=dtype)


def _read_tensor(message: Any, where: str) -> Array:
    _refuse_unknown(message, where)
    if message.dtype not in DTYPES:
        raise UsageError(f"{where} has an unknown dtype", got=message.dtype, expected="float32 or int64")
    dtype, shape = DTYPES[message.dtype], tuple(message.shape)
    if message.WhichOneof("encoding") == "sparse_csr":
        array = _to_dense(message.sparse_csr, dtype, shape, where)
    else:
        array = _numbers(message.dense, dtype, where)
        if shape and array.size != math.prod(shape):
            raise UsageError(f"{where} does not fit its shape", got=f"{array.size} entries", expected=f"shape {shape}")
        array = array.reshape(shape) if shape else array
    if array.dtype.kind == "f":
        if not np.isfinite(array).all():
            raise UsageError(f"{where} is not finite", got="nan or inf", expected="finite numbers")
        return array.astype(np.float32)
    return array.astype(np.int64)


def _to_dense(message: Any, dtype: str, shape: tuple[int, ...], where: str) -> Array:
    """Convert a sparse matrix to a dense one."""
    rows = _numbers(message.crow_indices, "<i8", where)
    columns, values = _numbers(message.col_indices, "<i8", where), _numbers(message.values, dtype, where)
    is_matrix = len(shape) == 2 and len(rows) == shape[0] + 1 and len(columns) == len(values)
    if not is_matrix or rows[0] != 0 or rows[-1] != len(values) or (np.diff(rows) < 0).any():
        raise UsageError(
            f"{where} is not a valid sparse matrix", got=f"shape {shape}, {len(rows)} rows, {len(values)} values"
        )
    if len(columns) and not (columns.min() >= 0 and columns.max() < shape[1]):
        raise UsageError(f"{where} has a column outside its shape", got=f"{columns.max()}", expected=f"shape {shape}")
    array = np.zeros(shape, dtype=dtype)
    array[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return array


def write_pass(logprobs: Sequence[Array], metrics: Mapping[str, float]) -> bytes:
    """Write the log-probabilities of each datum's targets, [N] or [N, K], and metrics.

    Consecutive data with the same number of targets share a record, because a record stores one trailing shape.
    """
    records: list[list[Array]] = []
    for array in logprobs:
        if not records or records[-1][0].shape[1:] != array.shape[1:]:
            records.append([])
        records[-1].append(array)
    output = _messages().ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=dict(metrics))
    for record in records:
        arrays = [np.ascontiguousarray(array, dtype="<f4") for array in record]
        offsets = np.cumsum([0, *(array.nbytes for array in arrays)]).astype("<i8")
        batched = _messages().BatchedTensor(
            data=b"".join(array.tobytes() for array in arrays),
            offsets=offsets.tobytes(),
            dtype=FLOAT32,
            trailing_shape=arrays[0].shape[1:],
        )
        output.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(arrays)).fields["logprobs"].CopyFrom(batched)
    return bytes(output.SerializeToString())


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sampled sequence."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    is_stopped: bool
    """True if a stop token or text ended the sample; False at the maximum length."""
    top: TopTokenTable | None = None


def write_samples(
    samples: Sequence[Sample],
    *,
    prompt_logprobs: Array | None = None,
    prompt_top: TopTokenTable | None = None,
    cached_tokens: int = 0,
) -> bytes:
    """Write samples of one prompt and the prompt's log-probabilities, [prompt]; NaN where not computed."""
    response = _messages().SampleResponse(prompt_cache_hit_tokens=cached_tokens)
    for sample in samples:
        sequence = response.sequences.add(
            stop_reason=STOPPED if sample.is_stopped else LENGTH,
            tokens=np.asarray(sample.token_ids, dtype="<i4").tobytes(),
            logprobs=np.asarray(sample.logprobs, dtype="<f4").tobytes(),
        )
        if sample.top is not None:
            sequence.topk_sampled_logprobs.CopyFrom(sample.top.message())
    if prompt_logprobs is not None:
        response.prompt_logprobs = prompt_logprobs.astype("<f4").tobytes()
    if prompt_top is not None:
        response.topk_prompt_logprobs.CopyFrom(prompt_top.message())
    return bytes(response.SerializeToString())
