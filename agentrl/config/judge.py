"""Settings of judges: language models that score episodes, fill in rubrics, or rank the episodes of a group."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

import yaml
from pydantic import BeforeValidator, Field, field_validator, model_validator

from agentrl.config.engines import OpenAIEngineConfig
from agentrl.config.section import Finite, Section

NAME = r"^[A-Za-z][A-Za-z0-9_]*$"
"""Names of rubric items and verdict fields, which become parts of metric names."""
_BEFORE = """\
An agent was given a task. Judge how well it did.
{% if task.prompt %}
Task: {{ task.prompt }}
{% endif %}{% if task.ground_truth %}
Expected: {{ task.ground_truth }}
{% endif %}
Transcript of the episode, in which the agent's own messages are marked:

{{ transcript }}

Judge the results, not the agent's claims."""
SCORE_PROMPT = (
    _BEFORE
    + """ End with a line of the form "Score: N", N from {{ low }} to {{ high }}.
"""
)
VERDICT_PROMPT = _BEFORE
COMPARE_PROMPT = """\
{{ count }} agents were given the same task. Compare how well they did.
{% if task.prompt %}
Task: {{ task.prompt }}
{% endif %}{% if task.ground_truth %}
Expected: {{ task.ground_truth }}
{% endif %}
Transcript of each attempt, in which the agent's own messages are marked:

{{ transcript }}

Judge the results, not the agents' claims. Ignore the order in which the attempts are shown, and their length."""
_READERS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("pattern", "low", "high"), ("",)),
    (("reward",), ("verdict",)),
    (("rubric_requests",), ("rubric",)),
    (("reasons",), ("rubric", "compare")),
    (("guided",), ("verdict", "rubric", "compare")),
)
"""Keys, and the kinds of answers (empty: not typed) that use them."""


class RubricItem(Section):
    """One criterion of a rubric."""

    name: str = Field(pattern=NAME)
    """Name of the item, as in the metric ``reward/component/judge/NAME``."""
    criterion: str = Field(min_length=1)
    """Question for the judge, or statement that is true or false."""
    weight: Finite = 1.0
    """Share of the reward; negative for a penalty."""
    scale: list[Finite] | None = None
    """Worst and best score, ``[0, 5]``; the answer is yes or no if not set."""
    required: bool = False
    """True for a gate: if the answer is no, the reward is the rubric's lowest. Only for yes or no."""

    @field_validator("scale", mode="before")
    @classmethod
    def _yes_or_no(cls, scale: Any) -> Any:
        return None if scale == "yes/no" else scale

    @model_validator(mode="after")
    def _can_be_scored(self) -> Self:
        if self.scale is not None and (len(self.scale) != 2 or self.scale[0] >= self.scale[1]):
            raise ValueError(f"item {self.name}: scale is {self.scale}: give the worst and the best score, [0, 5]")
        if self.required and self.scale is not None:
            raise ValueError(f"item {self.name} is required and has a scale: a gate is answered with yes or no")
        if self.required and self.weight < 0:
            raise ValueError(f"item {self.name} is required and a penalty: state it the other way round")
        if self.weight == 0 and not self.required:
            raise ValueError(
                f"item {self.name} has weight 0 and is not required, so it has no effect: set weight or required"
            )
        return self


class RubricConfig(Section):
    """Criteria of a judge. ``agent.judge.rubric: file.yaml`` reads them from a file."""

    items: list[RubricItem]
    """List of criteria: ``[{name: correct, criterion: Is the answer right?, weight: 2, required: true}, …]``."""

    @model_validator(mode="after")
    def _items_have_names(self) -> Self:
        check_items(self.items)
        return self


def check_items(items: list[RubricItem]) -> None:
    """Check that items, which may come from a file and from a task, form a rubric.

    Raises:
        ValueError: no weight is positive, or two items have the same name.
    """
    names = [item.name for item in items]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"a rubric has two items with the same name: {', '.join(twice)}")
    if not any(item.weight > 0 for item in items):
        raise ValueError("a rubric needs an item with a weight above 0: with only penalties it has no best score")


def _read_file(value: Any, section: str) -> Any:
    """Return the content of the YAML or JSON file at a path; anything but a path unchanged."""
    if not isinstance(value, str):
        return value
    try:
        text = Path(value).expanduser().read_text(encoding="utf-8")
        return json.loads(text) if value.endswith(".json") else yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{section}: cannot read {value}: {error}") from error


