"""Settings of environments, agents and curricula, and of the reward models that score episodes."""

from __future__ import annotations

import enum
import itertools
import math
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    Self,
    TypeAlias,
)

from pydantic import BeforeValidator, Field, field_validator, model_validator

from agentrl.config.engines import OpenAIEngineConfig
from agentrl.config.judge import JudgeConfig
from agentrl.config.schedule_forms import check_plain_value
from agentrl.config.section import Finite, Section, user_path
from agentrl.env import Isolation


class HorizonConfig(Section):
    """Turn limit that grows during training: at given steps, or when enough episodes succeed."""

    turns: list[int] = Field(min_length=2)
    """Maximum number of turns in each stage: ``[10, 20, 30]``. ``agent.max_turns`` still applies."""
    at_steps: list[int] | None = None
    """Training steps after which the stages begin, one per stage: ``[0, 100, 200]``."""
    success_above: float | None = Field(None, gt=0, lt=1)
    """Success rate of training episodes above which the next stage begins, instead of ``at_steps``; several
    environments advance separately."""
    over_steps: int = Field(5, ge=1)
    """Training steps, all in the current stage, whose mean success rate is compared with ``success_above``."""

    @model_validator(mode="before")
    @classmethod
    def _is_no_schedule(cls, data: Any) -> Any:
        check_plain_value("curriculum.horizon", data)
        return data

    @model_validator(mode="after")
    def _stages_fit(self) -> Self:
        if self.turns[0] < 1 or not _grows(self.turns):
            raise ValueError(f"curriculum.horizon.turns is {self.turns}: expected increasing numbers from at least 1")
        if (self.at_steps is None) == (self.success_above is None):
            raise ValueError(
                "curriculum.horizon grows by curriculum.horizon.at_steps or by curriculum.horizon.success_above: "
                "set one of them"
            )
        if self.success_above is None and self.over_steps != type(self).model_fields["over_steps"].default:
            raise ValueError("curriculum.horizon.over_steps is ignored without success_above: remove it")
        return self

    @model_validator(mode="after")
    def _steps_fit(self) -> Self:
        steps = self.at_steps
        if steps is None:
            return self
        if len(steps) != len(self.turns):
            raise ValueError(
                f"curriculum.horizon.at_steps has {len(steps)} steps for {len(self.turns)} stages: give one per stage"
            )
        if steps[0] != 0 or not _grows(steps):
            raise ValueError(f"curriculum.horizon.at_steps is {steps}: expected increasing numbers, the first one 0")
        return self


class PooledBy(enum.StrEnum):
    """Unit whose success rate is measured."""

    TASK = "task"
    """Each task; for a set of tasks that the run plays more than once."""
    TYPE = "type"
    """All tasks of one type together; for environments whose tasks have a type."""
    ENVIRONMENT = "environment"
    """All tasks of an environment together; for several environments, such as sizes of one puzzle."""


class PoolsConfig(Section):
    """Less frequent sampling of tasks that are nearly always or hardly ever solved, whose groups rarely differ."""

    by: PooledBy = PooledBy.TASK
    """Unit whose success rate is measured: ``task``, ``type`` of task, or ``environment``."""
    easy_above: float = Field(0.9, gt=0, le=1)
    """Success rate above which a task, type or environment is easy."""
    hard_below: float = Field(0.1, ge=0, lt=1)
    """Success rate below which a task, type or environment is hard."""
    revisit: float = Field(0.1, gt=0, lt=1)
    """Probability with which an easy or hard task is played anyway when it is drawn, so that its rate stays current."""
    half_life: float = Field(100.0, gt=0)
    """Training steps after which the weight of an episode in the success rate is halved, because the policy has
    changed."""

    @model_validator(mode="after")
    def _thresholds_fit(self) -> Self:
        if self.hard_below >= self.easy_above:
            raise ValueError(
                f"curriculum.pools.hard_below ({self.hard_below:g}) must be below curriculum.pools.easy_above "
                f"({self.easy_above:g}): tasks between them are always played"
            )
        return self


