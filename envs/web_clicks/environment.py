"""Clicks on generated pages, which headless Chromium shows."""

from __future__ import annotations

import functools
import hashlib
import json
import random
import re
from collections.abc import Sequence
from typing import Any

import gymnasium
from agentrl.envs.choices import choose_all
from agentrl.envs.content_space import ContentSpace
from agentrl.envs.pictures import ObservationForm, observation_form, shows_images

from agentrl.env import EnvironmentSpec, Isolation
from agentrl.errors import EnvironmentFailure, UsageError
from agentrl.message import Content, ImagePart, TextPart
from agentrl.task import seed_tasks

from .chromium import SHARED, Page, chromium_program
from .pages import MIN_SIZE, READ, Element, PageKind, PageTask, make_page

WIDTH, HEIGHT = 336, 252
"""Pixels of a page: 12 x 9 tokens of Qwen2.5-VL."""
MAX_SIZE = 4096
MAX_STEPS = 12
_PAIR = re.compile(r"(?<![\d.-])(\d{1,5})\s*,\s*(\d{1,5})(?![\d.])")
_CLOSED = "The page is closed."


class Clicks(gymnasium.spaces.Text):
    """Space of texts; a sample is a click anywhere on the page."""

    def __init__(self, width: int, height: int) -> None:
        super().__init__(400)
        self.width, self.height = width, height

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """Return a click."""
        return f"click({self.np_random.integers(self.width)}, {self.np_random.integers(self.height)})"


class WebClicks(gymnasium.Env[Content, str]):
    """Follow an instruction on a web page by clicking; reward 1 if it is done when the last button is pressed.

    Args:
        kinds: Kinds of pages (default: all of `PageKind`).
        width: Width of the page in pixels.
        height: Height of the page in pixels.
        max_steps: Number of clicks after which an episode is truncated.
        observation: ``image`` for screenshots, or ``text`` for a list of the page's elements and their positions.

    Raises:
        UsageError: an option is not valid, or Chromium is not installed.
    """

    action_hint = "click(x, y), with x and y in pixels from the top left corner, for example: click(120, 45)"

    def __init__(
        self,
        *,
        kinds: Sequence[str] | None = None,
        width: int = WIDTH,
        height: int = HEIGHT,
        max_steps: int = MAX_STEPS,
        observation: str = ObservationForm.IMAGE,
    ) -> None:
        self.kinds = choose_all(PageKind, kinds, "kind of page")
        self.form = observation_form(observation, of="web_clicks")
        if not (MIN_SIZE[0] <= width <= MAX_SIZE and MIN_SIZE[1] <= height <= MAX_SIZE):
            expected = f"{MIN_SIZE[0]} x {MIN_SIZE[1]} to {MAX_SIZE} x {MAX_SIZE}"
            raise UsageError("the size of web_clicks' page is not valid", got=f"{width} x {height}", expected=expected)
        chromium_program()
        self.width, self.height, self.max_steps = width, height, max_steps
        self.observation_space = ContentSpace(8192)
        self.action_space = Clicks(width, height)
        self.task: PageTask
        self.elements: list[Element] = []
        self._page: Page | None = None
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Content, dict[str, Any]]:
        """Show the page of the seed."""
        super().reset(seed=seed)
        drawn = int(self.np_random.integers(2**31)) if seed is None else seed
        kind = random.Random(f"web_clicks/{drawn}").choice(self.kinds)
        self.task = make_page(kind, drawn, self.width, self.height)
        self._steps = 0
        if self._page is None or not self._page.is_open:
            self._page = SHARED.open_page(self.width, self.height)
        page = self._page
        page.show(self.task.document)
        self._read(page)
        goal = f"Your task is to: {self.task.goal}."
        size = f"The page is {self.width} pixels wide and {self.height} pixels high."
        return self._show(page, before=f"{size}\n{goal}"), {"success": False, "goal": goal}

    def step(self, action: str) -> tuple[Content, float, bool, bool, dict[str, Any]]:
        """Click."""
        page, place = self._page, self._parse(action)
        if page is None or not page.is_open:
            raise EnvironmentFailure("the browser of this episode has exited", hint="the next episode starts a new one")
        self._steps += 1
        is_late = self._steps >= self.max_steps
        if place is None:
            problem = f"That is not a click on the page, so nothing happened. Write {self.action_hint}"
            return self._show(page, before=problem), 0.0, False, is_late, {"success": False, "valid": False}
        wanted = self.task.next_click(self.elements)
        page.click(*place)
        pressed = self._read(page)
        if not pressed:
            return self._show(page), 0.0, False, is_late, {"success": False, "valid": True}
        solved = pressed == wanted == self.task.final
        closed: Content = (TextPart(text=_CLOSED),)
        return closed, float(solved), True, False, {"success": solved, "valid": True}

    def expert(self) -> ClickExpert:
        """Return a policy that solves every page."""
        return ClickExpert(self)

    def state_key(self) -> str:
        """Return a key of the goal and the visible elements."""
        state = json.dumps([self.task.goal, list(map(str, self.elements))])
        return hashlib.blake2b(state.encode(), digest_size=16).hexdigest()

    def close(self) -> None:
        """Close the page."""
        if self._page is not None:
            self._page.close()
            self._page = None

    def _read(self, page: Page) -> str:
        """Read the visible elements, and return the name of the pressed button; empty if none was."""
        found = json.loads(page.evaluate(READ))
        self.elements = [Element(**{n: v for n, v in one.items() if n != "seen"}) for one in found["elements"]]
        return str(found["pressed"])

    def _parse(self, action: str) -> tuple[int, int] | None:
        """Return the place of a click; ``None`` if the text has no place or several, or one outside the page."""
        pairs = _PAIR.findall(action)
        if len(pairs) != 1:
            return None
        x, y = map(int, pairs[0])
        return (x, y) if x < self.width and y < self.height else None

    def _show(self, page: Page, *, before: str = "") -> Content:
        listed = "\n".join(map(str, self.elements))
        text = f"{before}\n" if before else ""
        if self.form is ObservationForm.TEXT:
            return (TextPart(text=text + listed),)
        image = ImagePart(data=page.screenshot(), alternative=listed)
        return (TextPart(text=text), image) if text else (image,)


class ClickExpert:
    """Expert that clicks on the middle of the right element."""

    def __init__(self, environment: WebClicks) -> None:
        self._environment = environment

    def act(self, observation: Content) -> str:
        """Return the next click."""
        elements = self._environment.elements
        wanted = self._environment.task.next_click(elements)
        found = next(element for element in elements if element.name == wanted)
        return f"click({found.x}, {found.y})"


SPEC = EnvironmentSpec(
    name="web_clicks",
    make=WebClicks,
    tasks=functools.partial(seed_tasks, "web_clicks"),
    description=(
        "Follow an instruction on a web page by clicking: a screenshot of Chromium in, a position out. Pages with"
        " buttons, coloured shapes, check boxes, radio buttons, tabs, lists, numbers and dialogs are generated from"
        " seeds. Needs Chromium (apt-get install chromium fonts-dejavu-core). Options: kinds, width, height, max_steps,"
        " observation (image, or text for a list of the elements)."
    ),
    instructions=(
        "You see a web page and act on it by clicking. Each turn, click on one position. The task ends when you click"
        " on the button or link that completes it, so do everything else first."
    ),
    max_turns=MAX_STEPS,
    reward_range=(0.0, 1.0),
    success_threshold=1.0,
    isolation=Isolation.THREAD,
    images_of=functools.partial(shows_images, observation=ObservationForm.IMAGE),
    scores={"random": 0.05, "expert": 1.0},
)