def _read_rubric(value: Any) -> Any:
    found = _read_file(value, "agent.judge.rubric")
    return {"items": found} if isinstance(found, list) else found


def _read_verdict(value: Any) -> Any:
    return _read_file(value, "agent.judge.verdict") if isinstance(value, str) and value.endswith(".json") else value


def _read_comparison(value: Any) -> Any:
    return {"how": value} if isinstance(value, str) else value


Verdict: TypeAlias = Annotated[dict[str, Any] | str | None, BeforeValidator(_read_verdict)]


class ComparisonConfig(Section):
    """Ranking of a group's episodes by comparisons. ``agent.judge.compare: pairwise`` sets only ``how``."""

    how: Literal["pairwise", "listwise"]
    """``pairwise``: two episodes at a time, in both orders; ``listwise``: all episodes at once."""
    opponents: int | None = Field(None, ge=2)
    """Pairwise: number of episodes that each one is compared with, an even number; all if not set."""
    rounds: int | None = Field(None, ge=1)
    """Listwise: number of rankings of the group, each in another order; 3 if not set."""

    @model_validator(mode="after")
    def _keys_are_used(self) -> Self:
        if self.opponents is not None and self.how == "listwise":
            raise ValueError("agent.judge.compare.opponents is ignored with listwise: remove it")
        if self.rounds is not None and self.how == "pairwise":
            raise ValueError("agent.judge.compare.rounds is ignored with pairwise: remove it")
        if self.opponents is not None and self.opponents % 2:
            raise ValueError(
                f"agent.judge.compare.opponents is {self.opponents}: expected an even number, so that all episodes "
                "have equally many opponents"
            )
        return self


