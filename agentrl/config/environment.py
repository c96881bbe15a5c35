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
from agentrl.config.section import Finite, Section
from agentrl.env import Isolation


class HorizonConfig(Section):
    """Episodes of few turns first, and of more later: at given steps, or when enough of them succeed."""

    turns: list[int] = Field(min_length=2)
    """Turns of an episode, stage by stage: ``[10, 20, 30]``. Never more than ``agent.max_turns``."""
    at_steps: list[int] | None = None
    """Training steps after which each stage begins, one for each: ``[0, 100, 200]``."""
    success_above: float | None = Field(None, gt=0, lt=1)
    """Or else: the success of training episodes above which the next stage begins; each environment has its own."""
    over_steps: int = Field(5, ge=1)
    """Training steps whose mean success is compared with ``success_above``; all of them at the same horizon."""

    @model_validator(mode="after")
    def _stages_fit(self) -> Self:
        if self.turns[0] < 1 or not _grows(self.turns):
            raise ValueError(f"curriculum.horizon.turns is {self.turns}: give numbers that grow, from at least 1")
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
                f"curriculum.horizon.at_steps has {len(steps)} steps for {len(self.turns)} stages: give one for each"
            )
        if steps[0] != 0 or not _grows(steps):
            raise ValueError(f"curriculum.horizon.at_steps is {steps}: give 0 first, and then numbers that grow")
        return self


class PooledBy(enum.StrEnum):
    """Whose success is counted together."""

    TASK = "task"
    """Judge each task by its own success rate; for a set of tasks that the run plays more than once."""
    TYPE = "type"
    """All tasks of one type together; for environments whose tasks say their type."""
    ENVIRONMENT = "environment"
    """All tasks of an environment together; for several environments, such as sizes of one puzzle."""


class PoolsConfig(Section):
    """Tasks that are nearly always, or hardly ever, solved are played less often: their groups seldom differ."""

    by: PooledBy = PooledBy.TASK
    """What is judged: ``task``, ``type`` of task, or ``environment``."""
    easy_above: float = Field(0.9, gt=0, le=1)
    """Success rate above which something is easy."""
    hard_below: float = Field(0.1, ge=0, lt=1)
    """Success rate below which something is hard."""
    revisit: float = Field(0.1, gt=0, lt=1)
    """Share of their turns at which the easy and the hard are played all the same, so that nothing is lost."""
    half_life: float = Field(100.0, gt=0)
    """Training steps after which an episode counts half in the rate: the policy that played it is no more."""

    @model_validator(mode="after")
    def _thresholds_fit(self) -> Self:
        if self.hard_below >= self.easy_above:
            raise ValueError(
                f"curriculum.pools.hard_below ({self.hard_below:g}) must be below curriculum.pools.easy_above "
                f"({self.easy_above:g}): what lies between them is played always"
            )
        return self


class CurriculumConfig(Section):
    """Curricula: episodes that grow longer, and tasks chosen by their success rates."""

    horizon: HorizonConfig | None = None
    """Growing turn limits; the agent's own from the start when left out."""
    pools: PoolsConfig | None = None
    """Pools by success; every task equally often when left out."""


def _grows(numbers: list[int]) -> bool:
    return all(low < high for low, high in itertools.pairwise(numbers))


class RewardModelConfig(Section):
    """A sequence classifier with one output reads an episode's transcript; its output is the reward."""

    path: str
    """A Hugging Face name or folder, or a run of `agentrl reward-model`."""
    max_tokens: int = Field(4096, ge=1)
    """Tokens of a transcript, in the reward model's own tokens; of a longer one the end is read."""
    environment_weight: Finite = 0.0
    """Weight of the environment's own reward, which is added."""


class EnvironmentConfig(Section):
    name: str
    """Registry name, or ``module:EnvId`` / ``module:attr`` of your own."""
    split: str = "train"
    """Split to train on."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the environment and its task source: sizes, task types, files."""
    tasks: str | None = None
    """A JSON-lines or Parquet file of tasks, instead of the environment's own."""
    isolation: Isolation | None = None
    """Where blocking code runs: ``inline``, ``thread`` or ``process``; the environment's own choice when left out."""
    workers: int = Field(4, ge=1, le=1024)
    """Worker threads or processes."""
    max_concurrent: int = Field(256, ge=1)
    """Most episodes that hold an environment at once."""
    reset_timeout_s: float = Field(60.0, gt=0)
    """Deadline of a reset."""
    step_timeout_s: float = Field(30.0, gt=0)
    """Deadline of a step."""

    @model_validator(mode="after")
    def _keys_are_used(self) -> Self:
        if self.tasks is not None and self.split != "train":
            raise ValueError("environment.split is ignored with environment.tasks: remove one of them")
        if self.isolation is Isolation.INLINE and self.workers != 4:
            raise ValueError("environment.workers is ignored with environment.isolation inline: remove one of them")
        return self


ToolEntry: TypeAlias = str | dict[str, Any]
"""A tool's name, or its name with options."""


