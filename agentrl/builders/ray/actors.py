"""Ray actors: their environment, their start, and the trainer's ranks as actors.

An actor first sets up its module path, environment variables and log, and checks that it sees the shared files.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from agentrl.builders.ray.connection import Cluster, ClusterPlace, gloo_variables
from agentrl.errors import AgentRLError, EngineError, RankLost, TrainingError, UsageError
from agentrl.training.distributed import Ranks
from agentrl.training.distributed.group import leave
from agentrl.training.distributed.launch import RANK_END_S, StartedRanks, join_store


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorEnvironment:
    """Environment of an actor, which is set up before its work."""

    paths: Sequence[str]
    """Module search path of the run's process, including the user's modules."""
    log: Path
    variables: Mapping[str, str]
    """Environment variables."""
    shared: Mapping[str, str]
    """Files and folders that the actor must see, with a hint for the error if it does not."""


class NodeActor:
    """Base class of actors."""

    def __init__(self, setting: ActorEnvironment) -> None:
        self._setting = setting
        sys.path.extend(path for path in setting.paths if path not in sys.path)
        os.environ.update(setting.variables)

    def missing(self) -> list[str]:
        """Return the shared files that the actor does not see; if there are none, redirect its output to its log."""
        missing = [path for path in self._setting.shared if not os.path.exists(path)]
        if not missing:
            self._setting.log.parent.mkdir(parents=True, exist_ok=True)
            log = os.open(self._setting.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
        return missing


class GpuReservation(NodeActor):
    """Actor that holds the GPUs reserved for a process that is not an actor."""

    def gpu(self) -> str:
        """Return the driver's name of the first GPU that Ray assigned to the actor."""
        return os.environ["CUDA_VISIBLE_DEVICES"].split(",")[0]


