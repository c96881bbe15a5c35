"""Runs whose model is trained and sampled at a Tinker-compatible service: checks, and the parts for it."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import AutoConfig

from agentrl.algorithms.traits import needed_inputs, tracker_of
from agentrl.builders.trainers import LearningParts
from agentrl.config.config import AlgorithmConfig, Config, TrainerConfig
from agentrl.config.derived import environment_algorithms
from agentrl.config.engines import TinkerEngineConfig
from agentrl.engine import Capabilities
from agentrl.errors import ConfigError
from agentrl.registry import Kind, lookup
from agentrl.remote.tinker import TinkerClient, TinkerRun
from agentrl.serving.tinker import TinkerEngine
from agentrl.training.tinker_trainer import TinkerTrainer, TinkerWeights
from agentrl.weights import TOLERANCE, InProcessSync, Probe

LOSS_OPTIONS = frozenset({"clip", "clip_low", "clip_high", "dual_clip"})
TRAINER_KEYS = frozenset(
    {
        "steps",
        "tasks_per_step",
        "learning_rate",
        "warmup_steps",
        "schedule",
        "min_lr_ratio",
        "adam",
        "max_grad_norm",
        "epochs",
        "mini_batches",
        "tokens_per_micro_batch",
        "gradient_checkpointing",
        "lanes",
    }
)
"""Keys of ``trainer`` with an effect, and keys of speed and memory, which the service decides for itself."""
ALGORITHM_KEYS = frozenset(
    {
        "advantage",
        "advantage_options",
        "loss",
        "loss_options",
        "aggregation",
        "norm_length",
        "group_size",
        "correction",
        "shaping",
        "dynamic_sampling",
    }
)
NEEDS_MODELS = frozenset({"kl", "distill", "pf_ppo"})
"""Shapings that need models, or another number of copies of an episode."""


def check_tinker(config: Config) -> None:
    """Check that the service's loss and optimizer support the config.

    Raises:
        ConfigError: a setting does not fit.
    """
    if not isinstance(config.engine, TinkerEngineConfig):
        return
    for key, value, expected in _misfits(config):
        raise ConfigError(f"{key} does not work with engine tinker", got=f"{key} {value}", expected=expected)


def _misfits(config: Config) -> Iterator[tuple[str, object, str]]:
    """Yield the key, the value and the expected value of each setting that does not fit."""
    algorithm, lora = config.algorithm, config.model.lora
    if lora is None:
        yield "model.lora", "null", "model.lora={rank: 16}: the service trains only adapters"
    elif lora.dropout or lora.modules_to_save or lora.quantize or lora.target_modules != "all-linear":
        yield "model.lora", "with keys besides rank", "only model.lora.rank; the service decides the rest"
    for section, values, known, default in (
        ("trainer", config.trainer, TRAINER_KEYS, TrainerConfig()),
        ("algorithm", algorithm, ALGORITHM_KEYS, AlgorithmConfig()),
    ):
        for name in type(values).model_fields:
            value = getattr(values, name)
            if name not in known and value != getattr(default, name) and name != "restarts":
                yield f"{section}.{name}", value, "its default"
    if algorithm.loss != "ppo" or not algorithm.loss_options.keys() <= LOSS_OPTIONS:
        yield "algorithm.loss", algorithm.loss, "ppo, with clip, clip_low and clip_high"
    if algorithm.loss_options.get("dual_clip", 3.0) is not None:
        yield (
            "algorithm.loss_options",
            algorithm.loss_options,
            "dual_clip: null: the service has no dual clip",
        )
    estimator = lookup(Kind.ADVANTAGE, algorithm.advantage)
    if needed_inputs(estimator) or tracker_of(estimator) is not None:
        yield (
            "algorithm.advantage",
            algorithm.advantage,
            "one that needs rewards only, such as grpo or reinforce",
        )
    if algorithm.correction.mode == "icepop" or algorithm.correction.proximal != "trainer":
        yield "algorithm.correction", algorithm.correction.mode, "mode token, sequence or off, and proximal trainer"
    if unknown := NEEDS_MODELS & algorithm.shaping.keys():
        yield "algorithm.shaping", min(unknown), "a shaping of rewards"
    if config.named_adapters or environment_algorithms(config):
        yield "adapters", "or algorithms of environments", "one adapter and one algorithm"
    if config.sampling.temperature != 1 or config.sampling.min_p:
        yield "sampling", "with a temperature other than 1, or min_p", "temperature 1, at which the service trains"
    if config.cluster is not None:
        yield "cluster", "set", "none"
    if config.evaluation.engine is not None:
        yield "evaluation.engine", "set", "null: evaluations sample on the service"


def build_tinker(config: Config, base_path: str, version: int) -> LearningParts:
    """Build the trainer, the engine and the weights of a run at a service; nothing is sent yet.

    Args:
        config: Config of the run.
        base_path: Model whose tokenizer and config the run uses.
        version: Version of the weights.

    Raises:
        UsageError: the package tinker is missing.
    """
    engine, lora = config.engine, config.model.lora
    assert isinstance(engine, TinkerEngineConfig)
    assert lora is not None, "checked by check_tinker"
    client = TinkerClient(
        TinkerRun(
            url=engine.url,
            base_model=engine.base_model or config.model.path,
            rank=lora.rank,
            seed=config.run.seed,
            api_key_variable=engine.api_key_variable,
            timeout_s=engine.timeout_s,
        )
    )
    size = int(AutoConfig.from_pretrained(base_path).get_text_config().vocab_size)
    capabilities = Capabilities(max_context=engine.max_context, vocab_size=size)
    sampler = TinkerEngine(client, capabilities, version=version, timeout_s=engine.timeout_s)
    weights = TinkerWeights(client, base_path)
    probe = Probe.random(size, **TOLERANCE[config.model.dtype])
    return LearningParts(
        trainer=TinkerTrainer(client, config),
        source=weights,
        engine=sampler,
        sync=InProcessSync(weights, sampler, shared=True, probe=probe),
    )
