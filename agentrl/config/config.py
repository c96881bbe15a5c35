"""Every setting of agentrl, typed. An unknown key is an error; the docstring under a field is its documentation."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field, ValidationInfo, field_validator, model_validator

from agentrl.config.algorithm import ExpertConfig, PreferencesConfig, ReferenceConfig, TeacherConfig
from agentrl.config.cluster import ClusterConfig
from agentrl.config.engines import EngineConfig, LocalEngineConfig, ServerEngineConfig
from agentrl.config.environment import AgentConfig, CurriculumConfig, EnvironmentConfig, MixedEnvironmentConfig
from agentrl.config.number_format import AUTO, fastest_format
from agentrl.config.section import Finite, LearningRate, Section, implausible_values, without_old_key
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
    """Name of the run's folder; made from the config's name and the time when left out."""
    directory: str = "runs"
    """Folder that holds run folders."""
    seed: int = 0
    """Seed of everything: task order, sampling, initialisation."""


class ScratchModelConfig(Section):
    """A small model with random weights, for trying things without a download."""

    layers: int = Field(2, ge=1)
    """Transformer blocks."""
    hidden_size: int = Field(128, ge=1)
    """Width of the hidden states; a multiple of ``heads``."""
    heads: int = Field(4, ge=1)
    """Attention heads."""
    kv_heads: int = Field(2, ge=1)
    """Key-value heads; divides ``heads``."""
    vocab_size: int = Field(512, ge=1)
    """Most entries of the byte-level BPE vocabulary, trained on the environment's own text."""
    numbered_names: bool = False
    """Let a word and the number after it (``mug 1``) be one token: shorter episodes, and names are copied whole."""
    initializer_range: float = Field(0.06, gt=0)
    """Standard deviation of the initial weights (0.02 learns far slower at this size)."""
    tie_word_embeddings: bool = True
    """The output head is the embedding."""
    max_context: int = Field(4096, ge=1)
    """Most tokens of a sequence."""


class ModelConfig(Section):
    path: str = "scratch"
    """A Hugging Face name or folder, a run folder, or ``scratch``: a new small model (see ``model.scratch``)."""
    scratch: ScratchModelConfig | None = None
    """Sizes of the new model; only with ``path: scratch``."""
    chat_template: str | None = None
    """In place of the model's own: a Jinja file, or ``chatml``, ``qwen3``, ``llama3`` or ``gemma`` (docs/models.md)."""
    device: str = "auto"
    """``cpu``, ``cuda``, ``cuda:1``; ``auto`` takes a GPU when there is one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the weights; ``auto`` becomes bfloat16 on GPUs and on processors that multiply in it, and
    float32 elsewhere."""
    head_dtype: Literal["model", "float32"] = "model"
    """Number format in which logits are computed: that of the weights, or float32 in the trainer, the local engine and
    servers that agentrl launches; with ``dtype: bfloat16`` this brings their probabilities closer together."""
    lora: LoraConfig | None = None
    """Train adapters (LoRA) and freeze the base weights; see docs/lora.md."""

    @field_validator("dtype", mode="before")
    @classmethod
    def _dtype_of_this_machine(cls, value: object, info: ValidationInfo) -> object:
        return fastest_format(info.data.get("device", AUTO)) if value == AUTO else value

    @model_validator(mode="after")
    def _scratch_is_used(self) -> Self:
        if self.scratch is not None and self.path != "scratch":
            raise ValueError(
                f"model.scratch is ignored with model.path {self.path}: remove it, or set model.path: scratch"
            )
        if self.chat_template is not None and self.path == "scratch":
            raise ValueError("model.chat_template is ignored with model.path scratch, which has a template of its own")
        return self


class SamplingConfig(Section):
    temperature: float = Field(1.0, ge=0)
    """Logits are divided by it; 0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the fewest tokens that have this share of probability."""
    top_k: int = Field(0, ge=0)
    """Sample from the most probable k tokens; 0 from all."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Drop tokens below this share of the most probable one."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end an answer, such as the closing tag of an action; they stay in it."""


LOGITS_MEGABYTES = 256
"""Memory, in MiB, of the logits that the trainer keeps at once; twice as much at the peak."""

Checkpointing: TypeAlias = Literal["full", "selective", "offload"]
"""What is kept of a layer's forward pass; see `agentrl.training.compile`."""

