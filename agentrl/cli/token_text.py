"""Episodes token by token as coloured text, for the terminal."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from rich.text import Text

from agentrl.evaluation.token_view import (
    Decode,
    Segment,
    TokenCell,
    conversations,
    has_tokens,
    reward_words,
    segments,
    turn_words,
)
from agentrl.trajectory import SOLE_ROLE, Source, Trajectory

STYLES = {
    Source.PROMPT: "",
    Source.TEMPLATE: "dim",
    Source.OBSERVATION: "blue",
    Source.SAMPLED: "bold green",
    Source.FORCED: "yellow",
    Source.MISTAKE: "red",
}


def episode_text(trajectory: Trajectory, decode: Decode, *, labelled: bool = False) -> Text:
    """Format an episode.

    If `labelled`, sources are named and sampled tokens are listed, for output without colours.
    """
    text = Text.assemble(
        (f"{trajectory.task_id}", "bold"),
        f"  {trajectory.outcome or 'unfinished'}, reward {reward_words(trajectory)}, {len(trajectory.turns)} turns\n",
        f"{trajectory.error}\n" if trajectory.error else "",
    )
    if not has_tokens(trajectory):
        for speaker, message in itertools.chain(*conversations(trajectory)):
            text.append(f"[{speaker}]\n", "bold").append(f"{message}\n")
        return text.append("\n")
    has_roles = any(turn.role != SOLE_ROLE for turn in trajectory.turns)
    for sequence in trajectory.sequences:
        if has_roles:
            speakers = ", ".join(dict.fromkeys(turn.role for turn in sequence.turns))
            text.append(f"{speakers}{'' if len(sequence) else ': in text, without tokens'}\n", "bold")
        text.append_text(segments_text(segments(sequence, decode), labelled=labelled))
    return text


def segments_text(found: Iterable[Segment], *, labelled: bool) -> Text:
    """Format segments of a sequence, coloured by source or `labelled` with it."""
    text = Text()
    for segment in found:
        if labelled:
            text.append_text(_labelled_text(segment))
            continue
        for cell in segment.cells:
            text.append(_cell_text(cell), STYLES[segment.source])
    return text.append("\n")


def _labelled_text(segment: Segment) -> Text:
    """Format a segment under its source's name; sampled tokens are also listed, one per line."""
    turn = f" · {turn_words(segment.turn)}" if segment.turn else ""
    text = Text(f"[{segment.source.name.lower()}{turn}]\n{''.join(map(_cell_text, segment.cells)).rstrip()}\n")
    if segment.source is Source.SAMPLED:
        text.append("".join(f"  {_cell_text(cell)!r}  {cell.hint}\n" for cell in segment.cells))
    return text


def _cell_text(cell: TokenCell) -> str:
    if cell.image is None:
        return cell.text.replace("↵", "")
    return f"[image]\n{cell.image.alternative}\n".replace("\n\n", "\n")
