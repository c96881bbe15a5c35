"""Settings of a judge: a language model that scores finished episodes."""

from __future__ import annotations

import re
from typing import Self

from pydantic import Field, field_validator, model_validator

from agentrl.config.engines import OpenAIEngineConfig
from agentrl.config.section import Finite, Section

PROMPT = """\
An agent was given a task. Judge how well it did.
{% if task.prompt %}
Task: {{ task.prompt }}
{% endif %}{% if task.ground_truth %}
Expected: {{ task.ground_truth }}
{% endif %}
What happened, with the agent's own words marked:

{{ transcript }}

Weigh what was achieved, not what was promised. End with a line of the form "Score: N", N from {{ low }} to {{ high }}.
"""


class JudgeConfig(Section):
    """Asks a model behind an OpenAI-compatible address, which vLLM and SGLang servers have too, for a score."""

    engine: OpenAIEngineConfig
    """Where it is: ``{url: http://HOST:PORT/v1, model: NAME}``."""
    prompt: str = PROMPT
    """Jinja2 template of the question; reads ``task``, ``transcript``, ``reward`` (the environment's), ``outcome``,
    ``low`` and ``high``."""
    pattern: str = r"(?i)score\s*[:=]\s*(-?\d+(?:\.\d+)?)"
    """Regular expression whose last match in the answer holds the score in its first group."""
    low: Finite = 0.0
    """The worst score, which is a reward of 0."""
    high: Finite = 10.0
    """The best score, which is a reward of 1."""
    attempts: int = Field(3, ge=1)
    """Answers that are read before the episode counts as failed by the machinery."""
    max_tokens: int = Field(512, ge=1)
    """Tokens of an answer."""
    temperature: float = Field(0.0, ge=0)
    """Of the judge."""
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
