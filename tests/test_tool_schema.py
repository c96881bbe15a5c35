"""Which functions can be tools as they are, and how they are described: docstring styles, types, kinds of callables."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import functools
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from typing import Annotated, Any, Literal, NotRequired, Optional, TypedDict

import pytest
from pydantic import BaseModel, Field
from typing_extensions import Doc

import agentrl
from agentrl.errors import ToolError, UsageError
from agentrl.tool import Tool
from agentrl.tool.json_schema import misfits
from agentrl.tool.schema import Docstring, read_docstring

GOOGLE = """
    Find books.

    Only those on the shelf: no others.

    Args:
        author (str): Who wrote it, e.g.:
            a surname.
        limit (int, optional): How many. Defaults to 5.
        *more: Further words.

            They are joined.

    Keyword Args:
        region: Where to look.

    Returns:
        list: The titles.
    """
NUMPY = """Find books.

    Only those on the shelf: no others.

    Parameters
    ----------
    author : str
        Who wrote it, e.g.:
        a surname.
    limit : int, optional
        How many. Defaults to 5.
    more
        Further words.

        They are joined.

    Returns
    -------
    titles : list
        The titles.

    Other Parameters
    ----------------
    region : {'north', 'south'}
        Where to look.

    Examples
    --------
    limit : 3
    """
SPHINX = """Find books.

    Only those on the shelf: no others.

    :param author: Who wrote it, e.g.:
        a surname.
    :type author: str
    :param int limit: How many. Defaults to 5.
    :param more: Further words. They
        are joined.
    :keyword region: Where to look.
    :returns: The titles.
    :rtype: list

    limit: 3
    """
TIGHT = """Find books.

Only those on the shelf: no others.
Args:
author: Who wrote it, e.g.: a surname.
limit: How many. Defaults to 5.
more: Further words. They are joined.
region: Where to look.
Raises:
ValueError: never
"""
LISTED = """Find books.

Only those on the shelf: no others.

Args:
    - author (dict(str, int), optional): Who wrote it, e.g.: a surname.
    - `limit`: How many. Defaults to 5.
    * **more**: Further words. They
      are joined.
    + region : Where to look.
