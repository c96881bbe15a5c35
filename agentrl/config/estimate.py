"""Estimates of a run from its config: episodes, tokens, updates, model size and memory; for ``--dry-run``."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TypeAlias

from agentrl.config.config import LOGITS_MEGABYTES, Config, ModelConfig, TrainerConfig
from agentrl.config.derived import (
    EnvironmentConfigs,
    agent_loop_class,
    most_turns,
    per_environment_configs,
    placement_words,
)
from agentrl.config.engines import LocalEngineConfig, ServerEngineConfig
from agentrl.config.model_size import (
    FULL_BYTES,
    MOMENT_BYTES,
    ModelSize,
    TrainedSize,
    model_size,
    trained_size,
    weight_bytes,
)
from agentrl.config.trainer import CriticConfig

_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes that follow from the config; activations are not included."""

    weights: int
    gradients: int
    optimizer: int
    reference: int
    critic: int
    """Weights, gradients and moments of a critic with its own model."""
    process_reward: int
    """Weights, gradients and moments of an implicit process reward model, and the weights of its frozen reference."""
    engine_copy: int
    """Weights of local engines that cannot share the trainer's."""
    cache: int
    """Full key-value caches of local engines."""
    logits: int
    """Logits of one chunk and their gradient."""

    @property
    def training_state(self) -> int:
        """Bytes that are allocated when training starts: all but the engine's copy, its cache, and logits."""
        return self.weights + self.gradients + self.optimizer + self.reference + self.critic + self.process_reward

    @property
    def total(self) -> int:
        """Sum of all bytes."""
        return self.training_state + self.engine_copy + self.cache + self.logits


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEstimate:
    """Estimates for a run."""

    groups_per_step: int
    episodes_per_step: int
    episodes: int
    """Episodes of the whole run, without retries and replaced groups."""
    episodes_in_flight: int
    """Maximum number of concurrent episodes."""
    sequences_per_episode: int
    """Maximum number of sequences in an episode, without forks of a user's own loop."""
    most_tokens_per_episode: int
    """Tokens of an episode if every sequence uses its whole budget."""
    most_sampled_tokens_per_episode: int
    most_tokens_per_step: int
    most_micro_batches: int
    """Forward and backward passes per optimizer step if every episode uses its budget."""
    updates_per_step: int
    """Optimizer steps per training step; with ``trainer.mini_batch_rows`` the maximum."""
    optimizer_steps: int
    """Optimizer steps of the whole run; with ``trainer.mini_batch_rows`` the maximum."""
    admitted_ahead: int
    """Episodes that may start before the first training step ends."""
    evaluation_episodes: int
    """Episodes of all periodic evaluations together."""
    checkpoints: int
    """Checkpoints that the run writes, including those that it deletes."""
    model: ModelSize | None
    critic_parameters: int | None
    """Trained weights of the critic; ``None`` without a critic, or if its config.json is not on this machine."""
    memory: Memory | None


def derive(config: Config) -> RunEstimate:
    """Estimate the numbers of a run; reads at most the ``config.json`` files of model folders.

    Raises:
        UnknownNameError: no such agent loop.
        ConfigError: an option of the agent loop is invalid.
    """
    trainer, agent = config.trainer, config.agent
    episodes = trainer.tasks_per_step * config.algorithm.group_size
    evaluations = trainer.steps // config.evaluation.every if config.evaluation.every else 0
    parts = per_environment_configs(config)
    sequences = max(map(_sequences, parts))
    most_tokens = sequences * agent.max_tokens
    size = model_size(config.model)
    updates = trainer.epochs * _mini_batches(trainer, episodes * sequences)
    return RunEstimate(
        groups_per_step=trainer.tasks_per_step,
        episodes_per_step=episodes,
        episodes=episodes * trainer.steps,
        episodes_in_flight=most_episodes_in_flight(config),
        sequences_per_episode=sequences,
        most_tokens_per_episode=most_tokens,
        most_sampled_tokens_per_episode=min(most_tokens, max(map(math.prod, _answers(config)))),
        most_tokens_per_step=episodes * most_tokens,
        most_micro_batches=_micro_batches(
            rows_per_update(trainer, episodes, sequences), agent.max_tokens, trainer.tokens_per_micro_batch
        ),
        updates_per_step=updates,
        optimizer_steps=updates * trainer.steps,
        admitted_ahead=_admission_limit(config),
        evaluation_episodes=evaluations * len(parts) * config.evaluation.tasks * config.evaluation.samples,
        checkpoints=math.ceil(trainer.steps / config.checkpoint.every),
        model=size,
        critic_parameters=None if size is None else _critic_parameters(config, size),
        memory=None if size is None else _memory(config, size),
    )


