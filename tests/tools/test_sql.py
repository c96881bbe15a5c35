"""The tool sql reads one database, within its limits, and nothing else."""

from __future__ import annotations

import contextlib
import sqlite3

import pytest

from agentrl.builders.tools import find_tool
from agentrl.errors import ConfigError, UsageError


@pytest.fixture
def shop(tmp_path):
    path = tmp_path / "shop.db"
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("create table goods (name text, price real, picture blob)")
        rows = [(f"thing {n}", n / 2, b"\x00\x01" if n else None) for n in range(8)]
        connection.executemany("insert into goods values (?, ?, ?)", rows)
    connection.close()
    return path


async def test_queries_show_rows(desk, shop):
    async with desk() as tools:
        entry = {"name": "sql", "database": str(shop), "max_rows": 2}
        assert await tools.text(entry, query="select * from goods where price < 1") == (
            "name | price | picture\nthing 0 | 0.0 | NULL\nthing 1 | 0.5 | [2 bytes]"
        )
        assert (await tools.text(entry, query="select name from goods")).endswith(
            "thing 1\n[more than 2 rows; the rest is not shown]"
        )
        assert await tools.text(entry, query="select name from goods where price > 99") == "name\n[no rows]"
        assert "price" in await tools.text(entry, query="pragma table_info(goods)")
        assert (await tools.call(entry, query="select 1")).result.metrics == {"rows": 1}


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("select * from godos", "no such table: godos"),
        ("selct 1", "syntax error"),
        ("select 1; select 2", "one statement at a time"),
        ("delete from goods", "not allowed"),
        ("create table other (x)", "not allowed"),
        ("attach '/etc/passwd' as other", "not allowed"),
        ("vacuum into '{folder}/copy.db'", "not allowed"),
        ("pragma writable_schema = 1", "not allowed"),
        ("pragma database_list", "not allowed"),
        ("select load_extension('x')", "not authorized"),
        ("with recursive n(x) as (select 1 union all select x + 1 from n) select max(x) from n", "takes too long"),
        ("select zeroblob(1000000000)", "too big"),
        ("select printf('%.*c', 900000000, 'x')", "not allowed"),
        ("select 'a\x00b' from goods where name = '\x00", ""),
        ("", "the query is empty"),
        (" ", "the query is empty"),
    ],
)
async def test_what_is_wrong_or_not_allowed_is_told(desk, shop, tmp_path, query, words):
    entry = {"name": "sql", "database": str(shop), "max_seconds": 0.3}
    async with desk() as tools:
        called = await tools.call(entry, query=query.format(folder=tmp_path))
        if words:
            assert words in called.result.text
            assert called.failed
        assert await tools.text(entry, query="select count(*) from goods") == "count(*)\n8"
    assert [path.name for path in tmp_path.iterdir()] == ["shop.db"]


async def test_each_episode_may_change_a_copy_of_its_own(desk, shop, tmp_path):
    entry = {"name": "sql", "database": str(shop), "read_only": False}
    for _ in range(2):
        async with desk() as tools:
            assert await tools.text(entry, query="delete from goods where price > 1") == "Done; 5 rows changed."
            assert await tools.text(entry, query="select count(*) from goods") == "count(*)\n3"
            for query in ("attach '{folder}/other.db' as other", "vacuum into '{folder}/other.db'"):
                assert "not allowed" in await tools.error(entry, query=query.format(folder=tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["shop.db"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"database": "nowhere.db"}, "does not exist: got nowhere.db"),
        ({}, "database is missing"),
        ({"databse": "x"}, r"unknown argument databse \(did you mean database"),
        ({"database": __file__, "max_rows": 0}, "too small"),
        ({"database": __file__, "max_concurrent": "many"}, "max_concurrent of tool sql is not a number"),
    ],
)
def test_wrong_options_are_found_before_the_run(options, words):
    with pytest.raises(UsageError, match=words):
        find_tool({"name": "sql", **options})


async def test_a_file_that_is_no_database_stops_the_run(desk):
    async with desk() as tools:
        with pytest.raises(UsageError, match="cannot be read"):
            await tools.call({"name": "sql", "database": __file__}, query="select 1")


def test_options_and_limits_stand_side_by_side(shop):
    tool = find_tool({"name": "sql", "database": str(shop), "max_concurrent": 2, "timeout_s": 9})
    assert (tool.rules.max_concurrent, tool.rules.timeout_s, tool.options["max_rows"]) == (2, 9, 50)
    assert find_tool({"name": "calculator", "max_per_second": 5}).rules.max_per_second == 5
    with pytest.raises(ConfigError, match="calculator has no options: got digits"):
        find_tool({"name": "calculator", "digits": 3})
