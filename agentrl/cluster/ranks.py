"""Ranks 1, 2, … of a trainer as actors: what processes of one machine are, on the nodes of a cluster."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentrl.cluster.connection import Cluster, Place
from agentrl.cluster.host import Host, Setting, look
from agentrl.cluster.interface import gloo_variables
from agentrl.errors import AgentRLError, TrainingError
from agentrl.training.ranks import Ranks
from agentrl.training.ranks.group import leave
from agentrl.training.ranks.processes import END_S
from agentrl.training.ranks.started import StartedRanks, meet

Work = Callable[[Ranks], None]
"""What a rank does from the meeting to the end."""
NODE_LOSS_S = 30.0
"""In which Ray notices that a node is gone: at once where its connections break, else by its health check."""
CAUSE_S = 10.0
"""How long a rank that failed is taken for one that tells of another."""
ONE_DEVICE = {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
"""An actor sees its own GPU only."""


class RankActor(Host):
    """A rank."""

    def serve(self, work: Work, *, own: str, host: str, port: int, rank: int, count: int) -> None:
        """Meet the others, and do what rank 0 says until it says that this was all.

        Args:
            work: What that is.
            own: Address of this node.
            host: Where rank 0 waits.
            port: There.
            rank: This one's number.
            count: How many there are.
        """
        os.environ.update({**ONE_DEVICE, **gloo_variables(own)})
        work(meet(host, port, rank=rank, count=count))
        leave()


class RankActors(StartedRanks):
    """The actors of all ranks but this one.

    Args:
        count: Ranks, this one included.
        logs: Folder of their logs.
        on_loss: Called from a thread, once, when one has ended by itself.
        cluster: With a place for each.
        setting: Of a rank, by its number.
        work: What ranks do.
        host: Address of this process in the cluster.
    """

    explain_s = NODE_LOSS_S

    def __init__(
        self,
        count: int,
        *,
        logs: Path,
        on_loss: Callable[[TrainingError], None] = lambda _: None,
        cluster: Cluster,
        setting: Callable[[int], Setting],
        work: Work,
        host: str,
    ) -> None:
        super().__init__(count, logs=logs, on_loss=on_loss, host=host)
        self._cluster, self._setting, self._work = cluster, setting, work
        self._actors: dict[int, Any] = {}
        self._ends: dict[int, Any] = {}

    def start(self) -> Ranks:
        """Start them, and meet them; rank 0, this process, is one of them.

        Raises:
            UsageError: one does not see what ranks share.
            TrainingError: one ended, or was not there in time.
        """
        for rank in range(1, self.count):
            self._actors[rank] = self._cluster.actor(self._place(rank), RankActor, self._setting(rank))
        for rank, actor in self._actors.items():
            look(self._cluster, actor, self._setting(rank).shared, self._place(rank))
        return super().start()

    def _place(self, rank: int) -> Place:
        return self._cluster.places[f"rank {rank}"]

    def _start_rank(self, rank: int, port: int) -> None:
        own = self._place(rank).node.address
        self._ends[rank] = self._actors[rank].serve.remote(
            self._work, own=own, host=self._host, port=port, rank=rank, count=self.count
        )

    def _loss(self) -> TrainingError | None:
        ray = self._cluster.ray
        numbers = {end: rank for rank, end in self._ends.items()}
        ended, running = ray.wait(list(numbers), num_returns=len(numbers), timeout=0)
        if not ended:
            return None
        causes = {numbers[end]: self._cause(end) for end in ended}
        if running and not any(self._says_it_all(cause) for cause in causes.values()):
            # what failed in a collective tells of another rank, whose end may not have come here yet
            ended, _ = ray.wait(running, num_returns=1, timeout=CAUSE_S)
            causes |= {numbers[end]: self._cause(end) for end in ended}
        rank = min(causes, key=lambda number: (not self._says_it_all(causes[number]), number))
        return self._cluster.loss(self._place(rank), f"rank {rank} of the trainer", causes[rank])

    def _cause(self, end: Any) -> BaseException | None:
        try:
            self._cluster.ray.get(end)
        except self._cluster.ray.exceptions.RayTaskError as error:
            cause: BaseException = error.cause
            return cause if isinstance(cause, AgentRLError) else error
        except self._cluster.ray.exceptions.RayError as error:
            lost: BaseException = error
            return lost
        return None

    def _says_it_all(self, cause: BaseException | None) -> bool:
        """Whether a rank is the one that began it: it was killed, or says in our own words what is wrong."""
        return not isinstance(cause, self._cluster.ray.exceptions.RayTaskError)

    def _kill(self) -> None:
        for actor in self._actors.values():
            self._cluster.kill(actor)

    def close(self, *, at_once: bool) -> None:
        """Wait for ranks that were dismissed, and kill what is left; idempotent."""
        self._closing.set()
        if self._ends and not at_once:
            self._cluster.ray.wait(list(self._ends.values()), num_returns=len(self._ends), timeout=END_S)
        self._kill()
        self._actors = {}
