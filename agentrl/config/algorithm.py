"""Settings of the algorithm's parts: teacher, expert, reference policy, learning from pairs, and correction."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from agentrl.config.engines import address
from agentrl.config.section import LearningRate, Section

POLICY = "policy"
"""Value of ``algorithm.teacher.path`` for the policy itself."""


class TeacherConfig(Section):
    """Frozen model, or the policy with a hint, that provides log-probabilities of the policy's tokens, or its own most
    probable tokens; for ``loss: distill`` or ``distill_top_k``, or ``shaping: {distill: {coef: …}}``.
    """

    path: str
    """Hugging Face name or folder, or a run folder. With a tokenizer other than the policy's, texts are compared, not
    tokens. Without ``servers``, the model is loaded in the trainer's processes and sharded over the ranks.
    ``policy`` is the policy at the start of each step, which needs a ``hint``."""
    hint: str | None = None
    """Text that only the teacher reads, in a message before the episode; it may contain fields of the task:
    ``"A correct answer is {ground_truth}."``, or ``{NAME}`` for another column of its row."""
    top_k: int | None = Field(None, ge=1)
    """Number of the teacher's most probable tokens that are used at each position; for ``loss: distill_top_k``."""
    servers: list[str] = Field(default_factory=list)
    """Addresses of servers of this model: ``[http://HOST:PORT]``. They compute the log-probabilities of the sampled
    tokens; the trainer then loads only the tokenizer."""
    engine: Literal["vllm", "sglang"] = "vllm"
    """Type of the servers."""
    api_key_variable: str | None = None
    """Environment variable that holds the servers' API key, if they require one."""
    timeout_s: float = Field(600.0, gt=0)
    """Seconds for the log-probabilities of one episode, retries included."""
    max_concurrent: int = Field(32, ge=1)
    """Maximum number of concurrent requests."""

    @field_validator("engine", mode="before")
    @classmethod
    def _engine_scores_tokens(cls, engine: object) -> object:
        if engine == "openai":
            raise ValueError(
                "algorithm.teacher.engine openai: a chat service does not return log-probabilities of given tokens: "
                "use vllm or sglang, or remove algorithm.teacher.servers"
            )
        return engine

    @property
    def is_loaded(self) -> bool:
        """True if the trainer loads the teacher: it is neither served nor the policy."""
        return not self.servers and self.path != POLICY

    @model_validator(mode="after")
    def _keys_are_used(self) -> Self:
        if self.path == POLICY and not self.hint:
            raise ValueError(
                "algorithm.teacher.path=policy needs algorithm.teacher.hint: without a hint, the teacher would be "
                "identical to the policy"
            )
        if self.servers and (self.path == POLICY or self.hint is not None):
            raise ValueError(
                "served teachers support neither a hint nor path=policy: remove algorithm.teacher.servers, so that the "
                "trainer computes the teacher's log-probabilities"
            )
        if self.servers:
            for url in self.servers:
                address(url)
            return self
        for name in ("engine", "api_key_variable", "timeout_s", "max_concurrent"):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"algorithm.teacher.{name} is ignored without algorithm.teacher.servers: remove it")
        return self


class ExpertConfig(Section):
    """Episodes of every group that the environment's expert plays, or that were stored earlier; for ``loss: luffy``."""

    members: int = Field(1, ge=1)
    """Number of expert episodes among the ``algorithm.group_size``; the policy plays the others. One in eight is
    usual."""
    trajectories: str | None = None
    """Stored episodes to use instead of the environment's expert: a run, its folder ``trajectories`` or a file of that
    folder. A task without a stored episode gets no expert episode."""


class ReferenceConfig(Section):
    """Reference policy of ``algorithm.kl_coef``, the shaping ``kl``, and losses such as ``sppo``."""

    kl_estimator: Literal["k1", "k2", "k3", "k1+", "k3+", "k3_ratio"] = "k3+"
    """Estimator of the KL divergence of ``algorithm.kl_coef``. ``k1+`` and ``k3+`` have the value of k1 and k3 and the
    gradient of k2, which is an unbiased estimate of the divergence's gradient. The gradient of plain k3 (GRPO paper,
    verl, TRL) is that of another divergence. ``k3_ratio`` weighs k3 by pi / pi_old, which is unbiased in later updates
    of a step, too (DeepSeek-V3.2)."""
    refresh_every: int = Field(0, ge=0)
    """Training steps after which the current policy becomes the reference: for self-play with ``loss: sppo``, or a KL
    that follows the policy. 0 keeps the policy of the start of the run."""


