"""Actors of ranks and engines; each one first finds code and logs where the run has them, and says what it sees.

- Noticing the end of actors that should live as long as the run.
- Ranks 1, 2, … of a trainer as actors: what processes of one machine are, on the nodes of a cluster.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.builders.ray.connection import Cluster, ClusterPlace, gloo_variables
from agentrl.errors import AgentRLError, TrainingError, UsageError
from agentrl.training.distributed import Ranks
from agentrl.training.distributed.group import leave
from agentrl.training.distributed.launch import END_S, StartedRanks, join_store


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorEnvironment:
    """Settings of an actor, needed before it does anything."""

    paths: Sequence[str]
    """Where the process of the run finds modules: those of the user, too."""
    log: Path
    variables: Mapping[str, str]
    """Of the environment."""
    shared: Mapping[str, str]
    """Files and folders that it must see, and what to do when it does not."""


class NodeActor:
    """Base of the actors.

    Args:
        setting: Of this one.
    """

    def __init__(self, setting: ActorEnvironment) -> None:
        self._setting = setting
        sys.path.extend(path for path in setting.paths if path not in sys.path)
        os.environ.update(setting.variables)

    def missing(self) -> list[str]:
        """Return what the actor should see and does not; from now on it writes into its log."""
        missing = [path for path in self._setting.shared if not os.path.exists(path)]
        if not missing:
            self._setting.log.parent.mkdir(parents=True, exist_ok=True)
            log = os.open(self._setting.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
        return missing


class GpuReservation(NodeActor):
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


def check_shared(shared: Mapping[str, str], place: ClusterPlace, missing: Iterable[str]) -> None:
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


def look(cluster: Cluster, actor: Any, shared: Mapping[str, str], place: ClusterPlace) -> None:
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


POLL_S = 0.5


class ActorMonitor:
    """Whose actor has ended.

    Args:
        cluster: That they are in.
        lives: Calls that never end, and where their actors are.
        on_loss: Called from a thread, once.
    """

    def __init__(
        self, cluster: Cluster, lives: Mapping[Any, ClusterPlace], on_loss: Callable[[TrainingError], None]
    ) -> None:
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
    cluster: Cluster, actors: Sequence[tuple[Any, ClusterPlace]], on_loss: Callable[[TrainingError], None]
) -> Iterator[None]:
    """Watch actors of engines during the block.

    Args:
        cluster: That they are in.
        actors: Their handles, and where they are.
        on_loss: Called from a thread, once, when one has ended.
    """
    losses = ActorMonitor(cluster, {actor.live.remote(): place for actor, place in actors}, on_loss)
    try:
        yield
    finally:
        losses.close()


Work = Callable[[Ranks], None]
"""What a rank does from the meeting to the end."""
NODE_LOSS_S = 30.0
"""In which Ray notices that a node is gone: at once where its connections break, else by its health check."""
CAUSE_S = 10.0
"""Seconds during which a failed rank may only be reporting the failure of another one."""
ONE_DEVICE = {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
"""An actor sees its own GPU only."""


class RankActor(NodeActor):
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
        work(join_store(host, port, rank=rank, count=count))
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
        setting: Callable[[int], ActorEnvironment],
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

    def _place(self, rank: int) -> ClusterPlace:
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
            # a failed collective points to another rank, whose end may not have been noticed yet
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
        """Check whether a rank is the root cause: it was killed, or says in our own words what is wrong."""
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
