"""Several adapters of a run: which roles they play, their trainers, and how an engine gets and answers with them."""

from __future__ import annotations

import copy
import filecmp
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from transformers import PreTrainedModel

from agentrl.algorithms.traits import Input, needed_inputs
from agentrl.builders.adapters import adapter_transport
from agentrl.builders.models import find_adapter, load_images
from agentrl.config.config import LABEL, Config
from agentrl.config.derived import adapter_config, parts_of
from agentrl.config.engines import LocalEngineConfig, ServerEngineConfig, VLLMEngineConfig
from agentrl.config.environment import BASE
from agentrl.engine import AdapterVersions, PolicyEngine
from agentrl.errors import ConfigError, UsageError, did_you_mean
from agentrl.models.load import load_model
from agentrl.models.lora import ADAPTER_WEIGHTS, adapter_folder, base_of, lora_of, with_adapter
from agentrl.registry import Kind, lookup
from agentrl.rollout.policies import RoleAdapters
from agentrl.rollout.runner import make_agent_loop
from agentrl.rollout.turns import derive_seed
from agentrl.training.adapters import AdapterTrainers
from agentrl.training.signals import check_signals
from agentrl.training.trainer import Trainer
from agentrl.training.weights import AdaptersWeights, ModelWeights
from agentrl.weights import AdaptersProbe, AdaptersTransport, Probe, SyncReport, WeightSync


def roles_of_adapters(config: Config) -> dict[str, str]:
    """Return the adapter of each role that one plays, of all environments; the base model plays the others.

    Raises:
        ConfigError: a role has different adapters in two environments.
    """
    found: dict[str, str] = {}
    for part in parts_of(config):
        for role, section in (part.config.agent.roles or {}).items():
            if section.adapter is None or section.adapter == BASE:
                continue
            if found.setdefault(role, section.adapter) != section.adapter:
                raise ConfigError(
                    f"role {role} has different adapters in two environments",
                    got=f"{found[role]} and {section.adapter}",
                    expected="one adapter, or roles of different names",
                )
    return found


def _trained_roles(config: Config) -> dict[str, frozenset[str]]:
    """Return the roles that train each adapter, of those that learn."""
    untrained = {
        role
        for part in parts_of(config)
        for role, section in (part.config.agent.roles or {}).items()
        if not section.is_trained
    }
    plays = roles_of_adapters(config)
    return {
        name: frozenset(role for role, adapter in plays.items() if adapter == name and role not in untrained)
        for name, section in config.adapters.items()
        if section.trained
    }


def check_role_adapters(config: Config) -> None:
    """Check that every role has an adapter where there are several, and that all parts of the run can do with them.

    Raises:
        ConfigError: a role without an adapter, an adapter without a role, or a feature that several adapters exclude.
    """
    _check_roles(config)
    if config.adapters:
        _check_features(config)
        for name, section in config.adapters.items():
            own = adapter_config(config, name)
            if section.trained:
                check_signals(own.algorithm, own.trainer, has_adapters=True)
                _check_estimator(config, own, name)


def refuse_role_adapters(config: Config, what: str) -> None:
    """Refuse several adapters where one model is trained.

    Raises:
        ConfigError: the config has some.
    """
    if config.adapters:
        raise ConfigError(
            f"{what} trains one model", got=f"adapters {', '.join(config.adapters)}", hint="set adapters={}"
        )


