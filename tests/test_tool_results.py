"""The text of what tools return: what a reader expects, a short notice, and never an error."""

from __future__ import annotations

import argparse
import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import datetime
import enum
import functools
import io
import json
import sqlite3
import threading
import types
from collections import UserString
from contextlib import AsyncExitStack
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePosixPath
from typing import Any, NamedTuple
from uuid import UUID

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import BaseModel, RootModel, SecretStr

import agentrl
from agentrl.message import Content, ImagePart, TextPart, ToolCall
from agentrl.remote.wire import read_tool_result, write_tool_result
from agentrl.rollout.tools import tool_session
from agentrl.tool.results import CUT, MAX_PARTS, MAX_TEXT_CHARS, as_json, as_text


class Colour(enum.Enum):
    GREEN = "green"


class Level(enum.IntEnum):
    HIGH = 3


class Plant(BaseModel):
    name: str
    seen: datetime.date
    colour: Colour = Colour.GREEN
    pin: SecretStr = SecretStr("1234")


class Plants(RootModel[list[str]]):
    pass


@dataclasses.dataclass
class Pot:
    size: Decimal
    plant: Plant | None = None


class Point(NamedTuple):
    x: int
    y: float


class Plain:
    pass


class Worded:
    def __str__(self) -> str:
        return "a worded thing"


class Broken:
    def __str__(self) -> str:
        raise OSError("gone")


class Shelf:
    """Iterable, and not a sequence."""

    def __iter__(self) -> Any:
        yield from ("fern", Decimal("1.5"))

    def __repr__(self) -> str:
        return "Shelf()"


