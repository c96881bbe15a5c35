"""The tasks of a served environment, fetched page by page when they are first asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from agentrl.remote.links import ask_now
from agentrl.remote.wire import TASKS, TASKS_PER_PAGE, read_task
from agentrl.task import Task

PATIENCE_S = 20.0
"""Seconds for which a lost or full server is asked again, unless the option ``patience_s`` says otherwise."""


@dataclass(slots=True)
class RemoteTasks:
    """A split of a served environment's tasks.

    Args:
        url: The server's address.
        split: The split's name.
        patience_s: Seconds for which a lost server is asked again.

    Raises:
        UsageError: there is no such split, or its data is not there.
        EnvironmentFailure: the server is lost.
    """

    url: str
    split: str
    patience_s: float = PATIENCE_S
    _size: int = field(init=False)
    _pages: dict[int, list[dict[str, Any]]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._size = int(self._ask(0)["total"])

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Task:
        if not 0 <= index < self._size:
            raise IndexError(index)
        page, place = divmod(index, TASKS_PER_PAGE)
        if page not in self._pages:
            self._ask(page)
        return read_task(self._pages[page][place], self.url)

    def _ask(self, page: int) -> Any:
        query = f"start={page * TASKS_PER_PAGE}&count={TASKS_PER_PAGE}"
        answer = ask_now(self.url, f"{TASKS}/{quote(self.split, safe='')}?{query}", patience_s=self.patience_s)
        self._pages[page] = answer["tasks"]
        return answer


def remote_tasks(url: str, split: str, *, patience_s: float = PATIENCE_S) -> RemoteTasks:
    """`RemoteTasks` in the shape of a spec's task source."""
    return RemoteTasks(url, split, patience_s)
