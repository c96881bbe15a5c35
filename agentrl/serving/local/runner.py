"""Model of the local engine: computes the logits after the last tokens of each chunk.

On the CPU, models of the Llama family run in a `PackedDecoder`: for small batches, the modules of transformers spend
more time between matrix products than in them. A layer of a `PackedDecoder` is five matrix products and a few
operations between them; weights are packed for oneDNN if that is faster. Results differ from the model's only by
rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM, MistralForCausalLM, PreTrainedModel, Qwen2ForCausalLM, Qwen3ForCausalLM

from agentrl.errors import EngineError, UsageError
from agentrl.message.image import ImageReader
from agentrl.models.lora import factors, frozen_weight, has_adapters, product
from agentrl.models.matrix_products import PackedProduct, float32_linear, has_float32_head
from agentrl.models.memory import memory_limit
from agentrl.models.moe import ChosenExperts, routers
from agentrl.models.packing import layer_obstacle, short_windows
from agentrl.models.vision import forward_with_images
from agentrl.serving.local.cache import STEP, CacheRow, RowStore
from agentrl.serving.local.forward import ATTENTION, ForwardStep, SequenceChunk

FAMILY = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
FORMATS = (torch.float32, torch.bfloat16)
MAX_COPY_SHARE = 1 / 8
"""Maximum share of this process's memory limit for a second copy of the weights."""
CHUNKS = ((7, 1, 1), (4, 5, 1))
"""Tokens that each sequence computes in each step."""
TOLERANCE = {torch.float32: 5e-3, torch.float64: 5e-3}
"""Maximum difference of logits, relative to their norm, that is explained by rounding. Models of 90 architectures
differ by at most 2e-6 in float32 if the engine computes them as they do, and otherwise by 0.014 or more."""
TOLERANCE_OF_SHORT_FORMATS = 0.1


def can_pack(model: PreTrainedModel, *, copies: int = 1) -> bool:
    """Return True if `PackedDecoder` supports a model and its copies fit into memory.

    It supports models of `FAMILY` on the CPU, with adapters in float32 only. The answer depends only on the model and
    the machine, so that runs are reproducible.
    """
    config = model.config
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return (
        type(model) in FAMILY
        and model.device.type == "cpu"
        and model.dtype in FORMATS
        and copies * size <= MAX_COPY_SHARE * memory_limit()
        and config.hidden_act == "silu"
        and all(type(p) is nn.Parameter and p.dtype is model.dtype for p in model.parameters())
        and (model.dtype is torch.float32 or not has_adapters(model))
    )


