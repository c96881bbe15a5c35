"""HTML view of episodes token by token: the source, probability and weight version of each token."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import TypeAlias

import jinja2

from agentrl.message import ImagePart
from agentrl.message.image import PlacedImage
from agentrl.trajectory import SOLE_ROLE, Source, TokenSequence, Trajectory, Turn

Decode: TypeAlias = Callable[[int], str]
"""Function that returns the text of one token id."""

LEGEND: dict[Source, str] = {
    Source.PROMPT: "prompt",
    Source.TEMPLATE: "chat template",
    Source.OBSERVATION: "observation",
    Source.SAMPLED: "sampled by the policy: in the loss",
    Source.FORCED: "written for the policy, not sampled",
    Source.MISTAKE: "deliberate mistake, or answer of weight 0, in a demonstration: not in the loss",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCell:
    """One displayed token."""

    text: str
    source: Source
    hint: str
    """Position, id and, for sampled tokens, log-probability and version."""
    surprise: float
    """Surprise from 0 (certain) to 1 (probability of 1 % or less); 0 unless the token was sampled."""
    image: ImagePart | None = None
    """Image that begins with this token; the other tokens of an image have no text."""


@dataclass(slots=True, kw_only=True)
class Segment:
    """Adjacent tokens with the same source; `turn` is the turn that ends with them, if any."""

    source: Source
    cells: list[TokenCell] = field(default_factory=list)
    turn: Turn | None = None


def segments(sequence: TokenSequence, decode: Decode) -> list[Segment]:
    """Group the tokens of a sequence where their source changes or a turn begins."""
    ends = {turn.end: turn for turn in sequence.turns}
    starts = {turn.start for turn in sequence.turns}
    found: list[Segment] = []
    for position, cell in enumerate(_cells(sequence, decode)):
        if not found or found[-1].source is not cell.source or position in starts:
            found.append(Segment(source=cell.source))
        found[-1].cells.append(cell)
        found[-1].turn = ends.get(position + 1)
    return found


def turn_words(turn: Turn) -> str:
    """Return the label of a turn: its number, role, adapter and reward."""
    parts = [f"turn {turn.index + 1}"]
    parts += [turn.role] if turn.role != SOLE_ROLE else []
    parts += [f"adapter {turn.adapter}"] if turn.adapter else []
    parts += [f"reward {turn.reward:.3g}"] if turn.reward else []
    parts += ["repaired call"] if turn.repaired_calls else []
    return " · ".join([*parts, *([] if turn.valid else ["invalid"])])


def reward_words(trajectory: Trajectory) -> str:
    """Return the reward of an episode, and the amounts that add up to it by source."""
    if trajectory.reward is None:
        return "none"
    parts = ", ".join(f"{source} {amount:.4g}" for source, amount in trajectory.reward_sources.items())
    return f"{trajectory.reward:.4g} ({parts})" if parts else f"{trajectory.reward:.4g}"


def conversations(trajectory: Trajectory) -> list[list[tuple[str, str]]]:
    """Return the messages of an episode without tokens: the role with the turn's label, and the text."""
    labels = [f" · {turn_words(turn)}" for turn in trajectory.turns]
    return [
        [(one.role if one.turn is None else one.role + labels[one.turn], one.text) for one in messages]
        for messages in trajectory.transcript
    ]


def trajectory_html(trajectory: Trajectory, decode: Decode) -> str:
    """Render one episode as an HTML fragment (`page_html` adds the style); as text if it has no tokens."""
    views = [segments(sequence, decode) for sequence in trajectory.sequences]
    return template("trajectory.html").render(
        trajectory=trajectory,
        sequences=[view for view in views if view],
        conversations=conversations(trajectory),
        reward_words=reward_words,
        turn_words=turn_words,
    )


def page_html(title: str, trajectories: list[Trajectory], decode: Decode) -> str:
    """Render a self-contained page of episodes."""
    pieces = [trajectory_html(trajectory, decode) for trajectory in trajectories]
    legend = LEGEND if any(has_tokens(trajectory) for trajectory in trajectories) else {}
    return template("page.html").render(title=title, pieces=pieces, legend=legend)


def has_tokens(trajectory: Trajectory) -> bool:
    """Return True if the episode has tokens."""
    return any(len(sequence) for sequence in trajectory.sequences)


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("agentrl.evaluation"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def template(name: str) -> jinja2.Template:
    """Load a template of this package."""
    return _environment().get_template(name)


def _cells(sequence: TokenSequence, decode: Decode) -> Iterator[TokenCell]:
    seen = {position: image for image in sequence.images for position in range(image.start, image.end)}
    arrays = zip(sequence.token_ids, sequence.sources, sequence.logprobs, sequence.versions, strict=True)
    for position, (token_id, source, logprob, version) in enumerate(arrays):
        if position in seen:
            yield _image_cell(position, seen[position], Source(int(source)))
            continue
        sampled = source == Source.SAMPLED
        hint = f"token {position}, id {token_id}"
        if sampled:
            hint += f", log-probability {logprob:.3f} (p = {math.exp(logprob):.1%}), version {version}"
        yield TokenCell(
            text=visible(decode(int(token_id))),
            source=Source(int(source)),
            hint=hint,
            surprise=min(1.0, -float(logprob) / math.log(100)) if sampled else 0.0,
        )


def _image_cell(position: int, placed: PlacedImage, source: Source) -> TokenCell:
    hint = f"tokens {placed.start} to {placed.end - 1}, {placed.rows} rows of {placed.columns}"
    image = placed.image if position == placed.start else None
    return TokenCell(text="", source=source, hint=hint, surprise=0.0, image=image)


def visible(text: str) -> str:
    r"""Make line ends visible.

    >>> visible("a\n")
    'a↵\n'
    """
    return text.replace("\n", "↵\n")