class CurriculumConfig(Section):
    """Curricula: a growing turn limit, and tasks chosen by their success rates."""

    horizon: HorizonConfig | None = None
    """Growing turn limit; ``agent.max_turns`` from the start if not set."""
    pools: PoolsConfig | None = None
    """Pools of tasks by success rate; if not set, all tasks are drawn equally often."""

    @model_validator(mode="before")
    @classmethod
    def _is_no_schedule(cls, data: Any) -> Any:
        check_plain_value("curriculum", data)
        return data


def _grows(numbers: list[int]) -> bool:
    return all(low < high for low, high in itertools.pairwise(numbers))


class RewardModelConfig(Section):
    """Sequence classifier with one output, which reads an episode's transcript; the output is the reward."""

    path: str
    """Hugging Face name or folder, or a run of `agentrl reward-model`."""
    max_tokens: int = Field(4096, ge=1)
    """Maximum length of a transcript, in tokens of the reward model; of a longer transcript, the end is used."""
    environment_weight: Finite = 0.0
    """Weight of the environment's reward, which is added to the model's output."""


class EnvironmentConfig(Section):
    name: str
    """Registry name, or ``module:EnvId`` or ``module:attr`` of your own environment."""
    split: str = "train"
    """Split of the training tasks."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the environment and its task source: sizes, task types, files."""
    tasks: Annotated[str, user_path("environment.tasks")] | None = None
    """JSON Lines or Parquet file of tasks that replaces the environment's tasks."""
    isolation: Isolation | None = None
    """Isolation of blocking code: ``inline``, ``thread`` or ``process``; the environment's default if not set."""
    workers: int = Field(4, ge=1, le=1024)
    """Number of worker threads or processes."""
    max_concurrent: int = Field(256, ge=1)
    """Maximum number of environment instances at once."""
    reset_timeout_s: float = Field(60.0, gt=0)
    """Seconds before a reset times out."""
    step_timeout_s: float = Field(30.0, gt=0)
    """Seconds before a step times out."""

    @model_validator(mode="after")
    def _keys_are_used(self) -> Self:
        if self.tasks is not None and self.split != "train":
            raise ValueError("environment.split is ignored with environment.tasks: remove one of them")
        if self.isolation is Isolation.INLINE and self.workers != 4:
            raise ValueError(
                "environment.workers is ignored with environment.isolation=inline, which has none: remove it, or set "
                "environment.isolation to thread or process"
            )
        return self


ToolEntry: TypeAlias = str | dict[str, Any]
"""A tool's name, or its name with options."""


def _checked_entries(tools: Any) -> Any:
    if not isinstance(tools, list):
        return tools
    for entry in tools:
        name = entry.get("name") if isinstance(entry, dict) else entry
        if not isinstance(name, str):
            raise ValueError(
                f"agent.tools: {entry!r} does not name a tool: write its name, or {{name: sql, database: …}}"
            )
    if twice := sorted({name for name in tools if isinstance(name, str) and tools.count(name) > 1}):
        raise ValueError(f"agent.tools names {', '.join(twice)} more than once")
    return tools


ToolEntries: TypeAlias = Annotated[list[ToolEntry], BeforeValidator(_checked_entries)]


RewardEntry: TypeAlias = str | dict[str, Any]
"""A reward's name, or its name with a weight and options."""


def _reward_entries(value: Any) -> Any:
    """Return one reward entry or a list of them as a checked list."""
    entries = [value] if isinstance(value, str | dict) else value
    if not isinstance(entries, list):
        return entries
    if not entries:
        raise ValueError("agent.reward is empty: name a function, or environment for the environment's own rewards")
    for entry in entries:
        name = entry.get("name") if isinstance(entry, dict) else entry
        if not isinstance(name, str):
            raise ValueError(
                f"agent.reward: {entry!r} does not name a function: write module:attr, or {{name: …, weight: 1}}"
            )
        weight = entry.get("weight", 1.0) if isinstance(entry, dict) else 1.0
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise ValueError(f"agent.reward: the weight of {name} is {weight!r}: expected a finite number")
    named = [entry["name"] if isinstance(entry, dict) else entry for entry in entries]
    if twice := sorted({name for name in named if named.count(name) > 1}):
        raise ValueError(f"agent.reward names {', '.join(twice)} more than once")
    return entries


