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
"""Names of a rubric's items and of a verdict's fields: they become names of metrics."""


class RubricItem(Section):
    """One criterion of a rubric."""

    name: str = Field(pattern=NAME)
    """In ``reward/component/judge/NAME``."""
    criterion: str = Field(min_length=1)
    """What the judge is asked: a question, or a statement that holds or does not."""
    weight: Finite = 1.0
    """Share of the reward; negative for a penalty."""
    scale: list[Finite] | None = None
    """The worst and the best score, ``[0, 5]``; yes or no when left out."""
    required: bool = False
    """A gate: where the answer is no, the reward is the lowest of the rubric. For yes or no only."""

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
            raise ValueError(f"item {self.name} has the weight 0 and is no gate: it would be asked for nothing")
        return self


class RubricConfig(Section):
    """Criteria of a judge, item by item. ``agent.judge.rubric: file.yaml`` reads it from a file."""

    items: list[RubricItem]
    """The criteria: ``[{name: correct, criterion: Is the answer right?, weight: 2, required: true}, …]``."""

    @model_validator(mode="after")
    def _items_have_names(self) -> Self:
        check_items(self.items)
        return self


def check_items(items: list[RubricItem]) -> None:
    """Check that the items of a rubric, from a file and from a task, are one rubric.

    Raises:
        ValueError: none rewards, or two have one name.
    """
    names = [item.name for item in items]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"a rubric has two items of one name: {', '.join(twice)}")
    if not any(item.weight > 0 for item in items):
        raise ValueError("a rubric needs an item with a weight above 0: penalties alone have no best score")


def _read_file(value: Any, section: str) -> Any:
    """Return what a YAML or JSON file holds, for its path; anything else unchanged."""
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
    """Ranks the episodes of a group by comparing them. ``agent.judge.compare: pairwise`` sets ``how`` alone."""

    how: Literal["pairwise", "listwise"]
    """``pairwise``: two episodes at a time, in both orders; ``listwise``: all of them at once."""
    opponents: int | None = Field(None, ge=2)
    """Pairwise: how many others each episode meets, an even number; all of them when left out."""
    rounds: int | None = Field(None, ge=1)
    """Listwise: how often the group is ranked, each time in another order; 3 when left out."""

    @model_validator(mode="after")
    def _keys_are_used(self) -> Self:
        if self.opponents is not None and self.how == "listwise":
            raise ValueError("agent.judge.compare.opponents is ignored with listwise: remove it")
        if self.rounds is not None and self.how == "pairwise":
            raise ValueError("agent.judge.compare.rounds is ignored with pairwise: remove it")
        if self.opponents is not None and self.opponents % 2:
            raise ValueError(
                f"agent.judge.compare.opponents is {self.opponents}: expected an even number, so that all episodes "
                "meet equally many"
            )
        return self


class JudgeBudgetConfig(Section):
    """Limits of a judge in a whole run, resumptions included. Answers from the cache are free."""

    max_requests: int | None = Field(None, ge=1)
    """Answers of the service."""
    max_tokens_total: int | None = Field(None, ge=1)
    """Tokens of questions and answers together, as the service counts them."""
    max_cost: float | None = Field(None, gt=0, allow_inf_nan=False)
    """In the currency of the prices."""
    prompt_price: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Of a million tokens of questions."""
    answer_price: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Of a million tokens of answers."""
    when_spent: Literal["stop", "environment"] = "stop"
    """``stop`` ends the run with an error and a checkpoint; ``environment`` goes on with the environment's reward times
    ``environment_weight`` alone."""

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
        """Something can be spent."""
        return any(limit is not None for limit in (self.max_requests, self.max_tokens_total, self.max_cost))


_BEFORE = """\
An agent was given a task. Judge how well it did.
{% if task.prompt %}
Task: {{ task.prompt }}
{% endif %}{% if task.ground_truth %}
Expected: {{ task.ground_truth }}
{% endif %}
What happened, with the agent's own words marked:

{{ transcript }}

Weigh what was achieved, not what was promised."""

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
What happened in each attempt, with the agent's own words marked:

{{ transcript }}