def _mini_batches(trainer: TrainerConfig, rows: int) -> int:
    """Return the number of optimizer steps of a pass over `rows` trained rows."""
    return trainer.mini_batches if trainer.mini_batch_rows is None else math.ceil(rows / trainer.mini_batch_rows)


def rows_per_update(trainer: TrainerConfig, episodes: int, sequences: int) -> int:
    """Return the maximum number of rows of an optimizer step.

    Args:
        trainer: Section of the config.
        episodes: Episodes of a training step.
        sequences: Maximum number of sequences of an episode.
    """
    if trainer.mini_batch_rows is not None:
        return min(trainer.mini_batch_rows, episodes * sequences)
    return math.ceil(episodes / trainer.mini_batches) * sequences


def most_episodes_in_flight(config: Config) -> int:
    """Return the maximum number of concurrent episodes: limits of the run and its environments, and admission."""
    environments = [part.config.sole_environment for part in per_environment_configs(config)]
    own = sum(environment.max_concurrent for environment in environments)
    return min(config.rollout.max_concurrent, own, _admission_limit(config))


def _admission_limit(config: Config) -> int:
    episodes = config.trainer.tasks_per_step * config.algorithm.group_size
    return (config.rollout.max_staleness + 1) * episodes


def engine_slots(config: Config) -> int:
    """Return the number of answers that the engine samples at once when it is fully used, at least 1."""
    engine, places = config.engine, 1
    if isinstance(engine, LocalEngineConfig):
        places = engine.max_num_seqs * (1 if config.cluster is None else config.cluster.engines)
    elif isinstance(engine, ServerEngineConfig):
        servers = engine.replicas if engine.servers == "launch" else len(engine.servers)
        places = engine.max_num_seqs * servers
    return min(places, most_episodes_in_flight(config))


def _sequences(part: EnvironmentConfigs) -> int:
    return most_turns(part) if agent_loop_class(part.config.agent.loop).sequence_per_turn else 1