@contextmanager
def set_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables of this process during the block."""
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
    """Check that an actor sees all shared files and folders, which have a hint each.

    Raises:
        UsageError: some are `missing`.
    """
    for path in missing:
        raise UsageError(
            f"{place.name} does not see {Path(path).parent if Path(path).name.startswith('.') else path}",
            got=f"nothing at this path on {place.node}",
            expected="the files that the run's process sees",
            hint=shared[path],
        )


def check_actor(
    cluster: Cluster, actor: Any, shared: Mapping[str, str], place: ClusterPlace, *, kind: type[AgentRLError]
) -> None:
    """Wait until an actor has started, and check that it sees the shared files and folders.

    Raises:
        UsageError: it does not see all of them.
        AgentRLError: of this kind: it did not start.
    """
    ray = cluster.ray
    try:
        missing = ray.get(actor.missing.remote(), timeout=cluster.section.timeout_s)
    except ray.exceptions.RayError as error:
        raise cluster.loss(place, place.name, error, kind=kind) from error
    check_shared(shared, place, missing)


class PlacedActor:
    """Actor at a place, which can be replaced after its loss."""

    def __init__(self, cluster: Cluster, place: ClusterPlace, make: Callable[[ClusterPlace], Any]) -> None:
        self._cluster, self._make = cluster, make
        self.place, self.handle = place, make(place)

    @property
    def name(self) -> str:
        """Name of the place."""
        return self.place.name

    def check(self, shared: Mapping[str, str]) -> None:
        """Wait until the actor has started, and check that it sees the shared files; see `check_actor`.

        Raises:
            UsageError: it does not see all of them.
            EngineError: it did not start.
        """
        check_actor(self._cluster, self.handle, shared, self.place, kind=EngineError)

    def start_again(self, shared: Mapping[str, str]) -> None:
        """Replace the actor by a new one, on another node if its node is lost, and check it.

        Raises:
            UsageError: no node has the resources, or the new one does not see all files.
            EngineError: the new actor did not start.
        """
        self._cluster.kill(self.handle)
        place = self._cluster.find_place(self.place)
        while True:
            self.place, self.handle = place, self._make(place)
            self.check(shared)
            place = self._cluster.find_place(place)
            if place.node == self.place.node:
                return
            self._cluster.kill(self.handle)  # Ray has moved the place after it noticed the loss of the node


Work = Callable[[Ranks], None]
"""Function that a rank runs after it has joined the others."""
NODE_LOSS_S = 30.0
"""Seconds in which Ray detects a lost node: at once if connections break, otherwise by its health check."""
ROOT_CAUSE_S = 10.0
"""Seconds to wait for another rank's exit, as a rank may fail only because another one has failed."""
ONE_DEVICE = {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
"""Variables of a rank in an actor, which sees only its own GPU."""


RANK_CALLS = 2
"""Concurrent calls of a rank: `RankActor.serve` and pings."""
RANK_PING_EVERY_S = 5.0
RANK_SILENCE_S = 60.0
"""Timeout of pings of a rank; a rank that does not answer counts as lost, because its process may be suspended."""


class Ping(NamedTuple):
    """Ping of an actor."""

    answer: Any
    """Ray's reference to the answer."""
    sent: float


class RankActor(NodeActor):
    """Actor of a rank."""

    def serve(self, work: Work, *, own: str, host: str, port: int, rank: int, count: int) -> None:
        """Join the other ranks (rank 0 listens at `host` and `port`), and run rank 0's calls until shutdown."""
        os.environ.update({**ONE_DEVICE, **gloo_variables(own)})
        work(join_store(host, port, rank=rank, count=count))
        leave()

    def ping(self) -> None:
        """Return at once, even during `serve`; proves that the actor's process runs."""


class RankActors(StartedRanks):
    """Actors of all ranks except this process's.

    `on_loss` is called once, from a thread, when a rank exits unexpectedly; `count` includes this process.
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
        self._pings: dict[int, Ping] = {}

    def start(self) -> Ranks:
        """Start the ranks and join them as rank 0.

        Raises:
            UsageError: a rank does not see a shared file or folder.
            TrainingError: a rank exited, or did not join in time.
        """
        for rank in range(1, self.count):
            setting = self._setting(rank)
            self._actors[rank] = self._cluster.actor(self._place(rank), RankActor, setting, calls=RANK_CALLS)
        for rank, actor in self._actors.items():
            check_actor(self._cluster, actor, self._setting(rank).shared, self._place(rank), kind=TrainingError)
            self._cluster.find_place(self._place(rank))  # Ray may have moved it from a node that was lost just before
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
            return self._silence()
        causes = {numbers[end]: self._cause(end) for end in ended}
        if running and not any(self._is_root_cause(cause) for cause in causes.values()):
            # a failed collective is caused by another rank, whose exit may not be detected yet
            ended, _ = ray.wait(running, num_returns=1, timeout=ROOT_CAUSE_S)
            causes |= {numbers[end]: self._cause(end) for end in ended}
        rank = min(causes, key=lambda number: (not self._is_root_cause(causes[number]), number))
        return self._lost_rank(rank, causes[rank])

    def _lost_rank(self, rank: int, cause: BaseException | None) -> TrainingError:
        """Return the error for a rank; a run can restart unless the rank's own code failed."""
        own_code = isinstance(cause, AgentRLError | self._cluster.ray.exceptions.RayTaskError)
        what, kind = f"rank {rank} of the trainer", TrainingError if own_code else RankLost
        hint = "resume the run from its newest checkpoint with --resume"
        return self._cluster.loss(self._place(rank), what, cause, kind=kind, hint=hint)

    def _silence(self) -> TrainingError | None:
        """Ping the ranks; return the error for a suspended rank, which has not answered for `RANK_SILENCE_S`."""
        for rank, actor in list(self._actors.items()):
            now, ping = time.monotonic(), self._pings.get(rank)
            if ping is None or self._cluster.ray.wait([ping.answer], timeout=0)[0]:
                if ping is None or now - ping.sent > RANK_PING_EVERY_S:
                    self._pings[rank] = Ping(actor.ping.remote(), now)
            elif now - ping.sent > RANK_SILENCE_S:
                return self._lost_rank(rank, TimeoutError(f"no answer in {RANK_SILENCE_S:g} s"))
        return None

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

    def _is_root_cause(self, cause: BaseException | None) -> bool:
        """Return True if a rank is the root cause: it was killed, or raised an agentrl error."""
        return not isinstance(cause, self._cluster.ray.exceptions.RayTaskError)

    def _kill(self) -> None:
        for actor in self._actors.values():
            self._cluster.kill(actor)

    def close(self, *, at_once: bool) -> None:
        """Wait for ranks that were shut down, and kill the others; idempotent."""
        self._closing.set()
        if self._ends and not at_once:
            self._cluster.ray.wait(list(self._ends.values()), num_returns=len(self._ends), timeout=RANK_END_S)
        self._kill()
        self._actors = {}
