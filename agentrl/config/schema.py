"""Every setting of agentrl, typed. An unknown key is an error; the docstring under a field is its documentation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from agentrl.env import Isolation


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are checked on assignment, docstrings document fields."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_assignment=True)


class RunConfig(Section):
    name: str | None = None
    """Name of the run's folder; made from the config's name and the time when left out."""
    directory: str = "runs"
    """Folder that holds run folders."""
    seed: int = 0
    """Seed of everything: task order, sampling, initialisation."""


class ScratchModelConfig(Section):
    """A small model with random weights, for trying things without a download."""

    layers: int = 2
    hidden_size: int = 128
    heads: int = 4
    kv_heads: int = 2
    vocab_size: int = 512
    """Most entries of the byte-level BPE vocabulary, trained on the environment's own text."""
    initializer_range: float = 0.06
    """Standard deviation of the initial weights (0.02 learns far slower at this size)."""
    tie_word_embeddings: bool = True
    max_context: int = 4096


class ModelConfig(Section):
    path: str = "scratch"
    """A Hugging Face name or folder, a run folder, or ``scratch``: a new small model (see ``model.scratch``)."""
    scratch: ScratchModelConfig | None = None
    """Sizes of the new model; only with ``path: scratch``."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "auto"
    """``cpu``, ``cuda``, ``cuda:1``; ``auto`` takes a GPU when there is one."""


class EnvironmentConfig(Section):
    name: str
    """Registry name, or ``module:EnvId`` / ``module:attr`` of your own."""
    split: str = "train"
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the environment and its task source: sizes, task types, files."""
    tasks: str | None = None
    """A JSON-lines or Parquet file of tasks, instead of the environment's own."""
    isolation: Isolation | None = None
    """Where blocking code runs: ``inline``, ``thread`` or ``process``; the environment's own choice when left out."""
    workers: int = 4
    """Worker threads or processes."""
    max_concurrent: int = 256
    """Most episodes that hold an environment at once."""
    reset_timeout_s: float = 60.0
    step_timeout_s: float = 30.0


class AgentConfig(Section):
    loop: str = "tool_calling"
    """Registry name of the agent loop: tool_calling, react_text, step_independent, single_turn, or module:attr."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the loop's constructor."""
    tools: list[str] = Field(default_factory=list)
    """Registry names or module:attr of tools, besides the environment's own."""
    tool_parser: str = "auto"
    """How tool calls are written: hermes, qwen3_coder, llama3_json; ``auto`` asks the model's family."""
    tool_timeout_s: float = 30.0
    system_prompt: str | None = None
    """Replaces the environment's instructions."""
    enable_thinking: bool = False
    """Passed to chat templates that know it."""
    max_turns: int = 50
    """Turns of an episode; the environment's own limit may be smaller."""
    max_answer_tokens: int = 256
    """Tokens of one answer."""
    max_observation_tokens: int = 2048
    """Tokens of one observation; what is longer is cut, with a visible mark."""
    max_tokens: int = 16384
    """Tokens of one sequence, prompt and answers together; never more than the engine's context."""
    max_seconds: float | None = None
    """Seconds of one episode, as a rule of the task."""
    max_invalid: int = 10
    """Unusable answers in an episode before it ends as policy_error."""
    scorer: str = "environment"
    """Registry name or module:attr of the scorer; ``environment`` sums the environment's rewards."""


class SamplingConfig(Section):
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    min_p: float = Field(0.0, ge=0, lt=1)


class LocalEngineConfig(Section):
    type: Literal["local"] = "local"
    """The model in this process, on torch; shares the trainer's weights when ``rollout.max_staleness`` is 0."""
    slots: int = 64
    """Sequences decoded together."""
    max_context: int | None = None
    """Tokens of a sequence; the model's own limit when left out."""
    cache_tokens: int = 262_144
    """Key-value cache kept for sessions, in tokens over all of them."""
    prefill_tokens: int = 4096
    """Most prompt tokens computed in one forward pass."""
    timeout_s: float = 600.0
    """Deadline of one answer."""