"""
MIXED = """Find books.

    Only those on the shelf: no others.

    Parameters
    ==========
    author, writer : str
        Who wrote it, e.g.: a surname.

    Args:
        limit: How many. Defaults to 5.
        more : Further words. They are joined.

    @param region: Where to look.
    """
DESCRIPTION = "Find books.\n\nOnly those on the shelf: no others."
PARAMETERS = {
    "author": "Who wrote it, e.g.: a surname.",
    "limit": "How many. Defaults to 5.",
    "more": "Further words. They are joined.",
    "region": "Where to look.",
}


@pytest.mark.parametrize(
    "text", [GOOGLE, NUMPY, SPHINX, TIGHT, MIXED], ids=["google", "numpy", "sphinx", "tight", "mixed"]
)
def test_docstring_styles_are_equivalent(text: str) -> None:
    found = read_docstring(text)
    assert found.description == DESCRIPTION
    assert {name: told for name, told in found.parameters.items() if name != "writer"} == PARAMETERS


@pytest.mark.parametrize(
    ("text", "description"),
    [
        ("", ""),
        ("Adds.", "Adds."),
        ("Adds.\n\nExample:\n    1 + 1\n\nReturns:\n    The sum.", "Adds.\n\nExample:\n    1 + 1"),
        ("Tells what Args: means.\n\nNote: it is a word.", "Tells what Args: means.\n\nNote: it is a word."),
        ("Reads :class:`Book` and\n:func:`shelf`.", "Reads :class:`Book` and\n:func:`shelf`."),
        ("Title\n-----\nText.", "Title\n-----\nText."),
        ("Args:", ""),
        ("Parameters\n----------", ""),
    ],
)
def test_text_without_parameters_is_the_description(text: str, description: str) -> None:
    assert read_docstring(text) == Docstring(description, {})


def find(author: str, limit: int = 5, *, region: str | None = None) -> str:
    return f"{author} {limit} {region}"


@pytest.mark.parametrize("text", [GOOGLE, NUMPY, SPHINX], ids=["google", "numpy", "sphinx"])
def test_a_tool_is_described_by_its_docstring(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "__doc__", text)
    function = agentrl.tool(find).schema["function"]
    assert function["description"] == DESCRIPTION
    properties = function["parameters"]["properties"]
    assert {name: told["description"] for name, told in properties.items()} == {
        name: text for name, text in PARAMETERS.items() if name != "more"
    }
    assert properties["limit"]["type"] == "integer"
    assert function["parameters"]["required"] == ["author"]


def lend(title: str, days: int, key: str = "none") -> str:
    """Lend a book.

    Args:
        title: Which one.
        days: For how long.
        key: Of the library.
    """
    return f"{title} for {days} days with {key}"


async def lend_later(title: str, days: int) -> str:
    """Lend a book.

    Args:
        title: Which one.
        days: For how long.
    """
    return f"{title} for {days} days"


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return f"logged {function(*args, **kwargs)}"

    return call


class Library:
    """A library."""

    def __init__(self, name: str) -> None:
        self.name = name

    def lend(self, title: str, days: int) -> str:
        """Lend a book.

        Args:
            title: Which one.
            days: For how long.
        """
        return f"{self.name} lends {title} for {days} days"

    @classmethod
    def open(cls, title: str, days: int) -> str:
        """Lend a book.

        Args:
            title: Which one.
            days: For how long.
        """
        return f"{cls.__name__} lends {title} for {days} days"


class Lender:
    """Lends books."""

    def __call__(self, title: str, days: int) -> str:
        """Lend a book.

        Args:
            title: Which one.
            days: For how long.
        """
        return f"lends {title} for {days} days"


CALLABLES = {
    "a partial": (functools.partial(lend, key="secret"), "lend", "fern for 3 days with secret"),
    "a partial of a partial": (
        functools.partial(functools.partial(lend, key="a"), key="b"),
        "lend",
        "fern for 3 days with b",
    ),
    "a partial of an async function": (functools.partial(lend_later), "lend_later", "fern for 3 days"),
    "a bound method": (Library("North").lend, "lend", "North lends fern for 3 days"),
    "a partial of a method": (functools.partial(Library("East").lend), "lend", "East lends fern for 3 days"),
    "a class method": (Library.open, "open", "Library lends fern for 3 days"),
    "an object": (Lender(), "lender", "lends fern for 3 days"),
    "a partial of an object": (functools.partial(Lender()), "lender", "lends fern for 3 days"),
    "a decorated function": (logged(lend), "lend", "logged fern for 3 days with none"),
    "a cached function": (functools.lru_cache(lend), "lend", "fern for 3 days with none"),
}


@pytest.mark.parametrize("kind", CALLABLES)
async def test_any_callable_with_a_docstring_is_a_tool(kind: str) -> None:
    target, name, text = CALLABLES[kind]
    made = agentrl.tool(target)
    assert made.name == name
    assert made.schema["function"]["description"] == "Lend a book."
    properties = made.schema["function"]["parameters"]["properties"]
    assert properties["days"] == {"type": "integer", "description": "For how long."}
    assert ("key" in properties) == (kind in ("a cached function", "a decorated function"))
    assert "secret" not in str(made.schema)
    async with AsyncExitStack() as stack:
        said = await made.call(await made.open(stack), {"title": "fern", "days": "3"})
    assert said == text


async def test_policy_cannot_override_arguments_of_a_partial() -> None:
    made = agentrl.tool(functools.partial(lend, "fern", key="secret"))
    assert list(made.schema["function"]["parameters"]["properties"]) == ["days"]
    with pytest.raises(ToolError, match="unknown argument key"):
        made.validate({"days": 3, "key": "mine"})


def test_a_partial_may_have_its_own_docstring() -> None:
    made = functools.partial(lend, key="x")
    made.__doc__ = "Lend one.\n\nArgs:\n    title: Its name.\n    days: How many."
    described = agentrl.tool(made).schema["function"]
    assert described["description"] == "Lend one."
    assert described["parameters"]["properties"]["title"]["description"] == "Its name."


def test_partial_without_a_docstring_is_rejected() -> None:
    def silent(x: int) -> int:
        return x

    with pytest.raises(UsageError, match="silent has no docstring"):
        agentrl.tool(functools.partial(silent))


class Filter(TypedDict):
    field: str
    least: NotRequired[int]


@dataclasses.dataclass
class Window:
    start: datetime.date
    days: int = 7


class Node(BaseModel):
    name: str
    children: list[Node] = []


class Size(enum.Enum):
    SMALL = "small"
    LARGE = "large"


@agentrl.tool
def query(
    where: Filter,
    window: Window,
    tree: Node,
    sizes: list[Size],
    order: Literal["up", "down"] = "up",
    page: Annotated[int, "Which page."] = 1,
    share: Annotated[float, Field(ge=0, le=1, description="Of the whole.")] = 0.5,
    note: Annotated[str, Doc("For the reader.")] = "",
    colour: Optional[str] = None,  # noqa: UP045
    pairs: dict[str, list[int]] | None = None,
) -> list[Any]:
    """Query the shelf.

    Args:
        where: Which rows.
        window: When.
        tree: A recursive part.
        sizes: Of boxes.
        order: Of rows.
        colour: Of covers.
        pairs: Numbers by name.
    """
    return [where, window, tree, sizes, order, page, share, note, colour, pairs]


def test_types_are_described_with_their_bounds_and_definitions() -> None:
    parameters = query.schema["function"]["parameters"]
    properties, definitions = parameters["properties"], parameters["$defs"]
    assert parameters["required"] == ["where", "window", "tree", "sizes"]
    assert definitions["Filter"]["required"] == ["field"]
    assert definitions["Window"]["properties"]["start"]["format"] == "date"
    assert definitions["Node"]["properties"]["children"]["items"] == {"$ref": "#/$defs/Node"}
    assert properties["order"]["enum"] == ["up", "down"]
    assert properties["page"] == {"type": "integer", "description": "Which page."}
    assert properties["share"] == {"type": "number", "minimum": 0, "maximum": 1, "description": "Of the whole."}
    assert properties["note"] == {"type": "string", "description": "For the reader."}
    assert all(told["description"] for told in properties.values())


async def test_values_arrive_in_their_types() -> None:
    arguments = {
        "where": '{"field": "x", "least": "3"}',
        "window": {"start": "2026-05-01"},
        "tree": {"name": "a", "children": [{"name": "b"}]},
        "sizes": ["small"],
        "page": "2",
    }
    read = query.validate(arguments)
    assert read["where"] == {"field": "x", "least": 3}
    assert read["window"] == Window(datetime.date(2026, 5, 1))
    assert read["tree"].children[0].name == "b"
    assert (read["sizes"], read["page"], read["colour"]) == ([Size.SMALL], 2, None)


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({"count": "null"}, (None, 5, "x")),
        ({"count": "null", "limit": "null"}, (None, 5, "x")),
        ({"count": 2, "name": "null"}, (2, 5, "null")),
        ({"count": "2", "limit": None}, (2, 5, "x")),
        ({"count": None, "limit": "3"}, (None, 3, "x")),
    ],
)
def test_the_text_null_is_null_where_text_does_not_fit(given: dict[str, Any], read: tuple[Any, ...]) -> None:
    @agentrl.tool
    def choose(count: int | None, limit: int = 5, name: str | None = "x") -> str:
        """Choose.

        Args:
            count: How many.
            limit: At most.
            name: Of whom.
        """
        return ""

    assert tuple(choose.validate(given).values()) == read
    assert misfits(given, choose.schema["function"]["parameters"]) == ""


def test_the_text_null_is_an_error_where_a_number_is_required() -> None:
    @agentrl.tool
    def take(count: int) -> str:
        """Take.

        Args:
            count: How many.
        """
        return ""

    with pytest.raises(ToolError, match="count is null, expected a whole number"):
        take.validate({"count": "null"})


class Shelf(TypedDict, total=False):
    name: str
    parent: Shelf
    filters: list[Filter] | None


async def test_dictionaries_with_types_may_be_nested_and_recursive() -> None:
    @agentrl.tool
    def tidy(shelves: dict[str, Shelf], first: Filter | None = None) -> Any:
        """Tidy up.

        Args:
            shelves: All of them.
            first: What to begin with.
        """
        return shelves

    given = {"a": {"name": "x", "parent": {"name": "y"}, "filters": [{"field": "z"}]}}
    assert tidy.validate({"shelves": given})["shelves"] == given
    with pytest.raises(ToolError, match=r"shelves.a.filters.*field is missing"):
        tidy.validate({"shelves": {"a": {"filters": [{}]}}})
    assert tidy.schema["function"]["parameters"]["properties"]["shelves"]["type"] == "object"


async def test_the_type_of_the_result_need_not_be_readable() -> None:
    @agentrl.tool
    def find_all(word: str) -> Nowhere:  # type: ignore[name-defined]  # noqa: F821
        """Find all.

        Args:
            word: Which.
        """
        return [word]

    assert find_all.schema["function"]["parameters"]["required"] == ["word"]
    async with AsyncExitStack() as stack:
        assert await find_all.call(await find_all.open(stack), {"word": "fern"}) == '["fern"]'


def test_quoted_types_inside_other_types_are_evaluated() -> None:
    @agentrl.tool
    def store(size: "Size", window: "Optional[Window]" = None, others: list["Size"] = []) -> str:  # noqa: UP037, UP045, B006
        """Store.

        Args:
            size: Of the box.
            window: When.
            others: More sizes.
        """
        return str(size)

    assert store.schema["function"]["parameters"]["properties"]["size"]["enum"] == ["small", "large"]
    read = store.validate({"size": "small", "others": ["large"], "window": {"start": "2026-05-01"}})
    assert read["others"] == [Size.LARGE]
    assert read["window"] == Window(datetime.date(2026, 5, 1))


def test_default_of_pydantic_field_is_its_value() -> None:
    @agentrl.tool
    def book(
        seats: int = Field(2, ge=1, description="How many."),
        name: str = Field(description="Whose."),
        extras: list[str] = Field(default_factory=list, description="What else."),  # noqa: B008
    ) -> str:
        """Book seats."""
        return name

    parameters = book.schema["function"]["parameters"]
    assert parameters["required"] == ["name"]
    assert parameters["properties"]["seats"] == {"type": "integer", "minimum": 1, "description": "How many."}
    first = book.validate({"name": "Ada"})
    assert first == {"seats": 2, "name": "Ada", "extras": []}
    first["extras"].append("window")
    assert book.validate({"name": "Ada"})["extras"] == []
    with pytest.raises(ToolError, match=r"seats is 0, expected greater than or equal to 1; name is missing"):
        book.validate({"seats": 0})


class Circle(BaseModel):
    kind: Literal["circle"]
    radius: int


class Square(BaseModel):
    kind: Literal["square"]
    side: int


def test_problem_names_the_value_and_all_types_of_a_union() -> None:
    @agentrl.tool
    def draw(
        shape: Circle | Square,
        border: Annotated[Circle | Square, Field(discriminator="kind")],
        size: int | list[str] | None = None,
        points: Iterable[int] = (),
        rows: dict[str, list[int | str]] | list[int] | None = None,
    ) -> str:
        """Draw.

        Args:
            shape: What.
            border: Around it.
            size: How large.
            points: Where.
            rows: Labels.
        """
        return str(points)

    shape = {"kind": "circle", "radius": 1}
    assert draw.validate({"shape": shape, "border": shape, "points": ["1", 2]})["points"] == [1, 2]
    wrong = {
        "shape": {"kind": "circle"},
        "border": {"kind": "star"},
        "size": {},
        "points": ["x"],
        "rows": {"a": [[1]]},
    }
    with pytest.raises(ToolError) as caught:
        draw.validate(wrong)
    message = str(caught.value)
    assert "shape.radius is missing; border is " in message
    assert "expected an object whose 'kind' is one of 'circle', 'square'; " in message
    assert "size is {}, expected a whole number or a list; " in message
    assert 'points.0 is "x", expected a whole number; ' in message
    assert "rows.a.0 is [1], expected a whole number or text; it takes: shape (a JSON object)" in message
    assert "border (a JSON object)" in message


def test_an_argument_without_any_description_names_the_three_styles() -> None:
    def vague(x: int) -> int:
        """Do something."""
        return x

    with pytest.raises(UsageError, match=r"vague cannot .* argument 'x'.*Google's style.*NumPy's.*:param"):
        _ = Tool(vague).schema


def test_error_names_the_unknown_dataclass_field() -> None:
    def look(window: Window) -> str:
        """Look.

        Args:
            window: What to look at.
        """
        return str(window)

    tool = agentrl.tool(look)
    with pytest.raises(ToolError, match=r"unknown argument window\.colour"):
        tool.validate({"window": {"start": "2020-01-01", "colour": "red"}})
