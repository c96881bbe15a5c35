"""All settings of a run. Unknown keys are errors; the docstring under a field is its documentation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field, ValidationInfo, field_validator, model_validator

from agentrl.config.algorithm import (
    CorrectionConfig,
    ExpertConfig,
    PreferencesConfig,
    ReferenceConfig,
    SelectionConfig,
    TeacherConfig,
)
from agentrl.config.cluster import ClusterConfig
from agentrl.config.engines import EngineConfig, LocalEngineConfig, ServerEngineConfig
from agentrl.config.environment import AgentConfig, CurriculumConfig, EnvironmentConfig, MixedEnvironmentConfig
from agentrl.config.number_format import AUTO, fastest_format
from agentrl.config.rollout import CheckpointConfig, EvaluationConfig, ObserveConfig, RolloutConfig, SamplingConfig
from agentrl.config.schedule import ScheduleConfig, with_stages
from agentrl.config.schedule_forms import check_options
from agentrl.config.section import Finite, LearningRate, Section, implausible_values, user_path
from agentrl.config.trainer import (
    AdamConfig,
    AdapterConfig,
    CriticConfig,
    FSDPOptions,
    LoraConfig,
    MoEConfig,
    NumericsConfig,
    ProcessRewardConfig,
    SFTConfig,
)
from agentrl.errors import ConfigError


class RunConfig(Section):
    name: str | None = None
    """Name of the run's folder; built from the config's name and the time if not set."""
    directory: Annotated[str, user_path("run.directory")] = "runs"
    """Folder that holds the run folders."""
    seed: int = Field(0, ge=-(2**63), lt=2**63)
    """Seed of task order, sampling and initialization."""
    price_per_hour: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Price of an hour of all machines of the run, in any currency, for the metrics ``time/cost/…``."""

    @field_validator("name")
    @classmethod
    def _stay_inside(cls, name: str | None) -> str | None:
        if name and (Path(name).is_absolute() or ".." in Path(name).parts):
            raise ValueError(
                f"run.name is a path outside run.directory: got {name!r}, expected a name; set run.directory to the "
                "folder of runs"
            )
        return name


class ScratchModelConfig(Section):
    """Small model with random weights, for experiments without a download."""

    layers: int = Field(2, ge=1)
    """Transformer blocks."""
    hidden_size: int = Field(128, ge=1)
    """Width of the hidden states; a multiple of ``heads``."""
    heads: int = Field(4, ge=1)
    """Attention heads."""
    kv_heads: int = Field(2, ge=1)
    """Key-value heads; must divide ``heads``."""
    vocab_size: int = Field(512, ge=1)
    """Maximum size of the byte-level BPE vocabulary, which is trained on the environment's text."""
    numbered_names: bool = False
    """True to encode a word and the number after it (``mug 1``) as one token: episodes are shorter, and the model
    copies names as a whole."""
    initializer_range: float = Field(0.06, gt=0)
    """Standard deviation of the initial weights (training with 0.02 is far slower at this size)."""
    tie_word_embeddings: bool = True
    """True to share the weights of embedding and output head."""
    max_context: int = Field(4096, ge=1)
    """Maximum number of tokens in a sequence."""


SCRATCH = "scratch"
"""`model.path` of a model with random initial weights."""


_DEVICE = re.compile(r"auto|cpu|(cuda|mps|xpu|npu)(:\d+)?")