class JudgeBudgetConfig(Section):
    """Limits of a judge over the whole run, including its resumptions. Cached answers are free."""

    max_requests: int | None = Field(None, ge=1)
    """Maximum number of the service's answers."""
    max_tokens_total: int | None = Field(None, ge=1)
    """Maximum number of tokens in prompts and answers together, as the service counts them."""
    max_cost: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Maximum cost, in the currency of the prices."""
    prompt_price: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Price of a million prompt tokens."""
    answer_price: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Price of a million answer tokens."""
    when_spent: Literal["stop", "environment"] = "stop"
    """``stop`` ends the run with an error and a checkpoint; ``environment`` continues with only the environment's
    reward times ``environment_weight``."""

    @model_validator(mode="after")
    def _keys_are_used(self) -> Self:
        has_prices = bool(self.prompt_price or self.answer_price)
        if self.max_cost is not None and not has_prices:
            raise ValueError("agent.judge.budget.max_cost needs prompt_price or answer_price")
        if self.when_spent != "stop" and not self.is_limited:
            raise ValueError("agent.judge.budget.when_spent is ignored without a limit: set max_requests, or remove it")
        return self

    @property
    def is_limited(self) -> bool:
        """True if there is a limit."""
        return any(limit is not None for limit in (self.max_requests, self.max_tokens_total, self.max_cost))


class JudgeConfig(Section):
    """Language model that scores episodes, at an OpenAI-compatible address such as that of a vLLM or SGLang server."""

    engine: OpenAIEngineConfig
    """Address and model: ``{url: http://HOST:PORT/v1, model: NAME}``."""
    prompt: str | None = None
    """Jinja2 template of the judge's prompt, with the variables ``task``, ``transcript``, ``reward`` (the
    environment's), ``outcome``, ``low`` and ``high``; with ``compare``, only ``task``, ``transcript`` and ``count``. A
    built-in one if not set. The format of a typed answer is appended."""
    verdict: Verdict = None
    """Fields of a typed answer with their types (``{reason: string, score: number 0..10}``), a JSON schema file, or
    ``module:Class`` of a pydantic model."""
    reward: str | dict[str, float] | None = None
    """Field of ``verdict`` that is the reward, or weights of several; optional if only one field is a number or a
    boolean."""
    rubric: Annotated[RubricConfig | None, BeforeValidator(_read_rubric)] = None
    """File with weighted items: ``rubric.yaml``. See docs/judges.md."""
    task_rubric: str | None = None
    """Column of the tasks that holds rubric items of each task, in addition to those of ``rubric`` if both are set."""
    rubric_requests: Literal["together", "each"] = "together"
    """``together``: one request for all items of a rubric; ``each``: one request per item."""
    reasons: bool = True
    """True if the judge gives a reason before its score of a rubric item or its choice in a comparison."""
    compare: Annotated[ComparisonConfig | None, BeforeValidator(_read_comparison)] = None
    """Ranking of a group's episodes instead of scores: ``pairwise`` or ``listwise``."""
    guided: Literal["auto", "always", "never"] = "auto"
    """Use of the JSON schema of a typed answer (``response_format``) in requests: ``auto`` continues without it, with a
    warning, if the service rejects it; ``always`` fails then."""
    pattern: str | None = None
    """Regular expression for answers that are not typed; the first group of its last match is the score. If not set,
    the score is the number after the last ``Score:``."""
    low: Finite = 0.0
    """Worst score of an answer that is not typed, for a reward of 0."""
    high: Finite = 10.0
    """Best score of an answer that is not typed, for a reward of 1."""
    attempts: int = Field(3, ge=1)
    """Number of unusable answers after which the episode counts as an infrastructure failure."""
    max_tokens: int = Field(512, ge=1)
    """Maximum number of tokens in an answer."""
    max_transcript_chars: int | None = Field(None, ge=200)
    """Maximum number of characters in a transcript; the middle of a longer one is removed, with a visible marker."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature of the judge."""
    cache: Literal["disk", "memory", "off"] = "disk"
    """Cache of answers, so that equal prompts are sent only once: ``disk`` keeps it in the run's folder, for resumed
    runs."""
    budget: JudgeBudgetConfig = Field(default_factory=JudgeBudgetConfig)
    """Limits of requests, tokens or cost."""
    environment_weight: Finite = 0.0
    """Weight of the environment's reward, which is added to the judge's."""

    @field_validator("pattern")
    @classmethod
    def _pattern_has_a_group(cls, pattern: str | None) -> str | None:
        try:
            groups = re.compile("()" if pattern is None else pattern).groups
        except re.error as error:
            raise ValueError(f"agent.judge.pattern {pattern!r} is not a regular expression: {error}") from None
        if groups < 1:
            raise ValueError(f"agent.judge.pattern {pattern!r} has no group: put the score in parentheses")
        return pattern

    @model_validator(mode="after")
    def _scores_have_a_range(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"agent.judge.low ({self.low:g}) must be below agent.judge.high ({self.high:g})")
        return self

    @model_validator(mode="after")
    def _one_kind_of_answer(self) -> Self:
        has_rubric = self.rubric is not None or self.task_rubric is not None
        kinds = {"verdict": self.verdict is not None, "rubric": has_rubric, "compare": self.compare is not None}
        chosen = [name for name, is_set in kinds.items() if is_set]
        if len(chosen) > 1:
            raise ValueError(f"agent.judge has {' and '.join(chosen)}: set only one of them")
        kind = chosen[0] if chosen else ""
        for keys, users in _READERS:
            self._check_used(keys, users, kind)
        return self

    def _check_used(self, keys: tuple[str, ...], users: tuple[str, ...], kind: str) -> None:
        ignored = [name for name in keys if getattr(self, name) != type(self).model_fields[name].get_default()]
        if ignored and kind not in users:
            here = f"with agent.judge.{kind}" if kind else "by a judge without typed answers"
            raise ValueError(f"agent.judge.{ignored[0]} is ignored {here}: remove one of them")

    @model_validator(mode="after")
    def _fallback_has_a_reward(self) -> Self:
        if self.budget.when_spent == "environment" and self.environment_weight == 0:
            raise ValueError(
                "agent.judge.budget.when_spent is environment, but agent.judge.environment_weight is 0: every episode "
                "would have a reward of 0; set environment_weight, or when_spent: stop"
            )
        return self

    @property
    def question(self) -> str:
        """Template of the judge's prompt."""
        if self.prompt is not None:
            return self.prompt
        if self.compare is not None:
            return COMPARE_PROMPT
        return VERDICT_PROMPT if self.is_typed else SCORE_PROMPT

    @property
    def is_typed(self) -> bool:
        """True if the judge answers with JSON."""
        return self.kind != "score"

    @property
    def kind(self) -> Literal["score", "verdict", "rubric", "compare"]:
        """Kind of the judge's answers."""
        if self.compare is not None:
            return "compare"
        if self.rubric is not None or self.task_rubric is not None:
            return "rubric"
        return "score" if self.verdict is None else "verdict"
