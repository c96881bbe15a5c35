"""Planned memory of each rank of a run, and config changes for a run that does not fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from agentrl.config.config import LOGITS_MEGABYTES, Config, ModelConfig
from agentrl.config.engines import LocalEngineConfig, ServerEngineConfig
from agentrl.config.estimate import derive, rows_per_update
from agentrl.config.model_size import QUANTIZED_BYTES, TrainedSize
from agentrl.config.overrides import apply, parse_override
from agentrl.training.diagnostics.memory_trace import ParameterCounts, PassMemory, count_parameters, footprint

FULL, MOMENTS = 4, 8
"""Bytes per parameter of float32, and of AdamW's two moments."""
BACKWARD = "backward"


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """An item of planned memory."""

    name: str
    bytes: int
    how: str
    when: str = ""
    """`BACKWARD` if the memory is used only during the backward pass; empty if it is always used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Planned memory of the rank that needs most (rank 0)."""

    footprint: PassMemory
    items: tuple[MemoryItem, ...]
    off_device: tuple[MemoryItem, ...]
    """Items outside the rank's device: in the CPU's memory, or on servers."""
    sequences_per_update: int
    tokens_per_micro_batch: int
    """Maximum number of tokens of a micro-batch; longer than ``trainer.tokens_per_micro_batch`` if a sequence is.
    """
    micro_batches: int
    """Maximum number of micro-batches of an update, over all ranks."""

    @property
    def total(self) -> int:
        """Peak: that of a backward pass."""
        return sum(item.bytes for item in self.items)


def plan(config: Config, known: PassMemory | None = None) -> MemoryPlan:
    """Plan a run's memory from the model's ``config.json``, which is not read if the footprint is `known`."""
    sizes, trainer = derive(config), config.trainer
    sequences = rows_per_update(trainer, sizes.episodes_per_step, sizes.sequences_per_episode)
    tokens = min(max(trainer.tokens_per_micro_batch, config.agent.max_tokens), sequences * config.agent.max_tokens)
    found = known or footprint(config.model, tokens=tokens, dtype=getattr(torch, config.model.dtype))
    lines = _Lines(config, found, tokens)
    return MemoryPlan(
        footprint=found,
        items=tuple(lines.items()),
        off_device=tuple(lines.off_device()),
        sequences_per_update=sequences,
        tokens_per_micro_batch=tokens,
        micro_batches=sizes.most_micro_batches,
    )