def _checked_entries(tools: Any) -> Any:
    if not isinstance(tools, list):
        return tools
    for entry in tools:
        name = entry.get("name") if isinstance(entry, dict) else entry
        if not isinstance(name, str):
            raise ValueError(f"agent.tools: {entry!r} names no tool: write its name, or {{name: sql, database: …}}")
    if twice := sorted({name for name in tools if isinstance(name, str) and tools.count(name) > 1}):
        raise ValueError(f"agent.tools names {', '.join(twice)} more than once")
    return tools


ToolEntries: TypeAlias = Annotated[list[ToolEntry], BeforeValidator(_checked_entries)]


RewardEntry: TypeAlias = str | dict[str, Any]
"""A reward's name, or its name with a weight and options."""


def _reward_entries(given: Any) -> Any:
    """Return one entry or several, as a list of checked ones."""
    entries = [given] if isinstance(given, str | dict) else given
    if not isinstance(entries, list):
        return entries
    if not entries:
        raise ValueError("agent.reward is empty: name a function, or environment for the environment's own rewards")
    for entry in entries:
        name = entry.get("name") if isinstance(entry, dict) else entry
        if not isinstance(name, str):
            raise ValueError(f"agent.reward: {entry!r} names no function: write module:attr, or {{name: …, weight: 1}}")
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


def _with_reward(data: Any) -> Any:
    """Read ``scorer`` in the config.yaml of an older run as ``reward``."""
    if not isinstance(data, dict) or "scorer" not in data:
        return data
    rest = {name: value for name, value in data.items() if name != "scorer"}
    return rest if data["scorer"] is None else {"reward": data["scorer"], **rest}


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
"""Names the model without adapters."""


def _one_request() -> dict[str, str]:
    return {"request": "What it should do, with everything that it needs to know. It sees nothing else."}


class RoleToolConfig(Section):
    """A role that other roles call like a tool: arguments in, its final answer out. See docs/roles.md."""

    description: str = Field(min_length=1)
    """What it is for; the caller reads this as the tool's description."""
    arguments: dict[str, str] = Field(default_factory=_one_request, min_length=1)
    """What a call says, as texts: the name of each argument, and what it is. One ``request`` when left out."""
    max_turns: int = Field(8, ge=1)
    """Answers in one call; ``agent.max_turns`` counts them, too."""

    @field_validator("arguments")
    @classmethod
    def _arguments_have_names(cls, arguments: dict[str, str]) -> dict[str, str]:
        if wrong := [name for name in arguments if not name.isidentifier()]:
            raise ValueError(f"arguments of a role in agent.roles need names such as request, not {wrong[0]!r}")
        return arguments


class RoleConfig(Section):
    """One of several agents of an episode: a role of the loop, or one that others call. See docs/roles.md."""

    system_prompt: SystemPrompt = None
    """Replaces the loop's system message for the role; ``file:PATH`` reads it from a file."""
    as_tool: RoleToolConfig | None = None
    """Makes it a tool of the other roles: ``{description: Finds facts.}``. Its name is the role's."""
    tools: ToolEntries | None = None
    """Its own tools, as in ``agent.tools``, and roles that it may call; those of the episode when left out, none with
    ``[]``."""
    trained: bool | None = None
    """Whether its tokens train; left out, they do unless another policy speaks."""
    max_answer_tokens: int | None = Field(None, ge=1)
    """Tokens of one answer, where that is fewer than ``agent.max_answer_tokens``."""
    policy: Literal["random", "expert"] | None = None
    """Speaks instead of the run's policy: random actions, or the environment's expert."""
    engine: OpenAIEngineConfig | None = None
    """Speaks instead of the run's policy: a model behind an OpenAI-compatible address, which servers of vLLM and SGLang
    have too: ``{url: http://HOST:PORT/v1, model: NAME}``."""
    temperature: float = Field(1.0, ge=0)
    """Of ``engine``."""
    adapter: str | None = None
    """The adapter among ``adapters`` that speaks, or ``base`` for the model without adapters, which does not train."""

    @model_validator(mode="after")
    def _one_speaks(self) -> Self:
        if self.policy is not None and self.engine is not None:
            raise ValueError("a role has both policy and engine in agent.roles: remove one of them")
        if self.speaks_elsewhere and self.trained:
            raise ValueError(
                "a role with a policy or an engine of its own cannot train: remove trained from agent.roles"
            )
        if self.policy is not None and self.as_tool is not None:
            raise ValueError(
                "a role with as_tool answers requests in agent.roles, and policy only takes actions: remove one of them"
            )
        if self.speaks_elsewhere and self.adapter is not None:
            raise ValueError("a role with a policy or an engine of its own has no adapter: remove one in agent.roles")
        if self.adapter == BASE and self.trained:
            raise ValueError("a role that the base model plays cannot train: remove trained from agent.roles")
        if self.engine is None and self.temperature != 1.0:
            raise ValueError("temperature of a role is ignored without its engine in agent.roles: remove it")
        return self

    @property
    def speaks_elsewhere(self) -> bool:
        """Another policy than the run's speaks."""
        return self.policy is not None or self.engine is not None

    @property
    def is_trained(self) -> bool:
        """Its tokens train."""
        return not (self.speaks_elsewhere or self.adapter == BASE) if self.trained is None else self.trained