def _micro_batches(sequences: int, length: int, budget: int) -> int:
    return math.ceil(sequences / max(1, budget // length))


def _memory(config: Config, size: ModelSize) -> Memory:
    width = _BYTES[config.model.dtype]
    trainer, lora = config.trainer, config.model.lora
    weights, trained = weight_bytes(lora, size, width), trained_size(lora, size)
    copied = weights
    if config.named_adapters:  # they share the frozen weights
        count, learning = len(config.named_adapters), sum(section.trained for section in config.named_adapters.values())
        copied = count * trained.adapter_bytes()
        weights += copied - trained.adapter_bytes()
        trained = replace(trained, adapters=learning * trained.adapters)
    local = isinstance(config.engine, LocalEngineConfig) and config.cluster is None
    return Memory(
        weights=weights,
        gradients=trained.gradient_bytes(),
        optimizer=trained.optimizer_bytes(width),
        reference=size.parameters * width
        if config.algorithm.keeps_reference and (lora is None or lora.modules_to_save)
        else 0,
        critic=_critic_bytes(config, size, width),
        process_reward=_process_reward_bytes(config, size, width),
        engine_copy=(copied if local and not config.rollout.is_synchronous else 0)
        + (weights if isinstance(config.evaluation.engine, LocalEngineConfig) else 0),
        cache=sum(_cache_tokens(config).values()) * size.cache_values_per_token * width,
        logits=2 * min(LOGITS_MEGABYTES << 20, trainer.tokens_per_micro_batch * size.vocab_size * FULL_BYTES),
    )


def _cache_tokens(config: Config) -> dict[str, int]:
    """Return the cache size of each local engine in tokens, by its config key."""
    engines = {"engine": config.engine, "evaluation.engine": config.evaluation.engine}
    return {
        f"{section}.cache_tokens": engine.cache_tokens
        for section, engine in engines.items()
        if isinstance(engine, LocalEngineConfig)
    }


def _critic_parameters(config: Config, policy: ModelSize) -> int | None:
    """Return the number of a critic's trained parameters."""
    critic = config.trainer.critic
    if critic is None:
        return None
    if critic.kind == "shared":
        return policy.hidden_size + 1
    size = _critic_size(critic, policy)
    return None if size is None else _trained_trunk(config, size).parameters + size.hidden_size + 1


def _critic_bytes(config: Config, policy: ModelSize, width: int) -> int:
    """Return the bytes of a critic's weights, gradients and moments."""
    critic = config.trainer.critic
    size = None if critic is None else _critic_size(critic, policy)
    if critic is None or size is None:
        return 0
    head = (size.hidden_size + 1) * (2 * width + MOMENT_BYTES)
    if critic.kind == "shared":
        return head
    trained = _trained_trunk(config, size)
    moments = MOMENT_BYTES * trained.parameters
    return size.trunk_parameters * width + trained.adapter_bytes() + trained.gradient_bytes() + moments + head


def _process_reward_bytes(config: Config, policy: ModelSize, width: int) -> int:
    """Return the bytes of an implicit process reward model and of its frozen reference, if adapters do not avoid it."""
    section, lora = config.trainer.process_reward, config.model.lora
    if section is None:
        return 0
    size = policy if section.path is None else model_size(ModelConfig(path=section.path))
    if size is None:
        return 0
    trained = trained_size(lora, size)
    start = 0 if lora is not None and not lora.modules_to_save else size.parameters * width
    return weight_bytes(lora, size, width) + trained.gradient_bytes() + trained.optimizer_bytes(width) + start


def _critic_size(critic: CriticConfig, policy: ModelSize) -> ModelSize | None:
    return policy if critic.path is None else model_size(ModelConfig(path=critic.path))


def _trained_trunk(config: Config, critic: ModelSize) -> TrainedSize:
    return trained_size(config.model.lora, critic, parameters=critic.trunk_parameters)


EstimateRow: TypeAlias = tuple[str, str, str]
"""Row of the dry run's table: name, value, and the keys that determine it."""


def rows(config: Config) -> list[EstimateRow]:
    """Return the numbers of `derive` as table rows."""
    a = derive(config)
    trainer = config.trainer
    group = config.algorithm.group_size
    return [
        ("groups per step", f"{a.groups_per_step:,}", "trainer.tasks_per_step"),
        ("episodes per step", f"{a.episodes_per_step:,}", f"{a.groups_per_step} groups x {group}"),
        ("episodes in total", f"{a.episodes:,}", f"{a.episodes_per_step:,} x {trainer.steps:,} steps"),
        ("episodes in flight", f"at most {a.episodes_in_flight:,}", "rollout.max_concurrent, admission"),
        _episode_row(a),
        (
            "sampled per episode",
            f"at most {a.most_sampled_tokens_per_episode:,}",
            " or ".join(f"{turns} turns x {tokens}" for turns, tokens in _answers(config)) + ", within that limit",
        ),
        ("tokens per step", f"at most {a.most_tokens_per_step:,}", "episodes x tokens per episode"),
        ("micro-batches", f"at most {a.most_micro_batches:,}", "per optimizer step, of trainer.tokens_per_micro_batch"),
        *_update_rows(a, trainer),
        ("started ahead", f"{a.admitted_ahead:,} episodes", f"rollout.max_staleness {config.rollout.max_staleness}"),
        ("groups of a batch", *_batch_order(config)),
        ("evaluation episodes", f"{a.evaluation_episodes:,}", "all periodic evaluations together"),
        ("checkpoints", f"{a.checkpoints:,}", f"newest {config.checkpoint.keep} kept"),
        *_memory_rows(a, config),
        *_server_rows(config),
        *placement_words(config),
    ]


def _update_rows(a: RunEstimate, trainer: TrainerConfig) -> list[EstimateRow]:
    """Return the rows about optimizer steps, whose number depends on the trained rows with ``mini_batch_rows``."""
    passes = f"{trainer.epochs} epochs x"
    if trainer.mini_batch_rows is None:
        most, how = "", f"{passes} {trainer.mini_batches} (trainer.mini_batches)"
    else:
        rows = a.episodes_per_step * a.sequences_per_episode
        most, how = "at most ", f"{passes} {rows:,} rows / {trainer.mini_batch_rows:,} (trainer.mini_batch_rows)"
    return [
        ("updates per step", f"{most}{a.updates_per_step:,}", how),
        ("optimizer steps", f"{most}{a.optimizer_steps:,}", f"updates per step x {trainer.steps:,} steps"),
    ]


def _batch_order(config: Config) -> tuple[str, str]:
    if config.rollout.is_synchronous:
        return "all groups that were started for it", "rollout.max_staleness 0"
    windowed = config.rollout.batch_order == "windowed"
    what = "waits for those that would become too stale" if windowed else "those that end first; slow ones are dropped"
    return what, f"rollout.batch_order {config.rollout.batch_order}"


def warm_start_rows(config: Config) -> list[EstimateRow]:
    """Return table rows about a warm start; the lengths of demonstrations are not known in advance."""
    sft = config.sft
    if sft.data is not None:
        return [
            ("conversations", sft.data, f"of at most {config.agent.max_tokens:,} tokens (agent.max_tokens)"),
            *_model_rows(model_size(config.model)),
            *_adapter_rows(model_size(config.model), config),
        ]
    a = derive(config)
    most = sft.episodes * a.most_tokens_per_episode * sft.epochs
    sequences = sft.episodes * a.sequences_per_episode * sft.epochs
    return [
        ("demonstrations", f"{sft.episodes:,}", "sft.episodes; unsolved ones are dropped"),
        _episode_row(a),
        ("tokens in total", f"at most {most:,}", f"demonstrations x tokens x {sft.epochs} epochs"),
        (
            "optimizer steps",
            f"at most {sequences:,}",
            f"one per sequence; about one per {sft.tokens_per_update:,} tokens (sft.tokens_per_update)",
        ),
        *_model_rows(a.model),
        *_adapter_rows(a.model, config),
    ]


def _episode_row(a: RunEstimate) -> EstimateRow:
    how = f"agent.max_tokens x {a.sequences_per_episode} sequences"
    return "tokens per episode", f"at most {a.most_tokens_per_episode:,}", how


def _answers(config: Config) -> list[tuple[int, int]]:
    """Return the distinct pairs of turns per episode and tokens per answer, at most, among the environments."""
    parts = per_environment_configs(config)
    return list(dict.fromkeys((most_turns(part), part.config.agent.max_answer_tokens) for part in parts))


def run_size(config: Config) -> str:
    """Describe the size of a run in one line: steps, episodes and sampled tokens.

    >>> from agentrl.config import load_config
    >>> run_size(load_config(None, ["environment=guess_number", "trainer.steps=3", "trainer.tasks_per_step=1"]))
    '3 steps of 8 episodes (1 task x 8): 24 episodes of at most 10 turns x 256 tokens, up to 61,440 sampled tokens'
    """
    steps, tasks, group = config.trainer.steps, config.trainer.tasks_per_step, config.algorithm.group_size
    each = f"{counted(steps, 'step')} of {counted(tasks * group, 'episode')} ({counted(tasks, 'task')} x {group:,})"
    return f"{each}: {_describe_sampling(config, steps * tasks * group)}"


def evaluation_size(config: Config, tasks: int, samples: int) -> str:
    """Describe the size of an evaluation in one line.

    Args:
        config: Config of the evaluation.
        tasks: Number of tasks.
        samples: Episodes per task.
    """
    return f"{counted(tasks, 'task')} x {counted(samples, 'sample')}: {_describe_sampling(config, tasks * samples)}"


def counted(number: int, what: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1.

    >>> counted(1, "task"), counted(2000, "task")
    ('1 task', '2,000 tasks')
    """
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _describe_sampling(config: Config, episodes: int) -> str:
    """Describe the maximum turns and sampled tokens of episodes."""
    turns, tokens = max(_answers(config), key=math.prod)
    most = f"{turns:,} turns x {tokens:,} tokens"
    return f"{counted(episodes, 'episode')} of at most {most}, up to {episodes * turns * tokens:,} sampled tokens"


def _model_rows(size: ModelSize | None) -> list[EstimateRow]:
    if size is None:
        return [("size of the model", "unknown", "its config.json is not on this machine")]
    return [("size of the model", f"{size.parameters:,} parameters", f"{size.layers} layers x {size.hidden_size}")]


def _memory_rows(arithmetic: RunEstimate, config: Config) -> list[EstimateRow]:
    memory = arithmetic.memory
    if memory is None:
        return _model_rows(arithmetic.model)
    weights, gradients, optimizer = map(shown_bytes, (memory.weights, memory.gradients, memory.optimizer))
    found = [
        *_model_rows(arithmetic.model),
        *_adapter_rows(arithmetic.model, config),
        *_critic_rows(arithmetic, config),
        *_process_reward_rows(memory, config),
        (
            "memory",
            f"{shown_bytes(memory.total)} and activations",
            f"weights {weights}, gradients {gradients}, optimizer {optimizer}",
        ),
    ]
    if keys := _cache_tokens(config):
        found.append(("key-value cache", f"{shown_bytes(memory.cache)} when full", " and ".join(keys)))
    return found


def _adapter_rows(size: ModelSize | None, config: Config) -> list[EstimateRow]:
    lora = config.model.lora
    if lora is None or size is None:
        return []
    trained = trained_size(lora, size)
    how = f"of rank {lora.rank}, in float32 (model.lora)"
    others = f"; also trains {trained.own:,} parameters of the model" if trained.own else ""
    if config.named_adapters:
        return [
            (f"adapter {name}", f"{trained.adapters:,} parameters", how if section.trained else "does not learn")
            for name, section in config.named_adapters.items()
        ]
    return [("adapters", f"{trained.adapters:,} parameters", how + others)]


def _critic_rows(arithmetic: RunEstimate, config: Config) -> list[EstimateRow]:
    critic, memory = config.trainer.critic, arithmetic.memory
    if critic is None or memory is None:
        return []
    if arithmetic.critic_parameters is None:
        return [("critic", "size unknown", f"the config.json of {critic.path} is not on this machine")]
    kind = "on the policy's hidden states" if critic.kind == "shared" else "a separate model"
    pretraining = f", pretrained for {critic.pretrain_steps} steps" if critic.pretrain_steps else ""
    how = f"{kind}{pretraining}; {shown_bytes(memory.critic)} with gradients and optimizer"
    return [("critic", f"{arithmetic.critic_parameters:,} parameters", how)]


def _process_reward_rows(memory: Memory, config: Config) -> list[EstimateRow]:
    section = config.trainer.process_reward
    if section is None:
        return []
    if not memory.process_reward:
        return [("process reward", "size unknown", f"the config.json of {section.path} is not on this machine")]
    how = f"a model like {section.path or 'the policy'}, with gradients and optimizer, and a frozen reference"
    return [("process reward", shown_bytes(memory.process_reward), how)]


def _server_rows(config: Config) -> list[EstimateRow]:
    """Return table rows about servers; their memory is not estimated."""
    engine = config.engine
    if not isinstance(engine, ServerEngineConfig):
        return []
    if isinstance(engine.servers, list):
        servers = ("servers", f"{len(engine.servers):,} attached", ", ".join(engine.servers))
    else:
        how = f"engine.replicas; engine.tensor_parallel {engine.tensor_parallel}"
        servers = ("servers", f"{engine.replicas:,} {engine.type} launched", how)
    context = "the model's own limit" if engine.max_context is None else f"{engine.max_context:,} tokens"
    return [
        servers,
        ("weight transport", engine.transport, "engine.transport"),
        ("decoded together", f"{engine.max_num_seqs:,} sequences per server", "engine.max_num_seqs"),
        ("context of servers", context, "engine.max_context"),
    ]


def shown_bytes(count: int) -> str:
    """Format a number of bytes with a unit: ``1.5 GiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"
