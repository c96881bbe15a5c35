"""Questions and answers in rows of data sets for verl, Search-R1 included.

Such a row has ``prompt`` (messages), ``data_source``, ``reward_model`` with a ``ground_truth``, and ``extra_info``;
each of the last two may be JSON text. Columns of an environment's own format come first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from agentrl.message.data_file import Row, message_rows


def column_object(row: Row, name: str) -> Mapping[str, Any]:
    """Return a column that holds an object, or its JSON text; an empty object for anything else."""
    found = row.values.get(name)
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except (ValueError, RecursionError):
            return {}
    return found if isinstance(found, Mapping) else {}


def ground_truth(row: Row) -> Any:
    """Return the ground truth of a row for verl; ``None`` if it has none. Search-R1 has a list under ``target``."""
    found = column_object(row, "reward_model").get("ground_truth")
    return found.get("target") if isinstance(found, Mapping) and "target" in found else found


def question(row: Row) -> str | None:
    """Return the question of a row for verl: that of ``extra_info``, which has no instructions, or the last message."""
    found = column_object(row, "extra_info").get("question")
    if isinstance(found, str) and found.strip():
        return found.strip()
    messages = message_rows(row.values.get("prompt"))
    last = messages[-1] if isinstance(messages, list) and messages else None
    content = last.get("content") if isinstance(last, Mapping) and last.get("role") == "user" else None
    return content.strip() if isinstance(content, str) and content.strip() else None


def row_type(row: Row, *names: str) -> str | None:
    """Return the type of a row: the first of some columns with a value, or else its ``data_source``."""
    found = row.first(*names, "data_source")
    return None if found is None else str(found)