class AgentConfig(Section):
    loop: str = "tool_calling"
    """Registry name of the agent loop: tool_calling, react_text, step_independent, single_turn, memory, self_play,
    planner_worker, debate, external, or module:attr. Where neither it nor tools are set and the model's chat template
    has no tool calls, react_text, with answers that begin with an action tag; the command prints that."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the loop's constructor."""
    tools: ToolEntries = Field(default_factory=list)
    """Registry names or module:attr of tools, besides the environment's own; with options ``{name: sql, …}``."""
    sandbox: dict[str, Any] | None = None
    """Where tools such as ``python`` run, one per episode: ``{type: local}``, and what its type takes."""
    roles: dict[str, RoleConfig] | None = None
    """Several agents: what is special about each role of the loop, by name, and roles that others call as tools. See
    docs/roles.md."""
    tool_parser: str = "auto"
    """How tool calls are written: hermes, mistral, harmony, … (docs/concepts/model-families.md); ``auto`` asks the
    model's family."""
    tool_timeout_s: float = Field(30.0, gt=0)
    """Deadline of a tool call."""
    system_prompt: SystemPrompt = None
    """Replaces the environment's instructions; ``file:PATH`` reads them from a file when the config is loaded."""
    shots: int = Field(0, ge=0)
    """Turns of the environment's expert, on tasks of the training split, that every prompt shows as examples."""
    enable_thinking: bool = False
    """Passed to chat templates that know it."""
    rewritten_history: Literal["fork", "refuse"] = "fork"
    """For a chat template that shows earlier turns differently once more messages follow, such as one that drops
    earlier thinking: ``fork`` renders the conversation anew there, as a sequence of its own; ``refuse`` ends the
    start."""
    max_turns: int = Field(50, ge=1)
    """Turns of an episode; the environment's own limit may be smaller."""
    max_answer_tokens: int = Field(256, ge=1)
    """Tokens of one answer."""
    max_observation_tokens: int = Field(2048, ge=1)
    """Tokens of one observation; what is longer is cut, with a visible mark."""
    max_tokens: int = Field(16384, ge=1)
    """Tokens of one sequence, prompt and answers together; never more than the engine's context."""
    max_seconds: float | None = Field(None, gt=0)
    """Seconds of one episode, as a rule of the task."""
    max_refused: int | None = Field(None, ge=1)
    """Actions that the environment did not accept before the episode ends as policy_error; no limit when left out."""
    max_invalid: int = Field(10, ge=1)
    """Unusable answers in an episode before it ends as policy_error."""
    reward: RewardEntries = Field(default_factory=_environments_own)
    """What scores an episode: a function by ``module:attr`` or registry name, or several, with weights and options:
    ``[my:exact, {name: my:brief, weight: 0.2}]``. ``environment`` is the sum of the environment's own rewards, which
    counts only where it is named. See docs/reward-functions.md."""
    judge: JudgeConfig | None = None
    """A language model that scores episodes instead: ``{engine: {url: …, model: …}}``. See docs/judges.md."""
    reward_model: RewardModelConfig | None = None
    """A sequence classifier that scores episodes instead: ``{path: …}``. See docs/guides.md."""

    @property
    def called_roles(self) -> list[str]:
        """Names of the roles that others call as tools."""
        return [name for name, role in (self.roles or {}).items() if role.as_tool is not None]

    @model_validator(mode="before")
    @classmethod
    def _without_what_was_a_key(cls, data: Any) -> Any:
        return _with_reward(data)


class AgentChanges(Section):
    """Changes of the run's ``agent`` for one environment of several; keys left out stay as they are there."""

    loop: str | None = None
    """Another agent loop; it starts without the run's ``agent.options``, ``agent.tools`` and ``agent.roles``."""
    options: dict[str, Any] | None = None
    """Instead of ``agent.options``."""
    tools: ToolEntries | None = None
    """Instead of ``agent.tools``."""
    roles: dict[str, RoleConfig] | None = None
    """Instead of ``agent.roles``."""
    system_prompt: SystemPrompt = None
    """Replaces this environment's instructions."""
    max_turns: int | None = Field(None, ge=1)
    """Turns of its episodes."""
    max_answer_tokens: int | None = Field(None, ge=1)
    """Tokens of one answer."""
    reward: RewardEntries | None = None
    """Instead of ``agent.reward``."""

    @model_validator(mode="before")
    @classmethod
    def _without_what_was_a_key(cls, data: Any) -> Any:
        return _with_reward(data)


class MixedEnvironmentConfig(EnvironmentConfig):
    """One of several environments, under a label of the user's: the keys of ``environment``, and these."""

    weight: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Share of the groups, relative to the weights of the others."""
    evaluation_split: str | None = None
    """Split of its evaluations; ``evaluation.split`` when left out."""
    agent: AgentChanges = Field(default_factory=AgentChanges)
