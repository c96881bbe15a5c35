"""Generated pages: a goal in words, the document, and how a correct visitor proceeds.

Elements that matter have a role, a name and a state in the document (``data-role`` and so on). A script of the page
handles clicks; `READ` is an expression for the visible elements and the name of the button that was pressed last.
"""

from __future__ import annotations

import enum
import html
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

WORDS = (
    *("anchor", "basket", "candle", "daisy", "eagle", "feather", "garden", "hammer"),
    *("island", "jacket", "kettle", "ladder", "marble", "needle", "orange", "pencil"),
    *("quartz", "ribbon", "saddle", "tunnel", "umbrella", "violin", "walnut", "yogurt"),
    *("zipper", "acorn", "bonnet", "cactus", "drum", "ember", "falcon", "goose"),
)
COLOURS = {"red": "#dc2828", "green": "#28a046", "blue": "#285adc", "orange": "#f08c1e", "purple": "#8c3cb4"}
SHAPES = {
    "circle": "border-radius:50%",
    "square": "",
    "triangle": "clip-path:polygon(50% 0,100% 100%,0 100%)",
}
SUBMIT = "Submit"
CLOSE = "Close"
MIN_SIZE = (280, 210)
"""Width and height of the smallest page, in pixels."""
READ = """JSON.stringify({pressed: window.pressed, elements: [...document.querySelectorAll('[data-role]')].map(e => {
  const r = e.getBoundingClientRect(), x = Math.round(r.x + r.width / 2), y = Math.round(r.y + r.height / 2);
  const top = document.elementFromPoint(x, y);
  return {role: e.dataset.role, name: e.dataset.name, state: e.dataset.state || '', x, y, seen: top === e};
}).filter(e => e.seen)})"""
_SCRIPT = """(() => {
window.pressed = '';
const all = (role) => [...document.querySelectorAll('[data-role=' + role + ']')];
const show = (e, shown) => { e.style.display = shown ? 'block' : 'none'; };
document.addEventListener('click', ({target: e}) => {
  const {role, name, state} = e.dataset;
  if (role === 'checkbox') e.dataset.state = state ? '' : 'checked';
  if (role === 'radio') all('radio').forEach(o => { o.dataset.state = o === e ? 'checked' : ''; });
  if (role === 'tab') {
    all('tab').forEach(o => { o.dataset.state = o === e ? 'open' : ''; });
    document.querySelectorAll('[data-panel]').forEach(p => show(p, p.dataset.panel === name));
  }
  if (role === 'list') document.querySelectorAll('[data-role=item]').forEach(i => show(i, i.style.display === 'none'));
  if (role === 'item') {
    all('list').forEach(l => { l.dataset.state = l.textContent = name; });
    all('item').forEach(i => show(i, false));
  }
  if (role === 'step') all('number').forEach(n => {
    n.dataset.state = n.textContent = String(Number(n.dataset.state) + (name === 'plus' ? 1 : -1));
  });
  if (role === 'dialog') show(document.getElementById('dialog'), false);
  if (['button', 'link', 'shape'].includes(role)) window.pressed = name;
});
})();"""
_STYLE = """
* { box-sizing: border-box; user-select: none; cursor: default }
body { margin: 0; background: #fff; font: 14px 'DejaVu Sans', sans-serif; overflow: hidden }
[data-role], [data-panel], #dialog { position: absolute }
[data-role] { line-height: 26px; height: 28px; white-space: nowrap }
[data-role=button], [data-role=dialog], [data-role=step] {
  background: #e6e6e6; border: 1px solid #555; border-radius: 4px; text-align: center }
[data-role=checkbox]::before { content: '\\2610  ' }
[data-role=checkbox][data-state=checked]::before { content: '\\2612  ' }
[data-role=radio]::before { content: '\\25CB  ' } [data-role=radio][data-state=checked]::before { content: '\\25CF  ' }
[data-role=tab] { background: #ddd; border: 1px solid #555; text-align: center }
[data-role=tab][data-state=open] { background: #fff; border-bottom: none }
[data-role=link] { color: #1a3fd0; text-decoration: underline }
[data-role=list], [data-role=item], [data-role=number] { border: 1px solid #555; padding-left: 6px; background: #fff }
[data-role=item] { background: #f3f3ff; z-index: 1 }
#dialog { background: #fff8dc; border: 2px solid #333; z-index: 2 }
"""


class PageKind(enum.StrEnum):
    """Kind of task on a page."""

    BUTTON = "button"
    SHAPE = "shape"
    CHECKBOXES = "checkboxes"
    RADIO = "radio"
    TABS = "tabs"
    DROPDOWN = "dropdown"
    NUMBER = "number"
    DIALOG = "dialog"