Weigh what was achieved, not what was promised. The order in which the attempts are shown, and how long they are, says
nothing about how good they are."""


class JudgeConfig(Section):
    """Asks a model behind an OpenAI-compatible address, which vLLM and SGLang servers have too, to score episodes."""

    engine: OpenAIEngineConfig
    """Where it is: ``{url: http://HOST:PORT/v1, model: NAME}``."""
    prompt: str | None = None
    """Jinja2 template of the question; reads ``task``, ``transcript``, ``reward`` (the environment's), ``outcome``,
    ``low`` and ``high``; with ``compare`` ``task``, ``transcript`` and ``count`` only. A built-in one when left out.
    The form of a typed answer is put after it."""
    verdict: Verdict = None
    """Typed answers: fields with their types (``{reason: string, score: number 0..10}``), a JSON schema file, or
    ``module:Class`` of a pydantic model."""
    reward: str | dict[str, float] | None = None
    """Field of ``verdict`` that is the reward, or weights of several; may be left out where only one is a number or a
    boolean."""
    rubric: Annotated[RubricConfig | None, BeforeValidator(_read_rubric)] = None
    """A file with weighted items: ``rubric.yaml``. See docs/judges.md."""
    task_rubric: str | None = None
    """Column of the tasks that holds rubric items of each task, alone or besides those of ``rubric``."""
    rubric_requests: Literal["together", "each"] = "together"
    """All items of a rubric in one request, or one request for each."""
    reasons: bool = True
    """The judge gives a reason before its score of a rubric or its choice in a comparison."""
    compare: Annotated[ComparisonConfig | None, BeforeValidator(_read_comparison)] = None
    """Ranks the episodes of a group instead: ``pairwise`` or ``listwise``."""
    guided: Literal["auto", "always", "never"] = "auto"
    """Whether the service is sent the JSON schema of a typed answer (``response_format``): ``auto`` goes on without it,
    and says so, where the service refuses it; ``always`` fails there."""
    pattern: str = r"(?i)score\s*[:=]\s*(-?\d+(?:\.\d+)?)"
    """Regular expression whose last match in an answer that is not typed holds the score in its first group."""
    low: Finite = 0.0
    """The worst score of an answer that is not typed, which is a reward of 0."""
    high: Finite = 10.0
    """The best score of an answer that is not typed, which is a reward of 1."""
    attempts: int = Field(3, ge=1)
    """Answers that are read before the episode counts as failed by the machinery."""
    max_tokens: int = Field(512, ge=1)
    """Tokens of an answer."""
    max_transcript_chars: int | None = Field(None, ge=200)
    """Characters of a transcript; the middle of a longer one is left out, with a visible mark."""
    temperature: float = Field(0.0, ge=0)
    """Of the judge."""
    cache: Literal["disk", "memory", "off"] = "disk"
    """Where answers are kept, so that an equal question is not paid for twice: ``disk`` keeps them in the run's folder,
    for resumed runs."""
    budget: JudgeBudgetConfig = Field(default_factory=JudgeBudgetConfig)
    """Limits of requests, tokens or money."""
    environment_weight: Finite = 0.0
    """Weight of the environment's own reward, which is added."""

    @field_validator("pattern")
    @classmethod
    def _pattern_has_a_group(cls, pattern: str) -> str:
        try:
            groups = re.compile(pattern).groups
        except re.error as error:
            raise ValueError(f"agent.judge.pattern {pattern!r} is no regular expression: {error}") from None
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
        asked = [name for name, is_asked in kinds.items() if is_asked]
        if len(asked) > 1:
            raise ValueError(f"agent.judge has {' and '.join(asked)}: a judge answers one kind of question")
        kind = asked[0] if asked else ""
        for keys, users in _READERS:
            self._check_used(keys, users, kind)
        return self

    def _check_used(self, keys: tuple[str, ...], users: tuple[str, ...], kind: str) -> None:
        ignored = [name for name in keys if getattr(self, name) != type(self).model_fields[name].get_default()]
        if ignored and kind not in users:
            here = f"with agent.judge.{kind}" if kind else "by a judge whose answers are not typed"
            raise ValueError(f"agent.judge.{ignored[0]} is ignored {here}: remove one of them")

    @model_validator(mode="after")
    def _goes_on_with_a_reward(self) -> Self:
        if self.budget.when_spent == "environment" and self.environment_weight == 0:
            raise ValueError(
                "agent.judge.budget.when_spent is environment, but agent.judge.environment_weight is 0: every episode "
                "would have a reward of 0; give the environment a weight, or stop"
            )
        return self

    @property
    def question(self) -> str:
        """The template of the question."""
        if self.prompt is not None:
            return self.prompt
        if self.compare is not None:
            return COMPARE_PROMPT
        return VERDICT_PROMPT if self.is_typed else SCORE_PROMPT

    @property
    def is_typed(self) -> bool:
        """The judge answers with JSON."""
        return self.kind != "score"

    @property
    def kind(self) -> Literal["score", "verdict", "rubric", "compare"]:
        """Kind of question that the judge is asked."""
        if self.compare is not None:
            return "compare"
        if self.rubric is not None or self.task_rubric is not None:
            return "rubric"
        return "score" if self.verdict is None else "verdict"


_READERS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("pattern", "low", "high"), ("",)),
    (("reward",), ("verdict",)),
    (("rubric_requests",), ("rubric",)),
    (("reasons",), ("rubric", "compare")),
    (("guided",), ("verdict", "rubric", "compare")),
)
"""Keys, and the kinds of answers (empty: not typed) that read them."""