MOST_EPISODES_PER_STEP = 1_000_000
"""A training step holds its episodes in memory: about 10 KB each, and more for long ones."""

LABEL = re.compile(r"[\w-]+")
"""How an environment of several may be called: labels stand in names of metrics, and in overrides."""


class CorrectionConfig(Section):
    """Train/inference correction: weights from pi_old / mu."""

    mode: Literal["token", "sequence", "icepop", "off"] = "token"
    """What is weighted: every token, whole sequences, tokens inside a band only, or nothing."""
    cap: float | None = Field(None, gt=0)
    """Truncation; 2 for token, 5 for sequence when left out. Not used by icepop and off."""
    band: tuple[float, float] | None = None
    """Range of rho that icepop keeps; [0.5, 5] when left out. Only icepop."""
    proximal: Literal["trainer", "behaviour", "loglinear"] = "trainer"
    """Where pi_old comes from: computed by the trainer, the engine's mu itself, or between mu and pi by their versions.
    The latter two save a forward pass where a step has several mini-batches."""

    @model_validator(mode="after")
    def _keys_are_used(self) -> Self:
        if self.cap is not None and self.mode in ("icepop", "off"):
            raise ValueError(
                f"algorithm.correction.cap is ignored with mode {self.mode}: remove it, or use token or sequence"
            )
        if self.band is not None and self.mode != "icepop":
            raise ValueError(f"algorithm.correction.band is ignored with mode {self.mode}: remove it, or use icepop")
        if self.band is not None and not 0 <= self.band[0] < self.band[1]:
            raise ValueError(f"algorithm.correction.band is {list(self.band)}: give [low, high] with 0 <= low < high")
        if self.proximal == "behaviour" and (self.cap is not None or self.mode == "icepop"):
            raise ValueError(
                "algorithm.correction.proximal behaviour makes pi_old / mu 1, so that "
                f"{'mode icepop' if self.mode == 'icepop' else 'cap'} is ignored: remove one of them"
            )
        if self.proximal == "loglinear" and self.mode == "icepop":
            raise ValueError(
                "algorithm.correction.proximal loglinear saves the forward pass that mode icepop needs: "
                "use mode token or sequence"
            )
        return self


REFERENCE_LOSSES = frozenset({"sppo"})
"""Shipped losses that compare with a reference policy; a test holds this against their marks."""

SEQUENCE_LOSSES = frozenset({"gmpo", "gspo", "sapo", "sppo"})
"""Shipped losses that are means over sequences in their papers; a test holds this against their marks."""


