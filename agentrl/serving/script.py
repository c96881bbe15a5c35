"""Scripts: what the scripted engine answers, and how it behaves meanwhile."""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from agentrl.policy import GenerateRequest, StopReason


class Failure(enum.StrEnum):
    """How a scripted answer goes wrong, once its tokens are played."""

    NONE = "none"
    RAISE = "raise"
    """`EngineError`, as when a server dies."""
    HANG = "hang"
    """Never answers: until the deadline, an abort, or `close`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedAnswer:
    """One answer of a script, and how the engine behaves while it gives it."""

    token_ids: Sequence[int]
    """Cut at the request's first stop token, at `max_tokens` and at the context's end, as an engine would."""
    logprobs: Sequence[float] | None = None
    """One per token; those of a uniform distribution when left out."""
    drift: float = 0.0
    """Added to every log-probability: an engine that disagrees with the trainer."""
    stop_reason: StopReason | None = None
    """Reported at the end of the tokens instead of the true one; with it, no stop token is appended."""
    version: int | None = None
    """Stamped on every token instead of the true version: an engine that missed an update."""
    first_delay_s: float = 0.0
    """Seconds before the first token, besides the engine's own delay per token."""
    failure: Failure = Failure.NONE
    """Happens when the tokens are played."""


Script: TypeAlias = Callable[[GenerateRequest], "Sequence[int] | ScriptedAnswer"]


def random_script(vocab_size: int, *, shortest: int = 4, longest: int = 24) -> Script:
    """A script of uniformly random tokens that end with a stop token.

    The request's seed decides them; at temperature 0 they are always the same.

    Args:
        vocab_size: Ids are below it; stop tokens of the request are left out until the end.
        shortest: Fewest tokens of an answer.
        longest: Most tokens of an answer, the stop token included; without stop tokens, `max_tokens` decides.
    """

    def play(request: GenerateRequest) -> Sequence[int]:
        generator = random.Random(request.params.seed if request.params.temperature else 0)
        stops = request.params.stop_token_ids
        length = generator.randint(shortest, longest) - 1 if stops else request.params.max_tokens
        drawn = generator.choices(range(vocab_size), k=length)
        return [*(token for token in drawn if token not in stops), *sorted(stops)[:1]]

    return play


def cut_answer(answer: ScriptedAnswer, stops: frozenset[int], room: int) -> tuple[list[int], StopReason]:
    """The tokens that an engine would have sampled of the script, and why it would have stopped.

    Args:
        answer: What the script gave. If it holds no stop token, the smallest of `stops` is appended.
        stops: The request's stop tokens.
        room: Most tokens: `max_tokens`, or what the context leaves.
    """
    token_ids = list(answer.token_ids)
    if answer.stop_reason is None and stops and not stops.intersection(token_ids):
        token_ids.append(min(stops))
    end = next((i + 1 for i, token in enumerate(token_ids) if token in stops), len(token_ids))
    token_ids = token_ids[: min(end, room)]
    if token_ids and token_ids[-1] in stops:
        return token_ids, StopReason.STOP
    reached_end = len(token_ids) == len(answer.token_ids) and len(token_ids) < room
    return token_ids, answer.stop_reason if reached_end and answer.stop_reason else StopReason.LENGTH
