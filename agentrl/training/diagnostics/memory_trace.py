"""Memory of a forward and backward pass, traced on tensors without data: no weights are read.

The passes run on models of one and of two layers, whose difference is what a layer takes. Attention is that of a kernel
which keeps its inputs, its output and one number per token and head, as FlashAttention and SDPA do.
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
from agentrl.config.estimate import TrainedSize
from agentrl.config.trainer import LoraConfig
from agentrl.errors import UsageError
from agentrl.models.load import model_class
from agentrl.models.lora import add_adapters
from agentrl.models.scratch import scratch_model_config
from agentrl.training.compile import checkpoint_activations
from agentrl.training.forward.logprobs import chunk_tokens, head_scores


class TensorMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts every tensor that an operation of this thread gives while the block runs; also of tensors without data.

        with TensorMemory() as memory:
            model(ids).logits.sum().backward()
        print(memory.peak)

    What a kernel takes for itself while it runs is not seen, nor what was there before (see `count`).
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self.largest = 0
        """Elements of the largest tensor that was made."""
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def count(self, tensor: torch.Tensor) -> None:
        """Count a tensor that was there before, for as long as it lives; one that is known already counts once."""
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._known:
            return
        self._known[key] = weakref.ref(storage, functools.partial(self._freed, key, size))
        self.live += size
        self.peak = max(self.peak, self.live)

    def _freed(self, key: int, size: int, _: object) -> None:
        self._known.pop(key, None)
        self.live -= size

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        """Run the operation, and count what it gives."""
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # its local tensors come here by themselves
        found = function(*arguments, **(options or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
                self.count(tensor)
        return found


def model_config(model: ModelConfig) -> Any:
    """Description of a model before its weights are read.

    Raises:
        UsageError: there is no config of the model, or it is not of a kind that transformers knows.
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
            expected="a Hugging Face model folder with a config.json, or a name on the hub that can be reached",
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Sizes of a model's parameters."""

    all: int
    in_layers: int
    trained: TrainedSize


def counts(settings: ModelConfig) -> Counts:
    """Count a model's parameters, by its ``config.json``."""
    config, lora = model_config(settings), settings.lora
    with torch.device("meta"):
        model = model_class(config).from_config(config)
    layers = (child for child in model.modules() if isinstance(child, torch.nn.ModuleList))
    in_layers = {id(p): p.numel() for layer in layers for p in layer.parameters()}
    every = sum(p.numel() for p in model.parameters())
    trained = TrainedSize(own=every) if lora is None else _trained(model, lora)
    return Counts(all=every, in_layers=sum(in_layers.values()), trained=trained)


def _trained(model: Any, lora: LoraConfig) -> TrainedSize:
    """Count what `agentrl.models.lora.add_adapters` would train."""
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


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of a model's config that say how many experts a layer has: their grouped product knows no float32."""
_LOG_SUM_BYTES = 4
"""Of the logarithm of a head's sum of weights, which attention keeps of each token."""
ATTENTION = "agentrl_planned"


@dataclass(frozen=True, slots=True, kw_only=True)
class PassMemory:
    """Memory of one model's passes; bytes in the number format in which it computes."""

    parameters: int
    """Without adapters."""
    layer_parameters: int
    """Of all layers together; the rest are embeddings, the head and a norm."""
    trained: TrainedSize
    """All parameters, or adapters and modules that are trained with them."""
    layers: int
    cache_values_per_token: int
    vocabulary: int
    tokens: int
    """Of the micro-batch that was tried."""
    activations: int
    """Bytes kept from its forward pass to its backward pass."""
    checkpointed: int
    """The same, where layers are computed again in the backward pass."""
    attended: int
    """Bytes of what attention gave in all layers, which selective checkpointing keeps as well."""
    working: int
    """Most bytes besides these, weights and gradients: logits, gradients of activations and of single operations."""
    working_checkpointed: int
    estimated: str | None
    """Why activations are estimated from the sizes of the model, and not tried; ``None`` where they are tried."""


@dataclass(frozen=True, slots=True)
class _Pass:
    kept: int
    working: int


def footprint(model: ModelConfig, *, tokens: int, dtype: torch.dtype) -> PassMemory:
    """Read the model's ``config.json``, and try a micro-batch of so many tokens, all of which carry loss."""
    config = model_config(model)
    text = config.get_text_config()
    known = counts(model)
    heads = text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    estimated = None
    try:
        tried = _tried(config, tokens, dtype, model.lora)
    except Exception as error:  # whatever a kind of model does with its first tensors without data
        tried = _estimated(text, tokens, dtype)
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
        activations=tried[False].kept,
        checkpointed=tried[True].kept,
        attended=text.num_hidden_layers * tokens * heads * (size * dtype.itemsize + _LOG_SUM_BYTES),
        working=tried[False].working,
        working_checkpointed=tried[True].working,
        estimated=estimated,
    )


def _tried(config: Any, tokens: int, dtype: torch.dtype, lora: LoraConfig | None) -> dict[bool, _Pass]:
    if dtype != torch.bfloat16 and any(getattr(config, name, None) for name in EXPERTS):
        raise NotImplementedError("experts are tried in bfloat16 only")
    layers = config.num_hidden_layers
    found = {}
    for checkpointing in (False, True):
        one, two = (_try(_with_layers(config, n), tokens, dtype, lora, checkpointing) for n in (1, 2))
        kept = one.kept + (layers - 1) * (two.kept - one.kept)
        found[checkpointing] = _Pass(kept, max(one.working, two.working))
    return found


def _with_layers(config: Any, layers: int) -> Any:
    """The same model with fewer layers; what is listed by layer is cut, too."""
    values = json.loads(config.to_json_string(use_diff=False))
    cut = {
        name: value[:layers] if isinstance(value, list) and len(value) == config.num_hidden_layers else value
        for name, value in values.items()
    }
    return type(config).from_dict({**copy.deepcopy(cut), "num_hidden_layers": layers})


def _try(config: Any, tokens: int, dtype: torch.dtype, lora: LoraConfig | None, checkpointing: bool) -> _Pass:
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
                attention_mask=torch.ones(1, 1, 1, 1),  # a mask of four dimensions is passed on as it is
                use_cache=False,
            )
            hidden = output.last_hidden_state[0]
            kept = memory.live - before
            _backward(model, hidden)
            return _Pass(kept, memory.peak - before - kept)


def _give_shapes(model: Any) -> None:
    """Let the parameters and buffers of a model be tensors without data, which behave as those on a device do."""
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
    function: Any = _Attention
    return function.apply(query, key, value).transpose(1, 2).contiguous(), None


class _Attention(torch.autograd.Function):
    """Tensors of the sizes that attention gives, with nothing in them."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = query.new_empty((*query.shape[:-1], value.shape[-1]))
        ctx.save_for_backward(query, key, value, output, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


def _estimated(text: Any, tokens: int, dtype: torch.dtype) -> dict[bool, _Pass]:
    """From the sizes: norms keep float32, attention what it reads and gives, a gated feed-forward part four widths."""
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