def _environments_own() -> list[RewardEntry]:
    return ["environment"]


RewardEntries: TypeAlias = Annotated[list[RewardEntry], BeforeValidator(_reward_entries)]


PROMPT_FILE = "file:"


def _read_prompt(value: Any) -> Any:
    """Return the text of a file for ``file:PATH``; anything else unchanged."""
    if not isinstance(value, str) or not value.startswith(PROMPT_FILE):
        return value
    path = value.removeprefix(PROMPT_FILE)
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"agent.system_prompt: cannot read {path}: {error}") from error


SystemPrompt: TypeAlias = Annotated[str | None, BeforeValidator(_read_prompt)]


BASE = "base"
"""Name of the model without adapters."""


def _one_request() -> dict[str, str]:
    return {"request": "Task for the role, with all the information that it needs. The role sees nothing else."}


class RoleToolConfig(Section):
    """Tool through which other roles call this role: arguments in, its final answer out. See docs/roles.md."""

    description: str = Field(min_length=1)
    """Description of the tool, which the calling model reads."""
    arguments: dict[str, str] = Field(default_factory=_one_request, min_length=1)
    """Names and descriptions of the tool's arguments, which are texts. One argument, ``request``, if not set."""
    max_turns: int = Field(8, ge=1)
    """Maximum number of answers in one call; they also count towards ``agent.max_turns``."""

    @field_validator("arguments")
    @classmethod
    def _arguments_have_names(cls, arguments: dict[str, str]) -> dict[str, str]:
        if wrong := [name for name in arguments if not name.isidentifier()]:
            raise ValueError(
                f"{wrong[0]!r} is not a name for an argument of a role in agent.roles: write one such as request"
            )
        return arguments


class RoleConfig(Section):
    """One of several agents of an episode: a role of the loop, or one that other roles call. See docs/roles.md."""

    system_prompt: SystemPrompt = None
    """System message of the role, which replaces the loop's; ``file:PATH`` reads it from a file."""
    as_tool: RoleToolConfig | None = None
    """Tool through which other roles call this role: ``{description: Finds facts.}``. Its name is the role's."""
    tools: ToolEntries | None = None
    """Tools of the role, as in ``agent.tools``, and roles that it may call; the episode's tools if not set, none with
    ``[]``."""
    trained: bool | None = None
    """True if the role's tokens are trained; if not set, they are unless another policy plays the role."""
    max_answer_tokens: int | None = Field(None, ge=1)
    """Maximum number of tokens in an answer, if fewer than ``agent.max_answer_tokens``."""
    policy: Literal["random", "expert"] | None = None
    """Policy that plays the role instead of the run's: random actions, or the environment's expert."""
    engine: OpenAIEngineConfig | None = None
    """Model that plays the role instead of the run's policy, at an OpenAI-compatible address, such as that of a vLLM or
    SGLang server: ``{url: http://HOST:PORT/v1, model: NAME}``."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature of ``engine``."""
    adapter: str | None = None
    """Adapter among ``adapters`` that plays the role, or ``base`` for the model without adapters, which is not
    trained."""

    @model_validator(mode="after")
    def _policies_exclude_each_other(self) -> Self:
        if self.policy is not None and self.engine is not None:
            raise ValueError("a role has both policy and engine in agent.roles: remove one of them")
        if self.has_own_policy and self.trained:
            raise ValueError("a role with its own policy or engine cannot be trained: remove trained from agent.roles")
        if self.policy is not None and self.as_tool is not None:
            raise ValueError(
                "a role in agent.roles with as_tool answers requests, but its policy can only take actions: remove one "
                "of them"
            )
        if self.has_own_policy and self.adapter is not None:
            raise ValueError("a role with its own policy or engine has no adapter: remove one of them in agent.roles")
        if self.adapter == BASE and self.trained:
            raise ValueError("a role that the base model plays cannot be trained: remove trained from agent.roles")
        if self.engine is None and self.temperature != 1.0:
            raise ValueError("temperature of a role in agent.roles is ignored without engine: remove it")
        return self

    @property
    def has_own_policy(self) -> bool:
        """True if another policy than the run's plays the role."""
        return self.policy is not None or self.engine is not None

    @property
    def is_trained(self) -> bool:
        """True if the role's tokens are trained."""
        return not (self.has_own_policy or self.adapter == BASE) if self.trained is None else self.trained