class AlgorithmConfig(Section):
    advantage: str = "grpo"
    """Registry name of the advantage estimator, or module:attr."""
    advantage_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the estimator (gamma, …); one that it does not take is an error."""
    loss: str = "ppo"
    """Registry name of the policy loss, or module:attr."""
    loss_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the loss (clip_low, clip_high, …); one that it does not take is an error."""
    aggregation: Literal[
        "token-mean",
        "seq-mean-token-mean",
        "seq-mean-token-sum",
        "seq-mean-token-sum-norm",
        "traj-mean-token-mean",
        "prompt-mean",
    ] = "token-mean"
    """How token losses become one number; denominators are counted over the whole optimizer step. When left out, the
    losses gmpo, gspo, sapo and sppo take seq-mean-token-mean, as their papers do, and all others token-mean."""
    norm_length: int | None = Field(None, ge=1)
    """Constant length of seq-mean-token-sum-norm; only there."""
    group_size: int = Field(8, ge=1)
    """Episodes per task."""
    correction: CorrectionConfig = Field(default_factory=CorrectionConfig)
    kl_coef: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Weight of the KL to the reference in the loss; 0 keeps no reference model."""
    reference: ReferenceConfig | None = None
    entropy_coef: Finite = 0.0
    """Weight of the entropy bonus."""
    shaping: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """What happens to rewards, in this order: registry names or module:attr with options, ``{invalid: {penalty:
    -0.1}}``; see the algorithms page."""
    filters: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Which tokens train: registry names or module:attr with options, ``{geometric: {band: [0.99, 1.01]}}``."""
    role_weights: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(default_factory=dict)
    """Factors of the advantages of roles, for loops of several agents: ``{planner: 2, worker: 0.5}``; 1 for those that
    are left out."""
    dynamic_sampling: bool = False
    """Replace groups whose episodes do not differ, as ``advantage`` compares them before shaping, by new ones."""
    teacher: TeacherConfig | None = None
    """A frozen model to learn from: ``{path: MODEL}``; none when left out. See docs/guides.md."""
    expert: ExpertConfig | None = None
    """The environment's expert as a member of every group: ``{members: 1}``; none when left out."""

    @model_validator(mode="before")
    @classmethod
    def _without_what_was_a_key(cls, data: Any) -> Any:
        """The config.yaml of an older run holds ``kl_estimator``, which is in ``reference`` now."""
        rest = without_old_key(data, "kl_estimator", "k3")
        if rest is not data and rest.get("kl_coef") and rest.get("reference") is None:
            return {**rest, "reference": {"kl_estimator": "k3"}}
        return rest

    @model_validator(mode="before")
    @classmethod
    def _aggregation_of_the_loss(cls, data: Any) -> Any:
        if isinstance(data, dict) and "aggregation" not in data and data.get("loss") in SEQUENCE_LOSSES:
            return {**data, "aggregation": "seq-mean-token-mean"}
        return data

    @property
    def keeps_reference(self) -> bool:
        """A frozen copy of the model is held."""
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
        ignored = self.reference is not None and self.reference.kl_estimator not in ("k3", "k3+")
        if ignored and self.kl_coef == 0:  # k3 was the default of older runs
            raise ValueError(
                "algorithm.reference.kl_estimator is ignored while algorithm.kl_coef is 0: set kl_coef, or remove it"
            )
        if self.dynamic_sampling and self.group_size == 1:
            raise ValueError(
                "algorithm.dynamic_sampling replaces groups whose episodes do not differ, and a group of one is never "
                "anything else: set it to false, or raise algorithm.group_size"
            )
        return self


OLDER = {"logprob_chunk": 2048, "betas": [0.9, 0.95], "weight_decay": 0.0, "compile": False, "router_balance": 0.0}
"""Keys of ``trainer`` in older runs, and their defaults."""