class PreferencesConfig(Section):
    """Training on pairs of stored episodes of one task (`agentrl dpo`); all other settings come from ``trainer``."""

    sources: list[str] = Field(default_factory=list)
    """Runs, their folders ``trajectories``, or files of these folders; ``--from`` on the command line."""
    loss: str = "dpo"
    """Registry name of a loss on pairs (``dpo``, ``spin``), or module:attr."""
    loss_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the loss: ``{beta: 0.1}``."""
    pairs: Literal["rewards", "demonstrations"] = "rewards"
    """Preferred episode of a pair: ``rewards``, the one with the greater reward; ``demonstrations``, the demonstration
    over the policy's own episode, for ``spin``."""
    pairs_per_task: int = Field(1, ge=1)
    """Maximum number of pairs per task: the best with the worst, the second best with the second worst, and so on."""
    epochs: int = Field(1, ge=1)
    """Passes over the pairs."""
    pairs_per_update: int = Field(16, ge=1)
    """Pairs per optimizer step."""
    learning_rate: LearningRate = 1e-6
    """Peak learning rate."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up."""
    schedule: Literal["constant", "cosine"] = "cosine"
    """Schedule of the learning rate after the warm-up; cosine ends at a tenth of the peak."""
    save_minutes: float = Field(10, gt=0)
    """Minutes between checkpoints. A stop (Ctrl-C) saves one, too; the last one, at the end, holds only the model."""

    @model_validator(mode="after")
    def _pairs_fit_the_loss(self) -> Self:
        if self.loss == "spin" and self.pairs != "demonstrations":
            raise ValueError(
                "preferences.loss spin prefers demonstrations to the policy's own episodes: "
                "set preferences.pairs=demonstrations, or preferences.loss=dpo"
            )
        return self


class ResampleConfig(Section):
    """Training on some episodes of a group: correct ones with small penalties, and wrong ones, as in rStar2-Agent."""

    keep: int = Field(ge=1)
    """Number of episodes of a group that are trained, of the ``algorithm.group_size`` that are played."""
    least_right: int = Field(2, ge=0)
    """Minimum number of correct episodes among them, if the group has that many."""
    least_wrong: int = Field(2, ge=0)
    """Minimum number of wrong episodes among them, if the group has that many."""
    penalties: list[str] = Field(default_factory=list)
    """Rewards in ``agent.reward`` whose unweighted sum is the penalty by which correct episodes are ordered:
    ``[tool_error_ratio, answer_tag_ratio]``, which have weight 0 there."""

    @model_validator(mode="after")
    def _numbers_fit(self) -> Self:
        if self.least_right + self.least_wrong > self.keep:
            raise ValueError(
                f"algorithm.selection.resample: least_right ({self.least_right}) + least_wrong ({self.least_wrong}) "
                f"exceed keep ({self.keep})"
            )
        return self


class SelectionConfig(Section):
    """Selection of groups, and of their episodes, to train on; see docs/algorithms.md."""

    min_accuracy: float | None = Field(None, ge=0, le=1)
    """Share of solved episodes below which a group is replaced by a new one. An episode's success counts, or its
    reward if the environment does not report success."""
    max_accuracy: float | None = Field(None, ge=0, le=1)
    """Share of solved episodes above which a group is replaced by a new one."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Share of a step's total spread of rewards: the groups with the largest spreads are trained until they reach it,
    and the other groups of the step are not."""
    top_p_scale: Literal["linear", "softmax"] = "linear"
    """Weight of a group: its spread, or the exponential of it."""
    resample: ResampleConfig | None = None
    """Episodes of each group to train on: ``{keep: 16}``; all if not set."""

    @model_validator(mode="after")
    def _keys_are_used(self) -> Self:
        if not self.model_fields_set:
            raise ValueError("algorithm.selection has no effect: remove it, or set one of its keys, such as top_p")
        low, high = self.min_accuracy, self.max_accuracy
        if low is not None and high is not None and low >= high:
            raise ValueError(
                f"algorithm.selection.min_accuracy ({low:g}) must be below algorithm.selection.max_accuracy ({high:g})"
            )
        if self.top_p is None and self.top_p_scale != "linear":
            raise ValueError("algorithm.selection.top_p_scale is ignored without top_p: remove it, or set top_p")
        return self

    @property
    def has_band(self) -> bool:
        """True if groups are replaced by their accuracy."""
        return self.min_accuracy is not None or self.max_accuracy is not None


class CorrectionConfig(Section):
    """Train/inference correction: importance weights pi_old / mu (rho)."""

    mode: Literal["token", "sequence", "icepop", "off"] = "token"
    """Unit of the weights: ``token``, every token; ``sequence``, whole sequences; ``icepop``, tokens inside a band, and
    the others are dropped; ``off``, no weights."""
    cap: float | None = Field(None, gt=0)
    """Upper limit of the weights; if not set, 2 for token and 5 for sequence. Not used by icepop and off."""
    band: tuple[float, float] | None = None
    """Range of rho that icepop keeps; [0.5, 5] if not set. Only for icepop."""
    proximal: Literal["trainer", "behaviour", "loglinear"] = "trainer"
    """Source of pi_old: ``trainer`` computes it; ``behaviour`` uses the engine's mu; ``loglinear`` interpolates between
    mu and pi by their versions. The latter two save a forward pass in steps with several mini-batches."""

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
