"""Memory of a forward and backward pass, traced on tensors without data, so that no weights are read.

The passes run on models with one and with two layers; the difference is the memory of a layer. Attention keeps its
inputs, its output and one number per token and head, as FlashAttention and SDPA do.
"""

from __future__ import annotations

import copy
import functools
import json
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from agentrl.config.config import LOGITS_MEGABYTES, ModelConfig, ScratchModelConfig
from agentrl.config.model_size import TrainedSize
from agentrl.config.trainer import LoraConfig
from agentrl.errors import UsageError
from agentrl.models.load import model_class
from agentrl.models.lora import add_adapters
from agentrl.models.scratch import scratch_model_config
from agentrl.training.compile import checkpoint_activations
from agentrl.training.forward.logprobs import chunk_tokens, head_scores

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Config keys with the number of experts of a layer, whose grouped matrix product does not support float32."""
_LOG_SUM_BYTES = 4
"""Bytes of the log-sum-exp that attention keeps for each token and head."""
ATTENTION = "agentrl_planned"


class TensorMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count of the memory of all tensors that operations of this thread return in a block, even tensors without data.

        with TensorMemory() as memory:
            model(ids).logits.sum().backward()
        print(memory.peak)

    Temporary memory inside a kernel is not counted, nor are tensors that existed before (see `count`).
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        """Bytes of the tensors that exist now."""
        self.peak = 0
        """Maximum of `live`, in bytes."""
        self.largest = 0
        """Number of elements of the largest tensor."""
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def count(self, tensor: torch.Tensor) -> None:
        """Count a tensor that existed before the block, as long as it exists; each storage counts once."""
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._known:
            return
        self._known[key] = weakref.ref(storage, functools.partial(self._release, key, size))
        self.live += size
        self.peak = max(self.peak, self.live)

    def _release(self, key: int, size: int, _: object) -> None:
        self._known.pop(key, None)
        self.live -= size

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        """Run the operation, and count the tensors that it returns."""
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # operations on its local tensors are dispatched here as well
        found = function(*arguments, **(options or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
                self.count(tensor)
        return found


def model_config(model: ModelConfig) -> Any:
    """Read a model's config, without its weights.

    Raises:
        UsageError: the config cannot be read, or its model type is unknown to transformers.
    """
    if model.path == "scratch":
        scratch = model.scratch or ScratchModelConfig()
        return scratch_model_config(scratch, vocab_size=scratch.vocab_size)
    try:
        return AutoConfig.from_pretrained(Path(model.path) if Path(model.path).is_dir() else model.path)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"cannot read the config of {model.path}",
            got=str(error).strip().splitlines()[0],
            expected="a Hugging Face model folder with a config.json, or a name on the hub, which must be reachable",
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCounts:
    """Numbers of a model's parameters."""

    all: int
    in_layers: int
    trained: TrainedSize


def count_parameters(settings: ModelConfig) -> ParameterCounts:
    """Count a model's parameters from its ``config.json``."""
    config, lora = model_config(settings), settings.lora
    with torch.device("meta"):
        model = model_class(config).from_config(config)
    layers = (child for child in model.modules() if isinstance(child, torch.nn.ModuleList))
    in_layers = {id(p): p.numel() for layer in layers for p in layer.parameters()}
    every = sum(p.numel() for p in model.parameters())
    trained = TrainedSize(own=every) if lora is None else _count_trained(model, lora)
    return ParameterCounts(all=every, in_layers=sum(in_layers.values()), trained=trained)


def _count_trained(model: Any, lora: LoraConfig) -> TrainedSize:
    """Count the trainable parameters after `agentrl.models.lora.add_adapters`."""
    named, head = dict(model.named_modules()), model.get_output_embeddings()
    matrices = [
        module
        for name, module in named.items()
        if isinstance(module, torch.nn.Linear)
        and (module is not head if lora.target_modules == "all-linear" else _ends_with(name, lora.target_modules))
    ]
    own = {
        id(p): p.numel() for name, m in named.items() if _ends_with(name, lora.modules_to_save) for p in m.parameters()
    }
    adapters = lora.rank * sum(matrix.in_features + matrix.out_features for matrix in matrices)
    return TrainedSize(adapters=adapters, own=sum(own.values()))


def _ends_with(name: str, ends: Sequence[str]) -> bool:
    return any(f".{name}".endswith(f".{end}") for end in ends)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassMemory:
    """Memory of a model's passes, in bytes for the data type in which it computes."""

    parameters: int
    """Number of parameters without adapters."""
    layer_parameters: int
    """Number of parameters of all layers; the rest are embeddings, the head and a norm."""
    trained: TrainedSize
    """Trained parameters: all of them, or adapters and the modules trained with them."""
    layers: int
    cache_values_per_token: int
    """Numbers in the key-value cache for each token."""
    vocabulary: int
    tokens: int
    """Number of tokens of the traced micro-batch."""
    activations: int
    """Bytes kept from the forward pass to the backward pass."""
    checkpointed: int
    """Bytes kept from the forward pass to the backward pass with gradient checkpointing."""
    attended: int
    """Bytes of attention's outputs in all layers, which selective checkpointing also keeps."""
    working: int
    """Maximum number of bytes in addition to activations, weights and their gradients: logits, gradients of
    activations, temporary results.
    """
    working_checkpointed: int
    """The value of `working` with gradient checkpointing."""
    estimated: str | None
    """Reason why activations were estimated from the model's sizes; ``None`` if they were traced."""


@dataclass(frozen=True, slots=True)
class _Pass:
    kept: int
    working: int