class OldShelf:
    """Iterable by its indices alone."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return [4, 7][index]


class Tag(Shelf):
    """Iterable, with a text of its own."""

    def __str__(self) -> str:
        return "<p>fern</p>"


class Record:
    def to_dict(self) -> dict[str, Any]:
        return {"name": "fern", "seen": datetime.date(2026, 5, 1)}

    def __str__(self) -> str:
        return "a record"


class Converter:
    def to_dict(self, form: str) -> dict[str, Any]:
        raise AssertionError(form)

    def __str__(self) -> str:
        return "a converter"


class Columns:
    """Has keys, and is not a mapping."""

    def keys(self) -> list[str]:
        return ["b", "a"]

    def __getitem__(self, name: str) -> str:
        return name * 2


def row_of_sqlite() -> Any:
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.row_factory = sqlite3.Row
        return connection.execute("SELECT 'fern' AS name, 3 AS count").fetchone()


class BrokenModel(BaseModel):
    def model_dump(self, **_: Any) -> Any:
        raise KeyError("gone")


DAY = datetime.date(2026, 5, 1)
RAMP = np.arange(6, dtype=np.float32).reshape(2, 3) / 10

TEXTS = {
    "text": ("3 rows", "3 rows"),
    "none": (None, "null"),
    "a decimal number": (Decimal("1.50"), "1.50"),
    "a date": (DAY, "2026-05-01"),
    "a time": (datetime.datetime(2026, 5, 1, 9, 30, tzinfo=datetime.UTC), "2026-05-01T09:30:00+00:00"),
    "a duration": (datetime.timedelta(days=1, minutes=5), "1 day, 0:05:00"),
    "an identifier": (UUID(int=7), "00000000-0000-0000-0000-000000000007"),
    "a path": (PurePosixPath("a/b.txt"), "a/b.txt"),
    "a fraction": (Fraction(1, 3), "1/3"),
    "an enum": (Colour.GREEN, "green"),
    "an enum of numbers": (Level.HIGH, "3"),
    "bytes of a text": ("größer".encode(), "größer"),
    "other bytes": (b"\x89PNG\x00\xff", "[6 bytes]"),
    "an exception": (ValueError("too long"), "ValueError: too long"),
    "a model": (
        Plant(name="fern", seen=DAY),
        '{"name": "fern", "seen": "2026-05-01", "colour": "green", "pin": "**********"}',
    ),
    "a root model": (Plants(["fern", "moss"]), '["fern", "moss"]'),
    "a dataclass": (Pot(Decimal("0.5")), '{"size": "0.5", "plant": null}'),
    "a named tuple": (Point(1, 2.5), '{"x": 1, "y": 2.5}'),
    "a tuple": ((1, "a", None), '[1, "a", null]'),
    "a set": ({"moss", "fern", "ivy"}, '["fern", "ivy", "moss"]'),
    "a set of numbers": (frozenset({10, 9, 2.5}), "[2.5, 9, 10]"),
    "a mixed set": ({"b", 3, Colour.GREEN}, '[3, "green", "b"]'),
    "keys of a dictionary": ({"b": 1, "a": 2}.keys(), '["a", "b"]'),
    "values of a dictionary": ({"b": 1, "a": 2}.values(), "[1, 2]"),
    "a mapping": (types.MappingProxyType({"a": DAY}), '{"a": "2026-05-01"}'),
    "a counter": (collections.Counter("aab"), '{"a": 2, "b": 1}'),
    "a deque": (collections.deque([1, 2]), "[1, 2]"),
    "a range": (range(3), "[0, 1, 2]"),
    "a generator": ((n * n for n in range(3)), "[0, 1, 4]"),
    "keys that are tuples": ({("a", 1): 2, DAY: 3}, '{"(\'a\', 1)": 2, "2026-05-01": 3}'),
    "keys of two types and one text": ({1: "a", "1": "b"}, '{"1": "a", "1 (str)": "b"}'),
    "keys as JSON has them": ({True: 1, None: 2, 2.5: 3}, '{"true": 1, "null": 2, "2.5": 3}'),
    "numbers that are not finite": ([float("nan"), float("-inf")], "[NaN, -Infinity]"),
    "a number of NumPy": (np.float64(0.5), "0.5"),
    "a short number of NumPy": (np.float32(0.1), "0.1"),
    "a large short number of NumPy": (np.float32(16_777_217), "16777216.0"),
    "half a number of NumPy": ([np.float16(0.1), np.float16(65504)], "[0.1, 65504.0]"),
    "short numbers that are not finite": (np.array([np.nan, np.inf], np.float32), "[NaN, Infinity]"),
    "a long number of NumPy": (np.longdouble("0.5"), "0.5"),
    "a brain float": (torch.tensor([0.1, 3.0], dtype=torch.bfloat16), "[0.1, 3.0]"),
    "a text of a user": (UserString("moss"), "moss"),
    "a whole number of NumPy": (np.int64(7), "7"),
    "a truth of NumPy": (np.bool_(True), "true"),
    "a date of NumPy": (np.datetime64("2026-05-01"), "2026-05-01"),
    "an array": (RAMP, "[[0.0, 0.1, 0.2], [0.3, 0.4, 0.5]]"),
    "an array within": ({"scores": np.array([1, 2])}, '{"scores": [1, 2]}'),
    "an image as an array": (np.zeros((48, 64, 3), np.uint8), "[image: 64 x 48, RGB]"),
    "an image": (Image.new("L", (64, 48)), "[image: 64 x 48, L]"),
    "an image of a message": (ImagePart(data=b"x", alternative="a map"), "[image: a map]"),
    "parts of a message": (
        (TextPart(text="You are here."), ImagePart(data=b"x", media_type="image/jpeg")),
        '["You are here.", "[image: image/jpeg]"]',
    ),
    "a large array": (np.zeros((500, 400)), "[array: 500 x 400, float64]"),
    "a tensor": (torch.tensor([0.1, 2.0]), "[0.1, 2.0]"),
    "a tensor with a gradient": (torch.tensor(3.0, requires_grad=True), "3.0"),
    "a plain object": (Plain(), f"<{Plain.__module__}.Plain object>"),
    "an object with words": ({"thing": Worded()}, '{"thing": "a worded thing"}'),
    "an object that fails": ([Broken(), 1], '["[Broken: OSError]", 1]'),
    "a model that fails": ([BrokenModel()], '["[BrokenModel: KeyError]"]'),
    "a namespace": (types.SimpleNamespace(b=1, a=Colour.GREEN), '{"b": 1, "a": "green"}'),
    "a namespace of arguments": (argparse.Namespace(rows=[DAY]), '{"rows": ["2026-05-01"]}'),
    "an iterable": ([Shelf()], '[["fern", "1.5"]]'),
    "an iterable by index": (OldShelf(), "[4, 7]"),
    "an iterable with a text": (Tag(), "<p>fern</p>"),
    "an object that becomes a dictionary": (Record(), '{"name": "fern", "seen": "2026-05-01"}'),
    "an object that needs arguments to become one": (Converter(), "a converter"),
    "an object with keys": (Columns(), '{"b": "bb", "a": "aa"}'),
    "a row of SQLite": (row_of_sqlite(), '{"name": "fern", "count": 3}'),
    "an enum class": (Colour, "<enum 'Colour'>"),
    "a class": (Plain, f"<class '{Plain.__module__}.Plain'>"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_value_is_what_a_reader_expects(name: str) -> None:
    value, text = TEXTS[name]
    assert as_text(value) == text
    assert agentrl.ToolResult(text).text == text


MAP = ImagePart(data=b"x", alternative="a map")


@pytest.mark.parametrize(
    ("value", "content", "text"),
    [
        (MAP, (MAP,), "[image: a map]"),
        (["here:", MAP], (TextPart(text="here:"), MAP), "here:\n[image: a map]"),
        (
            ("a", TextPart(text="b"), MAP, MAP),
            (TextPart(text="a\nb"), MAP, MAP),
            "a\nb\n[image: a map]\n[image: a map]",
        ),
        (["a", "b"], '["a", "b"]', '["a", "b"]'),
        ([MAP, 3], '["[image: a map]", 3]', '["[image: a map]", 3]'),
        ([], "[]", "[]"),
    ],
)
def test_images_are_kept_for_policies_that_read_them(value: object, content: Content, text: str) -> None:
    result = agentrl.ToolResult(value)
    for one in (result, result.normalize("camera"), read_tool_result(write_tool_result(result.normalize("camera")))):
        assert (one.content, one.text) == (content, text)


URL = "data:image/jpeg;base64,eA=="


@pytest.mark.parametrize("image", [Image.new("RGB", (6, 4)), MAP, URL], ids=["pillow", "part", "url"])
def test_content_blocks_are_texts_and_images(image: object) -> None:
    blocks = [{"type": "text", "text": "North:"}, {"type": "image", "image": image}, {"type": "text", "text": "End."}]
    north, shown, end = agentrl.ToolResult(blocks).normalize("camera").content
    assert (north, end) == (TextPart(text="North:"), TextPart(text="End."))
    assert isinstance(shown, ImagePart)


def test_other_forms_of_content_blocks() -> None:
    assert agentrl.ToolResult([{"type": "image_url", "image_url": {"url": URL}}]).content == (
        ImagePart(data=b"x", media_type="image/jpeg"),
    )
    texts = [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]
    assert agentrl.ToolResult(texts).content == agentrl.ToolResult(texts).normalize("t").text == "One.\nTwo."


@pytest.mark.parametrize(
    "value",
    [
        [{"type": "text", "text": "x", "page": 1}],  # data of the tool's own
        [{"type": "text", "text": 3}],
        [{"type": "image", "image": "https://example.com/map.png"}],  # is not fetched
        [{"type": "image", "image": "data:image/png;base64,%%%"}],
        [{"type": "text", "text": "x"}, "y"],
        [],
    ],
)
def test_other_lists_are_json(value: list[Any]) -> None:
    assert agentrl.ToolResult(value).content == json.dumps(value)


def test_an_image_of_pillow_becomes_png() -> None:
    for mode in ("L", "RGBA", "CMYK", "F"):
        (part,) = agentrl.ToolResult(Image.new(mode, (6, 4))).normalize("camera").content
        assert isinstance(part, ImagePart)
        assert Image.open(io.BytesIO(part.data)).size == (6, 4)
        assert part.alternative == f"6 x 4, {mode}"


def test_a_table_is_a_list_of_rows() -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"name": ["fern", "moss"], "rows": [1, 2]})
    assert as_text(table) == '[{"name": "fern", "rows": 1}, {"name": "moss", "rows": 2}]'
    assert as_text(table["rows"]) == '{"0": 1, "1": 2}'
    assert as_text(table.set_index("name")) == as_text(table)


def circular() -> Any:
    whole: dict[str, Any] = {"name": "a", "parts": []}
    whole["parts"].append(whole)
    return whole


def deep(levels: int) -> Any:
    whole: Any = "bottom"
    for _ in range(levels):
        whole = [whole]
    return whole


def doubled(levels: int) -> Any:
    whole: Any = ["x"]
    for _ in range(levels):
        whole = [whole, whole]
    return whole


def failing() -> Any:
    yield 1
    raise OSError("gone")


NOTICES = {
    "circular": (circular, '{"name": "a", "parts": ["[circular]"]}'),
    "deep": (lambda: deep(5_000), "[nested too deeply]"),
    "doubled": (lambda: doubled(60), CUT),
    "endless": (lambda: iter(int, 1), CUT),
    "long": (lambda: dict.fromkeys(range(MAX_PARTS + 5), "x"), CUT),
    "a long text": (lambda: "x" * (MAX_TEXT_CHARS + 1), CUT),
    "a long number": (lambda: 7**9_000, "[a whole number of about 7606 digits]"),
    "a long number in a list": (lambda: [7**9_000], "[a whole number of about 7606 digits]"),
    "an iterator that fails": (failing, "[generator: OSError]"),
}


@pytest.mark.parametrize("name", NOTICES)
def test_undisplayable_values_become_notices(name: str) -> None:
    make, notice = NOTICES[name]
    text = as_text(make())
    assert notice in text
    assert len(text) < 2 * MAX_TEXT_CHARS


def test_a_shared_part_is_not_circular() -> None:
    part = {"a": 1}
    assert as_text([part, part]) == '[{"a": 1}, {"a": 1}]'


@pytest.mark.parametrize("name", TEXTS)
def test_values_are_json_after_one_conversion(name: str) -> None:
    value = TEXTS[name][0]
    if isinstance(value, types.GeneratorType):  # was read above
        value = (n for n in range(3))
    plain = as_json(value)
    assert as_json(plain) == plain or plain != plain
    json.dumps(plain)


class Promise:
    """An awaitable of its own kind."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __await__(self) -> Any:
        yield from asyncio.sleep(0).__await__()
        return self.value


