"""Headless Chromium, controlled through its DevTools protocol over a pipe.

One process serves all pages of this process; each page is a tab of its own. The pipe needs no port, and Chromium ends
when the pipe closes. Pages have no network.
"""

from __future__ import annotations

import atexit
import base64
import concurrent.futures
import contextlib
import fcntl
import functools
import json
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Mapping
from typing import Any

from agentrl.errors import EnvironmentFailure, UsageError

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
"""Names of the program, in the order in which they are tried."""
BROWSER_CALL_S = 60.0
"""Deadline of one command of the protocol, in seconds; the first one waits until the browser has started."""
BROWSER_END_S = 5.0
_FIRST_FREE = 10
"""Smallest number of a pipe's ends in this process, so that the numbers 3 and 4 are free in the child."""
_ARGUMENTS = (
    *("--headless", "--remote-debugging-pipe", "--no-first-run", "--no-default-browser-check", "--mute-audio"),
    *("--disable-gpu", "--disable-sync", "--disable-background-networking", "--disable-component-update"),
    *("--disable-extensions", "--disable-dev-shm-usage", "--disable-renderer-backgrounding"),
    *("--disable-background-timer-throttling", "--disable-backgrounding-occluded-windows", "--hide-scrollbars"),
    *("--font-render-hinting=none", "--force-device-scale-factor=1", "--force-color-profile=srgb"),
    "--host-resolver-rules=MAP * ~NOTFOUND",
)


def chromium_program() -> str:
    """Return the path of Chromium.

    Raises:
        UsageError: it is not installed.
    """
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        raise UsageError(
            "environment web_clicks needs Chromium",
            got=f"none of {', '.join(NAMES)} in PATH",
            expected="an installed browser",
            hint="apt-get install chromium fonts-dejavu-core",
        )
    return found


class Chromium:
    """A running browser.

    Raises:
        UsageError: it is not installed.
        EnvironmentFailure: it did not start.
    """

    def __init__(self) -> None:
        program = chromium_program()
        self._folder = tempfile.mkdtemp(prefix="agentrl-chromium-")
        self._pid, self._commands, self._answers = _start(program, self._folder)
        self._lock = threading.Lock()
        self._pending: dict[int, concurrent.futures.Future[Mapping[str, Any]]] = {}
        self._last = 0
        self._is_gone = False
        self._reader = threading.Thread(target=self._read, name="chromium", daemon=True)
        self._reader.start()

    @property
    def is_running(self) -> bool:
        """False once the browser has ended."""
        return not self._is_gone

    def call(self, method: str, session: str | None = None, **parameters: Any) -> Mapping[str, Any]:
        """Send a command, and return its result.

        Raises:
            EnvironmentFailure: the browser has ended, reports an error, or does not answer in time.
        """
        with self._lock:
            if self._is_gone:
                raise EnvironmentFailure("Chromium has ended", got=method, expected="a running browser")
            self._last += 1
            number, answer = self._last, concurrent.futures.Future[Mapping[str, Any]]()
            self._pending[number] = answer
            command = {"id": number, "method": method, "params": parameters}
            data = json.dumps(command | ({"sessionId": session} if session else {})).encode() + b"\0"
            try:
                _write(self._commands, data)
            except OSError as error:
                raise EnvironmentFailure("Chromium has ended", got=f"{method}: {error}") from error
        try:
            found = answer.result(BROWSER_CALL_S)
        except TimeoutError:
            self.close()
            raise EnvironmentFailure(f"Chromium did not answer {method} in {BROWSER_CALL_S:g} s") from None
        finally:
            self._pending.pop(number, None)
        if "error" in found:
            raise EnvironmentFailure(f"Chromium rejected {method}", got=found["error"].get("message"))
        result: Mapping[str, Any] = found["result"]
        return result

    def close(self) -> None:
        """End the browser and delete its files."""
        self._fail_pending("it was closed")
        with contextlib.suppress(OSError):
            os.close(self._commands)
        self._commands = -1
        _end(self._pid)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read(self) -> None:
        """Hand answers to their callers until the pipe ends; events are ignored."""
        buffer = b""
        with contextlib.suppress(OSError):
            while data := os.read(self._answers, 1 << 20):
                *messages, buffer = (buffer + data).split(b"\0")
                for message in map(json.loads, messages):
                    answer = self._pending.get(message.get("id"))
                    if answer is not None and not answer.done():
                        answer.set_result(message)
        os.close(self._answers)
        self._fail_pending("its pipe was closed")

    def _fail_pending(self, why: str) -> None:
        self._is_gone = True
        for answer in list(self._pending.values()):
            if not answer.done():
                answer.set_exception(EnvironmentFailure("Chromium has ended", got=why))