@dataclass(frozen=True, slots=True, kw_only=True)
class Element:
    """A visible element of a page."""

    role: str
    name: str
    state: str
    x: int
    """Column of its centre, in pixels."""
    y: int

    def __str__(self) -> str:
        state = f" ({self.state})" if self.state and self.state != self.name else ""
        return f"{self.role} {self.name}{state} at {self.x}, {self.y}"


Elements = Sequence[Element]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTask:
    """A page and what to do on it."""

    goal: str
    """Continuation of "Your task is to"."""
    document: str
    next_click: Callable[[Elements], str]
    """Returns the name of the element that a correct visitor clicks next; the last one ends the task."""
    final: str
    """Name of the element whose click ends a solved task."""


@dataclass(frozen=True, slots=True)
class _Canvas:
    """Random positions on a page."""

    rng: random.Random
    width: int
    height: int

    def places(self, count: int, width: int, height: int) -> list[tuple[int, int]]:
        """Return the corners of `count` boxes that do not overlap."""
        columns, rows = self.width // (width + 8), self.height // (height + 8)
        cells = self.rng.sample([(row, column) for row in range(rows) for column in range(columns)], count)
        across, down = self.width // columns, self.height // rows
        return [
            (
                column * across + self.rng.randint(0, across - width),
                row * down + self.rng.randint(0, down - height),
            )
            for row, column in cells
        ]

    def words(self, count: int) -> list[str]:
        """Return distinct words."""
        return self.rng.sample(WORDS, count)


def make_page(kind: PageKind, seed: int, width: int, height: int) -> PageTask:
    """Return the page of a seed.

    Args:
        kind: Kind of the task.
        seed: Decides names and positions.
        width: Width in pixels, at least that of `MIN_SIZE`.
        height: Height in pixels.
    """
    canvas = _Canvas(random.Random(f"web_clicks/{kind}/{seed}"), width, height)
    return _MAKERS[kind](canvas)


def _button(canvas: _Canvas) -> PageTask:
    words = canvas.words(canvas.rng.randint(4, 7))
    wanted = canvas.rng.choice(words)
    places = canvas.places(len(words), 90, 28)
    body = "".join(_element("button", word, *place, width=90) for word, place in zip(words, places, strict=True))
    return _page(f"click on the button {wanted}", body, lambda _: wanted, wanted)


def _shape(canvas: _Canvas) -> PageTask:
    looks = canvas.rng.sample([(colour, shape) for colour in COLOURS for shape in SHAPES], canvas.rng.randint(5, 8))
    wanted = " ".join(canvas.rng.choice(looks))
    body = ""
    for (colour, shape), (x, y) in zip(looks, canvas.places(len(looks), 40, 40), strict=True):
        style = f"width:40px;height:40px;background:{COLOURS[colour]};{SHAPES[shape]}"
        body += _element("shape", f"{colour} {shape}", x, y, text="", style=style)
    return _page(f"click on the {wanted}", body, lambda _: wanted, wanted)


def _checkboxes(canvas: _Canvas) -> PageTask:
    words, body = _column(canvas, "checkbox")
    chosen = canvas.rng.sample(words, canvas.rng.randint(1, 3))
    wanted = [word for word in words if word in chosen]

    def next_click(elements: Elements) -> str:
        boxes = [element for element in elements if element.role == "checkbox"]
        return next((box.name for box in boxes if (box.name in wanted) != bool(box.state)), SUBMIT)

    names = " and ".join(filter(None, [", ".join(wanted[:-1]), wanted[-1]]))
    return _page(f"select {names} and nothing else, then click on Submit", body, next_click)


def _radio(canvas: _Canvas) -> PageTask:
    words, body = _column(canvas, "radio")
    wanted = canvas.rng.choice(words)
    return _page(f"choose {wanted}, then click on Submit", body, _choose("radio", wanted, "checked"))


def _tabs(canvas: _Canvas) -> PageTask:
    words = canvas.words(12)
    tabs, links = words[:3], words[3:]
    width, left, top = 86, canvas.rng.randint(0, canvas.width - 264), canvas.rng.randint(0, 40)
    body, opened = "", canvas.rng.randrange(3)
    for number, tab in enumerate(tabs):
        body += _element("tab", tab, left + number * width, top, width=width, state="open" if number == opened else "")
        places = _Canvas(canvas.rng, canvas.width, canvas.height - top - 40).places(3, 90, 28)
        inside = "".join(
            _element("link", link, *place) for link, place in zip(links[3 * number :][:3], places, strict=True)
        )
        shown = "block" if number == opened else "none"
        body += f'<div data-panel="{tab}" style="display:{shown};left:0;top:{top + 36}px">{inside}</div>'
    tab, link = canvas.rng.choice([(tab, links[3 * n + k]) for n, tab in enumerate(tabs) for k in range(3)])

    def next_click(elements: Elements) -> str:
        return link if any(element.name == link and element.role == "link" for element in elements) else tab

    return _page(f"open the tab {tab} and click on the link {link}", body, next_click, link)