class _Lines:
    def __init__(self, config: Config, model: PassMemory, tokens: int) -> None:
        self._config, self._model, self._tokens = config, model, tokens
        self._width: int = getattr(torch, config.model.dtype).itemsize
        self._ranks = config.trainer.processes
        self._shards = self._ranks // config.trainer.fsdp.replicas
        self._parameters, self._trained = model.parameters, model.trained
        lora = config.model.lora
        self._quantized = lora is not None and lora.quantize is not None
        self._base_is_reference = lora is not None and not lora.modules_to_save

    def items(self) -> Iterator[MemoryItem]:
        """Yield the items on the rank's device."""
        if self._ranks == 1 or not self._config.trainer.fsdp.offload:
            yield from self._state()
        if self._ranks > 1:
            yield from self._gathered_parameters()
        yield from self._signal_models()
        yield from self._frozen()
        yield from self._passes()

    def off_device(self) -> Iterator[MemoryItem]:
        """Yield the items in the CPU's memory and on servers."""
        if self._ranks > 1 and self._config.trainer.fsdp.offload:
            for item in self._state():
                yield MemoryItem(f"{item.name}, on the CPU", item.bytes, item.how)
        if self._offloads_activations:
            yield self._activations()
        engine = self._config.engine
        if isinstance(engine, ServerEngineConfig):
            parallel = engine.tensor_parallel
            context = engine.max_context or self._config.agent.max_tokens
            tokens = engine.max_num_seqs * context
            each = self._model.cache_values_per_token * self._width // parallel
            yield MemoryItem("a server's weights", self._parameters * self._width // parallel, "on each of its GPUs")
            yield MemoryItem(
                "a server's cache",
                tokens * each,
                f"on each of its GPUs, for engine.max_num_seqs {engine.max_num_seqs} x {context:,} tokens",
            )

    def _state(self) -> Iterator[MemoryItem]:
        trained, optimizer = self._trained, self._config.trainer.optimizer
        if self._ranks > 1:
            held, share = (-(-n // self._shards) for n in (self._parameters + trained.adapters, trained.parameters))
            how = f"float32, a shard of {self._shards}"
            yield MemoryItem("parameters", FULL * held, how)
            yield MemoryItem("gradients", FULL * share, how)
            yield MemoryItem("optimizer", MOMENTS * share, f"two moments, {how}")
            return
        lanes, dtype = self._config.trainer.lanes, self._config.model.dtype
        yield MemoryItem("parameters", self._weights(), f"layers in 4 bits, {dtype}" if self._quantized else dtype)
        if trained.adapters:
            yield MemoryItem("adapters", trained.adapter_bytes(), "float32 (model.lora)")
        yield MemoryItem(
            "gradients",
            trained.gradient_bytes() * (1 if lanes == 1 else 2 * lanes),
            "float32" + ("" if lanes == 1 else f", two of each for {lanes} lanes"),
        )
        in_layers = self._model.trained.adapters or self._model.layer_parameters
        saved = FULL * in_layers if optimizer == "muon" else 0
        copies = self._width < FULL and trained.own > 0
        how = f"{optimizer}'s moments" + (", and float32 copies of the parameters" if copies else "")
        yield MemoryItem("optimizer", trained.optimizer_bytes(self._width) - saved, how)

    def _weights(self) -> int:
        """Compute the bytes of a whole model without its adapters."""
        in_layers = self._model.layer_parameters if self._quantized else 0
        return round(in_layers * QUANTIZED_BYTES) + (self._parameters - in_layers) * self._width

    def _gathered_parameters(self) -> Iterator[MemoryItem]:
        options = self._config.trainer.fsdp
        outside = self._parameters - self._model.layer_parameters
        layer = self._model.layer_parameters // max(1, self._model.layers)
        gathered = outside + 2 * layer if options.reshard else self._parameters
        how = "two layers, embeddings and head" if options.reshard else "all layers (fsdp.reshard false)"
        yield MemoryItem("gathered", gathered * self._width, how, when=BACKWARD)
        if not options.reduce:
            yield MemoryItem(
                "whole gradients",
                FULL * self._trained.parameters,
                "between micro-batches; none with trainer.fsdp={reduce: true}",
                when=BACKWARD,
            )

    def _signal_models(self) -> Iterator[MemoryItem]:
        """Yield the models of signals; their passes run when the policy's do not."""
        critic, teacher = self._config.trainer.critic, self._config.algorithm.teacher
        if critic is not None and critic.kind == "own":
            found = ParameterCounts(all=self._parameters, in_layers=self._model.layer_parameters, trained=self._trained)
            if critic.path is not None:
                found = count_parameters(self._config.model.model_copy(update={"path": critic.path}))
            how = "its own model, with gradients and moments"
            yield MemoryItem("critic", self._share(found.all, found.trained), how)
        yield from self._process_reward()
        if teacher is not None and teacher.is_loaded:
            found = count_parameters(ModelConfig(path=teacher.path))
            yield MemoryItem("teacher", self._share(found.all, TrainedSize(own=0)), "frozen")

    def _process_reward(self) -> Iterator[MemoryItem]:
        section = self._config.trainer.process_reward
        if section is None:
            return
        found = ParameterCounts(all=self._parameters, in_layers=self._model.layer_parameters, trained=self._trained)
        if section.path is not None:
            found = count_parameters(self._config.model.model_copy(update={"path": section.path}))
        start = 0 if self._base_is_reference else self._share(found.all, TrainedSize(own=0))
        how = "a model with gradients and moments" + ("" if self._base_is_reference else ", and its frozen start")
        yield MemoryItem("process reward", self._share(found.all, found.trained) + start, how)

    def _share(self, parameters: int, trained: TrainedSize) -> int:
        """Compute the bytes of a rank's part of a model: weights, and gradients and moments of trained parameters."""
        if self._ranks > 1:
            held = FULL * (parameters + trained.adapters) + (FULL + MOMENTS) * trained.parameters
            return -(-held // self._shards)
        moving = trained.adapter_bytes() + trained.gradient_bytes() + trained.optimizer_bytes(self._width)
        return parameters * self._width + moving

    def _frozen(self) -> Iterator[MemoryItem]:
        config, whole = self._config, self._parameters * self._width
        if config.algorithm.keeps_reference and not self._base_is_reference:
            share = whole if self._ranks == 1 else FULL * -(-self._parameters // self._shards)
            yield MemoryItem("reference", share, "frozen, for KL")
        if isinstance(config.engine, LocalEngineConfig):
            if not config.rollout.is_synchronous or self._ranks > 1:
                yield MemoryItem("engine", whole, "the local engine's own weights, on rank 0")
            yield MemoryItem(
                "key-value cache",
                config.engine.cache_tokens * self._model.cache_values_per_token * self._width,
                f"of the local engine, engine.cache_tokens {config.engine.cache_tokens:,} when full",
            )

    def _passes(self) -> Iterator[MemoryItem]:
        model, trainer = self._model, self._config.trainer
        scale = self._tokens / model.tokens
        working = model.working_checkpointed if trainer.gradient_checkpointing else model.working
        logits = 2 * min(LOGITS_MEGABYTES << 20, self._tokens * model.vocabulary * FULL)
        if not self._offloads_activations:
            yield self._activations()
        yield MemoryItem("logits", min(logits, working) * trainer.lanes, "a chunk, and its gradient", when=BACKWARD)
        yield MemoryItem(
            "working",
            round(max(0, working - logits) * scale) * trainer.lanes,
            "gradients before they are added up, intermediate results of a layer",
            when=BACKWARD,
        )

    @property
    def _offloads_activations(self) -> bool:
        """True if activations are kept in the CPU's memory and the rank's device has its own."""
        return self._config.trainer.gradient_checkpointing == "offload" and self._config.model.device != "cpu"

    def _activations(self) -> MemoryItem:
        """Count the memory kept between a forward pass and its backward pass."""
        model, trainer = self._model, self._config.trainer
        mode = trainer.gradient_checkpointing
        kept = model.checkpointed if mode else model.activations
        what = "inputs of layers; others are recomputed" if mode else "of all layers"
        if mode == "selective":
            kept, what = kept + model.attended, "inputs of layers and outputs of attention"
        at_once = "" if trainer.lanes == 1 else f", {trainer.lanes} at once"
        return MemoryItem(
            "activations, on the CPU" if self._offloads_activations else "activations",
            round(kept * self._tokens / model.tokens) * trainer.lanes,
            f"{what}, {self._tokens:,} tokens{at_once}",
            when=BACKWARD,
        )


def remedies(config: Config, planned: MemoryPlan, limit: int) -> tuple[list[str], MemoryPlan]:
    """Find config changes that make a run fit into `limit` bytes; return them with the plan after them.

    Changes are added one after another until the run fits or none is left.
    """
    chosen: list[str] = []
    best = planned
    for change in _changes(config):
        if best.total <= limit:
            break
        tried = _apply_changes(config, [*chosen, change])
        known = planned.footprint if tried.model.dtype == config.model.dtype else None
        found = plan(tried, known)
        if found.total < best.total:
            chosen, best = [*chosen, change], found
    return chosen, best


def _apply_changes(config: Config, changes: Sequence[str]) -> Config:
    data = config.model_dump()
    for change in changes:
        apply(data, parse_override(change))
    return Config.model_validate(data)


def _changes(config: Config) -> Sequence[str]:
    engine, trainer = config.engine, config.trainer
    found = []
    if isinstance(engine, LocalEngineConfig):
        found.append(f"engine.cache_tokens={max(config.agent.max_tokens, engine.cache_tokens // 8)}")
    found.append("trainer.gradient_checkpointing=true")
    if config.agent.max_tokens < trainer.tokens_per_micro_batch:
        found.append(f"trainer.tokens_per_micro_batch={config.agent.max_tokens}")
    if config.model.dtype == "float32" and trainer.processes == 1:
        found.append("model.dtype=bfloat16")
    if trainer.lanes > 1:
        found.append("trainer.lanes=1")
    return found