def _start(program: str, folder: str) -> tuple[int, int, int]:
    """Start the program in a process group of its own; return its pid, and the pipe's ends to write and to read."""
    (read_command, commands), (answers, write_answer) = _pipe(), _pipe()
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses its own sandbox to root
    arguments = [program, *_ARGUMENTS, *sandbox, f"--user-data-dir={folder}", "about:blank"]
    null = os.open(os.devnull, os.O_RDWR)
    places = ((null, 0), (null, 1), (null, 2), (read_command, 3), (write_answer, 4))
    try:
        pid = os.posix_spawn(
            program,
            arguments,
            {**os.environ, "HOME": folder},
            file_actions=[(os.POSIX_SPAWN_DUP2, source, target) for source, target in places],
            setpgroup=0,
        )
    finally:
        for end in (read_command, write_answer, null):
            os.close(end)
    return pid, commands, answers


def _pipe() -> tuple[int, int]:
    """Return a pipe's ends to read and to write, which no child inherits."""
    ends = os.pipe()
    moved = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE) for end in ends]
    for end in ends:
        os.close(end)
    return moved[0], moved[1]


def _write(pipe: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(pipe, view) :]


def _end(pid: int) -> None:
    """Wait for a process whose pipe is closed, and kill its group if it does not end."""
    deadline = time.monotonic() + BROWSER_END_S
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return
            time.sleep(0.01)


class Page:
    """A tab of the browser.

    Args:
        browser: The browser.
        width: Width in pixels.
        height: Height in pixels.
    """

    def __init__(self, browser: Chromium, width: int, height: int) -> None:
        self._browser = browser
        self._target = browser.call("Target.createTarget", url="about:blank", newWindow=True)["targetId"]
        attached = browser.call("Target.attachToTarget", targetId=self._target, flatten=True)
        self._call = functools.partial(browser.call, session=attached["sessionId"])
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    @property
    def is_open(self) -> bool:
        """False once the browser has ended."""
        return self._browser.is_running

    def show(self, html: str) -> None:
        """Replace the document; nothing of the previous one remains."""
        self._call("Page.navigate", url="about:blank")
        self.evaluate(f"document.open(); document.write({json.dumps(html)}); document.close()")

    def evaluate(self, expression: str) -> Any:
        """Return the JSON value of an expression of the page.

        Raises:
            EnvironmentFailure: the expression raises, or the browser fails.
        """
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in found:
            raise EnvironmentFailure("a script of the page failed", got=found["exceptionDetails"].get("text"))
        return found["result"].get("value")

    def click(self, x: int, y: int) -> None:
        """Press and release the left mouse button."""
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self) -> bytes:
        """Return the visible page as PNG."""
        return base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"])

    def close(self) -> None:
        """Close the tab."""
        with contextlib.suppress(EnvironmentFailure):
            self._browser.call("Target.closeTarget", targetId=self._target)


class SharedBrowser:
    """The browser of this process, started with its first page and ended at the process's exit or by `close`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._browser: Chromium | None = None
        self._owner = 0

    def open_page(self, width: int, height: int) -> Page:
        """Open a page, in a new browser if there is none or it has ended.

        Raises:
            UsageError: Chromium is not installed.
            EnvironmentFailure: the browser fails.
        """
        with self._lock:
            if self._owner != os.getpid():  # a forked process has no browser
                self._browser, self._owner = None, os.getpid()
            if self._browser is None or not self._browser.is_running:
                self._close()
                self._browser = Chromium()
            browser = self._browser
        return Page(browser, width, height)

    def close(self) -> None:
        """End the browser."""
        with self._lock:
            if self._owner == os.getpid():
                self._close()

    def _close(self) -> None:
        if self._browser is not None:
            self._browser.close()
            self._browser = None


SHARED = SharedBrowser()
atexit.register(SHARED.close)