def _check_roles(config: Config) -> None:
    named: set[str] = set()
    for part in parts_of(config):
        agent = part.config.agent
        sections = agent.roles or {}
        for role, section in sections.items():
            if section.adapter is not None:
                _check_name(config, role, section.adapter)
                named.add(section.adapter)
        if not config.adapters:
            continue
        roles = make_agent_loop(agent.loop, agent.options).roles
        if not roles:
            raise ConfigError(
                f"adapters are played by roles, and the agent loop {agent.loop} has none",
                got=f"adapters {', '.join(config.adapters)}",
                expected="a loop of several agents, or model.lora alone, which is one adapter",
            )
        for role in roles:
            own = sections.get(role)
            if own is None or (own.adapter is None and not own.speaks_elsewhere):
                raise ConfigError(
                    f"agent.roles.{role} names no adapter",
                    expected=f"adapter: {' or '.join([*config.adapters, BASE])}",
                    hint=f"set agent.roles.{role}.adapter={next(iter(config.adapters))}",
                )
    if unused := [name for name in config.adapters if name not in named]:
        raise ConfigError(
            f"adapters.{unused[0]} is named by no role",
            expected="agent.roles.ROLE.adapter of one role at least",
            hint=f"remove it, or set agent.roles.ROLE.adapter={unused[0]}",
        )
    if config.adapters:
        _check_learns(config)


def _check_name(config: Config, role: str, name: str) -> None:
    if not config.adapters or (name != BASE and name not in config.adapters):
        known = [*config.adapters, *([BASE] if config.adapters else [])]
        raise ConfigError(
            f"agent.roles.{role}.adapter is no adapter of the run",
            got=name,
            expected=", ".join(known) or "adapters: {NAME: {}, …}, or no adapter",
            hint=did_you_mean(name, known) or None,
        )


def _check_learns(config: Config) -> None:
    trained = _trained_roles(config)
    for name in config.adapters:
        if name == BASE or not LABEL.fullmatch(name):
            raise ConfigError(f"adapters: {name!r} is no name", expected=f"letters, digits, - and _, and not {BASE}")
    for name, roles in trained.items():
        if not roles:
            raise ConfigError(
                f"adapters.{name} learns from no role",
                got="roles with trained: false",
                hint=f"set adapters.{name}.trained=false with a path, or let one of its roles train",
            )
    if not trained:
        raise ConfigError("no adapter is trained", got=", ".join(config.adapters), expected="one at least")
    for part in parts_of(config):
        for role, section in (part.config.agent.roles or {}).items():
            if section.trained and section.adapter is not None and section.adapter not in trained:
                raise ConfigError(
                    f"agent.roles.{role}.trained is set, and its adapter does not learn",
                    got=f"adapters.{section.adapter}.trained false",
                    hint=f"remove agent.roles.{role}.trained",
                )


def _check_features(config: Config) -> None:
    lora, trainer, engine = config.model.lora, config.trainer, config.engine
    if lora is None:
        raise ConfigError(
            "adapters need model.lora, which says how large they are",
            got="training of all weights",
            expected="model.lora={rank: 16}",
        )
    excluded = {
        "model.lora.modules_to_save": lora.modules_to_save,
        "model.lora.quantize": lora.quantize,
        "trainer.processes": trainer.processes if trainer.processes > 1 else None,
        "trainer.critic": trainer.critic and "set",
        "trainer.process_reward": trainer.process_reward and "set",
        "cluster": config.cluster and "set",
    }
    for key, value in excluded.items():
        if value:
            raise ConfigError(
                f"{key} does not work with several adapters",
                got=f"{key} {value} with adapters {', '.join(config.adapters)}",
                expected=f"no {key}, or model.lora without adapters",
            )
    if isinstance(engine, ServerEngineConfig):
        _check_servers(config, engine, lora.rank)
    elif not isinstance(engine, LocalEngineConfig):
        raise ConfigError("adapters need an engine that has them", got=f"engine {engine.type}", expected="local, vllm")


def _check_servers(config: Config, engine: ServerEngineConfig, rank: int) -> None:
    if not isinstance(engine, VLLMEngineConfig):
        raise ConfigError(
            "SGLang exchanges an adapter only when no request uses it, and a sync holds requests",
            got=f"engine sglang with adapters {', '.join(config.adapters)}",
            expected="engine=local or engine=vllm",
        )
    if engine.adapter_rank is None or engine.max_adapters < len(config.adapters):
        raise ConfigError(
            "the servers have no room for the adapters",
            got=f"engine.adapter_rank {engine.adapter_rank}, engine.max_adapters {engine.max_adapters}",
            expected=f"room for {len(config.adapters)} of rank {rank}",
            hint=f"set engine.adapter_rank={rank} engine.max_adapters={len(config.adapters)}",
        )