class TrainerConfig(Section):
    steps: int = Field(100, ge=1)
    """Training steps of the run."""
    tasks_per_step: int = Field(16, ge=1)
    """Groups per training step."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """``muon`` orthogonalises the updates of the blocks' matrices, scaled to AdamW's size, and leaves the rest to
    AdamW: small models trained from nothing learn from far fewer examples. Also of a warm start."""
    learning_rate: LearningRate = 1e-6
    """Peak learning rate."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate after the warm-up."""
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    """Where cosine ends, as a share of the learning rate."""
    adam: AdamConfig | None = None
    """AdamW's decay rates, and weight decay: ``{betas: [0.9, 0.95], weight_decay: 0}`` when left out."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this norm."""
    epochs: int = Field(1, ge=1)
    """Passes over a step's data."""
    mini_batches: int = Field(1, ge=1)
    """Optimizer steps per pass."""
    max_kl: float | None = Field(None, gt=0)
    """KL of the policy to that of the start of the step, over a mini-batch, above which the step's other updates are
    left out."""
    critic: CriticConfig | None = None
    process_reward: ProcessRewardConfig | None = None
    tokens_per_micro_batch: int = Field(8192, ge=1)
    """Tokens of a forward and backward pass, padding included."""
    share_prefixes: bool = False
    """Compute what sequences begin with in common once: the prompt of a group, the history of branches. The gradients
    are the same; it pays where much is shared."""
    lanes: int = Field(1, ge=1, le=256)
    """Micro-batches that are computed at the same time, each on its share of torch's threads; on the CPU, for models so
    small that their operations cannot keep several cores busy."""
    gradient_checkpointing: bool | Checkpointing = False
    """Recompute activations in the backward pass: less memory, more time. ``full`` (or true) keeps the inputs of layers
    only, ``selective`` what attention gave as well, ``offload`` the inputs of layers in the CPU's memory."""
    kernels: Literal["torch", "compiled", "liger"] = "torch"
    """What computes layers. ``compiled``: torch.compile, for faster steps after a first one that is slow. ``liger``:
    Liger's norms, rotary positions and feed-forward parts, which need a GPU and the extra ``agentrl[gpu]``."""
    moe: MoEConfig | None = None
    """For models with routed experts: ``{aux_loss_coef: 0.001, router_replay: true}``; neither when left out."""
    deterministic: bool = False
    """Let equal steps give equal bits, and runs of one seed too: the local engine waits for all episodes before each of
    its steps. It costs speed; see docs/numerics.md."""
    numerics: NumericsConfig | None = None
    """Limits of the watch over the training's numbers; its defaults when left out."""
    processes: int = Field(1, ge=1, le=4096)
    """Processes (ranks) that share the model's parameters and a step's work, each with a GPU of its own where there are
    any; see docs/distributed.md."""
    context_parallel: int = Field(1, ge=1)
    """Processes that share the tokens of every row, for sequences that are too long for one."""
    tensor_parallel: int = Field(1, ge=1)
    """Processes that share the matrices of every layer."""
    fsdp: FSDPOptions = Field(default_factory=FSDPOptions)
    """How they share, as ``{reshard: false, …}``. ``replicas`` (1): rows of processes that hold the whole model each.
    ``reshard`` (true): a layer's parameters are given up between its forward and its backward pass. ``offload``
    (false): parameters and moments wait in the CPU's memory, where updates are computed. ``reduce`` (false): gradients
    are added up over the processes after every micro-batch instead of once per update, and never kept whole."""

    @property
    def router_balance(self) -> float:
        """``moe.aux_loss_coef``; 0 without."""
        return 0.0 if self.moe is None else self.moe.aux_loss_coef

    @property
    def router_replay(self) -> bool:
        """``moe.router_replay``; not without."""
        return self.moe is not None and self.moe.router_replay

    @model_validator(mode="before")
    @classmethod
    def _without_what_was_a_key(cls, data: Any) -> Any:
        """The config.yaml of an older run holds keys that exist no more, with their defaults."""
        for key, value in OLDER.items():
            data = without_old_key(data, key, value)
        return data

    @model_validator(mode="after")
    def _ranks_fit(self) -> Self:
        compiled = self.kernels == "compiled"
        if self.processes > 1 and self.lanes > 1:
            raise ValueError(
                f"trainer.lanes ({self.lanes}) are threads of one process, and trainer.processes is {self.processes}: "
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
                f"trainer.kernels compiled compiles for one thread, and trainer.lanes is {self.lanes}: set lanes to 1"
            )
        if self.kernels == "liger" and self.tensor_parallel > 1:
            raise ValueError(
                f"trainer.kernels liger has some for whole norms, and trainer.tensor_parallel ({self.tensor_parallel}) "
                "shares them: set one of them"
            )
        for name, used in (("aux_loss_coef", self.router_balance), ("router_replay", self.router_replay)):
            if used and compiled:
                raise ValueError(
                    f"trainer.moe.{name} looks into layers, which trainer.kernels compiled closes: set one of them"
                )
        if compiled and self.context_parallel * self.tensor_parallel > 1:
            raise ValueError(
                "trainer.kernels compiled is made for layers that one process computes: not with "
                f"trainer.context_parallel ({self.context_parallel}) and trainer.tensor_parallel "
                f"({self.tensor_parallel})"
            )
        return self

    @model_validator(mode="after")
    def _keys_are_used(self) -> Self:
        if self.schedule == "constant" and self.min_lr_ratio != 0.1:
            raise ValueError("trainer.min_lr_ratio is ignored with schedule constant: remove it, or use cosine")
        if self.max_kl is not None and self.epochs * self.mini_batches == 1:
            raise ValueError(
                "trainer.max_kl is ignored with one update per step: raise trainer.epochs or trainer.mini_batches"
            )
        if self.critic is not None and self.critic.pretrain_steps >= self.steps:
            raise ValueError(
                f"trainer.critic.pretrain_steps ({self.critic.pretrain_steps}) leaves none of the {self.steps} "
                "trainer.steps to the policy: lower it"
            )
        return self


class RolloutConfig(Section):
    max_staleness: int = Field(0, ge=0)
    """0: synchronous; 1: one step off; k: at most k versions between sampling and training."""
    max_concurrent: int = Field(128, ge=1)
    """Most episodes in flight."""
    retries: int = Field(2, ge=0)
    """New attempts for an episode that the machinery failed."""
    stall_report_s: float = Field(60.0, gt=0)
    """Silence after which the run prints who waits for what."""


