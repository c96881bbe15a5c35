"""What is played, and how an agent plays it."""

from __future__ import annotations

import math
from typing import Annotated, Any, Self, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from agentrl.config.judge import JudgeConfig
from agentrl.config.reward_model import RewardModelConfig
from agentrl.config.section import Section
from agentrl.env import Isolation


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
    """One entry or several, as a list of checked ones."""
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
    """The config.yaml of an older run holds ``scorer``, which is ``reward`` now."""
    if not isinstance(data, dict) or "scorer" not in data:
        return data
    rest = {name: value for name, value in data.items() if name != "scorer"}
    return rest if data["scorer"] is None else {"reward": data["scorer"], **rest}


class AgentConfig(Section):
    loop: str = "tool_calling"
    """Registry name of the agent loop: tool_calling, react_text, step_independent, single_turn, or module:attr."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the loop's constructor."""
    tools: ToolEntries = Field(default_factory=list)
    """Registry names or module:attr of tools, besides the environment's own; with options ``{name: sql, …}``."""
    sandbox: dict[str, Any] | None = None
    """Where tools such as ``python`` run, one per episode: ``{type: local}``, and what its type takes."""
    tool_parser: str = "auto"
    """How tool calls are written: hermes, mistral, harmony, … (docs/concepts/model-families.md); ``auto`` asks the
    model's family."""
    tool_timeout_s: float = Field(30.0, gt=0)
    """Deadline of a tool call."""
    system_prompt: str | None = None
    """Replaces the environment's instructions."""
    enable_thinking: bool = False
    """Passed to chat templates that know it."""
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
    """A language model that scores episodes instead: ``{engine: {url: …, model: …}}``. See docs/guides.md."""
    reward_model: RewardModelConfig | None = None
    """A sequence classifier that scores episodes instead: ``{path: …}``. See docs/guides.md."""

    @model_validator(mode="before")
    @classmethod
    def _without_what_was_a_key(cls, data: Any) -> Any:
        return _with_reward(data)


class AgentChanges(Section):
    """What one environment of several changes of the run's ``agent``; what is left out stays as it is there."""

    loop: str | None = None
    """Another agent loop; it starts without the run's ``agent.options`` and ``agent.tools``."""
    options: dict[str, Any] | None = None
    """Instead of ``agent.options``."""
    tools: ToolEntries | None = None
    """Instead of ``agent.tools``."""
    system_prompt: str | None = None
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
    """Its share of the groups that are played, beside the weights of the others."""
    evaluation_split: str | None = None
    """Split of its evaluations; ``evaluation.split`` when left out."""
    agent: AgentChanges = Field(default_factory=AgentChanges)