class ModelConfig(Section):
    path: Annotated[str, user_path("model.path")] = SCRATCH
    """Hugging Face name or folder, a run folder, or ``scratch`` for a new small model (see ``model.scratch``)."""
    scratch: ScratchModelConfig | None = None
    """Sizes of the new model; only with ``path: scratch``."""
    chat_template: str | None = None
    """Chat template that replaces the model's: a Jinja file, or ``chatml``, ``qwen3``, ``llama3`` or ``gemma``
    (docs/models.md)."""
    device: str = "auto"
    """``cpu``, ``cuda`` or ``cuda:1``; ``auto`` uses a GPU if one is available."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the weights: ``float32``, ``bfloat16``, or ``auto``, which is bfloat16 on GPUs and on CPUs that
    multiply in bfloat16, and float32 elsewhere."""
    head_dtype: Literal["model", "float32"] = "model"
    """Data type of the logits in the trainer, the local engine and launched servers: ``model`` for that of the weights,
    or ``float32``, with which trainer and engine agree more closely if ``dtype`` is ``bfloat16``."""
    lora: LoraConfig | None = None
    """Train adapters (LoRA) and freeze the base weights; see docs/lora.md."""

    @field_validator("device")
    @classmethod
    def _device_is_known(cls, device: str) -> str:
        if not _DEVICE.fullmatch(device):
            raise ValueError(f"model.device: got {device!r}, expected auto, cpu, cuda or cuda:N")
        return device

    @field_validator("dtype", mode="before")
    @classmethod
    def _dtype_of_this_machine(cls, value: object, info: ValidationInfo) -> object:
        return fastest_format(info.data.get("device", AUTO)) if value == AUTO else value

    @model_validator(mode="after")
    def _scratch_is_used(self) -> Self:
        if self.scratch is not None and self.path != SCRATCH:
            raise ValueError(
                f"model.scratch is ignored with model.path {self.path}: remove it, or set model.path: scratch"
            )
        if self.chat_template is not None and self.path == SCRATCH:
            raise ValueError("model.chat_template is ignored with model.path scratch, which has its own template")
        return self


LOGITS_MEGABYTES = 256
"""MiB of logits that the trainer keeps at once; the peak is twice as much."""

Checkpointing: TypeAlias = Literal["full", "selective", "offload"]
"""Part of a layer's forward pass that is kept in memory; see `agentrl.training.compile`."""

MAX_EPISODES_PER_STEP = 1_000_000
"""A training step holds its episodes in memory: about 10 KB each, and more for long ones."""

LABEL = re.compile(r"[\w-]+")
"""Labels of several environments; they are part of metric names and overrides."""


REFERENCE_LOSSES = frozenset({"flowrl", "online_dpo", "online_spin", "sppo"})
"""Shipped losses that compare with a reference policy; a test compares this with their traits."""

LOSS_AGGREGATIONS = {
    **dict.fromkeys(("gmpo", "gspo", "sapo", "sppo"), "seq-mean-token-mean"),
    **dict.fromkeys(("flowrl", "gvpo", "luspo", "online_dpo", "online_spin", "pacs"), "seq-mean-token-sum"),
}
"""Aggregation of shipped losses that are means over sequences in their papers."""

WHOLE_EPISODES = frozenset({"traj-mean-token-mean", "prompt-mean"})
"""Aggregations whose denominators are over an episode's or a group's tokens."""