def footprint(model: ModelConfig, *, tokens: int, dtype: torch.dtype) -> PassMemory:
    """Read the model's ``config.json``, and trace a micro-batch of `tokens` tokens, all with a loss."""
    config = model_config(model)
    text = config.get_text_config()
    known = count_parameters(model)
    heads = text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    estimated = None
    try:
        passes = _trace_passes(config, tokens, dtype, model.lora)
    except Exception as error:  # a model's code may raise anything on tensors without data
        passes = _estimate_passes(text, tokens, dtype)
        estimated = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:100] if str(error) else ''}"
    return PassMemory(
        parameters=known.all,
        layer_parameters=known.in_layers,
        trained=known.trained,
        layers=text.num_hidden_layers,
        cache_values_per_token=2
        * text.num_hidden_layers
        * (getattr(text, "num_key_value_heads", None) or heads)
        * size,
        vocabulary=text.vocab_size,
        tokens=tokens,
        activations=passes[False].kept,
        checkpointed=passes[True].kept,
        attended=text.num_hidden_layers * tokens * heads * (size * dtype.itemsize + _LOG_SUM_BYTES),
        working=passes[False].working,
        working_checkpointed=passes[True].working,
        estimated=estimated,
    )


def _trace_passes(config: Any, tokens: int, dtype: torch.dtype, lora: LoraConfig | None) -> dict[bool, _Pass]:
    if dtype != torch.bfloat16 and any(getattr(config, name, None) for name in EXPERTS):
        raise NotImplementedError("routed experts are traced in bfloat16 only")
    layers = config.num_hidden_layers
    found = {}
    for checkpointing in (False, True):
        one, two = (_trace(_with_layers(config, n), tokens, dtype, lora, checkpointing) for n in (1, 2))
        kept = one.kept + (layers - 1) * (two.kept - one.kept)
        found[checkpointing] = _Pass(kept, max(one.working, two.working))
    return found


def _with_layers(config: Any, layers: int) -> Any:
    """Copy a config with fewer layers; lists with one entry per layer are shortened, too."""
    values = json.loads(config.to_json_string(use_diff=False))
    cut = {
        name: value[:layers] if isinstance(value, list) and len(value) == config.num_hidden_layers else value
        for name, value in values.items()
    }
    return type(config).from_dict({**copy.deepcopy(cut), "num_hidden_layers": layers})


def _trace(config: Any, tokens: int, dtype: torch.dtype, lora: LoraConfig | None, checkpointing: bool) -> _Pass:
    AttentionInterface.register(ATTENTION, _attention)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    if lora is not None:
        add_adapters(model, lora, base="", seed=0)
    with FakeTensorMode():
        _give_shapes(model)
        model.config._attn_implementation = ATTENTION
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        with checkpoint_activations(model, enabled=checkpointing), TensorMemory() as memory:
            for parameter in model.parameters():
                memory.count(parameter)
                if parameter.grad is not None:
                    memory.count(parameter.grad)
            before = memory.live
            ids = torch.zeros(1, tokens, dtype=torch.long)
            output = model.base_model(
                input_ids=ids,
                position_ids=ids,
                attention_mask=torch.ones(1, 1, 1, 1),  # a mask with four dimensions is passed on unchanged
                use_cache=False,
            )
            hidden = output.last_hidden_state[0]
            kept = memory.live - before
            _backward(model, hidden)
            return _Pass(kept, memory.peak - before - kept)


def _give_shapes(model: Any) -> None:
    """Replace a model's parameters and buffers by tensors without data, which behave like tensors on a device."""
    made: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in made:
                new = torch.empty(parameter.shape, dtype=parameter.dtype)
                made[id(parameter)] = torch.nn.Parameter(new, requires_grad=parameter.requires_grad)
            module.register_parameter(name, made[id(parameter)])
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


def _backward(model: Any, hidden: Tensor) -> None:
    head = model.get_output_embeddings()
    scores = head_scores(
        hidden,
        head.weight,
        head.bias,
        torch.zeros(len(hidden), dtype=torch.long),
        temperature=1.0,
        chunk=chunk_tokens(head.weight.shape[0], LOGITS_MEGABYTES),
    )
    torch.autograd.backward(scores.logp.sum())


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    function: Any = _EmptyAttention
    return function.apply(query, key, value).transpose(1, 2).contiguous(), None


class _EmptyAttention(torch.autograd.Function):
    """Attention that returns and saves empty tensors of the real sizes."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = query.new_empty((*query.shape[:-1], value.shape[-1]))
        ctx.save_for_backward(query, key, value, output, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


def _estimate_passes(text: Any, tokens: int, dtype: torch.dtype) -> dict[bool, _Pass]:
    """Estimate memory from the model's sizes.

    Norms keep float32 tensors, attention its inputs and outputs, and a gated feed-forward part four inner widths.
    """
    width, heads = text.hidden_size, text.num_attention_heads
    size = getattr(text, "head_dim", None) or width // heads
    keys = (getattr(text, "num_key_value_heads", None) or heads) * size
    inner = getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", None) or 4 * width
    experts = getattr(text, "num_experts_per_tok", None) or 1
    short = torch.finfo(dtype).bits // 8
    layer = tokens * (8 * width * 4 + (6 * heads * size + 4 * keys + 4 * inner * experts) * short)
    logits = 2 * min(LOGITS_MEGABYTES << 20, tokens * text.vocab_size * 4)
    working = logits + layer // 2 + 2 * text.vocab_size * width * short
    layers = text.num_hidden_layers
    return {
        False: _Pass(layers * layer, working),
        True: _Pass(layers * tokens * width * short, working + layer),
    }