class BranchConfig(Section):
    """Episodes of a group that branch from others: they repeat the others' first turns, then sample turns of their own.
    For ``algorithm.advantage: tree``.
    """

    roots: int = Field(2, ge=2)
    """Number of episodes of a group that are played from the start; the others of ``algorithm.group_size`` branch from
    them, the same number from each."""
    turns: list[Annotated[int, Field(ge=1)]] | None = Field(None, min_length=1)
    """Numbers of turns after which episodes branch: ``[1, 3]``. If the root has ended by then, it is repeated."""
    every: int | None = Field(None, ge=1)
    """Number of turns between branch points: with 2, episodes branch after 2, 4, 6, … turns."""
    by_entropy: bool = False
    """True to branch before the turns in which the root's policy was least certain: those with the highest mean of -log
    p over the sampled tokens. This choice depends on the whole episode, so gradients are slightly biased."""
    children: int = Field(1, ge=1)
    """Number of episodes that branch from a root at one branch point; further ones branch at the next point."""

    @model_validator(mode="after")
    def _one_rule(self) -> Self:
        given = [name for name in ("turns", "every") if getattr(self, name) is not None]
        given += ["by_entropy"] if self.by_entropy else []
        if len(given) != 1:
            raise ValueError(
                f"agent.branch has {' and '.join(given) or 'no turns'}: set one of agent.branch.turns, "
                "agent.branch.every and agent.branch.by_entropy"
            )
        if self.turns is not None and not _grows(self.turns):
            raise ValueError(f"agent.branch.turns is {self.turns}: expected increasing numbers")
        return self


