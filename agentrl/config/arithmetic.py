"""What a config amounts to: episodes, tokens, micro-batches, optimizer steps, memory. Printed by ``--dry-run``."""

from __future__ import annotations

import math
from dataclasses import dataclass

from agentrl.config.engines import LocalEngineConfig, ServerEngineConfig
from agentrl.config.model_size import ModelSize, model_size
from agentrl.config.parts import parts_of
from agentrl.config.schema import LOGITS_MEGABYTES, AgentConfig, Config
from agentrl.registry import Kind, lookup

_BYTES = {"float32": 4, "bfloat16": 2}
_OPTIMIZER_BYTES = 8
"""AdamW keeps two float32 moments per weight; Muon one, of the matrices that it takes."""
_LOGIT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes that are certain from the config; activations come on top."""

    weights: int
    gradients: int
    optimizer: int
    reference: int
    engine_copy: int
    """Weights of the engine, when it cannot share the trainer's."""
    cache: int
    """Key-value cache of the local engine, when full."""
    logits: int
    """Logits of one chunk and their gradient."""

    @property
    def total(self) -> int:
        """All of them."""
        return (
            self.weights
            + self.gradients
            + self.optimizer
            + self.reference
            + self.engine_copy
            + self.cache
            + self.logits
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """The derived numbers of a config."""

    groups_per_step: int
    episodes_per_step: int
    episodes: int
    """Of the whole run, without retries and replaced groups."""
    episodes_in_flight: int
    """Most at once."""
    sequences_per_episode: int
    """Most; forks of a user's own loop come on top."""
    most_tokens_per_episode: int
    """When the whole budget of every sequence is used."""
    most_sampled_tokens_per_episode: int
    most_tokens_per_step: int
    most_micro_batches: int
    """Forward and backward passes per optimizer step, when every episode uses its budget."""
    optimizer_steps_per_step: int
    optimizer_steps: int
    admitted_ahead: int
    """Episodes that may be started before the first training step is done."""
    evaluation_episodes: int
    """Of all periodic evaluations together."""
    checkpoints: int
    """Written over the run, before older ones are deleted."""
    model: ModelSize | None
    memory: Memory | None


def derive(config: Config) -> Arithmetic:
    """Work out the numbers; reads at most a model folder's ``config.json``.

    Raises:
        UnknownNameError: no such agent loop.
    """
    trainer, agent = config.trainer, config.agent
    episodes = trainer.tasks_per_step * config.algorithm.group_size
    optimizer_steps = trainer.epochs * trainer.mini_batches
    admitted = (config.rollout.max_staleness + 1) * episodes
    evaluations = trainer.steps // config.evaluation.every if config.evaluation.every else 0
    per_mini_batch = math.ceil(episodes / trainer.mini_batches)
    parts = parts_of(config)
    environments = [part.config.sole_environment for part in parts]
    agents = [part.config.agent for part in parts]
    sequences = max(map(_sequences, agents))
    most_tokens = sequences * agent.max_tokens
    size = model_size(config.model)
    return Arithmetic(
        groups_per_step=trainer.tasks_per_step,
        episodes_per_step=episodes,
        episodes=episodes * trainer.steps,
        episodes_in_flight=min(
            config.rollout.max_concurrent, sum(environment.max_concurrent for environment in environments), admitted
        ),
        sequences_per_episode=sequences,
        most_tokens_per_episode=most_tokens,
        most_sampled_tokens_per_episode=min(most_tokens, max(a.max_turns * a.max_answer_tokens for a in agents)),
        most_tokens_per_step=episodes * most_tokens,
        most_micro_batches=_micro_batches(per_mini_batch * sequences, agent.max_tokens, trainer.tokens_per_micro_batch),
        optimizer_steps_per_step=optimizer_steps,
        optimizer_steps=optimizer_steps * trainer.steps,
        admitted_ahead=admitted,
        evaluation_episodes=evaluations * len(parts) * config.evaluation.tasks * config.evaluation.samples,
        checkpoints=math.ceil(trainer.steps / config.checkpoint.every),
        model=size,
        memory=None if size is None else _memory(config, size),
    )


def _sequences(agent: AgentConfig) -> int:
    return agent.max_turns if lookup(Kind.AGENT_LOOP, agent.loop).sequence_per_turn else 1


def _micro_batches(sequences: int, length: int, budget: int) -> int:
    return math.ceil(sequences / max(1, budget // length))


def _memory(config: Config, size: ModelSize) -> Memory:
    width = _BYTES[config.model.dtype]
    trainer = config.trainer
    weights = size.parameters * width
    local = isinstance(config.engine, LocalEngineConfig)
    trained, trained_bytes, lora = size.parameters, weights, config.model.lora
    has_reference = config.algorithm.keeps_reference
    if lora is not None:
        trained = size.adapter_parameters(lora)
        trained_bytes = trained * _BYTES["float32"]
        weights += trained_bytes
        has_reference = has_reference and bool(lora.whole)
    return Memory(
        weights=weights,
        gradients=trained_bytes,
        optimizer=trained * _OPTIMIZER_BYTES,
        reference=weights if has_reference else 0,
        engine_copy=weights if local and config.rollout.max_staleness else 0,
        cache=config.engine.cache_tokens * size.cache_values_per_token * width
        if isinstance(config.engine, LocalEngineConfig)
        else 0,
        logits=2 * min(LOGITS_MEGABYTES << 20, trainer.tokens_per_micro_batch * size.vocab_size * _LOGIT_BYTES),
    )


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the dry run's table."""

    name: str
    value: str
    how: str


def rows(config: Config) -> list[Row]:
    """The numbers of `derive` in words, for people."""
    a = derive(config)
    trainer = config.trainer
    group = config.algorithm.group_size
    table = [
        Row("groups per step", f"{a.groups_per_step:,}", "trainer.tasks_per_step"),
        Row("episodes per step", f"{a.episodes_per_step:,}", f"{a.groups_per_step} groups x {group}"),
        Row("episodes in all", f"{a.episodes:,}", f"{a.episodes_per_step:,} x {trainer.steps:,} steps"),
        Row("episodes in flight", f"at most {a.episodes_in_flight:,}", "rollout.max_concurrent, admission"),
        Row(
            "tokens per episode",
            f"at most {a.most_tokens_per_episode:,}",
            f"agent.max_tokens x {a.sequences_per_episode} sequences",
        ),
        Row(
            "sampled per episode",
            f"at most {a.most_sampled_tokens_per_episode:,}",
            " or ".join(f"{turns} turns x {tokens}" for turns, tokens in _answers(config)) + ", within that",
        ),
        Row("tokens per step", f"at most {a.most_tokens_per_step:,}", "episodes x tokens per episode"),
        Row(
            "micro-batches",
            f"at most {a.most_micro_batches:,}",
            "per optimizer step, of trainer.tokens_per_micro_batch",
        ),
        Row("optimizer steps", f"{a.optimizer_steps:,}", f"{trainer.epochs} epochs x {trainer.mini_batches} x steps"),
        Row("started ahead", f"{a.admitted_ahead:,} episodes", f"rollout.max_staleness {config.rollout.max_staleness}"),
        Row("evaluation episodes", f"{a.evaluation_episodes:,}", "all periodic evaluations together"),
        Row("checkpoints", f"{a.checkpoints:,}", f"newest {config.checkpoint.keep} kept"),
    ]
    return [*table, *_memory_rows(a, config), *_server_rows(config)]


def warm_start_rows(config: Config) -> list[Row]:
    """What a warm start amounts to, in words; nobody knows the demonstrations' lengths before they are played."""
    sft = config.sft
    if sft.data is not None:
        return [
            Row("conversations", sft.data, f"of at most {config.agent.max_tokens:,} tokens (agent.max_tokens)"),
            *_model_rows(model_size(config.model)),
        ]
    a = derive(config)
    most = sft.episodes * a.most_tokens_per_episode * sft.epochs
    sequences = sft.episodes * a.sequences_per_episode * sft.epochs
    return [
        Row("demonstrations", f"{sft.episodes:,}", "sft.episodes; unsolved ones are left out"),
        Row(
            "tokens per episode",
            f"at most {a.most_tokens_per_episode:,}",
            f"agent.max_tokens x {a.sequences_per_episode} sequences",
        ),
        Row("tokens in all", f"at most {most:,}", f"demonstrations x tokens x {sft.epochs} epochs"),
        Row(
            "optimizer steps",
            f"at most {sequences:,}",
            f"one per sequence; about one per {sft.tokens_per_update:,} tokens (sft.tokens_per_update)",
        ),
        *_model_rows(a.model),
    ]


def _answers(config: Config) -> list[tuple[int, int]]:
    """Turns of an episode and tokens of an answer, as they differ among environments."""
    agents = [part.config.agent for part in parts_of(config)]
    return list(dict.fromkeys((agent.max_turns, agent.max_answer_tokens) for agent in agents))


def _model_rows(size: ModelSize | None) -> list[Row]:
    if size is None:
        return [Row("model", "size unknown", "its config.json is not on this machine")]
    return [Row("model", f"{size.parameters:,} parameters", f"{size.layers} layers x {size.hidden_size}")]


def _memory_rows(arithmetic: Arithmetic, config: Config) -> list[Row]:
    memory = arithmetic.memory
    if memory is None:
        return _model_rows(arithmetic.model)
    parts = (
        f"weights {_bytes(memory.weights)}, gradients {_bytes(memory.gradients)}, optimizer {_bytes(memory.optimizer)}"
    )
    found = [*_model_rows(arithmetic.model), Row("memory", f"{_bytes(memory.total)} and activations", parts)]
    if isinstance(config.engine, LocalEngineConfig):
        found.append(Row("key-value cache", f"{_bytes(memory.cache)} when full", "engine.cache_tokens"))
    return found


def _server_rows(config: Config) -> list[Row]:
    """What is known of servers before they run; how much memory they take is their own affair."""
    engine = config.engine
    if not isinstance(engine, ServerEngineConfig):
        return []
    if isinstance(engine.servers, list):
        servers = Row("servers", f"{len(engine.servers):,} attached", ", ".join(engine.servers))
    else:
        how = f"engine.replicas; engine.tensor_parallel {engine.tensor_parallel}"
        servers = Row("servers", f"{engine.replicas:,} {engine.type} launched", how)
    context = "the model's own limit" if engine.max_context is None else f"{engine.max_context:,} tokens"
    return [
        servers,
        Row("weights reach them by", engine.transport, "engine.transport"),
        Row("sampled at once", f"{engine.max_running:,} sequences per server", "engine.max_running"),
        Row("servers' context", context, "engine.max_context"),
    ]


def _bytes(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"
