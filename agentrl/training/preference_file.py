"""Pairs of conversations of a file, for preference training; the assistant's messages are compared.

A row is ``{"prompt": […], "chosen": […], "rejected": […], "tools": […]}``, each a list of messages; without ``prompt``,
both conversations are whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.data_file import Row, message_rows, read_rows
from agentrl.errors import UsageError
from agentrl.render.renderer import Renderer
from agentrl.training.chat_file import Chat, chat_of, check_chats, to_trajectory
from agentrl.training.preferences import Pair

SIDES = ("chosen", "rejected")


def is_preference_file(file: Path) -> bool:
    """Return True if the first row of a file is a pair of conversations."""
    if not file.is_file():
        return False
    try:
        first = next(iter(read_rows(file, "pairs")), None)
    except UsageError:
        return False
    return first is not None and all(first.values.get(side) for side in SIDES)


def read_preference_pairs(file: Path, renderer: Renderer) -> list[Pair]:
    """Read the pairs of a file, tokenized for a model.

    Raises:
        UsageError: a row is not a pair of conversations; names the line.
        TemplateError: the model's chat template cannot render them turn by turn.
    """
    chats = [tuple(_side(row, side) for side in SIDES) for row in read_rows(file, "pairs")]
    check_chats([chat for pair in chats for chat in pair], renderer)
    return [
        Pair(better=to_trajectory(better, renderer), worse=to_trajectory(worse, renderer)) for better, worse in chats
    ]


def _side(row: Row, side: str) -> Chat:
    prompt, own = (_messages(row.values, name) for name in ("prompt", side))
    if not own:
        raise UsageError(
            f"{row.location} is not a pair of conversations",
            got=f"the columns {', '.join(row.columns)}",
            expected='{"prompt": […], "chosen": […], "rejected": […]}, each a list of messages',
        )
    values = {"messages": [*prompt, *own], "tools": row.values.get("tools")}
    return chat_of(Row(location=row.location, values=values, number=row.number))


def _messages(values: Mapping[str, Any], name: str) -> list[Any]:
    found = message_rows(values.get(name))
    return found if isinstance(found, list) else []
