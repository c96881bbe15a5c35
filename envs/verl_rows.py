"""Questions and answers in rows of data sets for verl, Search-R1 included.

Such a row has ``prompt`` (messages), ``data_source``, ``reward_model`` with a ``ground_truth``, and ``extra_info``;
each of the last two may be JSON text. Columns of an environment's own format come first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from agentrl.errors import UsageError
from agentrl.message.data_file import Row, list_in_text, message_rows, read_messages, texts_of


def column_object(row: Row, name: str) -> Mapping[str, Any]:
    """Return a column that holds an object, or its JSON text; an empty object for anything else."""
    return _object(row.values.get(name))


def _object(found: Any) -> Mapping[str, Any]:
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except (ValueError, RecursionError):
            return {}
    return found if isinstance(found, Mapping) else {}


def ground_truth(row: Row) -> Any:
    """Return the ground truth of a row for verl; ``None`` if it has none. Search-R1 has a list under ``target``."""
    truth = column_object(row, "reward_model")
    nested = _object(truth.get("ground_truth"))
    return nested["target"] if "target" in nested else truth.get("ground_truth")


def answers_in(value: Any) -> tuple[str, ...]:
    """Return the answers of a column: a text or number, or a list of them, which may be a text, as in Skywork-OR1.

    >>> answers_in(0), answers_in(["a", 1.0]), answers_in('["18"]'), answers_in("[0, 1]"), answers_in(1e-7)
    (('0',), ('a', '1'), ('18',), ('[0, 1]',), ('0.0000001',))

    Raises:
        ValueError: anything else.
    """
    if isinstance(value, str):
        found = list_in_text(value)
        is_interval = isinstance(found, list) and not all(isinstance(one, str) for one in found)
        return (value,) if is_interval else texts_of(value)
    given = value if isinstance(value, list) else [value]
    if not all(isinstance(one, str | int | float) for one in given):
        raise ValueError(f"{value!r:.80}, not a text or a number, or a list of them")
    return tuple(map(_written, given))


def _written(value: str | float) -> str:
    """Write a number without exponent; whole numbers next to nulls are floats in data sets."""
    if isinstance(value, float) and math.isfinite(value):
        return format(Decimal(repr(value)), "f").removesuffix(".0")
    return str(value)


def question(row: Row) -> str | None:
    """Return the question of a row for verl: that of ``extra_info``, which has no instructions, or the user's message.

    Raises:
        UsageError: the prompt is a conversation, or has images.
    """
    found = column_object(row, "extra_info").get("question")
    if isinstance(found, str) and found.strip():
        return found.strip()
    messages = message_rows(row.values.get("prompt"), row.location)
    if not isinstance(messages, list):
        return None
    asked = [message for message in read_messages(messages, row.location) if message.role != "system"]
    if len(asked) > 1:
        raise UsageError(
            f"the prompt of {row.location} is a conversation, which this environment does not show",
            got=f"messages of {', '.join(message.role for message in asked)}",
            expected="one message of the user, or a question in extra_info",
            hint="the environment prompts shows conversations",
        )
    return asked[0].text.strip() or None if asked and asked[0].role == "user" else None


def row_type(row: Row, *names: str) -> str | None:
    """Return the type of a row: the first of some columns with a value, or else its ``data_source``."""
    found = row.first(*names, "data_source")
    return None if found is None else str(found)
