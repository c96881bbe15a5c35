"""A customer's session in the shop: the current page, its clickable elements, and the effects of clicks."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from . import pages
from .pages import CLICKABLE, Element, Part, SubPage
from .records import Goal, Product
from .shop import BY_CHANCE, Shop
from .tables import Rows

ADDRESS = "http://127.0.0.1:3000"
_ACTION = re.compile(r"(.+)\[(.+)\]")
_NOT_CLICKED = "search"
"""Button that cannot be clicked; only a search uses it."""
_SUB_PAGES = {page.lower(): page for page in SubPage}


class Page(enum.StrEnum):
    """Kind of the current page."""

    SEARCH = "search"
    RESULTS = "results"
    ITEM = "item"
    SUB_PAGE = "sub_page"
    DONE = "done"


@dataclass(slots=True, kw_only=True)
class State:
    """State of a session, as plain data."""

    page: Page = Page.SEARCH
    keywords: list[str] = field(default_factory=list)
    number: int = 0
    """Number of the page of results, from 1."""
    asin: str = ""
    options: dict[str, str] = field(default_factory=dict)
    """Chosen values by name, in the order of their first choice."""
    sub_page: str = ""
    visited: list[str] = field(default_factory=list)
    """Products visited since the search page."""
    draws: int = 0
    """Number of random searches so far."""

    def to_plain(self) -> dict[str, Any]:
        """Return this state as JSON types; `from_plain` restores it."""
        return {part.name: _copy(getattr(self, part.name)) for part in fields(self)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> State:
        """Restore a state from `to_plain`; shares nothing with `plain`."""
        return cls(**{**{name: _copy(value) for name, value in plain.items()}, "page": Page(plain["page"])})


def _copy(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else list(value) if isinstance(value, list) else value


class Action(NamedTuple):
    """A parsed action."""

    name: str
    argument: str
    """Argument in lower case."""


def parse_action(text: str) -> Action | None:
    """Parse ``name[argument]`` as WebShop does, at the last opening bracket; return ``None`` for other texts.

    >>> parse_action("click[Buy Now]"), parse_action("click[m [40]]")
    (Action(name='click', argument='buy now'), Action(name='click[m ', argument='40]'))
    """
    parsed = _ACTION.match(text)
    return None if parsed is None else Action(parsed[1], parsed[2].lower())


class Session:
    """One episode in the shop.

    Args:
        shop: The shop.
        goal: The customer's goal.
        name: Name of the session; part of addresses, and the seed of random searches.
        show_attributes: Give products a page with their attributes.
        state: State to continue from; by default the search page.
    """

    def __init__(
        self, shop: Shop, goal: Goal, *, name: str, show_attributes: bool = False, state: State | None = None
    ) -> None:
        self.shop = shop
        self.goal = goal
        self.name = name
        self.show_attributes = show_attributes
        self.state = state or State()
        self._found: Rows | None = None
        self._elements: list[Element] | None = None

    @property
    def product(self) -> Product:
        """Product of the current page."""
        return self.shop.product_of(self.state.asin)

    @property
    def address(self) -> str:
        """Address of the page."""
        state, words = self.state, "+".join(self.state.keywords)
        match state.page:
            case Page.SEARCH:
                return f"{ADDRESS}/{self.name}"
            case Page.RESULTS:
                return f"{ADDRESS}/search_results/{self.name}/{words}/{state.number}"
            case Page.ITEM:
                options = json.dumps(state.options)
                return f"{ADDRESS}/item_page/{self.name}/{state.asin}/{words}/{state.number}/{options}"
            case Page.SUB_PAGE:
                where = f"{state.asin}/{words}/{state.number}/{state.sub_page}/{state.options}"
                return f"{ADDRESS}/item_sub_page/{self.name}/{where}"
            case Page.DONE:
                return f"{ADDRESS}/done/{self.name}/{state.asin}/{state.options}"

    def elements(self) -> list[Element]:
        """Return the elements of the page; empty for the last page, which `pages.done_page` creates."""
        if self._elements is None:
            self._elements = self._page()
        return self._elements

    def _page(self) -> list[Element]:
        text, state = self.goal.instruction, self.state
        match state.page:
            case Page.SEARCH:
                return pages.search_page(text)
            case Page.RESULTS:
                first = (state.number - 1) * pages.PRODUCTS_PER_PAGE
                found = self._results()
                shown = [self.shop.product(int(row)) for row in found[first : first + pages.PRODUCTS_PER_PAGE]]
                return pages.results_page(text, shown, number=state.number, total=len(found))
            case Page.ITEM:
                return pages.item_page(text, self.product, show_attributes=self.show_attributes)
            case Page.SUB_PAGE:
                return pages.sub_page(text, self.product, SubPage(state.sub_page))
            case Page.DONE:
                return []

    def is_done(self) -> bool:
        """Return True if a product was bought."""
        return self.state.page is Page.DONE

    @property
    def has_search_bar(self) -> bool:
        """True on the search page; searches are also valid on every other page."""
        return self.state.page is Page.SEARCH

    def clickables(self) -> dict[str, Element]:
        """Return the clickable elements by their text in lower case: buttons, then products, then options.

        If several elements have the same text, the last one counts.
        """
        elements = [element for element in self.elements() if element.part in CLICKABLE]
        elements.sort(key=lambda element: CLICKABLE.index(element.part))
        return {element.text if element.part is Part.OPTION else element.text.lower(): element for element in elements}

    def clicks(self) -> list[str]:
        """Return the click actions; as in WebShop, option values with brackets cannot be clicked."""
        texts = [text for text in self.clickables() if text != _NOT_CLICKED]
        return [f"click[{text}]" for text in texts if parse_action(f"click[{text}]") == ("click", text)]

    def act(self, action: str) -> bool:
        """Carry out an action: ``search[words]`` or ``click[text]``.

        Returns:
            True if the action is valid; otherwise nothing has changed.
        """
        parsed = parse_action(action)
        if parsed is None:
            return False
        name, argument = parsed
        if name == "search":
            self._show_results(argument.split(" "), 1)
        else:
            clicked = self.clickables().get(argument) if name == "click" and argument != _NOT_CLICKED else None
            if clicked is None:
                return False
            self._click(argument, clicked)
        self._elements = None
        return True

    def _click(self, text: str, clicked: Element) -> None:
        state = self.state
        if text == pages.BUY_NOW.lower():
            state.page = Page.DONE
        elif text == pages.BACK_TO_SEARCH.lower():
            self.state = State(draws=state.draws)
        elif text == pages.NEXT.lower() and state.page is Page.RESULTS:
            self._show_results(state.keywords, state.number + 1)
        elif text == pages.PREVIOUS.lower() and state.page is Page.RESULTS:
            self._show_results(state.keywords, state.number - 1)
        elif text == pages.PREVIOUS.lower() and state.page is Page.ITEM:
            self._show_results(state.keywords, state.number)
        elif text in _SUB_PAGES:
            state.page, state.sub_page = Page.SUB_PAGE, _SUB_PAGES[text]
        else:
            self._show_item(text, clicked)

    def _show_item(self, text: str, clicked: Element) -> None:
        state = self.state
        if clicked.part is Part.LINK:
            state.asin = text.upper()
            state.visited += [] if state.asin in state.visited else [state.asin]
        elif clicked.part is Part.OPTION:
            state.options[clicked.name.lower()] = text
        state.page, state.sub_page = Page.ITEM, ""

    def _show_results(self, keywords: list[str], number: int) -> None:
        state = self.state
        is_new = keywords != state.keywords or keywords[0] == BY_CHANCE
        state.draws += keywords[0] == BY_CHANCE
        state.page, state.keywords, state.number = Page.RESULTS, keywords, number
        state.asin, state.sub_page, state.options = "", "", {}
        self._found = self._search() if is_new else self._results()

    def _results(self) -> Rows:
        if self._found is None:
            self._found = self._search()
        return self._found

    def _search(self) -> Rows:
        return self.shop.search(self.state.keywords, f"{self.name}/{self.state.draws}")
