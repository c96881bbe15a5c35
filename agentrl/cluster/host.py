"""What every actor does first: it finds code and logs where the run has them, and says what it sees."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.cluster.connection import Cluster, Place
from agentrl.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What an actor needs to know before it does anything."""

    paths: Sequence[str]
    """Where the process of the run finds modules: those of the user, too."""
    log: Path
    variables: Mapping[str, str]
    """Of the environment."""
    shared: Mapping[str, str]
    """Files and folders that it must see, and what to do when it does not."""


class Host:
    """Base of the actors.

    Args:
        setting: Of this one.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        sys.path.extend(path for path in setting.paths if path not in sys.path)
        os.environ.update(setting.variables)

    def missing(self) -> list[str]:
        """What it should see and does not; from now on it writes into its log."""
        missing = [path for path in self._setting.shared if not os.path.exists(path)]
        if not missing:
            self._setting.log.parent.mkdir(parents=True, exist_ok=True)
            log = os.open(self._setting.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
        return missing


class Holder(Host):
    """Holds what was reserved for a process that is no actor."""

    def gpu(self) -> str:
        """The first GPU that Ray gave it, as the driver calls it."""
        return os.environ["CUDA_VISIBLE_DEVICES"].split(",")[0]


@contextmanager
def variables_set(variables: Mapping[str, str]) -> Iterator[None]:
    """Variables of this process's environment during the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def check_shared(shared: Mapping[str, str], place: Place, missing: Iterable[str]) -> None:
    """Refuse what cannot work across nodes.

    Args:
        shared: What the actor must see, and what to do when it does not.
        place: Where it is.
        missing: What it does not see.

    Raises:
        UsageError: there is something.
    """
    for path in missing:
        raise UsageError(
            f"{place.name} does not see {Path(path).parent if Path(path).name.startswith('.') else path}",
            got=f"nothing there on {place.node}",
            expected="what the process of the run has there",
            hint=shared[path],
        )


def look(cluster: Cluster, actor: Any, shared: Mapping[str, str], place: Place) -> None:
    """Wait until an actor has started, and check that it shares what it must.

    Raises:
        UsageError: it does not.
        TrainingError: it did not start.
    """
    ray = cluster.ray
    try:
        missing = ray.get(actor.missing.remote(), timeout=cluster.section.timeout_s)
    except ray.exceptions.RayError as error:
        raise cluster.loss(place, place.name, error) from error
    check_shared(shared, place, missing)