class EvaluationConfig(Section):
    every: int = Field(0, ge=0)
    """Training steps between evaluations; 0 never."""
    split: str = "valid"
    """Split to evaluate on."""
    tasks: int = Field(64, ge=1)
    """Tasks of the panel; ``run.seed`` chooses them."""
    samples: int = Field(1, ge=1)
    """Episodes per task."""
    sampling: SamplingConfig | None = None
    """The training's sampling when left out; its stop texts also when only they are."""


class CheckpointConfig(Section):
    every: int = Field(10, ge=1)
    """Training steps between checkpoints; the last step is always saved."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints kept."""
    background: bool = False
    """Copy at the end of the step, and write the copy while the next ones run."""


class Config(Section):
    """A whole run."""

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
    """Several adapters (``model.lora``) that roles name in ``agent.roles.ROLE.adapter``, each with an optimizer of its
    own: ``{planner: {learning_rate: 2e-4}, worker: {}}``. See docs/roles.md."""
    sft: SFTConfig = Field(default_factory=SFTConfig)
    preferences: PreferencesConfig | None = None
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    curriculum: CurriculumConfig = Field(default_factory=CurriculumConfig)
    cluster: ClusterConfig | None = None
    trackers: list[str] = Field(default_factory=list)
    """Registry names: tensorboard, wandb (extra ``agentrl[trackers]``). ``metrics.jsonl`` is always written."""

    @property
    def named_adapters(self) -> dict[str, AdapterConfig]:
        """Several adapters by name; none where ``model.lora`` alone is one."""
        return self.adapters or {}

    @property
    def evaluation_sampling(self) -> SamplingConfig:
        """Sampling of the run's evaluations."""
        own = self.evaluation.sampling
        if own is None:
            return self.sampling
        return own if "stop" in own.model_fields_set else own.model_copy(update={"stop": self.sampling.stop})

    @property
    def has_environment(self) -> bool:
        """Return True if an environment is configured; learning from a file (``sft.data``) needs none."""
        return self.environment is not None or bool(self.environments)

    @property
    def sole_environment(self) -> EnvironmentConfig:
        """The environment of a run that has one, and of each part of a run that has several (`parts_of`).

        Raises:
            ConfigError: there are several.
        """
        if self.environment is None:
            raise ConfigError(
                "this needs one environment",
                got=f"the environments {', '.join(self.environments)}" if self.environments else "none",
                expected="one of them: environment=NAME",
            )
        return self.environment

    @model_validator(mode="before")
    @classmethod
    def _labels_are_names(cls, data: Any) -> Any:
        """An environment of several that has no name is called as its label says."""
        if not isinstance(data, dict) or not isinstance(data.get("environments"), dict):
            return data
        named = {
            label: {"name": label, **entry} if isinstance(entry, dict) else entry
            for label, entry in data["environments"].items()
        }
        return {**data, "environments": named}

    @field_validator("environments")
    @classmethod
    def _labels_can_be_written(
        cls, environments: dict[str, MixedEnvironmentConfig]
    ) -> dict[str, MixedEnvironmentConfig]:
        for label in environments:
            if not LABEL.fullmatch(label):
                raise ValueError(
                    f"environments: {label!r} is no label, which is letters, digits, - and _: "
                    f"write {{my_label: {{name: {label!r}}}}}"
                )
        return environments

    @model_validator(mode="after")
    def _environments_fit(self) -> Self:
        if not self.has_environment and (self.sft.data is None or self.sft.stop_at is not None):
            raise ValueError(
                "no environment is named: give environment=household/train, or --env NAME on the command line"
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
        if episodes > MOST_EPISODES_PER_STEP:
            raise ValueError(
                f"trainer.tasks_per_step ({self.trainer.tasks_per_step:,}) x algorithm.group_size "
                f"({self.algorithm.group_size:,}) are {episodes:,} episodes in each training step, which are kept in "
                f"memory until it ends: expected at most {MOST_EPISODES_PER_STEP:,}"
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
        # a budget that is the default has not been chosen, and a run's own config.yaml holds the defaults, too
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
        if isinstance(self.engine, ServerEngineConfig) and self.engine.sleep and self.rollout.max_staleness:
            raise ValueError(
                "engine.sleep puts the servers to sleep while the trainer trains, and rollout.max_staleness "
                f"{self.rollout.max_staleness} lets episodes go on then: remove one of them"
            )
        return self
