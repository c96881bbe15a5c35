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
"""Instructions of SQLite's virtual machine between two checks of the time limit."""
MAX_SHOWN_LENGTH = 200
"""Maximum characters of a value that are shown."""
MAX_VALUE_BYTES = 2**20
"""Maximum bytes of a value in a query."""
_READ_PRAGMAS = frozenset({"table_info", "table_xinfo", "table_list", "index_list", "index_info", "foreign_key_list"})
_FORBIDDEN_FUNCTIONS = frozenset({"load_extension", "printf", "format"})
"""Forbidden functions: with huge widths, the last two write past SQLite 3.40's memory and crash this process."""
_FORBIDDEN = frozenset({sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH})
_READS = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE})


class Sql:
    """Database connection of one episode.

    Args:
        database: The database file.
        read_only: Refuse statements that change the database; otherwise each episode changes its own copy in memory.
        max_rows: Maximum number of rows that are shown.
        max_seconds: Time limit of a query.
    """

    def __init__(self, database: str, *, read_only: bool = True, max_rows: int = 50, max_seconds: float = 5.0) -> None:
        if not Path(database).is_file():
            raise UsageError("the database of tool sql does not exist", got=database, expected="a SQLite file")
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
        self._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
        self._connection.set_authorizer(self._judge)
        self._connection.set_progress_handler(self._is_late, CHECK_EVERY)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.interrupt()  # a query may still run after its caller timed out
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
            allowed = "a query that only reads" if self._read_only else "a statement on this database only"
            return ToolError("the statement is not allowed", got=str(error), expected=allowed)
        return ToolError("the statement is wrong", got=str(error))

    def _is_late(self) -> int:
        return int(time.monotonic() > self._deadline)

    def _judge(self, action: int, first: str | None, second: str | None, *_: Any) -> int:
        """Return SQLite's code for an allowed or a forbidden action; other files and settings are forbidden."""
        if action == sqlite3.SQLITE_PRAGMA:
            return sqlite3.SQLITE_OK if first in _READ_PRAGMAS else sqlite3.SQLITE_DENY
        if action == sqlite3.SQLITE_FUNCTION and second in _FORBIDDEN_FUNCTIONS:
            return sqlite3.SQLITE_DENY
        allowed = action in _READS if self._read_only else action not in _FORBIDDEN
        return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


def _table(names: list[str], rows: list[tuple[Any, ...]], more: bool) -> str:
    lines = [" | ".join(names), *(" | ".join(map(_format, row)) for row in rows)]
    if more:
        lines.append(f"[more than {len(rows)} rows; the rest is not shown]")
    return "\n".join(lines) if rows else f"{lines[0]}\n[no rows]"


def _format(value: object) -> str:
    if isinstance(value, bytes):
        return f"[{len(value)} bytes]"
    text = "NULL" if value is None else str(value).replace("\n", "\\n")
    return text if len(text) <= MAX_SHOWN_LENGTH else f"{text[:MAX_SHOWN_LENGTH]}…"


sql = tool(name="sql")(Sql)