def _dropdown(canvas: _Canvas) -> PageTask:
    words = canvas.words(4)
    wanted, left = canvas.rng.choice(words), canvas.rng.randint(4, canvas.width - 230)
    top = canvas.rng.randint(4, canvas.height - 160)
    body = _element("list", "list", left, top, text="choose", width=110)
    for number, word in enumerate(words, start=1):
        body += _element("item", word, left, top + 28 * number, width=110, style="display:none")
    body += _element("button", SUBMIT, left + 130, top + canvas.rng.randint(0, 110), width=80)
    chosen = _choose("list", wanted, wanted)

    def next_click(elements: Elements) -> str:
        if chosen(elements) == SUBMIT:
            return SUBMIT
        return wanted if any(element.role == "item" for element in elements) else "list"

    return _page(f"choose {wanted} in the list, then click on Submit", body, next_click)


def _number(canvas: _Canvas) -> PageTask:
    start = canvas.rng.randint(5, 15)
    wanted = start + canvas.rng.choice([-3, -2, -1, 1, 2, 3])
    (minus, plus, number, submit) = canvas.places(4, 80, 28)
    body = _element("step", "minus", *minus, text="&minus;", width=40)
    body += _element("step", "plus", *plus, text="+", width=40)
    body += _element("number", "number", *number, text=str(start), width=50, state=str(start))
    body += _element("button", SUBMIT, *submit, width=80)

    def next_click(elements: Elements) -> str:
        shown = next(int(element.state) for element in elements if element.role == "number")
        return SUBMIT if shown == wanted else "plus" if shown < wanted else "minus"

    return _page(f"set the number to {wanted}, then click on Submit", body, next_click)


def _dialog(canvas: _Canvas) -> PageTask:
    words = canvas.words(4)
    wanted = canvas.rng.choice(words[:3])
    places = canvas.places(3, 90, 28)
    body = "".join(_element("button", word, *place, width=90) for word, place in zip(words[:3], places, strict=True))
    width, height = canvas.width - canvas.rng.randint(20, 60), canvas.height - canvas.rng.randint(10, 40)
    close = (canvas.rng.randint(8, width - 90), canvas.rng.randint(40, height - 40))
    inside = f'<p style="margin:12px">Today: {words[3]}</p>' + _element("dialog", CLOSE, *close, width=80)
    body += f'<div id="dialog" style="left:4px;top:4px;width:{width}px;height:{height}px">{inside}</div>'

    def next_click(elements: Elements) -> str:
        return CLOSE if any(element.role == "dialog" for element in elements) else wanted

    return _page(f"close the dialog and click on the button {wanted}", body, next_click, wanted)


def _column(canvas: _Canvas, role: str) -> tuple[list[str], str]:
    """Return words, and a column of elements with their names above or below a button."""
    words = canvas.words(canvas.rng.randint(4, 5))
    left, top = canvas.rng.randint(4, canvas.width - 140), canvas.rng.randint(0, 40)
    first = canvas.rng.choice([0, 34])
    body = "".join(_element(role, word, left, top + first + 28 * n, width=130) for n, word in enumerate(words))
    below = 0 if first else 28 * len(words) + 2
    return words, body + _element("button", SUBMIT, canvas.rng.randint(4, canvas.width - 90), top + below, width=80)


def _choose(role: str, name: str, state: str) -> Callable[[Elements], str]:
    """Return a function that names the element to click until the element with a role has a state."""

    def next_click(elements: Elements) -> str:
        found = [element for element in elements if element.role == role and element.state == state]
        return SUBMIT if any(element.name in (name, role) for element in found) else name

    return next_click


def _element(
    role: str, name: str, x: int, y: int, *, text: str | None = None, width: int = 0, state: str = "", style: str = ""
) -> str:
    place = f"left:{x}px;top:{y}px;" + (f"width:{width}px;" if width else "")
    shown = html.escape(name) if text is None else text
    return f'<div data-role="{role}" data-name="{name}" data-state="{state}" style="{place}{style}">{shown}</div>'


def _page(goal: str, body: str, next_click: Callable[[Elements], str], final: str = SUBMIT) -> PageTask:
    document = (
        f"<!DOCTYPE html><html><head><meta charset=utf-8><style>{_STYLE}</style></head>"
        f"<body>{body}<script>{_SCRIPT}</script></body></html>"
    )
    return PageTask(goal=goal, document=document, next_click=next_click, final=final)


_MAKERS: Mapping[PageKind, Callable[[_Canvas], PageTask]] = {
    PageKind.BUTTON: _button,
    PageKind.SHAPE: _shape,
    PageKind.CHECKBOXES: _checkboxes,
    PageKind.RADIO: _radio,
    PageKind.TABS: _tabs,
    PageKind.DROPDOWN: _dropdown,
    PageKind.NUMBER: _number,
    PageKind.DIALOG: _dialog,
}