class AlgorithmConfig(Section):
    advantage: str = "grpo"
    """Registry name of the advantage estimator, or module:attr."""
    advantage_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the estimator (gamma, …); unknown ones are errors."""
    loss: str = "ppo"
    """Registry name of the policy loss, or module:attr."""
    loss_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the loss (clip_low, clip_high, …); unknown ones are errors."""
    aggregation: Literal[
        "token-mean",
        "seq-mean-token-mean",
        "seq-mean-token-sum",
        "seq-mean-token-sum-norm",
        "traj-mean-token-mean",
        "prompt-mean",
    ] = "token-mean"
    """Reduction of the token losses to one number; denominators are counted over the whole optimizer step. If not set,
    as in their papers: seq-mean-token-mean for the losses gmpo, gspo, sapo and sppo, seq-mean-token-sum for flowrl,
    gvpo, luspo, online_dpo, online_spin and pacs, and token-mean for all others."""
    norm_length: int | None = Field(None, ge=1)
    """Constant length, in tokens, by which seq-mean-token-sum-norm divides; only for that aggregation."""
    group_size: int = Field(8, ge=1)
    """Episodes per task."""
    correction: CorrectionConfig = Field(default_factory=CorrectionConfig)
    kl_coef: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Weight in the loss of the KL divergence from the reference policy; with 0 no reference model is loaded for it."""
    reference: ReferenceConfig | None = None
    entropy_coef: Finite = 0.0
    """Weight of the entropy bonus."""
    observation_coef: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Weight of the cross-entropy of observation tokens after the policy's first turn, as in Echo: the policy also
    learns to predict its environment. Takes another pass per update."""
    shaping: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Reward shaping steps, applied in this order: registry names or module:attr with options, ``{invalid: {penalty:
    -0.1}}``; see the algorithms page."""
    filters: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Filters of the tokens that are trained: registry names or module:attr with options, ``{geometric: {band: [0.99,
    1.01]}}``."""
    role_weights: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(default_factory=dict)
    """Factors of the advantages of roles, for loops with several agents: ``{planner: 2, worker: 0.5}``; 1 for roles
    that are not named."""
    dynamic_sampling: bool = False
    """True to replace groups whose episodes ``advantage`` cannot distinguish (before shaping) with new groups; not with
    a teacher or a loss that reads no advantage, which also learn from such groups."""
    selection: SelectionConfig | None = None
    """Selection of groups and of their episodes: ``{min_accuracy: 0.2, max_accuracy: 0.8}``; all if not set. See
    docs/algorithms.md."""
    teacher: TeacherConfig | None = None
    """Frozen model to learn from: ``{path: MODEL}``; none if not set. See docs/guides.md."""
    expert: ExpertConfig | None = None
    """Episodes of the environment's expert in every group: ``{members: 1}``; none if not set."""

    @model_validator(mode="after")
    def _options_are_values(self) -> Self:
        check_options("algorithm.advantage_options", self.advantage, self.advantage_options)
        check_options("algorithm.loss_options", self.loss, self.loss_options)
        for section, functions in (("shaping", self.shaping), ("filters", self.filters)):
            for name, options in functions.items():
                check_options(f"algorithm.{section}.{name}", name, options)
        return self

    @model_validator(mode="before")
    @classmethod
    def _aggregation_of_the_loss(cls, data: Any) -> Any:
        if isinstance(data, dict) and "aggregation" not in data and data.get("loss") in LOSS_AGGREGATIONS:
            return {**data, "aggregation": LOSS_AGGREGATIONS[data["loss"]]}
        return data

    @property
    def keeps_reference(self) -> bool:
        """True if a frozen copy of the model is kept."""
        return self.kl_coef != 0 or "kl" in self.shaping or self.loss in REFERENCE_LOSSES

    @model_validator(mode="after")
    def _keys_are_used(self) -> Self:
        needs_length = self.aggregation == "seq-mean-token-sum-norm"
        if self.norm_length is not None and not needs_length:
            raise ValueError(
                f"algorithm.norm_length is ignored with aggregation {self.aggregation}: "
                "remove it, or use seq-mean-token-sum-norm"
            )
        if needs_length and self.norm_length is None:
            raise ValueError("aggregation seq-mean-token-sum-norm divides by algorithm.norm_length: set it, in tokens")
        ignored = self.reference is not None and self.reference.kl_estimator != "k3+"  # the default
        if ignored and self.kl_coef == 0:
            raise ValueError(
                "algorithm.reference.kl_estimator is ignored while algorithm.kl_coef is 0: set kl_coef, or remove it"
            )
        resample = None if self.selection is None else self.selection.resample
        if resample is not None and resample.keep >= self.group_size:
            raise ValueError(
                f"algorithm.selection.resample.keep ({resample.keep}) must be below algorithm.group_size "
                f"({self.group_size}), the episodes to choose from"
            )
        if self.dynamic_sampling and self.group_size == 1:
            raise ValueError(
                "algorithm.dynamic_sampling replaces groups whose episodes do not differ, which is always true of a "
                "group of one: set it to false, or raise algorithm.group_size"
            )
        return self


