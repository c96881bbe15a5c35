"""First renderings of a chat template, which may never end: each has a deadline, before anything is played."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from agentrl.errors import UsageError
from agentrl.errors.foreign import DaemonThreads, ignore_result

RENDERING_S = 20.0
"""Deadline in seconds of one rendering while a template is tried; ordinary templates take less than a millisecond."""
_THREADS = DaemonThreads("chat template")
T = TypeVar("T")


class EndlessTemplate(UsageError):
    """A chat template did not end before the deadline; its thread is abandoned."""


def render_in_time(render: Callable[[], T], roles: str) -> T:
    """Render in a daemon thread.

    Args:
        render: Renders the template.
        roles: Roles of the messages, for the error.

    Raises:
        EndlessTemplate: no result within `RENDERING_S`.
    """
    running = _THREADS.submit(render)
    try:
        return running.result(RENDERING_S)
    except TimeoutError as late:
        if running.done():  # just now, or with an error of this type
            return running.result()
        running.add_done_callback(ignore_result)
        raise EndlessTemplate(
            "the chat template does not end",
            got=f"messages with roles {roles} not rendered in {RENDERING_S:g} s",
            expected="a template whose loops and recursive macros end",
            hint="set model.chat_template to another template (a shipped one, such as chatml, or a file)",
        ) from late
