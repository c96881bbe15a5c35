"""Noticing the end of actors that should live as long as the run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from agentrl.cluster.connection import Cluster, Place
from agentrl.errors import TrainingError

POLL_S = 0.5


class Losses:
    """Whose actor has ended.

    Args:
        cluster: That they are in.
        lives: Calls that never end, and where their actors are.
        on_loss: Called from a thread, once.
    """

    def __init__(self, cluster: Cluster, lives: Mapping[Any, Place], on_loss: Callable[[TrainingError], None]) -> None:
        self._cluster, self._lives, self._on_loss = cluster, lives, on_loss
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="actors", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        ray = self._cluster.ray
        while not self._closing.is_set():
            ended, _ = ray.wait(list(self._lives), num_returns=1, timeout=POLL_S)
            if ended and not self._closing.is_set():
                self._on_loss(self._loss(ended[0]))
                return

    def _loss(self, life: Any) -> TrainingError:
        place = self._lives[life]
        try:
            self._cluster.ray.get(life)
        except self._cluster.ray.exceptions.RayError as error:
            return self._cluster.loss(place, place.name, error)
        return self._cluster.loss(place, place.name, None)

    def close(self) -> None:
        """Whoever ends from now on is not lost."""
        self._closing.set()
        self._thread.join()


@contextmanager
def watching_actors(
    cluster: Cluster, actors: Sequence[tuple[Any, Place]], on_loss: Callable[[TrainingError], None]
) -> Iterator[None]:
    """Watch actors of engines during the block.

    Args:
        cluster: That they are in.
        actors: Their handles, and where they are.
        on_loss: Called from a thread, once, when one has ended.
    """
    losses = Losses(cluster, {actor.live.remote(): place for actor, place in actors}, on_loss)
    try:
        yield
    finally:
        losses.close()