class TrainerConfig(Section):
    steps: int = Field(100, ge=1)
    """Training steps of the run."""
    tasks_per_step: int = Field(16, ge=1)
    """Groups per training step."""
    episodes: Annotated[str, user_path("trainer.episodes")] | None = None
    """Stored episodes to train on, without an engine: a run, its folder `trajectories` or a file of that folder."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """``muon`` orthogonalizes the updates of the blocks' matrices, scales them to AdamW's size, and leaves the other
    parameters to AdamW; small models then learn from scratch with far fewer examples. Also used by `agentrl sft`."""
    learning_rate: LearningRate = 1e-6
    """Peak learning rate."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Schedule of the learning rate after the warm-up."""
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    """Final learning rate of the cosine schedule, as a share of the peak."""
    adam: AdamConfig | None = None
    """Decay rates of AdamW, and weight decay; ``{betas: [0.9, 0.95], weight_decay: 0}`` if not set."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Maximum gradient norm; larger gradients are scaled down to it."""
    epochs: int = Field(1, ge=1)
    """Passes over a step's data."""
    mini_batches: int = Field(1, ge=1)
    """Optimizer steps per pass."""
    mini_batch_rows: int | None = Field(None, ge=1)
    """Trained rows per optimizer step, instead of ``mini_batches``: a row is a sequence with sampled tokens, which is a
    turn in loops such as step_independent and an episode in others. The number of optimizer steps per pass follows from
    the step's rows; rows of a group may train in different steps."""
    max_kl: float | None = Field(None, gt=0)
    """KL divergence from the policy at the start of the step, over a mini-batch, above which the remaining updates of
    the step are skipped."""
    critic: CriticConfig | None = None
    process_reward: ProcessRewardConfig | None = None
    tokens_per_micro_batch: int = Field(8192, ge=1)
    """Tokens per forward and backward pass, padding included."""
    share_prefixes: bool = False
    """True to compute the common prefix of sequences once: the prompt of a group, the history of branches. The
    gradients are the same; training is faster where sequences share much."""
    lanes: int = Field(1, ge=1, le=256)
    """Micro-batches that are computed in parallel, each on its share of torch's threads; on the CPU, for models whose
    operations are too small to use several cores."""
    gradient_checkpointing: bool | Checkpointing = False
    """Recomputation of activations in the backward pass: less memory, more time. ``full`` (or true) keeps only the
    inputs of layers, ``selective`` also the outputs of attention, ``offload`` the inputs of layers in CPU memory."""
    kernels: Literal["torch", "compiled", "liger"] = "torch"
    """Implementation of the layers. ``compiled``: torch.compile, for faster steps after a slow first step. ``liger``:
    Liger's norms, rotary embeddings and feed-forward layers, which need a GPU and the extra ``agentrl[gpu]``."""
    moe: MoEConfig | None = None
    """Settings for models with routed experts: ``{aux_loss_coef: 0.001, router_replay: true}``; neither if not set."""
    deterministic: bool = False
    """True to make equal steps, and runs with the same seed, bitwise equal: the local engine waits for all episodes
    before each of its steps. Slower; see docs/numerics.md."""
    numerics: NumericsConfig | None = None
    """Limits of the alarms about the numbers of training; the defaults if not set."""
    processes: int = Field(1, ge=1, le=4096)
    """Processes (ranks) that share the model's parameters and the work of a step, each with its own GPU if there are
    any; see docs/distributed.md."""
    cpus: list[int] | None = None
    """Cores for training, in equal parts for the ``processes``; any if not set. See docs/asynchronous.md."""
    restarts: int = Field(3, ge=0)
    """Maximum number of restarts from the newest checkpoint after a rank was killed, stopped, or lost with its node,
    without a new finished step in between; 0 ends the run instead."""
    context_parallel: int = Field(1, ge=1)
    """Processes that share the tokens of every row, for sequences that are too long for one process."""
    tensor_parallel: int = Field(1, ge=1)
    """Processes that share the matrices of every layer."""
    fsdp: FSDPOptions = Field(default_factory=FSDPOptions)
    """FSDP options: ``{reshard: false, …}``. ``replicas`` (1): groups of processes that each hold the whole model.
    ``reshard`` (true): release a layer's parameters between its forward and its backward pass. ``offload`` (false):
    keep parameters and moments in CPU memory and compute updates there. ``reduce`` (false): reduce gradients over the
    processes after every micro-batch instead of once per update, so that full gradients are never kept."""

    @property
    def router_balance(self) -> float:
        """``moe.aux_loss_coef``; 0 without ``moe``."""
        return 0.0 if self.moe is None else self.moe.aux_loss_coef

    @property
    def router_replay(self) -> bool:
        """``moe.router_replay``; False without ``moe``."""
        return self.moe is not None and self.moe.router_replay

    @model_validator(mode="after")
    def _ranks_fit(self) -> Self:
        compiled = self.kernels == "compiled"
        if self.processes > 1 and self.lanes > 1:
            raise ValueError(
                f"trainer.lanes ({self.lanes}) needs a single process, but trainer.processes is {self.processes}: "
                "set one of them to 1"
            )
        if self.processes % (self.context_parallel * self.tensor_parallel):
            raise ValueError(
                f"trainer.context_parallel ({self.context_parallel}) times trainer.tensor_parallel "
                f"({self.tensor_parallel}) must divide trainer.processes ({self.processes})"
            )
        if self.processes // self.tensor_parallel % self.fsdp.replicas:
            raise ValueError(
                f"trainer.fsdp.replicas ({self.fsdp.replicas}) must divide trainer.processes ({self.processes})"
                + (f" divided by trainer.tensor_parallel ({self.tensor_parallel})" if self.tensor_parallel > 1 else "")
            )
        if self.lanes > 1 and compiled:
            raise ValueError(
                f"trainer.kernels compiled supports one thread, but trainer.lanes is {self.lanes}: set lanes to 1"
            )
        if self.kernels == "liger" and self.tensor_parallel > 1:
            raise ValueError(
                f"trainer.kernels liger needs whole layers, which trainer.tensor_parallel ({self.tensor_parallel}) "
                "shards: set one of them"
            )
        for name, used in (("aux_loss_coef", self.router_balance), ("router_replay", self.router_replay)):
            if used and compiled:
                raise ValueError(
                    f"trainer.moe.{name} needs access to layers that trainer.kernels compiled fuses: set one of them"
                )
        if compiled and self.context_parallel * self.tensor_parallel > 1:
            raise ValueError(
                "trainer.kernels compiled needs layers that one process computes: it does not work with "
                f"trainer.context_parallel ({self.context_parallel}) and trainer.tensor_parallel "
                f"({self.tensor_parallel})"
            )
        return self

    @model_validator(mode="after")
    def _keys_are_used(self) -> Self:
        if self.schedule == "constant" and self.min_lr_ratio != 0.1:
            raise ValueError("trainer.min_lr_ratio is ignored with schedule constant: remove it, or use cosine")
        if self.mini_batch_rows is not None:
            self._check_rows()
        if self.max_kl is not None and self.mini_batch_rows is None and self.epochs * self.mini_batches == 1:
            raise ValueError(
                "trainer.max_kl is ignored with one update per step: raise trainer.epochs or trainer.mini_batches"
            )
        if self.critic is not None and self.critic.pretrain_steps >= self.steps:
            raise ValueError(
                f"trainer.critic.pretrain_steps ({self.critic.pretrain_steps}) leaves none of the {self.steps} "
                "trainer.steps to the policy: lower it"
            )
        return self

    def _check_rows(self) -> None:
        """Refuse settings that need a known number of updates, or whole episodes in an update."""
        if self.mini_batches != 1:
            raise ValueError(
                f"trainer.mini_batch_rows ({self.mini_batch_rows}) and trainer.mini_batches ({self.mini_batches}) both "
                "divide a step into updates: remove one of them"
            )
        if self.schedule == "cosine":
            raise ValueError(
                "trainer.schedule cosine needs the number of updates, which trainer.mini_batch_rows leaves open: use "
                "mini_batches, or schedule constant"
            )
        if self.process_reward is not None:
            raise ValueError(
                "trainer.process_reward learns from whole episodes, whose rows trainer.mini_batch_rows may train in "
                "different updates: use mini_batches"
            )


