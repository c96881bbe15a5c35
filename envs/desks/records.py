"""Records of one episode: a shared constant store, and copies of the rows that the episode changes."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import orjson

Row: TypeAlias = dict[str, Any]


class Action(NamedTuple):
    """A call that the agent has to make."""

    name: str
    arguments: Mapping[str, Any]


class EditedTable:
    """A table of the store with the rows of one episode on top.

    Args:
        stored: Rows of the store by their ids; never changed.
        rows: Rows of the episode by their ids.
    """

    def __init__(self, stored: Mapping[str, Row], rows: Mapping[str, Row] | None = None) -> None:
        self._stored = stored
        self.rows: dict[str, Row] = copy.deepcopy(dict(rows or {}))
        """Copied and new rows, including those that equal the store's again."""

    def get(self, key: str) -> Row | None:
        """Return a row for reading."""
        return self.rows.get(key) or self._stored.get(key)

    def edit(self, key: str) -> Row:
        """Return a row of the store for changing."""
        if key not in self.rows:
            self.rows[key] = copy.deepcopy(self._stored[key])
        return self.rows[key]

    def add(self, key: str, row: Row) -> None:
        """Add a new row."""
        self.rows[key] = row

    def differences(self) -> dict[str, Row]:
        """Return the rows that differ from the store."""
        return {key: row for key, row in self.rows.items() if row != self._stored.get(key)}


def hash_records(records: Any) -> str:
    """Return a hash of records in JSON types that does not depend on the order of keys."""
    return hashlib.blake2b(orjson.dumps(records, option=orjson.OPT_SORT_KEYS), digest_size=16).hexdigest()
