"""Whether an action or a tool gives away files of this machine.

- Notices that a file is opened, by whatever process and whether or not anything is shown of it. Linux only.
- What an environment's own sandbox shows to the programs of the policy.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from agentrl.testing.env_session import EnvSession, plain_text
from agentrl.testing.env_subject import (
    Broken,
    Finding,
    Missing,
    Subject,
    Suspect,
)
from agentrl.tool import Tool

IN_OPEN = 0x20
_EVENTS_BYTES = 4096


class WatchedFile:
    """A file that is watched.

    Args:
        descriptor: Of inotify; ``None`` where there is none, and nothing is noticed.
    """

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def was_opened(self) -> bool:
        """Whether it was opened since the last time."""
        try:
            return self._descriptor is not None and bool(os.read(self._descriptor, _EVENTS_BYTES))
        except BlockingIOError:
            return False


@contextmanager
def watched(path: Path) -> Iterator[WatchedFile]:
    """Watch a file."""
    descriptor = _inotify(path)
    try:
        yield WatchedFile(descriptor)
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _inotify(path: Path) -> int | None:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "inotify_init1"):
        return None
    descriptor = int(libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
    if descriptor < 0:
        return None
    if libc.inotify_add_watch(descriptor, os.fsencode(path), IN_OPEN) < 0:
        os.close(descriptor)
        return None
    return descriptor


def reads_no_files(subject: Subject) -> Finding:
    """No action and no tool of the episode opens a file that lies beside it: answers and tests do, too."""
    mark = secrets.token_hex(16)
    with tempfile.TemporaryDirectory() as folder, subject.session() as session:
        path = Path(folder) / "answer.txt"
        path.write_text(mark, encoding="utf-8")
        tried = 0
        with watched(path) as file:
            for what, shown in _tries(session, subject, str(path)):
                tried += 1
                if mark in shown:
                    raise Suspect(f"{what} shows a file of this machine: let it run in a sandbox")
                if file.was_opened():
                    raise Suspect(f"{what} opens a file of this machine: let it run in a sandbox")
    return Finding(detail=f"{tried} ways tried")


def _tries(session: EnvSession, subject: Subject, path: str) -> Iterator[tuple[str, str]]:
    """What was tried, and what it showed."""
    command, program = f"cat {path}", f"print(open({path!r}).read())"
    texts = (path, command, f"open({path!r}).read()", program, f"file://{path}")
    for text in (*texts, f"```bash\n{command}\n```", f"```python\n{program}\n```"):
        session.reset(subject.tasks[0])
        yield f"the action {text.replace(path, 'FILE')!r}", plain_text(session.step(text).observation)
    session.reset(subject.tasks[0])
    for tool in session.find("tools") or ():
        if tool.is_stateful:
            continue
        for text in texts:
            yield f"the tool {tool.name}", session.call_tool(tool, dict.fromkeys(_text_arguments(tool), text))


def _text_arguments(tool: Tool) -> list[str]:
    parameters = tool.schema["function"]["parameters"]["properties"]
    return [name for name, described in parameters.items() if described.get("type") == "string"]


LOOKED_AT = 4
"""Tasks."""


def keeps_secrets_out_of_the_sandbox(subject: Subject) -> Finding:
    """No hidden test and no solution can be read where the policy acts, neither at first nor after a step.

    ``visible()`` gives the texts of what can be read there by place, ``secrets()`` the texts that must not be.
    """
    read = 0
    with subject.session() as session:
        if session.find("visible") is None or session.find("secrets") is None:
            raise Missing("no visible() and secrets(), which tell of a sandbox")
        tasks = subject.tasks[:LOOKED_AT]
        for task in tasks:
            session.reset(task)
            read += _look(session)
            if not session.step("").done:
                read += _look(session)
    return Finding(detail=f"{read} things read, {len(tasks)} tasks", figures={"read": float(read)})


def _look(session: EnvSession) -> int:
    """How much is shown.

    Raises:
        Broken: a secret.
    """
    shown: Mapping[str, str] = session.call("visible")
    secrets: Sequence[str] = session.call("secrets")
    for place, text in shown.items():
        for secret in filter(str.strip, secrets):
            if secret in text:
                raise Broken(f"{place} shows {secret[:60]!r}")
    return len(shown)
