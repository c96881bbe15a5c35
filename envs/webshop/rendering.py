"""A page in WebShop's forms: plain text, rich text, HTML. The texts equal those of the original's page readers."""

from __future__ import annotations

import html
from collections.abc import Collection, Iterable

from .pages import CLICKABLE, SEARCH, Element, Part

SEPARATOR = " [SEP] "
_INVISIBLE = (Part.PICTURE, Part.SEARCH_BAR)
_STYLE = """<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 1.5rem auto; padding: 0 1rem; }
#instruction-text { background: #f2f0e9; border-radius: .4rem; padding: .1rem 1rem; }
button, label { display: inline-block; margin: .2rem .3rem .2rem 0; padding: .3rem .7rem; }
.product-link { display: block; margin-top: 1.2rem; border-top: 1px solid #ccc; padding-top: .6rem; }
p { margin: .3rem 0; } img { max-width: 12rem; } #search_input { width: 70%; padding: .4rem; }
</style>"""


def _visible(page: Iterable[Element]) -> list[Element]:
    """Return the elements with visible text. Blank text is visible unless it contains a line break."""
    return [
        element
        for element in page
        if element.text and element.part not in _INVISIBLE and not (element.text.isspace() and "\n" in element.text)
    ]


def plain_text(page: Iterable[Element]) -> str:
    """Return all texts in one line, separated by ``[SEP]``."""
    return SEPARATOR.join(element.text.strip() for element in _visible(page))


def rich_text(page: Iterable[Element], *, address: str, visited: Collection[str]) -> str:
    """Return a line per text, with marks around clickable and clicked texts.

    Args:
        page: Elements of the page.
        address: Address of the page; an option counts as clicked if its value occurs there in quotation marks.
        visited: Ids of the visited products.
    """
    clicked, lines = [], []
    for element in _visible(page):
        text = " " if element.text.isspace() else element.text
        match element.part:
            case Part.BUTTON:
                lines.append(f"[button] {text} [button_]")
            case Part.LINK:
                lines.append(f"\n{_button(text, was_clicked=text in visited)}")
            case Part.OPTION:
                was_clicked = f'"{text}"' in address
                lines.append(f"  {_button(text, was_clicked=was_clicked)}")
                clicked += [f"You have clicked {text}."] if was_clicked else []
            case _:
                lines.append(text)
    return "".join(f"{line}\n" for line in [*reversed(clicked), *lines])


def _button(text: str, *, was_clicked: bool) -> str:
    return f"[clicked button] {text} [clicked button_]" if was_clicked else f"[button] {text} [button_]"


def html_page(page: Iterable[Element], *, chosen: Collection[tuple[str, str]], for_person: bool = False) -> str:
    """Return an HTML page with the ids and classes of WebShop's pages, without their style.

    Args:
        page: Elements of the page.
        chosen: Names and values of the chosen options.
        for_person: Add a style sheet, and the action of a click in ``data-action``, with "{}" for the typed text.
    """
    body = "\n".join(
        _tag(element, is_chosen=(element.name, element.text) in chosen, action=_action(element) if for_person else "")
        for element in page
    )
    head = f"<title>WebShop</title>{_STYLE if for_person else ''}"
    return f"<!DOCTYPE html>\n<html>\n<head>{head}</head>\n<body>\n{body}\n</body>\n</html>"


def _action(element: Element) -> str:
    """Return the attribute with the action of a click on an element."""
    if element.part not in CLICKABLE:
        return ""
    action = "search[{}]" if element == Element(Part.BUTTON, SEARCH) else f"click[{element.text.lower()}]"
    return f' data-action="{html.escape(action)}"'


def _tag(element: Element, *, is_chosen: bool, action: str) -> str:
    text, name = html.escape(element.text), html.escape(element.name)
    match element.part:
        case Part.HEADING:
            return f"<h2>{text}</h2>"
        case Part.INSTRUCTION:
            return f'<div id="instruction-text"><h4>{text}</h4></div>'
        case Part.TEXT:
            return f"<p>{text}</p>"
        case Part.SEARCH_BAR:
            return '<input id="search_input" type="text" name="search_query">'
        case Part.BUTTON:
            return f'<button class="btn" type="submit"{action}>{text}</button>'
        case Part.LINK:
            return f'<a class="product-link" href="#"{action}>{text}</a>'
        case Part.OPTION:
            checked = " checked" if is_chosen else ""
            return f'<label><input type="radio" name="{name}" value="{text}"{checked}{action}>{text}</label>'
        case Part.PICTURE:
            return f'<img src="{text}" alt="">' if text else ""