def _check_estimator(config: Config, own: Config, name: str) -> None:
    """Check that the groups that are played have what an adapter's own estimator compares with."""
    needs, played = (
        Input.GREEDY_RETURN in needed_inputs(lookup(Kind.ADVANTAGE, one.algorithm.advantage)) for one in (own, config)
    )
    if needs and not played:
        raise ConfigError(
            f"adapters.{name}.algorithm.advantage needs greedy rollouts, which groups have for algorithm.advantage",
            got=f"{own.algorithm.advantage}, with algorithm.advantage {config.algorithm.advantage}",
            expected=f"algorithm.advantage={own.algorithm.advantage}, and another one for the other adapters",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterModels:
    """A frozen base, and models with one adapter each around its tensors."""

    base: PreTrainedModel
    adapted: Mapping[str, PreTrainedModel]


def load_adapters(config: Config, base_path: str, saved: Path | None) -> AdapterModels:
    """Load the base, and make the adapters or read them.

    Args:
        config: The run.
        base_path: The model that the adapters belong to.
        saved: A model folder that holds the adapters of a checkpoint; those of ``adapters.NAME.path``, or new ones,
            when left out.

    Raises:
        UsageError: an adapter that is not there, is of another base, or does not fit ``model.lora``.
    """
    base = load_model(base_path, dtype=config.model.dtype, device=config.model.device).requires_grad_(False)
    adapted = {}
    for name, section in config.adapters.items():
        folder = None if saved is None else adapter_folder(saved, name)
        if folder is None and section.path is not None:
            folder = find_adapter(section.path, section.source or name)
            _check_base(name, folder, base_path)
        lora = config.model.lora
        assert lora is not None
        if folder is not None and not section.trained:
            lora = lora_of(folder)
        elif folder is not None and lora_of(folder).scale != lora.scale:
            raise UsageError(
                f"adapters.{name}.path holds an adapter of another scale",
                got=f"alpha / rank of {lora_of(folder).scale:g}",
                expected=f"{lora.scale:g}, as model.lora says",
            )
        seed = derive_seed(config.run.seed, "adapter", name)
        adapted[name] = with_adapter(base, lora, path=base_path, seed=seed, folder=folder)
    return AdapterModels(base=base, adapted=adapted)


def _check_base(name: str, folder: Path, base_path: str) -> None:
    own = base_of(folder)
    if own != base_path and not _same_weights(Path(own), Path(base_path)):
        raise UsageError(
            f"adapters.{name}.path is an adapter of another base",
            got=own,
            expected=base_path,
            hint=f"start from its base: model.path={own}",
        )


def _same_weights(first: Path, second: Path) -> bool:
    """Compare the weights' files of two folders byte by byte."""
    files = sorted(file.name for file in first.glob("*.safetensors"))
    if not files or files != sorted(file.name for file in second.glob("*.safetensors")):
        return False
    return filecmp.cmpfiles(first, second, files, shallow=False)[0] == files


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterParts:
    """What a run with several adapters trains, and what weight sync needs from it."""

    models: AdapterModels
    trainer: AdapterTrainers
    source: AdaptersWeights


def build_adapter_trainers(config: Config, base_path: str, saved: Path | None) -> AdapterParts:
    """Load the adapters, and make the trainer of each that learns.

    Args:
        config: The run.
        base_path: The model that the adapters belong to.
        saved: A model folder that holds the adapters of a checkpoint, if the run goes on from one.

    Raises:
        ConfigError: an algorithm that does not fit.
        UsageError: an adapter that does not fit, or is not there.
    """
    models, images = load_adapters(config, base_path, saved), load_images(base_path)
    trainers, runs = {}, {}
    for name, roles in _trained_roles(config).items():
        own = adapter_config(config, name)
        trainers[name] = Trainer(
            models.adapted[name],
            own.algorithm,
            own.trainer,
            seed=derive_seed(config.run.seed, "trainer", name),
            max_tokens=config.agent.max_tokens,
            image_processor=images,
            roles=roles,
            signal_models=_teacher(config),
        )
        runs[name] = own.model_dump(mode="json")
    frozen = [name for name in models.adapted if name not in trainers]
    source = AdaptersWeights({name: ModelWeights(model) for name, model in models.adapted.items()}, models.base)
    return AdapterParts(models=models, trainer=AdapterTrainers(trainers, runs=runs, frozen=frozen), source=source)


def _teacher(config: Config) -> dict[str, PreTrainedModel]:
    teacher = config.algorithm.teacher
    if teacher is None or teacher.servers:
        return {}
    model = load_model(teacher.path, dtype=config.model.dtype, device=config.model.device)
    return {"teacher": model.requires_grad_(False)}


def copied(models: AdapterModels) -> AdapterModels:
    """Return models with copies of the adapters' tensors, around the same base: they can be sampled from while the
    others train.
    """
    shared = {id(tensor): tensor for tensor in [*models.base.parameters(), *models.base.buffers()]}
    adapted = {name: copy.deepcopy(model, memo=dict(shared)) for name, model in models.adapted.items()}
    return AdapterModels(base=models.base, adapted=adapted)


def adapters_probe(probe: Probe, source: AdaptersWeights) -> AdaptersProbe:
    """Make the probe of every adapter from that of one model."""
    return AdaptersProbe(
        prompts=probe.prompts,
        tolerance=probe.tolerance,
        mean_tolerance=probe.mean_tolerance,
        sources={name: AdapterSource(own) for name, own in source.sources.items()},
    )


class AdapterSource:
    """One adapter as a `WeightSource`: its own tensors, and log-probabilities with it."""

    def __init__(self, weights: ModelWeights) -> None:
        self._weights = weights
        self.weights = weights.trained
        self.token_logprobs = weights.token_logprobs


def adapters_transport(
    section: ServerEngineConfig, shared_folder: Path, source: AdaptersWeights, trainer: AdapterTrainers
) -> AdaptersTransport:
    """Make the transport by which the adapters reach servers."""
    own = {name: adapter_transport(section, shared_folder, weights) for name, weights in source.sources.items()}
    return AdaptersTransport(own, lambda: trainer.versions)


class AdaptersSync(WeightSync):
    """Weight sync of several adapters, which tells episodes the version of each before the engine samples with it.

    Args:
        inner: Brings the weights to the engine, all under one count of updates.
        engine: Gets them.
        trainer: Of the adapters.
        versions: Read by episodes.
        probe: Of `inner`.
    """

    def __init__(
        self,
        inner: WeightSync,
        engine: PolicyEngine,
        trainer: AdapterTrainers,
        versions: AdapterVersions,
        probe: AdaptersProbe,
    ) -> None:
        self._inner, self._engine, self._trainer, self._versions, self._probe = inner, engine, trainer, versions, probe

    async def sync(self, version: int) -> SyncReport:
        """Serve all adapters as they are, and verify each of them."""
        self._versions.publish(version, self._trainer.versions)
        report = await self._inner.sync(version)
        return replace(report, adapters=dict(self._probe.differences))

    async def verify(self) -> float:
        """Compare engine and trainers as they are."""
        self._versions.publish(self._engine.version, self._trainer.versions)
        return await self._inner.verify()

    async def release_memory(self) -> None:
        """Let the engine give its memory to the trainer until the next sync."""
        await self._inner.release_memory()

    async def close(self) -> None:
        """Release what it holds."""
        await self._inner.close()
