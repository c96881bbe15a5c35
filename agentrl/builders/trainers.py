"""Trainer of a run: the parts of every rank, and their connection on rank 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from transformers import PreTrainedModel

from agentrl.builders.models import load_images
from agentrl.config.algorithm import PreferencesConfig
from agentrl.config.config import Config
from agentrl.config.derived import environment_algorithms
from agentrl.config.section import Section
from agentrl.engine import PolicyEngine
from agentrl.models.load import load_model
from agentrl.models.lora import add_adapters, is_adapter_folder, load_adapter
from agentrl.rollout.roles.role_policies import RoleAdapters
from agentrl.training.contract import PolicyTrainer, PolicyWeights
from agentrl.training.distributed import Ranks
from agentrl.training.distributed.fsdp import load_sharded
from agentrl.training.learner import Learner
from agentrl.training.mixture_trainer import MixtureTrainer
from agentrl.training.preferences import RewardLearner, RewardModel, TextPair
from agentrl.training.signals.process_reward import START
from agentrl.training.signals.reference import reads_reference
from agentrl.training.trainer import Trainer
from agentrl.training.weights import ModelWeights
from agentrl.weights import WeightSync

BUILD = "build"
"""Name of rank 0's call that builds the trainer's parts on every rank."""


class RankParts(Protocol):
    """Parts of a training run on one rank."""

    def calls(self) -> Mapping[str, Callable[..., object]]:
        """Return the functions that rank 0 calls on other ranks, by name."""


Parts = TypeVar("Parts", bound=RankParts)


def build_on_ranks(ranks: Ranks, build: Callable[..., Parts], *arguments: Any) -> Parts:
    """Call `build`, a module-level function, with the arguments and ``ranks=`` on every rank."""
    with ranks.broadcast_call(BUILD, build, *arguments):
        return build(*arguments, ranks=ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerParts:
    """Trainer of a rank, and its weights for weight sync."""

    trainer: Trainer
    source: ModelWeights

    def calls(self) -> Mapping[str, Callable[..., object]]:
        """Return the functions that rank 0 calls on other ranks, by name."""
        return {**self.trainer.calls(), **self.source.calls()}


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerParts:
    """Learner of a rank from fixed data, and the weights of its model."""

    learner: Learner[Any]
    source: ModelWeights

    def calls(self) -> Mapping[str, Callable[..., object]]:
        """Return the functions that rank 0 calls on other ranks, by name."""
        return {**self.learner.calls(), **self.source.calls()}


def build_trainer(config: Config, model_path: str, base_path: str | None, *, ranks: Ranks) -> TrainerParts:
    """Load the policy and the models of its signals, whole or sharded.

    `base_path` is the model that the run started from, if the weights are from a checkpoint: the reference of the KL
    penalty.

    Raises:
        ConfigError: the algorithm's options are invalid, or the parallelism settings do not match the number of ranks.
        UsageError: a model does not exist.
    """
    ranks.arrange(context=config.trainer.context_parallel, tensor=config.trainer.tensor_parallel)
    model = load_policy(config, model_path, base_path=base_path, ranks=ranks)
    algorithms = environment_algorithms(config)
    make = partial(MixtureTrainer, algorithms=algorithms) if algorithms else Trainer
    trainer = make(
        model,
        config.algorithm,
        config.trainer,
        seed=config.run.seed,
        max_tokens=config.agent.max_tokens,
        signal_models=_load_signal_models(config, model_path, base_path, ranks),
        image_processor=load_images(model_path),
        ranks=ranks,
    )
    source = ModelWeights(model, ranks=ranks, dtype=config.model.dtype)
    return TrainerParts(trainer=trainer, source=source)


def _load_signal_models(
    config: Config, model_path: str, base_path: str | None, ranks: Ranks
) -> dict[str, PreTrainedModel]:
    """Load the models of signals, except those that are derived from the policy or served."""
    lora, base = config.model.lora, base_path or model_path
    is_free = lora is not None and not lora.modules_to_save  # without its adapters, the policy is the initial model
    models = {}
    if reads_reference(config.algorithm) and not is_free and (base_path is not None or ranks.is_distributed):
        models["reference"] = _load(config, base, ranks).requires_grad_(False)
    if (critic := config.trainer.critic) is not None and critic.kind == "own":
        models["critic"] = load_policy(config, critic.path or base, ranks=ranks)
    if (teacher := config.algorithm.teacher) is not None and teacher.is_loaded:
        models["teacher"] = _load(config, teacher.path, ranks).requires_grad_(False)
    if (section := config.trainer.process_reward) is not None:
        models["process_reward"] = load_policy(config, section.path or base, ranks=ranks)
        if not is_free:
            models[START] = _load(config, section.path or base, ranks).requires_grad_(False)
    return models


def build_learner(
    learner: Callable[..., Learner[Any]],
    config: Config,
    examples: Sequence[object],
    section: Section,
    model_path: str,
    base_path: str,
    *,
    ranks: Ranks,
) -> LearnerParts:
    """Load a policy, whole or sharded over `ranks`, and make its learner from fixed data.

    Args:
        learner: `SupervisedLearner` or `PreferenceLearner`.
        config: Config of the run.
        examples: Demonstrations or pairs.
        section: Section with the learning rate.
        model_path: Folder of the model, or of the adapter of a checkpoint.
        base_path: Folder of the model that the run started from.
        ranks: Ranks that train together.

    Raises:
        ConfigError: the parallelism settings do not match the number of ranks.
        UsageError: the model does not exist.
        TrainingError: there is nothing to learn from.
    """
    ranks.arrange(context=config.trainer.context_parallel, tensor=config.trainer.tensor_parallel)
    model = load_policy(config, model_path, base_path=base_path, ranks=ranks)
    settings = {"seed": config.run.seed, "image_processor": load_images(base_path), "ranks": ranks}
    source = ModelWeights(model, ranks=ranks, dtype=config.model.dtype)
    return LearnerParts(learner=learner(model, examples, section, config.trainer, **settings), source=source)


def load_policy(
    config: Config, model_path: str, *, base_path: str | None = None, ranks: Ranks | None = None
) -> PreTrainedModel:
    """Load a model to train, with adapters if the config has them; several `ranks` share it.

    With the `base_path` of an adapter, `model_path` may be the adapter of a checkpoint.

    Raises:
        ConfigError: the adapters do not match the model.
        UsageError: the model does not exist, or an extra is not installed.
    """
    ranks, lora = ranks or Ranks(), config.model.lora
    if lora is None:
        return _load(config, model_path, ranks)
    base = base_path or model_path
    adapter = model_path if base_path is not None and is_adapter_folder(model_path) else None
    adapt = partial(_adapt, config=config, base=base, adapter=adapter, ranks=ranks)
    if ranks.is_distributed:
        return _load(config, base, ranks, adapt)
    model = load_model(base, dtype=config.model.dtype, device=config.model.device, quantize=lora.quantize)
    adapt(model)
    return model


def _adapt(model: PreTrainedModel, *, config: Config, base: str, adapter: str | None, ranks: Ranks) -> None:
    assert config.model.lora is not None
    device = ranks.device(config.model.device) if ranks.is_distributed else None
    add_adapters(model, config.model.lora, base=base, seed=config.run.seed, device=device)
    if adapter is not None:
        load_adapter(model, adapter)


def _load(
    config: Config, path: str, ranks: Ranks, adapt: Callable[[PreTrainedModel], None] = lambda model: None
) -> PreTrainedModel:
    """Load a model from its files, whole or sharded."""
    section = config.model
    if not ranks.is_distributed:
        return load_model(path, dtype=section.dtype, device=section.device)
    device = ranks.device(section.device)
    fsdp = config.trainer.fsdp
    return load_sharded(path, dtype=section.dtype, device=device, ranks=ranks, options=fsdp, adapt=adapt)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningParts:
    """Trainer, weight source and engine of a run."""

    trainer: PolicyTrainer
    source: PolicyWeights
    engine: PolicyEngine
    sync: WeightSync
    roles: RoleAdapters | None = None
    """Adapters of roles, if the run has several adapters."""


def build_reward_model(
    config: Config, pairs: Sequence[TextPair], model_path: str, *, new_head: bool, ranks: Ranks
) -> LearnerParts:
    """Load a reward model, or a language model that gets a new reward head, whole or sharded, and make its learner.

    Raises:
        ConfigError: the parallelism settings do not match the number of ranks.
        UsageError: the model does not exist.
        TrainingError: there are no pairs.
    """
    ranks.arrange(context=1, tensor=1)
    model = RewardModel(
        model_path,
        dtype=config.model.dtype,
        device=config.model.device,
        new_head=new_head,
        seed=config.run.seed,
        ranks=ranks,
        sharding=config.trainer.fsdp,
    )
    settings = config.preferences or PreferencesConfig()
    learner = RewardLearner(model, pairs, settings, config.trainer, seed=config.run.seed)
    return LearnerParts(learner=learner, source=model.source)