class Config(Section):
    """Config of a run."""

    run: RunConfig = Field(default_factory=RunConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    environment: EnvironmentConfig | None = None
    environments: dict[str, MixedEnvironmentConfig] = Field(default_factory=dict)
    agent: AgentConfig = Field(default_factory=AgentConfig)
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    engine: EngineConfig = Field(default_factory=LocalEngineConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    adapters: dict[str, AdapterConfig] | None = None
    """Several adapters (``model.lora``) by name, each with its own optimizer, for roles with
    ``agent.roles.ROLE.adapter``: ``{planner: {learning_rate: 2e-4}, worker: {}}``. See docs/roles.md."""
    sft: SFTConfig = Field(default_factory=SFTConfig)
    preferences: PreferencesConfig | None = None
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    curriculum: CurriculumConfig = Field(default_factory=CurriculumConfig)
    schedules: dict[str, ScheduleConfig] | None = None
    """Values of keys that change by training step, or by the target of a metric, and stages, which change several keys
    from a step on: ``{sampling.temperature: {0: 1.4, 500: 1.45}, algorithm.entropy_coef: {factor: 0.985}, 500:
    {agent.max_tokens: 24576, environment.tasks: hard.jsonl}}``. See docs/schedules.md."""
    cluster: ClusterConfig | None = None
    observe: ObserveConfig = Field(default_factory=ObserveConfig)
    trackers: list[str] = Field(default_factory=list)
    """Registry names of trackers: tensorboard, wandb (extra ``agentrl[trackers]``). ``metrics.jsonl`` is always
    written."""

    @property
    def named_adapters(self) -> dict[str, AdapterConfig]:
        """Several adapters by name; empty if ``model.lora`` is the only adapter."""
        return self.adapters or {}

    @property
    def evaluation_sampling(self) -> SamplingConfig:
        """Sampling parameters of the run's evaluations."""
        own = self.evaluation.sampling
        if own is None:
            return self.sampling.model_copy(update={"first_token": None})
        return own if "stop" in own.model_fields_set else own.model_copy(update={"stop": self.sampling.stop})

    @property
    def has_environment(self) -> bool:
        """True if an environment is configured; learning from a file (``sft.data``) needs none."""
        return self.environment is not None or bool(self.environments)

    @property
    def sole_environment(self) -> EnvironmentConfig:
        """The environment of a run with one, or of one of its `per_environment_configs`.

        Raises:
            ConfigError: no environment, or several.
        """
        if self.environment is None:
            raise ConfigError(
                "this needs exactly one environment",
                got=f"the environments {', '.join(self.environments)}" if self.environments else "none",
                expected="one of them: environment=NAME",
            )
        return self.environment

    @model_validator(mode="before")
    @classmethod
    def _labels_are_names(cls, data: Any) -> Any:
        """Use the label of an environment without a name as its name."""
        if not isinstance(data, dict) or not isinstance(data.get("environments"), dict):
            return data
        named = {
            label: {"name": label, **entry} if isinstance(entry, dict) else entry
            for label, entry in data["environments"].items()
        }
        return {**data, "environments": named}

    @field_validator("schedules", mode="before")
    @classmethod
    def _schedules_name_keys(cls, data: Any) -> Any:
        return with_stages(data) if isinstance(data, dict) else data

    @field_validator("environments")
    @classmethod
    def _labels_can_be_written(
        cls, environments: dict[str, MixedEnvironmentConfig]
    ) -> dict[str, MixedEnvironmentConfig]:
        for label in environments:
            if not LABEL.fullmatch(label):
                raise ValueError(
                    f"environments: {label!r} is not a label, which has letters, digits, - and _: "
                    f"write {{my_label: {{name: {label!r}}}}}"
                )
        return environments

    @model_validator(mode="after")
    def _environments_fit(self) -> Self:
        has_data = self.sft.data is not None or bool(self.preferences and self.preferences.sources)
        if not self.has_environment and (not has_data or self.sft.stop_at is not None):
            raise ValueError(
                "no environment is set: set environment=household/train, or --env NAME on the command line"
            )
        if self.environment is not None and self.environments:
            raise ValueError(
                f"environment ({self.environment.name}) and environments ({', '.join(self.environments)}) are both "
                "given: remove one of them"
            )
        for label, entry in self.environments.items():
            if (entry.agent.max_answer_tokens or 0) > self.agent.max_tokens:
                raise ValueError(
                    f"environments.{label}.agent.max_answer_tokens ({entry.agent.max_answer_tokens}) exceeds "
                    f"agent.max_tokens ({self.agent.max_tokens}): an answer could never fit"
                )
        return self

    @model_validator(mode="after")
    def _values_are_plausible(self) -> Self:
        if problems := list(implausible_values(self)):
            raise ValueError("; ".join(problems))
        episodes = self.trainer.tasks_per_step * self.algorithm.group_size
        if episodes > MAX_EPISODES_PER_STEP:
            raise ValueError(
                f"trainer.tasks_per_step ({self.trainer.tasks_per_step:,}) x algorithm.group_size "
                f"({self.algorithm.group_size:,}) are {episodes:,} episodes per training step, which are kept in "
                f"memory until the step ends: expected at most {MAX_EPISODES_PER_STEP:,}"
            )
        return self

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        if self.agent.max_answer_tokens > self.agent.max_tokens:
            raise ValueError(
                f"agent.max_answer_tokens ({self.agent.max_answer_tokens}) exceeds agent.max_tokens "
                f"({self.agent.max_tokens}): an answer could never fit"
            )
        context = self.engine.max_context if isinstance(self.engine, LocalEngineConfig | ServerEngineConfig) else None
        # a run's config.yaml holds the defaults, too: only another value was chosen
        is_chosen = self.agent.max_tokens != AgentConfig.model_fields["max_tokens"].default
        if context is not None and is_chosen and self.agent.max_tokens > context:
            raise ValueError(
                f"agent.max_tokens ({self.agent.max_tokens}) exceeds engine.max_context ({context}), where "
                "episodes end: raise engine.max_context, or lower agent.max_tokens"
            )
        episodes = self.trainer.tasks_per_step * self.algorithm.group_size
        if self.trainer.mini_batches > episodes:
            raise ValueError(
                f"trainer.mini_batches ({self.trainer.mini_batches}) exceeds the {episodes} episodes of a step "
                "(trainer.tasks_per_step x algorithm.group_size)"
            )
        if self.trainer.mini_batch_rows is not None and self.algorithm.aggregation in WHOLE_EPISODES:
            raise ValueError(
                f"algorithm.aggregation {self.algorithm.aggregation} is a mean over the tokens of whole episodes or "
                "groups, whose rows trainer.mini_batch_rows may train in different updates: use trainer.mini_batches, "
                "or another aggregation"
            )
        if isinstance(self.engine, ServerEngineConfig) and self.engine.sleep and not self.rollout.is_synchronous:
            raise ValueError(
                "engine.sleep suspends the servers while the trainer trains, and with rollout.max_staleness "
                f"{self.rollout.max_staleness} episodes continue then: remove one of them"
            )
        return self
