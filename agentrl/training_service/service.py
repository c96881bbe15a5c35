"""Execution of the service's requests: sessions, runs with ordered requests, samplers, checkpoints.

event loop                        training thread               sampling thread
one ordered queue per run ──────► one request at a time  ┐
samplers ────────────────────────────────────────────────┼────► engines, concurrently
                                  checkpoints, snapshots ┘
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import random
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from agentrl.errors import UsageError, shorten
from agentrl.errors.foreign import run_in_own_thread
from agentrl.training_service import requests
from agentrl.training_service.futures import FetchedResult, Futures, fingerprint, protocol_buffer
from agentrl.training_service.runs import AdamStep, BaseWeights, RunSettings, TrainingRun
from agentrl.training_service.samplers import BASE, Samplers, SamplerWeights
from agentrl.training_service.sessions import Busy, ClientSession, ServedRun, WaitingRequest, Work
from agentrl.training_service.store import (
    EPHEMERAL,
    SAMPLER,
    TRAINING,
    CheckpointInfo,
    CheckpointStore,
    StoredCheckpoint,
    now,
)
from agentrl.training_service.wire import PassRequest, parse_pass, read_pass, write_pass

_log = logging.getLogger(__name__)
T = TypeVar("T")
MAX_SAMPLING = 8192
"""Maximum number of running sampling requests."""
SWEEP_S = 10.0
NEWEST_SAMPLERS = 32
"""Number of unnamed samplers that a run keeps; older ones are deleted."""
_RESTARTED = "make a new client from a saved state: the session has ended, or the server restarted"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingServiceSettings:
    """Settings and limits of a service."""

    folder: Path
    """Folder of the checkpoints."""
    model_name: str
    """Name of the base model for clients."""
    all_weights: bool = False
    """True if runs train all weights instead of adapters."""
    alpha: float = 32.0
    """Alpha of adapters; see `agentrl.training_service.runs.ALPHA`."""
    most_runs: int = 16
    """Maximum number of concurrent runs."""
    most_engines: int = 4
    """Maximum number of samplers whose weights are in memory."""
    lease_s: float = 1800.0
    """Seconds without a request after which a session ends; clients send a heartbeat every 10 s."""


class NotFound(UsageError):
    """A request names an object that does not exist or has ended."""


class Worker:
    """A thread with its own event loop for engines, whose steps block the loop."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread; cancelling the awaiting task cancels it."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def close(self) -> None:
        """End the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@dataclass(frozen=True, slots=True)
class SamplingSession:
    """A sampler that a client created."""

    session: ClientSession
    weights: SamplerWeights
    path: str | None


class Service:
    """All sessions of a server; they belong to one event loop.

    The training thread calls `load`, which loads the base model.
    """

    def __init__(self, settings: TrainingServiceSettings, load: Callable[[], BaseWeights]) -> None:
        self.settings, self.store, self.futures = settings, CheckpointStore(settings.folder), Futures()
        self._load = load
        self._sessions: dict[str, ClientSession] = {}
        self._samplers_by_id: dict[str, SamplingSession] = {}
        self._making: set[str] = set()
        self._trainer = ThreadPoolExecutor(1, thread_name_prefix="training")
        self._worker: Worker | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._base: BaseWeights | None = None
        self._samplers: Samplers | None = None

    @property
    def base(self) -> BaseWeights:
        """Base model; available after `start`."""
        assert self._base is not None
        return self._base

    async def start(self) -> None:
        """Load the model, and delete the weights of an earlier server process's unnamed samplers.

        Raises:
            UsageError: the model cannot be loaded, or another server uses the folder.
        """
        self.store.lock()
        self._base = await self._in_training(self._load)
        self._worker = Worker("sampling")
        self._samplers = Samplers(self._base, self.settings.most_engines)
        await self._in_training(self.store.forget_ephemeral)
        self._sweeper = asyncio.create_task(self._sweep(), name="sweeper")

    async def close(self) -> None:
        """Cancel all requests and end the threads; idempotent."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self.futures.close()
        for session in list(self._sessions.values()):
            self._end(session)
        if self._worker is not None and self._samplers is not None:
            await self._worker.run(self._samplers.close())
            self._worker.close()
            self._worker = None
        await run_in_own_thread(self._trainer.shutdown, cancel_futures=True)
        self.store.unlock()

    async def _in_training(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._trainer, work)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            limit = time.monotonic() - self.settings.lease_s
            for session in [own for own in self._sessions.values() if own.seen < limit]:
                if not any(run.task for run in session.runs.values()):
                    self._end(session)
            self.futures.sweep()
            try:
                await self._in_training(self.store.sweep)
            except OSError:
                _log.exception("expired checkpoints could not be deleted")

    def create_session(self, body: requests.CreateSession) -> dict[str, Any]:
        """Open a session."""
        requests.check_metadata(body.user_metadata)
        session = ClientSession(uuid.uuid4().hex, body.user_metadata)
        self._sessions[session.id] = session
        answer = {"type": "create_session", "session_id": session.id}
        if self.settings.all_weights:
            answer["warning_message"] = (
                "this server trains all weights: rank, seed, train_mlp, train_attn and train_unembed of "
                "create_lora_training_client have no effect"
            )
        return answer

    def session(self, session_id: str) -> ClientSession:
        """Return a session and renew its lease.

        Raises:
            NotFound: the session has ended or never existed.
        """
        session = self._sessions.get(session_id)
        if session is None:
            raise NotFound("unknown session", got=shorten(session_id), hint=_RESTARTED)
        session.seen = time.monotonic()
        return session

    def finish(self, session_id: str) -> None:
        """End a session with its runs and samplers."""
        self._end(self.session(session_id))

    def _end(self, session: ClientSession) -> None:
        self._sessions.pop(session.id, None)
        for run in list(session.runs.values()):
            self._unload(run)
        self._making = {name for name in self._making if not name.startswith(f"{session.id}:")}
        own = [name for name, sampler in self._samplers_by_id.items() if sampler.session is session]
        for name in own:
            del self._samplers_by_id[name]
        self.futures.drop([f"{session.id}:"])

    def _unload(self, run: ServedRun) -> None:
        run.end()
        self._trainer.submit(self.store.forget_ephemeral, run.id)

    def run(self, model_id: str) -> ServedRun:
        """Return a run and renew its session's lease.

        Raises:
            NotFound: the run has ended, or never existed.
        """
        session = self._sessions.get(model_id.partition(":")[0])
        run = None if session is None else session.runs.get(model_id)
        if run is None:
            raise NotFound("unknown model", got=shorten(model_id), hint=_RESTARTED)
        run.session.seen = time.monotonic()
        return run

    def create_model(self, body: requests.CreateModel, raw: bytes) -> dict[str, Any]:
        """Start a run from the base model."""
        self._check_name(body.base_model)
        requests.check_metadata(body.user_metadata)
        adapters = body.lora_config or requests.Adapters(rank=32)
        if not (adapters.train_attn or adapters.train_mlp or adapters.train_unembed):
            raise UsageError("lora_config selects no layers", expected="train_attn, train_mlp or train_unembed")
        if body.lora_config is None and not self.settings.all_weights:
            raise UsageError("lora_config is missing", hint="start the server with --all-weights to train all weights")
        seed = random.getrandbits(62) if adapters.seed is None else adapters.seed % (1 << 62)
        settings = RunSettings(
            rank=None if self.settings.all_weights else adapters.rank,
            seed=seed,
            alpha=self.settings.alpha,
            train_attn=adapters.train_attn,
            train_mlp=adapters.train_mlp,
            train_unembed=adapters.train_unembed,
        )
        session = self.session(body.session_id)
        return self._make_run(
            session,
            f"{session.id}:train:{body.model_seq_id}",
            raw,
            lambda: TrainingRun(self.base, settings),
            body.user_metadata,
            {"type": "create_model"},
        )

    def create_from_weights(self, body: requests.CreateFromWeights, raw: bytes) -> dict[str, Any]:
        """Start a run from a checkpoint."""
        if body.base_model is not None:
            self._check_name(body.base_model)
        requests.check_metadata(body.user_metadata)
        session = self.session(body.session_id)

        def make() -> TrainingRun:
            saved = self._find_loadable(body.path, optimizer=body.optimizer)
            run = TrainingRun(self.base, saved.about.settings)
            run.load(saved.folder, optimizer=body.optimizer)
            return run

        name = f"{session.id}:train:{body.model_seq_id}"
        return self._make_run(session, name, raw, make, body.user_metadata, {"type": "load_weights", "path": body.path})

    def _make_run(
        self,
        session: ClientSession,
        model_id: str,
        raw: bytes,
        make: Callable[[], TrainingRun],
        metadata: dict[str, Any] | None,
        answer: dict[str, Any],
    ) -> dict[str, Any]:
        request_id, digest = f"{model_id}:0", fingerprint(raw)
        if (earlier := self.futures.find_retried(request_id, digest)) is not None:
            return earlier.announcement()
        if model_id in self._making or model_id in session.runs:
            raise UsageError("a model with this number already exists", got=model_id)
        count = len(self._making) + len(list(self.runs()))
        if count >= self.settings.most_runs:
            raise UsageError(
                "the maximum number of runs is active",
                got=f"{count} runs",
                hint="end a session, or start the server with a higher --max-runs",
            )

        async def work() -> FetchedResult:
            try:
                run = await self._in_training(make)
            finally:
                self._making.discard(model_id)
            if session.id not in self._sessions:
                raise UsageError("the session has ended")
            session.runs[model_id] = ServedRun(model_id, session, run, metadata)
            return FetchedResult.of({**answer, "model_id": model_id})

        self._making.add(model_id)
        future = self.futures.add(request_id, digest, model_id=model_id)
        self.futures.run(future, work())
        return future.announcement()

    def _check_name(self, name: str) -> None:
        if name not in (self.settings.model_name, self.base.path):
            raise UsageError("the server has another base model", got=shorten(name), expected=self.settings.model_name)

    def _find_loadable(self, path: str, *, optimizer: bool) -> StoredCheckpoint:
        """Find a checkpoint that this server can load.

        Raises:
            UsageError: the checkpoint does not exist, or does not fit the server or the request.
        """
        saved = self.store.find(path)
        if saved.about.base_model != self.base.path:
            raise UsageError(
                "the checkpoint belongs to another base model", got=saved.about.base_model, expected=self.base.path
            )
        if saved.about.settings.rank is None and not self.settings.all_weights:
            raise UsageError("the checkpoint contains all weights", hint="start the server with --all-weights")
        if optimizer and saved.kind != TRAINING:
            raise UsageError(f"{path} has no optimizer state", expected="a path that save_state returned")
        return saved

    def info(self, body: requests.ModelOnly) -> dict[str, Any]:
        """Describe a run."""
        run = self.run(body.model_id)
        rank = run.training.settings.rank
        return {
            "type": "get_info",
            "model_id": run.id,
            "model_data": {
                "arch": self.base.model.config.model_type,
                "model_name": self.settings.model_name,
                "tokenizer_id": self.base.path,
            },
            "model_name": self.settings.model_name,
            "is_lora": rank is not None,
            "lora_rank": rank,
            "optimizer_config": {"type": "adamw"},
        }

    def unload(self, body: requests.ModelOnly, raw: bytes) -> dict[str, Any]:
        """End a run."""
        run = self.run(body.model_id)
        self._unload(run)
        future = self.futures.add(f"{run.id}:unload", fingerprint(raw))
        future.set(FetchedResult.of({"type": "unload_model", "model_id": run.id}))
        return future.announcement()

    def forward_backward(self, raw: bytes) -> dict[str, Any]:
        """Queue a pass in its run; an invalid one keeps its position and fails there, and later ones proceed."""
        message = parse_pass(raw)
        run, number = self.run(message.model_id), message.seq_id
        if (earlier := self.futures.find_retried(f"{run.id}:{number}", fingerprint(raw))) is not None:
            return earlier.announcement()
        try:
            request = read_pass(message)
        except UsageError as error:
            self._refuse(run, number, raw, error, is_pass=not message.forward_only)
            raise
        return self._in_order(run, number, raw, lambda: self._pass(run.training, request))

    def refuse(self, body: dict[str, Any], raw: bytes, error: UsageError) -> None:
        """Queue an error in place of an invalid request, if the request has a valid model and number."""
        model_id, number = body.get("model_id"), body.get("seq_id")
        if isinstance(model_id, str) and type(number) is int and number >= 1:
            try:
                run = self.run(model_id)
            except NotFound:
                return
            if self.futures.find_retried(f"{run.id}:{number}", fingerprint(raw)) is None:
                self._refuse(run, number, raw, error, is_pass=False)

    def _refuse(self, run: ServedRun, number: int, raw: bytes, error: UsageError, *, is_pass: bool) -> None:
        def fail() -> FetchedResult:
            if is_pass:
                run.training.mark_incomplete(str(error))
            raise error

        self._in_order(run, number, raw, fail)

    def _pass(self, run: TrainingRun, request: PassRequest) -> FetchedResult:
        try:
            logprobs, loss = run.forward_backward(request)
        except Exception as error:
            if not request.forward_only:
                run.mark_incomplete(str(error))
            raise
        return protocol_buffer(write_pass(logprobs, {"loss:sum": loss}))

    def optim_step(self, body: requests.OptimStep, raw: bytes) -> dict[str, Any]:
        """Queue an update in its run."""
        run, step = self.run(body.model_id), AdamStep(**body.adam_params.model_dump())
        return self._in_order(
            run, body.seq_id, raw, lambda: FetchedResult.of({"metrics": run.training.optim_step(step)})
        )

    def save(self, body: requests.SaveWeights, raw: bytes) -> dict[str, Any]:
        """Queue the writing of a checkpoint in its run."""
        run = self.run(body.model_id)
        requests.check_metadata(body.user_metadata)

        def write() -> FetchedResult:
            about = self._about(run, body.ttl_seconds, body.user_metadata)
            fill = _make_saver(run.training, optimizer=True)
            saved = self.store.write(run.id, TRAINING, body.path, about, fill, overwrite=body.overwrite)
            return FetchedResult.of({"type": "save_weights", "path": saved.path})

        return self._in_order(run, body.seq_id, raw, write)

    def save_for_sampler(self, body: requests.SaveForSampler, raw: bytes) -> dict[str, Any]:
        """Queue the writing of a sampler's weights in its run."""
        run = self.run(body.model_id)
        requests.check_metadata(body.user_metadata)
        if (body.path is None) == (body.sampling_session_seq_id is None):
            raise UsageError(
                "save_weights_for_sampler needs exactly one of path and sampling_session_seq_id",
                got=f"path {body.path}, sampling_session_seq_id {body.sampling_session_seq_id}",
            )
        name, loop = f"{run.session.id}:sample:{body.sampling_session_seq_id}", asyncio.get_running_loop()

        def write() -> FetchedResult:
            about = self._about(run, body.ttl_seconds, body.user_metadata)
            fill = _make_saver(run.training, optimizer=False)
            if body.path is not None:
                saved = self.store.write(run.id, SAMPLER, body.path, about, fill)
                return FetchedResult.of({"type": "save_weights_for_sampler", "path": saved.path})
            run.unnamed_samplers += 1
            saved = self.store.write(run.id, EPHEMERAL, f"{run.unnamed_samplers:06d}", about, fill)
            self.store.forget_old(run.id, EPHEMERAL, keep=NEWEST_SAMPLERS)
            sampler = SamplingSession(run.session, SamplerWeights.of(saved), None)
            loop.call_soon_threadsafe(self._add_sampler, name, sampler)  # runs before the client receives the answer
            return FetchedResult.of({"type": "save_weights_for_sampler", "sampling_session_id": name})

        return self._in_order(run, body.seq_id, raw, write)

    def _add_sampler(self, name: str, sampler: SamplingSession) -> None:
        if sampler.session.id in self._sessions:
            self._samplers_by_id[name] = sampler

    def _about(self, run: ServedRun, ttl_s: int | None, metadata: dict[str, Any] | None) -> CheckpointInfo:
        created = now()
        expires = None if ttl_s is None else (created + datetime.timedelta(seconds=ttl_s)).isoformat()
        return CheckpointInfo(
            base_model=self.base.path,
            settings=run.training.settings,
            updates=run.training.updates,
            created=created.isoformat(),
            expires=expires,
            user_metadata=texts(metadata),
            run_metadata=texts(run.metadata),
        )

    def load(self, body: requests.LoadWeights, raw: bytes) -> dict[str, Any]:
        """Queue the loading of a checkpoint in its run."""
        run = self.run(body.model_id)

        def read() -> FetchedResult:
            saved = self._find_loadable(body.path, optimizer=body.optimizer)
            if saved.about.settings.compatibility_key != run.training.settings.compatibility_key:
                raise UsageError(
                    "the checkpoint's adapters differ from the run's",
                    got=f"rank {saved.about.settings.rank}",
                    expected=f"rank {run.training.settings.rank} in the same layers",
                    hint="start a run with create_training_client_from_state",
                )
            run.training.load(saved.folder, optimizer=body.optimizer)
            return FetchedResult.of({"type": "load_weights", "path": saved.path, "model_id": run.id})

        return self._in_order(run, body.seq_id, raw, read)

    def _in_order(self, run: ServedRun, number: int, raw: bytes, work: Work) -> dict[str, Any]:
        """Queue a request of a run, or return the answer of the request that it retries."""
        request_id, digest = f"{run.id}:{number}", fingerprint(raw)
        if (earlier := self.futures.find_retried(request_id, digest)) is not None:
            return earlier.announcement()
        run.check(number, len(raw), sum(own.waiting_bytes for own in self.runs()))
        future = self.futures.add(request_id, digest, model_id=run.id)
        run.queue(number, WaitingRequest(future, work, len(raw)), self._in_training)
        return future.announcement()

    def runs(self) -> Iterator[ServedRun]:
        """Yield all runs."""
        for session in self._sessions.values():
            yield from session.runs.values()

    async def new_sampler(self, body: requests.CreateSamplingSession) -> dict[str, Any]:
        """Make a sampler with the weights of the base or of a checkpoint."""
        session = self.session(body.session_id)
        if body.base_model is not None:
            self._check_name(body.base_model)
        weights = BASE
        if body.model_path is not None:
            saved = await run_in_own_thread(self._find_loadable, body.model_path, optimizer=False)
            weights = SamplerWeights.of(saved)
        elif body.base_model is None:
            raise UsageError("a sampler needs weights", expected="model_path or base_model")
        name = f"{session.id}:sample:{body.sampling_session_seq_id}"
        sampler = self._samplers_by_id.setdefault(name, SamplingSession(session, weights, body.model_path))
        if sampler.weights != weights:
            raise UsageError("another sampler with this number already exists", got=name)
        return {"type": "create_sampling_session", "sampling_session_id": name}

    def sampler(self, name: str) -> SamplingSession:
        """Return a sampler and renew its session's lease.

        Raises:
            NotFound: the sampler's session has ended, or it never existed.
        """
        found = self._samplers_by_id.get(name)
        if found is None:
            raise NotFound("unknown sampler", got=shorten(name), hint=_RESTARTED)
        found.session.seen = time.monotonic()
        return found

    def sample(self, body: requests.SampleRequest, raw: bytes) -> dict[str, Any]:
        """Start sampling."""
        sampler = self.sampler(body.sampling_session_id)
        request_id, digest = f"{body.sampling_session_id}:{body.seq_id}", fingerprint(raw)
        if (earlier := self.futures.find_retried(request_id, digest)) is not None:
            return earlier.announcement()
        if self.futures.running >= MAX_SAMPLING:
            raise Busy("too many sampling requests are running", expected=f"at most {MAX_SAMPLING}")
        assert self._worker is not None
        assert self._samplers is not None
        worker, samplers = self._worker, self._samplers

        async def work() -> FetchedResult:
            return protocol_buffer(await worker.run(samplers.sample(sampler.weights, body)))

        sequences = [f"{request_id}:{number}" for number in range(body.num_samples)]
        future = self.futures.add(request_id, digest, sample_sequence_ids=sequences)
        self.futures.run(future, work())
        return future.announcement()


def texts(metadata: Mapping[str, Any] | None) -> dict[str, str] | None:
    """Return a client's metadata with all values as texts."""
    return None if metadata is None else {key: str(value) for key, value in metadata.items()}


def _make_saver(run: TrainingRun, *, optimizer: bool) -> Callable[[Path], None]:
    return lambda folder: run.save(folder, optimizer=optimizer)
