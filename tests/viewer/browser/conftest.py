"""Chromium, a server of the viewer, and small runs that it shows."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright
from support.waiting import join
from support.written_episodes import EpisodeWriter, scripts
from transformers import AutoTokenizer

from agentrl.runs.rl import train
from agentrl.viewer.server import ViewerServer, ViewerSettings

T = TypeVar("T")
CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


class RunningViewer:
    """A server of the viewer in a thread of its own."""

    def __init__(self, folders: list[Path], **settings: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self.server = ViewerServer(ViewerSettings(folders=folders, **settings))
        self.call(self.server.start())
        self.url = self.server.url

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the server's thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def wait_for_index(self, key: str) -> None:
        """Wait until all stored episodes of a source are in its index."""
        opened = self.server.library[key]
        opened.want_index()
        assert opened.index.scanned.wait(100)

    def close(self) -> None:
        """Stop the server and its thread."""
        self.call(self.server.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        join(self._thread)
        self.loop.close()


@pytest.fixture(scope="session")
def small_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small runs: ``third`` has the tasks of ``first``, ``second`` the written episodes in step 5."""
    from support.fixtures import tiny_runs  # a plugin, which pytest has to load first

    folder = tmp_path_factory.mktemp("viewer")
    with tiny_runs(folder) as start:
        for name, seed, rate in (("first", 1, "1e-2"), ("third", 1, "2e-2"), ("second", 2, "1e-2")):
            words = (
                f"run.seed={seed}",
                f"trainer.learning_rate={rate}",
                "evaluation={every: 2, tasks: 3, split: test}",
            )
            run = start(*words, name=name)
            train(run)
    tokenizer = AutoTokenizer.from_pretrained(run.folder.model)
    writer = EpisodeWriter(run.folder.path, tokenizer)
    written = writer.write(5, scripts())
    writer.write_tables(5, [trajectory for trajectory in written if trajectory.group_id == "9-shop"])
    return folder / "runs"


@pytest.fixture(scope="session")
def viewer(small_runs: Path) -> Iterator[RunningViewer]:
    """A server of the viewer on the small runs."""
    running = RunningViewer([small_runs])
    for name in ("first", "second", "third"):
        running.wait_for_index(name)
    yield running
    running.close()


@pytest.fixture
def run_viewer() -> Iterator[Callable[..., RunningViewer]]:
    """Start servers of the viewer on other folders."""
    running: list[RunningViewer] = []

    def start(folders: list[Path], **settings: str) -> RunningViewer:
        running.append(RunningViewer(folders, **settings))
        return running[-1]

    yield start
    for one in running:
        one.close()


@pytest.fixture(scope="session")
def browser(small_runs: Path) -> Iterator[Browser]:
    """Headless Chromium. Playwright's event loop stays in this thread, so the runs are trained before it starts."""
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


class Visitor:
    """A page of the browser whose errors fail the test."""

    def __init__(self, page: Page, url: str, folder: Path) -> None:
        self.page, self.url, self.folder = page, url, folder
        self.errors: list[str] = []
        self.expects_errors = False
        """True if the server refuses what the test asks for, which the browser logs."""
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", self._hear)

    def _hear(self, message: ConsoleMessage) -> None:
        is_refused = "status of 404" in message.text or ("status of 400" in message.text and self.expects_errors)
        if message.type == "error" and not is_refused:
            self.errors.append(message.text)

    def open(self, path: str, heading: str | None = None) -> Page:
        """Open an address of the viewer, and wait until it shows its data."""
        self.page.goto(self.url + path)
        self.page.locator("main").wait_for()
        self.page.locator(".loading").first.wait_for(state="detached")
        if heading is not None:
            self.page.get_by_role("heading", name=heading, exact=False).first.wait_for()
        return self.page


@pytest.fixture
def new_visitor(browser: Browser, viewer: RunningViewer, small_runs: Path) -> Iterator[Callable[..., Visitor]]:
    """Open pages of the browser with options such as a width or a colour scheme."""
    contexts, visitors = [], []

    def make(url: str | None = None, width: int = 1280, height: int = 860, scheme: str = "light") -> Visitor:
        context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme=scheme,  # type: ignore[arg-type]
            permissions=["clipboard-read", "clipboard-write"],
        )
        contexts.append(context)
        visitors.append(Visitor(context.new_page(), url or viewer.url, small_runs))
        return visitors[-1]

    yield make
    errors = [error for visitor in visitors for error in visitor.errors]
    for context in contexts:
        context.close()
    assert errors == []


@pytest.fixture
def visit(new_visitor: Callable[..., Visitor]) -> Visitor:
    """A page of 1280 pixels in the light theme."""
    return new_visitor()


@pytest.fixture
def keep_picture() -> Callable[[Page, str], None]:
    """Keep a picture for the documentation, in the folder that VIEWER_IMAGES names."""
    folder = os.environ.get("VIEWER_IMAGES")

    def keep(page: Page, name: str) -> None:
        if folder:
            page.wait_for_timeout(400)
            page.screenshot(path=Path(folder) / f"viewer-{name}.png")

    return keep