class PackedDecoder:
    """Decoder that copies a model's matrices and shares its embedding and norms. Build a new one after an update."""

    def __init__(self, model: PreTrainedModel) -> None:
        decoder: Any = model.model
        self._embed: nn.Module = decoder.embed_tokens
        self._rotary: nn.Module = decoder.rotary_emb
        self._layers = [_PackedLayer(layer) for layer in decoder.layers]
        self._norm = decoder.norm
        head = model.get_output_embeddings()
        self._head = _join_layers([head])
        if has_float32_head(model.config) and model.dtype is not torch.float32:
            self._head = _Float32Head(_weight(head).float(), head.bias)

    def logits(self, step: ForwardStep) -> Tensor:
        """Return the logits after each of the step's `last_tokens`, [n, vocabulary]."""
        hidden: Tensor = self._embed(step.input_ids[0])
        cos, sin = self._rotary(hidden, step.positions)
        cos, sin = cos[0, :, None], sin[0, :, None].clone()
        sin[..., : sin.shape[-1] // 2].neg_()
        for layer in self._layers:
            hidden = layer.compute(hidden, cos, sin, step)
        return self._head(_apply_norm(hidden[step.last_tokens], self._norm))


class _Float32Head(PackedProduct):
    """Output head of a bfloat16 model whose logits are computed in float32."""

    def __call__(self, rows: Tensor) -> Tensor:
        """Return float32 [n, vocabulary] for rows [n, in]."""
        return super().__call__(rows.float())


class _PackedLayer:
    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._number = cast("int", attention.layer_idx)
        self._size = cast("int", attention.head_dim)
        self._scale = cast("float", attention.scaling)
        config = attention.config
        self._queries, self._keys = config.num_attention_heads, config.num_key_value_heads
        window = getattr(attention, "sliding_window", None)
        self._window = getattr(config, "sliding_window", None) if config.model_type == "mistral" else window
        self._heads_norm = _heads_norm(attention, self._queries, self._keys)
        self._before, self._after = layer.input_layernorm, layer.post_attention_layernorm
        self._qkv = _join_layers([attention.q_proj, attention.k_proj, attention.v_proj])
        self._out = _join_layers([attention.o_proj])
        self._gate, self._up, self._down = (_join_layers([p]) for p in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))

    def compute(self, hidden: Tensor, cos: Tensor, sin: Tensor, step: ForwardStep) -> Tensor:
        """Return the layer's output, [tokens, size]."""
        heads = self._qkv(_apply_norm(hidden, self._before)).view(len(hidden), -1, self._size)
        rotated = heads[:, : self._queries + self._keys]
        if self._heads_norm is not None:
            weight, epsilon = self._heads_norm
            rotated = weight * functional.rms_norm(rotated, (self._size,), None, epsilon)
        rotated = (rotated * cos).addcmul_(rotated.roll(self._size // 2, -1), sin)
        query, key = torch.split(rotated, [self._queries, self._keys], 1)
        value = heads[:, self._queries + self._keys :]
        attended = step.attend(
            self._number, query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), self._scale, self._window
        )
        hidden = self._out.plus(attended.reshape(len(hidden), -1), hidden)
        normed = _apply_norm(hidden, self._after)
        return self._down.plus(self._up.times(normed, self._gate.silu(normed)), hidden)


def _apply_norm(hidden: Tensor, norm: Any) -> Tensor:
    return functional.rms_norm(hidden, hidden.shape[-1:], norm.weight, norm.variance_epsilon)


def _heads_norm(attention: Any, queries: int, keys: int) -> tuple[Tensor, float] | None:
    """Return the weights of the query and key norms, [queries + keys, head_dim], and their epsilon."""
    if not hasattr(attention, "q_norm"):
        return None
    by_query, by_key = attention.q_norm.weight, attention.k_norm.weight
    weight = torch.cat([by_query.expand(queries, -1), by_key.expand(keys, -1)])
    return weight, cast("float", attention.q_norm.variance_epsilon)


def _join_layers(layers: Sequence[Any]) -> PackedProduct:
    """Return one product for several layers with the same input; adapters are merged."""
    biases = [layer.bias for layer in layers]
    return PackedProduct(
        torch.cat([_weight(layer) for layer in layers]), None if biases[0] is None else torch.cat(biases)
    )


def _weight(layer: Any) -> Tensor:
    if not hasattr(layer, "lora_A"):
        return cast("Tensor", layer.weight)
    up, down = factors(layer)
    return frozen_weight(layer) + product(layer, up=up, down=down)


class LocalModelRunner:
    """Runner of a decoder-only model with rotary positions, which may be in training.

    The runner's module shares the trainer's parameters and buffers, but has its own settings: evaluation mode, and
    attention over a `ForwardStep`.

    Args:
        model: Model to run.
        reader: Image processor of a model that accepts images.
        routed_experts: Report the routed experts of a mixture-of-experts model.
        copies: Number of packed copies of models of this size that must fit into memory.

    Raises:
        UsageError: the engine would compute other logits than the model's own forward pass, or the model has no experts
            to report.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        reader: ImageReader | None = None,
        *,
        routed_experts: bool = False,
        copies: int = 1,
    ) -> None:
        _check(model, routed_experts=routed_experts)
        self._reader = reader
        shared = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
        self._source = model
        self._module = copy.deepcopy(model, memo=shared).eval()
        if has_float32_head(model.config):
            head: Any = self._module.get_output_embeddings()
            head.forward = lambda hidden: _float32_logits(head, hidden)
        self._packs = can_pack(model, copies=copies)
        self._packed: PackedDecoder | None = None
        self._chosen: ChosenExperts | None = None
        trial = None if self._packs else Trial(self._module)
        self._module.config.get_text_config()._attn_implementation = ATTENTION
        if trial is not None:
            trial.check(self.logits)
        if routed_experts:
            self._chosen = ChosenExperts(routers(self._module))

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return cast("torch.device", self._source.device)

    def prepare(self) -> None:
        """Pack the weights if they have changed; call before a step's forward passes."""
        if self._packs and self._packed is None:
            self._packed = PackedDecoder(self._source)

    def weights_changed(self) -> None:
        """Discard the packed weights, so that `prepare` packs the current ones."""
        self._packed = None

    @torch.inference_mode()
    def logits(self, step: ForwardStep) -> Tensor:
        """Return the logits after each of the step's `last_tokens`, [n, vocabulary].

        Stores the keys and values in the chunks' rows, and the tokens' routed experts in the step.
        """
        if self._packed is not None:
            return self._packed.logits(step)
        if step.views:
            hidden = forward_with_images(
                self._module, step.input_ids, step.views, step.positions, self._reader, step=step
            )
            found = self._module.get_output_embeddings()(hidden[0, step.last_tokens])
        else:
            found = self._module(
                input_ids=step.input_ids,
                position_ids=step.positions,
                use_cache=False,
                logits_to_keep=step.last_tokens,
                step=step,
            ).logits[0]
        if self._chosen is not None:
            step.routed_experts = self._chosen.take()
        return cast("Tensor", found)

    @torch.no_grad()
    def load(self, weights: Mapping[str, Any]) -> None:
        """Copy weights into the parameters, all or none; raises `EngineError` if a trained one is missing."""
        parameters: dict[str, Tensor] = dict(self._source.named_parameters())
        known = {**self._source.state_dict(keep_vars=True), **parameters}
        if unknown := sorted(set(weights) - set(known)):
            raise EngineError("the model has no such weights", got=", ".join(unknown[:3]))
        trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
        if missing := sorted(trained - set(weights)):
            raise EngineError("weights are missing", got=f"no {', '.join(missing[:3])}")
        for name, tensor in weights.items():
            if tensor.shape != known[name].shape:
                raise EngineError(
                    f"weight {name} has the wrong shape", got=tuple(tensor.shape), expected=tuple(known[name].shape)
                )
        for name, tensor in weights.items():
            known[name].copy_(tensor)


def _float32_logits(head: Any, hidden: Tensor) -> Tensor:
    logits = float32_linear(hidden.reshape(-1, hidden.shape[-1]), head.weight, head.bias)
    return logits.reshape(*hidden.shape[:-1], -1)


def _check(model: PreTrainedModel, *, routed_experts: bool) -> None:
    name = type(model).__name__
    if (obstacle := layer_obstacle(model)) is not None:
        raise UsageError(
            f"the local engine does not support {name}", got=obstacle, hint="use engine=vllm or engine=sglang"
        )
    if routed_experts and not routers(model):
        raise UsageError(
            "the local engine cannot report routed experts",
            got=name,
            expected="a mixture-of-experts model",
            hint="set trainer.moe.router_replay=false",
        )


class Trial:
    """Trial of a module that still has its own attention; `check` compares it with the engine's.

    Two short sequences are computed in steps, and compared with the model's own forward pass. In a step, the tokens of
    all sequences form one row. A model whose tokens depend on others not only through attention as the engine computes
    it, such as one with recurrent or convolutional layers, or with attention or a mask of its own, would mix sequences
    or forget their beginnings without an error.
    """

    def __init__(self, module: PreTrainedModel) -> None:
        self._module = module
        size = int(module.config.get_text_config().vocab_size)
        # avoids the first ids, which may be special tokens
        self._sequences = [[(size // 2 + 7 * k * sum(c)) % size for k in range(sum(c))] for c in CHUNKS]
        with torch.inference_mode(), short_windows(module):
            self._expected = torch.stack([self._own_logits(module, k) for k in range(len(CHUNKS))])

    def _own_logits(self, module: Any, number: int) -> Tensor:
        ids = torch.tensor([self._sequences[number]], device=module.device)
        logits: Tensor = module(input_ids=ids, use_cache=False).logits[0]
        return logits[[end - 1 for end in accumulate(CHUNKS[number])]]

    def check(self, compute: Callable[[ForwardStep], Tensor]) -> None:
        """Compare with the logits that `compute` returns for the steps.

        Raises:
            UsageError: they differ, or the model does not use the engine's attention.
        """
        try:
            with torch.inference_mode(), short_windows(self._module):
                found = self._step_logits(compute)
        except (TypeError, RuntimeError, UsageError) as error:
            raise self._refusal(f"an error in a trial: {error}") from error
        finite = self._expected.isfinite()  # some models exclude tokens
        expected, found = (_center(torch.where(finite, logits.float(), 0.0)) for logits in (self._expected, found))
        apart = float((found - expected).norm() / expected.norm())
        if apart > TOLERANCE.get(self._module.dtype, TOLERANCE_OF_SHORT_FORMATS):
            raise self._refusal(f"logits in a trial that differ by {apart:.2g} from those of the model's forward pass")

    def _step_logits(self, compute: Callable[[ForwardStep], Tensor]) -> Tensor:
        store = RowStore(max_tokens=len(CHUNKS) * STEP, max_context=STEP)
        rows = [store.take(len(ids)) for ids in self._sequences]
        found: dict[CacheRow, list[Tensor]] = {row: [] for row in rows}
        for row, ids in zip(rows, self._sequences, strict=True):
            row.ids = ids
        for counts in zip(*CHUNKS, strict=True):
            chunks = [SequenceChunk(row, count) for row, count in zip(rows, counts, strict=True)]
            step = ForwardStep(chunks, self._module.device)
            for chunk, logits in zip(step.chunks, compute(step), strict=True):
                found[chunk.row].append(logits)
                chunk.row.computed += chunk.count
        return torch.stack([torch.stack(found[row]) for row in rows])

    def _refusal(self, got: str) -> UsageError:
        return UsageError(
            f"the local engine does not support {type(self._module).__name__}",
            got=got,
            expected="a causal language model whose tokens interact only in attention",
            hint="use engine=vllm or engine=sglang",
        )


def _center(logits: Tensor) -> Tensor:
    return logits - logits.mean(-1, keepdim=True)
