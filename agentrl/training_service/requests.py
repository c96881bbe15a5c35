"""JSON bodies of requests; every field is validated, and the error for an unsupported field names it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from agentrl.errors import UsageError, shorten

Id: TypeAlias = Annotated[str, Field(min_length=1, max_length=200)]
Count: TypeAlias = Annotated[int, Field(ge=0, le=2**31 - 1)]
SequenceNumber: TypeAlias = Annotated[int, Field(ge=1, le=2**62)]
"""Position in the order of a model's requests."""
Rate: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
UserMetadata: TypeAlias = dict[str, Any] | None
MIN_TTL, MAX_TTL = 3600, 10 * 366 * 86_400
"""Bounds in seconds of a checkpoint's time to live."""
Ttl: TypeAlias = Annotated[int, Field(ge=MIN_TTL, le=MAX_TTL)] | None
MAX_SAMPLES = 4096
MAX_STOPS = 64
MAX_TOP_LOGPROBS = 256
MAX_METADATA_BYTES = 64 << 10


class Body(BaseModel):
    """Base class of all bodies; unknown fields and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=(), use_attribute_docstrings=True)


B = TypeVar("B", bound=Body)


def read(kind: type[B], body: Mapping[str, Any]) -> B:
    """Read a body.

    Raises:
        UsageError: a field is invalid or unknown; the message names the first such field.
    """
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the request"
        if first["type"] == "extra_forbidden":
            raise UsageError(f"{where} is not supported here", got=shorten(first["input"])) from error
        raise UsageError(f"{where} is invalid: {first['msg']}", got=shorten(first["input"])) from error


def read_object(raw: bytes) -> dict[str, Any]:
    """Read a body as a JSON object.

    Raises:
        UsageError: the body is not a JSON object.
    """
    try:
        body = orjson.loads(raw)
    except ValueError as error:
        raise UsageError("the request is not valid JSON", got=shorten(str(error))) from error
    if not isinstance(body, dict):
        raise UsageError("the request is not a JSON object", got=shorten(raw[:80]))
    return body


def check_metadata(metadata: UserMetadata) -> None:
    """Reject metadata that is too large.

    Raises:
        UsageError: it is larger than `MAX_METADATA_BYTES` bytes.
    """
    if metadata is not None and len(orjson.dumps(metadata)) > MAX_METADATA_BYTES:
        raise UsageError("user_metadata is too large", expected=f"at most {MAX_METADATA_BYTES >> 10} KiB")


class CreateSession(Body):
    """Body of create_session."""

    tags: list[str] = Field(default_factory=list)
    user_metadata: UserMetadata = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None
    type: Literal["create_session"] = "create_session"


class SessionHeartbeat(Body):
    """Body of session_heartbeat."""

    session_id: Id
    type: Literal["session_heartbeat"] = "session_heartbeat"


class Adapters(Body):
    """LoRA settings of a new model."""

    rank: int = Field(ge=1, le=1024)
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class Optimizer(Body):
    """Optimizer type of a model."""

    type: Literal["adamw"] = "adamw"


class CreateModel(Body):
    """Body of create_model."""

    session_id: Id
    model_seq_id: Count
    base_model: str
    user_metadata: UserMetadata = None
    lora_config: Adapters | None = None
    optimizer_config: Optimizer = Field(default_factory=Optimizer)
    type: Literal["create_model"] = "create_model"


class ModelOnly(Body):
    """Body of get_info and unload_model."""

    model_id: Id
    type: Literal["get_info", "unload_model"] = "get_info"


class AdamParams(Body):
    """Hyperparameters of an update, with the client's defaults."""

    learning_rate: Rate = 1e-4
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: Rate = 1e-12
    weight_decay: Rate = 0.0
    grad_clip_norm: Rate = 0.0


class OrderedRequest(Body):
    """A request with a position in the order of a model's requests."""

    model_id: Id
    seq_id: SequenceNumber


class OptimStep(OrderedRequest):
    """Body of optim_step."""

    adam_params: AdamParams
    type: Literal["optim_step"] = "optim_step"


class SaveWeights(OrderedRequest):
    """Body of save_weights."""

    path: str
    ttl_seconds: Ttl = None
    overwrite: bool = False
    user_metadata: UserMetadata = None
    type: Literal["save_weights"] = "save_weights"


class SaveForSampler(OrderedRequest):
    """Body of save_weights_for_sampler; without a path, the weights are deleted with the session."""

    path: str | None = None
    sampling_session_seq_id: Count | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    """Ignored: every sampler has a snapshot, which also satisfies ``inflight`` (these weights or newer ones)."""
    ttl_seconds: Ttl = None
    user_metadata: UserMetadata = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class LoadWeights(OrderedRequest):
    """Body of load_weights into an existing model."""

    path: str
    optimizer: bool
    type: Literal["load_weights"] = "load_weights"


class CreateFromWeights(Body):
    """Body of load_weights into a new model."""

    session_id: Id
    model_seq_id: Count
    path: str
    optimizer: bool
    base_model: str | None = None
    user_metadata: UserMetadata = None
    optimizer_config: Optimizer | None = None
    type: Literal["load_weights"] = "load_weights"


class CreateSamplingSession(Body):
    """Body of create_sampling_session."""

    session_id: Id
    sampling_session_seq_id: Count
    base_model: str | None = None
    model_path: str | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


class TokenChunk(Body):
    """Tokens of a prompt."""

    tokens: list[int] = Field(max_length=1 << 22)
    type: Literal["encoded_text"] = "encoded_text"


class Prompt(Body):
    """A prompt that consists of tokens only."""

    chunks: list[TokenChunk]

    @property
    def ids(self) -> list[int]:
        """All tokens of the prompt."""
        return [token for chunk in self.chunks for token in chunk.tokens]


class Sampling(Body):
    """Sampling parameters."""

    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_k: int = Field(-1, ge=-1)
    top_p: float = Field(1.0, gt=0, le=1)

    @field_validator("stop")
    @classmethod
    def _stops_are_few(cls, stop: str | list[str] | list[int] | None) -> str | list[str] | list[int] | None:
        if isinstance(stop, list) and (len(stop) > MAX_STOPS or not all(end != "" for end in stop)):
            raise ValueError(f"expected at most {MAX_STOPS} texts or tokens, none of them empty")
        if stop == "":
            raise ValueError("a stop string must not be empty")
        return stop


class SampleRequest(Body):
    """Body of asample."""

    sampling_session_id: Id
    seq_id: Annotated[int, Field(ge=0, le=2**63 - 1)]
    prompt: Prompt
    sampling_params: Sampling
    num_samples: int = Field(1, ge=1, le=MAX_SAMPLES)
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None
    topk_prompt_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)
    topk_sample_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)
    prompt_alt_tokens_k: Literal[0] = 0
    record_stability_info: Literal[False] | None = None
    type: Literal["sample"] = "sample"


class RetrieveFuture(Body):
    """Body of retrieve_future."""

    request_id: Id
    allow_metadata_only: bool = False


class CancelFuture(Body):
    """Body of cancel_future."""

    request_id: Id


class WeightsInfo(Body):
    """Body of weights_info."""

    tinker_path: str


class FinishSession(Body):
    """Body of sessions/ID/finish."""

    reason: dict[str, Any]
    detail: str | None = None