async def later(value: Any) -> Any:
    await asyncio.sleep(0)
    return value


def made(function: Any, *, name: str = "made", **rules: Any) -> agentrl.Tool:
    function.__doc__ = "Make a value."
    return agentrl.tool(name=name, **rules)(function)


def coroutine() -> Any:
    return later("a")


def coroutine_of_a_coroutine() -> Any:
    return later(later("a"))


def promise() -> Any:
    return Promise("a")


def task() -> asyncio.Task[str]:
    return asyncio.ensure_future(later("a"))  # type: ignore[return-value]


def future() -> asyncio.Future[str]:
    found = asyncio.get_running_loop().create_future()
    found.set_result("a")
    return found


def thread_future() -> Any:
    found: concurrent.futures.Future[str] = concurrent.futures.Future()
    found.set_result("a")
    return found


async def direct() -> str:
    return "a"


async def promise_of_async() -> Any:
    return Promise("a")


def wrapped(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        asyncio.get_running_loop()
        return function(*args, **kwargs)

    return call


class Caller:
    async def __call__(self) -> str:
        """Make a value."""
        return "a"


FUNCTIONS = [
    coroutine,
    coroutine_of_a_coroutine,
    promise,
    task,
    future,
    thread_future,
    direct,
    promise_of_async,
    wrapped(direct),
    Caller(),
]


@pytest.mark.parametrize("function", FUNCTIONS)
async def test_awaitables_of_any_kind_are_awaited(function: Any) -> None:
    tool = agentrl.tool(name="made")(function) if isinstance(function, Caller) else made(function)
    async with AsyncExitStack() as stack:
        assert await tool.call(await tool.open(stack), {}) == "a"


async def test_an_async_iterator_is_read_to_its_end() -> None:
    async def pieces() -> Any:
        for piece in ("a", "b"):
            yield piece

    def found() -> Any:
        return pieces()

    async with AsyncExitStack() as stack:
        tool = made(found)
        assert await tool.call(await tool.open(stack), {}) == '["a", "b"]'


async def test_an_async_iterator_without_an_end_is_cut() -> None:
    async def pieces() -> Any:
        while True:
            yield "a"

    def found() -> Any:
        return pieces()

    async with AsyncExitStack() as stack:
        tool = made(found)
        assert (await tool.call(await tool.open(stack), {})).endswith(f'"a", "{CUT}"]')


async def test_an_iterator_of_a_sync_tool_is_read_in_its_thread() -> None:
    def found() -> Any:
        return (threading.current_thread() is threading.main_thread() for _ in range(2))

    async with AsyncExitStack() as stack:
        tool = made(found)
        assert await tool.call(await tool.open(stack), {}) == "[false, false]"


@pytest.mark.parametrize("name", ["circular", "deep", "keys"])
async def test_no_value_costs_an_episode(name: str) -> None:
    values = {"circular": circular(), "deep": deep(5_000), "keys": {("a", "b"): {Plain(): 1}}}

    def found() -> Any:
        return values[name]

    async with tool_session() as session:
        called = await session.carry_out(ToolCall(name="made", arguments={}), {"made": made(found)})
    assert not called.failed
    assert len(called.result.text) < 300
