"""Scorer that asks a language model about an episode's text.

A judge that cannot be understood is a failure of the infrastructure, never a reward of 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import groupby

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agentrl.config.environment import JudgeConfig
from agentrl.engine import ChatPolicy, SamplingParams
from agentrl.errors import ConfigError, EngineError, UsageError
from agentrl.message import Message, user
from agentrl.reward import Score, Scorer
from agentrl.task import Task
from agentrl.trajectory import Source, TokenSequence, Trajectory

Decode = Callable[[Sequence[int]], str]
WRITTEN = frozenset({Source.SAMPLED, Source.FORCED, Source.MISTAKE})
AGENT, WORLD = "[agent]", "[world]"


def transcript(trajectory: Trajectory, decode: Decode) -> str:
    """Return what the agent read and answered as text, each under a mark; branches follow one another.

    `decode` gives the text of token ids without special tokens.
    """
    return "\n\n".join(piece for sequence in trajectory.sequences for piece in _pieces(sequence, decode))


def _pieces(sequence: TokenSequence, decode: Decode) -> Iterator[str]:
    ids, sources = sequence.token_ids.tolist(), sequence.sources.tolist()
    own = range(sequence.shared, len(ids))
    for by_agent, places in groupby(own, key=lambda i: sources[i] in WRITTEN):
        if text := decode([ids[i] for i in places]).strip():
            yield f"{AGENT if by_agent else WORLD}\n{text}"


UNREADABLE = 'Your answer has no score that can be read. End with one line of the form "Score: N", N from {} to {}.'


class Judge(Scorer):
    """Scores episodes by asking a language model; `decode` gives the text of the policy's tokens."""

    def __init__(self, service: ChatPolicy, settings: JudgeConfig, decode: Decode) -> None:
        self._service, self._settings, self._decode = service, settings, decode
        try:
            self._prompt = ImmutableSandboxedEnvironment(undefined=StrictUndefined).from_string(settings.prompt)
        except TemplateError as error:
            raise ConfigError("agent.judge.prompt is no Jinja2 template", got=str(error)) from error

    async def score(self, trajectory: Trajectory, task: Task) -> Score:
        """Return the judge's score between 0 and 1, plus the weighted reward of the environment."""
        require_tokens(trajectory, "a judge")
        earned = trajectory.environment_reward
        judged = await self._ask(self._question(trajectory, task, earned), trajectory.id)
        return Score(
            reward=judged + self._settings.environment_weight * earned,
            components={"judge": judged, "environment": earned},
        )

    def _question(self, trajectory: Trajectory, task: Task, earned: float) -> str:
        settings = self._settings
        try:
            return self._prompt.render(
                task=asdict(task),
                transcript=transcript(trajectory, self._decode),
                reward=earned,
                outcome="" if trajectory.outcome is None else trajectory.outcome.value,
                low=f"{settings.low:g}",
                high=f"{settings.high:g}",
            )
        except TemplateError as error:
            raise UsageError(
                "agent.judge.prompt cannot be filled in",
                got=str(error),
                expected="task, transcript, reward, outcome, low and high only",
            ) from error

    async def _ask(self, question: str, name: str) -> float:
        settings = self._settings
        messages: list[Message] = [user(question)]
        params = SamplingParams(temperature=settings.temperature, max_tokens=settings.max_tokens)
        said = ""
        for attempt in range(settings.attempts):
            answer = await self._service.chat(messages, (), params, f"{name}/judge-{attempt}")
            said = answer.message.text
            if (found := self._read(said)) is not None:
                return (found - settings.low) / (settings.high - settings.low)
            told = UNREADABLE.format(f"{settings.low:g}", f"{settings.high:g}")
            messages += [answer.message, user(told)]
        raise EngineError(
            f"the judge gave no score for {name}",
            got=repr(said[-200:]),
            expected=f"a number from {settings.low:g} to {settings.high:g} that agent.judge.pattern finds",
            hint="raise agent.judge.max_tokens if the answer is cut short, or change the prompt",
        )

    def _read(self, answer: str) -> float | None:
        """Return the last score in an answer; ``None`` where there is none, or outside the range."""
        matches = list(re.finditer(self._settings.pattern, answer))
        try:
            score = float(matches[-1].group(1)) if matches else None
        except (TypeError, ValueError):
            return None
        return score if score is not None and self._settings.low <= score <= self._settings.high else None


def require_tokens(trajectory: Trajectory, reader: str) -> None:
    """Check that an episode has tokens for a reader to be shown; raise `UsageError` otherwise."""
    if not any(len(sequence) for sequence in trajectory.sequences):
        raise UsageError(
            f"{reader} reads the tokens of an episode",
            got="an episode in text only",
            expected="an engine that gives tokens: local, vllm or sglang",
            hint="remove agent.judge or agent.reward_model to evaluate a text service or a scripted policy",
        )