class AgentConfig(Section):
    loop: str = "tool_calling"
    """Agent loop: tool_calling, react_text, step_independent, single_turn, memory, self_play, planner_worker, debate,
    external, live, another registry name (docs/agent-loops.md), or module:attr. If neither the loop nor tools are set
    and the model's chat template has no tool calls, react_text is used, with answers that begin with an action tag; the
    command prints this."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the loop's constructor."""
    tools: ToolEntries = Field(default_factory=list)
    """Registry names or module:attr of tools, in addition to the environment's; with options ``{name: sql, …}``."""
    sandbox: dict[str, Any] | None = None
    """Sandbox of tools such as ``python``, one per episode: ``{type: local}`` and the options of its type."""
    roles: dict[str, RoleConfig] | None = None
    """Settings of the loop's roles by name, and roles that others call as tools. See docs/roles.md."""
    tool_parser: str = "auto"
    """Format of tool calls: hermes, mistral, harmony, … (docs/concepts/model-families.md); ``auto`` selects that of the
    model's family."""
    tool_timeout_s: float = Field(30.0, gt=0)
    """Seconds before a tool call times out."""
    system_prompt: SystemPrompt = None
    """System prompt that replaces the environment's instructions; ``file:PATH`` reads it from a file when the config is
    loaded."""
    few_shot_turns: int = Field(0, ge=0)
    """Number of turns of the environment's expert, on training tasks, that every prompt contains as examples."""
    enable_thinking: bool = False
    """Value of ``enable_thinking`` for chat templates that accept it."""
    rewritten_history: Literal["fork", "refuse"] = "fork"
    """Action for a chat template that renders earlier turns differently when messages follow, for example without their
    thinking: ``fork`` renders the conversation again, as a new sequence; ``refuse`` fails at the start of the run."""
    max_turns: int = Field(50, ge=1)
    """Maximum number of turns in an episode; the environment's limit may be smaller."""
    max_answer_tokens: int = Field(256, ge=1)
    """Maximum number of tokens in an answer."""
    max_observation_tokens: int = Field(2048, ge=1)
    """Maximum number of tokens in an observation; a longer one loses its end, and the result of a tool its middle,
    with a visible marker."""
    max_tokens: int = Field(16384, ge=1)
    """Maximum number of tokens in a sequence, prompt and answers together; the engine's context limit still applies."""
    max_seconds: float | None = Field(None, gt=0)
    """Maximum duration of an episode, in seconds; it then ends as truncated_time. No limit if not set."""
    max_rejected_actions: int | None = Field(None, ge=1)
    """Number of actions rejected by the environment after which an episode ends as policy_error; no limit if not
    set."""
    max_parse_failures: int = Field(10, ge=1)
    """Number of answers that cannot be parsed after which an episode ends as policy_error."""
    reward: RewardEntries = Field(default_factory=_environments_own)
    """Reward function of an episode by ``module:attr`` or registry name, or several, with weights and options:
    ``[my:exact, {name: my:brief, weight: 0.2}]``. ``environment`` is the sum of the environment's rewards, which counts
    only if it is named. See docs/reward-functions.md."""
    judge: JudgeConfig | None = None
    """Language model that scores episodes instead: ``{engine: {url: …, model: …}}``. See docs/judges.md."""
    reward_model: RewardModelConfig | None = None
    """Sequence classifier that scores episodes instead: ``{path: …}``. See docs/guides.md."""
    branch: BranchConfig | None = None
    """Training episodes that branch from others of their group: ``{turns: [1, 3]}``. See docs/branching.md."""

    @property
    def called_roles(self) -> list[str]:
        """Names of the roles that others call as tools."""
        return [name for name, role in (self.roles or {}).items() if role.as_tool is not None]


class AgentChanges(Section):
    """Changes of ``agent`` for one of several environments; keys that are not set keep the run's value."""

    loop: str | None = None
    """Another agent loop; it starts without the run's ``agent.options``, ``agent.tools`` and ``agent.roles``."""
    options: dict[str, Any] | None = None
    """Replacement of ``agent.options``."""
    tools: ToolEntries | None = None
    """Replacement of ``agent.tools``."""
    roles: dict[str, RoleConfig] | None = None
    """Replacement of ``agent.roles``."""
    system_prompt: SystemPrompt = None
    """System prompt that replaces this environment's instructions."""
    max_turns: int | None = Field(None, ge=1)
    """Maximum number of turns in an episode."""
    max_answer_tokens: int | None = Field(None, ge=1)
    """Maximum number of tokens in an answer."""
    few_shot_turns: int | None = Field(None, ge=0)
    """Number of turns of this environment's expert that its prompts contain as examples."""
    reward: RewardEntries | None = None
    """Replacement of ``agent.reward``."""


class MixedEnvironmentConfig(EnvironmentConfig):
    """One of several environments, under a label that you choose: the keys of ``environment``, and these."""

    weight: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Share of the groups, relative to the weights of the other environments."""
    evaluation_split: str | None = None
    """Split of its evaluation tasks; ``evaluation.split`` if not set."""
    agent: AgentChanges = Field(default_factory=AgentChanges)
    algorithm: dict[str, Any] = Field(default_factory=dict)
    """Overrides of ``algorithm`` for this environment: ``{advantage: rloo, loss: gspo}``. Keys that determine how
    groups are played, such as ``group_size``, cannot be overridden. See docs/curriculum.md."""