class ScriptedEngineConfig(Section):
    type: Literal["scripted"] = "scripted"
    """Plays a script with an engine's semantics; for tests and for trying environments."""
    script: str | None = None
    """``module:attr`` of the script; random tokens when left out."""
    delay_s: float = 0.0
    """Seconds per token."""
    timeout_s: float = 600.0


class OpenAIEngineConfig(Section):
    type: Literal["openai"] = "openai"
    """Any OpenAI-compatible service; evaluation only: it gives text, not tokens."""
    url: str
    """Base address, up to and with ``/v1``."""
    model: str
    api_key_variable: str = "OPENAI_API_KEY"
    """Environment variable that holds the key."""
    timeout_s: float = 120.0
    retries: int = 4
    max_concurrent: int = 32


EngineConfig = Annotated[LocalEngineConfig | ScriptedEngineConfig | OpenAIEngineConfig, Field(discriminator="type")]


class CorrectionConfig(Section):
    """Train/inference correction: weights from pi_old / mu."""

    mode: Literal["token", "sequence", "icepop", "off"] = "token"
    cap: float | None = None
    """Truncation; 2 for token, 5 for sequence when left out. Not used by icepop and off."""
    band: tuple[float, float] | None = None
    """Range of rho that icepop keeps; [0.5, 2] when left out. Only icepop."""


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
    norm_length: int | None = None
    """Constant length of seq-mean-token-sum-norm; only there."""
    group_size: int = Field(8, ge=1)
    """Episodes per task."""
    correction: CorrectionConfig = Field(default_factory=CorrectionConfig)
    kl_coef: float = 0.0
    """Weight of the KL to the reference in the loss; 0 keeps no reference model."""
    kl_estimator: Literal["k1", "k2", "k3", "k1+", "k3+"] = "k3"
    entropy_coef: float = 0.0
    invalid_penalty: float = 0.0
    """Added to a turn's reward when its answer or action was invalid (zero or negative)."""
    overlong_buffer: int | None = None
    """DAPO's soft penalty: tokens before ``agent.max_tokens`` over which the reward falls by ``overlong_factor``."""
    overlong_factor: float | None = None
    dynamic_sampling: bool = False
    """Replace groups in which all returns are equal by fresh ones."""


class TrainerConfig(Section):
    steps: int = Field(100, ge=1)
    tasks_per_step: int = Field(16, ge=1)
    """Groups per training step."""
    learning_rate: float = 1e-6
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up."""
    schedule: Literal["constant", "cosine"] = "constant"
    min_lr_ratio: float = 0.1
    """Where cosine ends, as a share of the learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    epochs: int = Field(1, ge=1)
    """Passes over a step's data."""
    mini_batches: int = Field(1, ge=1)
    """Optimizer steps per pass."""
    tokens_per_micro_batch: int = 8192
    """Padded tokens of a forward and backward pass."""
    logprob_chunk: int = 2048
    """Tokens whose logits exist at once."""
    gradient_checkpointing: bool = False


class RolloutConfig(Section):
    max_staleness: int = Field(0, ge=0)
    """0: synchronous; 1: one step off; k: at most k versions between sampling and training."""
    max_concurrent: int = 128
    """Most episodes in flight."""
    retries: int = 2
    """New attempts for an episode that the machinery failed."""
    stall_report_s: float = 60.0
    """Silence after which the run prints who waits for what."""


class EvaluationConfig(Section):
    every: int = 0
    """Training steps between evaluations; 0 never."""
    split: str = "valid"
    tasks: int = 64
    samples: int = 1
    sampling: SamplingConfig | None = None
    """The training's sampling when left out."""


class CheckpointConfig(Section):
    every: int = Field(10, ge=1)
    """Training steps between checkpoints; the last step is always saved."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints kept."""


class Config(Section):
    """A whole run."""

    run: RunConfig = Field(default_factory=RunConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    environment: EnvironmentConfig
    agent: AgentConfig = Field(default_factory=AgentConfig)
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    engine: EngineConfig = Field(default_factory=LocalEngineConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    trackers: list[str] = Field(default_factory=lambda: ["tensorboard"])
    """Registry names: tensorboard, wandb. ``metrics.jsonl`` is always written."""
