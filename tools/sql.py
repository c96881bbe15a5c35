"""Queries of a SQLite database, within limits of time, rows and rights."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from agentrl import ToolError, ToolResult, tool
from agentrl.errors import UsageError

CHECK_EVERY = 10_000
"""Steps of SQLite's machine between two looks at the clock."""
LONGEST_VALUE = 200
"""Characters of a value that are shown."""
LARGEST_VALUE = 2**20
"""Bytes of a value that a query may make."""
_READ_PRAGMAS = frozenset({"table_info", "table_xinfo", "table_list", "index_list", "index_info", "foreign_key_list"})
_FORBIDDEN_FUNCTIONS = frozenset({"load_extension", "printf", "format"})
"""SQLite 3.40 writes past its memory where the last two are given huge widths, and takes this process with it."""
_FORBIDDEN = frozenset({sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH})
_READS = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE})


class Sql:
    """A connection of one episode.

    Args:
        database: The file.
        read_only: Refuse whatever would change it; otherwise each episode changes a copy of its own, in memory.
        max_rows: Rows that are shown.
        max_seconds: Time of a query.
    """

    def __init__(self, database: str, *, read_only: bool = True, max_rows: int = 50, max_seconds: float = 5.0) -> None:
        if not Path(database).is_file():
            raise UsageError("the database of tool sql is not there", got=database, expected="a SQLite file")
        if max_rows < 1 or max_seconds <= 0:
            raise UsageError("a limit of tool sql is too small", got=f"{max_rows} rows, {max_seconds:g} s")
        self._path = Path(database).resolve()
        self._read_only = read_only
        self._max_rows = max_rows
        self._max_seconds = max_seconds
        self._connection: sqlite3.Connection | None = None
        self._deadline = 0.0

    async def __aenter__(self) -> Sql:
        """Open the database, or the episode's copy of it."""
        uri = f"{self._path.as_uri()}?mode=ro"
        try:
            file = sqlite3.connect(uri, uri=True, check_same_thread=False, isolation_level=None)
            if self._read_only:
                self._connection = file
            else:
                self._connection = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
                file.backup(self._connection)
                file.close()
            self._connection.execute("select count(*) from sqlite_master")
        except sqlite3.Error as error:
            raise UsageError(
                "the database of tool sql cannot be read", got=f"{self._path}: {error}", expected="a SQLite file"
            ) from error
        self._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LARGEST_VALUE)
        self._connection.set_authorizer(self._judge)
        self._connection.set_progress_handler(self._is_late, CHECK_EVERY)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        if self._connection is not None:
            self._connection.interrupt()  # a query whose caller waits no more
            self._connection.close()

    def __call__(self, query: str) -> ToolResult:
        """Runs one SQL statement on a SQLite database and shows the rows.

        The tables are in sqlite_master: select name, sql from sqlite_master.

        Args:
            query: One statement of SQL.
        """
        if not query.strip():
            raise ToolError("the query is empty", expected="one statement of SQL")
        assert self._connection is not None
        self._deadline = time.monotonic() + self._max_seconds
        try:
            cursor = self._connection.execute(query)
            rows = cursor.fetchmany(self._max_rows + 1)
        except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
            raise self._refusal(error) from error
        if cursor.description is None:
            return ToolResult(f"Done; {max(cursor.rowcount, 0)} rows changed.")
        names = [column[0] for column in cursor.description]
        more = len(rows) > self._max_rows
        cursor.close()
        return ToolResult(_table(names, rows[: self._max_rows], more), metrics={"rows": min(len(rows), self._max_rows)})

    def _refusal(self, error: Exception) -> ToolError:
        if time.monotonic() > self._deadline:
            return ToolError(
                "the query takes too long", got=f"more than {self._max_seconds:g} s", hint="ask for less at once"
            )
        if "authoriz" in str(error) or "readonly" in str(error):
            allowed = "a query that only reads" if self._read_only else "a statement on this database alone"
            return ToolError("the statement is not allowed", got=str(error), expected=allowed)
        return ToolError("the statement is wrong", got=str(error))

    def _is_late(self) -> int:
        return int(time.monotonic() > self._deadline)

    def _judge(self, action: int, first: str | None, second: str | None, *_: Any) -> int:
        """Return True if a statement may do something: other files are closed to it, settings too."""
        if action == sqlite3.SQLITE_PRAGMA:
            return sqlite3.SQLITE_OK if first in _READ_PRAGMAS else sqlite3.SQLITE_DENY
        if action == sqlite3.SQLITE_FUNCTION and second in _FORBIDDEN_FUNCTIONS:
            return sqlite3.SQLITE_DENY
        allowed = action in _READS if self._read_only else action not in _FORBIDDEN
        return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


def _table(names: list[str], rows: list[tuple[Any, ...]], more: bool) -> str:
    lines = [" | ".join(names), *(" | ".join(map(_shown, row)) for row in rows)]
    if more:
        lines.append(f"[more than {len(rows)} rows; the rest is left out]")
    return "\n".join(lines) if rows else f"{lines[0]}\n[no rows]"


def _shown(value: object) -> str:
    if isinstance(value, bytes):
        return f"[{len(value)} bytes]"
    text = "NULL" if value is None else str(value).replace("\n", "\\n")
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…"


sql = tool(name="sql")(Sql)
