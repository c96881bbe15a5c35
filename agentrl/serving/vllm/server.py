"""Client of one vLLM server, and the probe that checks the server before use."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from agentrl.config.engines import ServerEngineConfig
from agentrl.engine import (
    Broadcast,
    Capabilities,
    GenerateRequest,
    Generation,
    InferenceServer,
    ServerLoad,
    ServerLost,
    SharedTensors,
    TensorLayout,
    UpdateGroup,
)
from agentrl.errors import EngineError, UsageError
from agentrl.serving.first_token import generate_with_first_token
from agentrl.serving.http import CLEANUP_S, HttpSession, ServerStatusError, decode_version, decoding
from agentrl.serving.request import check_request
from agentrl.serving.vllm.command import RECEIVER
from agentrl.serving.vllm.wire import (
    ADAPTER,
    TOP_1_PROBE,
    LogprobConvention,
    adapter_name,
    check_convention,
    check_expansion,
    convention_of,
    decode_adapters,
    decode_answer,
    decode_checksums,
    decode_load,
    decode_top_logprobs,
    encode_abort,
    encode_request,
    encode_run,
    is_pre_truncation,
    join_events,
    reads_images,
)

EXCHANGE = "exchange_adapter"
"""Method that `agentrl_vllm_adapter` adds to the server's workers."""
OLDEST = "0.32"
"""Oldest supported version; older ones do not report the weight version of tokens."""
PROBE_IDS = [1, 2, 3]
GENERATE = "/inference/v1/generate"
PAUSE = "/pause?mode=keep&clear_cache=false"
ABORT = "/inference/v1/abort_requests"
FIRST_ABORT_WAIT_S = 0.05
MAX_ABORT_WAIT_S = 1.0


class VLLMUpdates:
    """Part of `VLLMServer` that updates weights. Errors are those of `agentrl.serving.http.HttpSession`."""

    def __init__(self, http: HttpSession, *, timeout_s: float) -> None:
        self._http = http
        self._timeout_s = timeout_s
        self._cache_sleeps = False
        self._loaded: list[str] = []
        """Adapters of the server, in the order in which they were loaded."""

    async def from_folder(self, folder: Path, version: int) -> None:
        """Load weights from a folder."""
        await self._post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        await self._publish(version)

    async def from_adapters(self, folders: Mapping[str, Path], version: int) -> None:
        """Load adapters from folders, by their names at the server; other adapters do not change.

        vLLM's own route is used only for the first load of a name. A request remembers its adapter's files and would
        load them again, so later updates replace the tensors of the loaded adapter.
        """
        for name, folder in folders.items():
            if name not in self._loaded:
                body = {"lora_name": name, "lora_path": str(folder)}
                await self._http.order("/v1/load_lora_adapter", body, deadline_s=self._timeout_s)
                self._loaded.append(name)
            kwargs = {"folder": str(folder), "number": self._loaded.index(name) + 1}
            await self._post("/collective_rpc", {"method": EXCHANGE, "kwargs": kwargs})
        await self._publish(version)

    async def from_broadcast(self, layouts: Sequence[TensorLayout], broadcast: Broadcast, version: int) -> None:
        """Load weights that are broadcast in the group that the server joined last."""
        async with self._update(version):
            for number, layout in enumerate(layouts):
                body = {"update_info": encode_run(layout)}
                await asyncio.gather(self._post("/update_weights", body), broadcast(number))

    async def from_memory(self, shared: Sequence[SharedTensors], version: int) -> None:
        """Load weights from this process's memory."""
        async with self._update(version):
            for tensors in shared:
                info = encode_run(tensors.layout, handle=tensors.handle())
                await self._post("/update_weights", {"update_info": info})

    @asynccontextmanager
    async def _update(self, version: int) -> AsyncIterator[None]:
        """Open an update around the block and publish its version; it is closed after a failure, too."""
        try:
            await self._post("/start_weight_update")
        except ServerStatusError:  # a trainer that died left an update open
            await self._post("/finish_weight_update", {})
            await self._post("/start_weight_update")
        try:
            yield
        except BaseException:
            with suppress(EngineError):  # otherwise the next update cannot begin
                await self._http.post("/finish_weight_update", {}, deadline_s=CLEANUP_S)
            raise
        await self._post("/finish_weight_update", {})
        await self._publish(version)

    async def _publish(self, version: int) -> None:
        """Clear all caches, then set the version."""
        reset = await self._post("/reset_prefix_cache?reset_running_requests=true&reset_external=true")
        if reset != {"success": True}:
            raise EngineError(f"{self._http.url} did not clear the cache of the old weights", got=reset)
        await self._post("/update_weight_version", {"new_version": str(version)})

    async def workers(self) -> int:
        """Return the number of processes that hold weights."""
        answer = await self._http.get("/get_world_size", deadline_s=self._timeout_s)
        with decoding(f"{self._http.url} does not report its number of workers", answer):
            return int(answer["world_size"])

    async def join_group(self, group: UpdateGroup) -> None:
        """Let the server's workers join a process group and leave the previous one."""
        await self._post("/init_weight_transfer_engine", {"init_info": asdict(group)})

    async def checksums(self) -> Mapping[str, str]:
        """Return the checksums of the weights, except tensors that vLLM keeps in a packed form, as on the CPU."""
        return decode_checksums(await self._post("/weight_checker", {"action": "checksum"}))

    async def sleep(self) -> None:
        """Release the memory of weights and cache while requests are held; on a CPU, vLLM keeps it."""
        self._cache_sleeps = True
        await self._post("/sleep?level=2&mode=keep")

    async def wake_up(self) -> None:
        """Allocate the memory of the weights again; the server stays paused until `wake_cache`."""
        await self._post("/wake_up?tags=weights")

    async def wake_cache(self) -> None:
        """Allocate the memory of the cache again if it was released; the weights must be loaded."""
        if self._cache_sleeps:
            await self._post("/wake_up?tags=kv_cache")
            self._cache_sleeps = False

    async def _post(self, route: str, body: Mapping[str, Any] | None = None) -> Any:
        return await self._http.post(route, body, deadline_s=self._timeout_s)


async def _check_awake(http: HttpSession, deadline_s: float) -> None:
    """Raise `UsageError` if a server is paused, as it does not answer requests. vLLM does not report sleep."""
    if await http.get("/is_paused", deadline_s=deadline_s) == {"is_paused": True}:
        hint = (
            f"wait until its weights are updated, or resume it: curl -X POST {http.url}/resume (restart it if a run "
            "with engine.sleep was killed: then it has no weights)"
        )
        raise UsageError(f"{http.url} is paused", hint=hint)


def _check_updates(url: str, found: Mapping[str, Any], config: ServerEngineConfig) -> None:
    """Raise `UsageError` if a server lacks a feature that the config needs. On a CPU, every vLLM server can sleep."""
    receiver = (found.get("weight_transfer_config") or {}).get("backend")
    if config.transport in ("collective", "cuda_ipc") and receiver != RECEIVER:
        hint = "start it with agentrl serve, or use another engine.transport"
        raise UsageError(
            f"{url} does not accept weights by transport {config.transport}",
            got=f"receiver {receiver}",
            expected=RECEIVER,
            hint=hint,
        )
    _check_adapters(url, found, config)
    is_on_cpu = (found.get("device_config") or {}).get("device") == "cpu"
    if config.sleep and not is_on_cpu and not found["model_config"].get("enable_sleep_mode"):
        raise UsageError(f"{url} cannot sleep", hint="start it with --enable-sleep-mode, or remove engine.sleep")


def _check_adapters(url: str, found: Mapping[str, Any], config: ServerEngineConfig) -> None:
    rank, count = config.adapter_rank, config.max_adapters
    if rank is None:
        return
    section = found.get("lora_config") or {}
    most = section.get("max_lora_rank")
    if most is None or most < rank:
        raise UsageError(
            f"{url} does not accept adapters of rank {rank}",
            got="no --enable-lora" if most is None else f"--max-lora-rank {most}",
            expected=f"--max-lora-rank {rank} or more",
            hint=f"start it with agentrl serve … engine.adapter_rank={rank}, or remove engine.adapter_rank",
        )
    if (room := section.get("max_loras", 1)) < count:
        raise UsageError(
            f"{url} does not accept {count} adapters",
            got=f"--max-loras {room}",
            expected=f"--max-loras {count} or more",
            hint=f"start it with agentrl serve … engine.adapter_rank={rank} engine.max_adapters={count}",
        )


async def _probe_top_1_logprob(http: HttpSession, deadline_s: float) -> float:
    body = {"token_ids": PROBE_IDS, "sampling_params": TOP_1_PROBE}
    answer: Any = await http.post("/inference/v1/generate", body, deadline_s=deadline_s)
    with decoding(f"{http.url} does not answer like vLLM", answer):
        choice = answer["choices"][0]
        if "weight_versions" not in choice:
            raise _too_old(await _version(http, deadline_s))
        return float(choice["logprobs"]["content"][0]["logprob"])


async def _reason(http: HttpSession, failure: ServerStatusError, deadline_s: float) -> EngineError | UsageError:
    """Explain an error status: an old version of vLLM, a missing flag, or else `failure` itself."""
    if failure.status == 403:
        hint = "start it with --enable-scale-out, or let agentrl launch it"
        return UsageError(f"{http.url} does not accept token ids", got=failure.message, hint=hint)
    if failure.status != 404:
        return failure
    version = await _version(http, deadline_s)
    if _numbers(version) < _numbers(OLDEST):
        return _too_old(version)
    hint = "start it with VLLM_SERVER_DEV_MODE=1 in its environment, reachable from this machine only"
    return UsageError(f"{http.url} lacks the routes for weight updates", got=f"vLLM {version}", hint=hint)


async def _version(http: HttpSession, deadline_s: float) -> str:
    try:
        return str((await http.get("/version", deadline_s=deadline_s))["version"])
    except (ServerStatusError, KeyError, TypeError) as error:
        raise UsageError(f"{http.url} is not a vLLM server", got=f"no version at {http.url}/version") from error


def _too_old(version: str) -> UsageError:
    return UsageError("this vLLM is too old", got=version, expected=f"{OLDEST} or newer")


def _numbers(version: str) -> list[int]:
    parts = version.split("+")[0].split(".")[:2]
    return [int("".join(filter(str.isdigit, part)) or 0) for part in parts]


@dataclass(slots=True)
class _Running:
    wire_id: str
    over: asyncio.Event = field(default_factory=asyncio.Event)


class VLLMServer(VLLMUpdates, InferenceServer):
    """Client of one vLLM server, with token ids in and out.

    Requests that run during a pause stay at the server. A weight update clears their key-value cache, which is then
    recomputed.

    `vocab_size` is that of the model, which vLLM does not report.
    """

    def __init__(self, url: str, config: ServerEngineConfig, *, vocab_size: int) -> None:
        super().__init__(HttpSession(url, api_key_variable=config.api_key_variable), timeout_s=config.timeout_s)
        self.url = self._http.url
        self._config = config
        self._vocab_size = vocab_size
        self._running: dict[str, _Running] = {}
        self._convention: LogprobConvention | None = None
        self._is_adapted = False
        self._read: dict[str, Path] = {}
        """Folders of the loaded adapters, by name."""
        self._client = uuid.uuid4().hex[:8]
        self._numbers = itertools.count()

    async def connect(self, *, deadline_s: float) -> None:
        """Wait until the server answers; check its version, settings and log-probabilities."""
        is_attached = self._config.servers != "launch"
        await self._http.wait_until_up("/health", "vLLM", deadline_s=deadline_s, is_attached=is_attached)
        http, config = self._http, self._config
        try:
            models = await http.get("/v1/models", deadline_s=deadline_s)
            info = await http.get("/server_info?config_format=json", deadline_s=deadline_s)
            await _check_awake(http, deadline_s)
            logprob = await _probe_top_1_logprob(http, deadline_s)
        except ServerStatusError as failure:
            raise await _reason(http, failure, deadline_s) from failure
        convention, settings = convention_of(info), info["vllm_config"]
        _check_updates(http.url, settings, config)
        with decoding(f"{http.url} does not report its maximum context", models):
            max_context = int(models["data"][0]["max_model_len"])
        self.capabilities = Capabilities(
            max_context=min(max_context, config.max_context or max_context),
            vocab_size=self._vocab_size,
            structures=True,
            first_tokens=True,
            routed_experts=bool((settings.get("aux_output_config") or {}).get("enable_return_routed_experts")),
            images=reads_images(info),
        )
        is_truncated = convention is LogprobConvention.PRE_TRUNCATION and not is_pre_truncation(logprob)
        self._convention = LogprobConvention.POST_TRUNCATION if is_truncated else convention
        self._loaded, self._read = decode_adapters(models), {}  # the server may be a new process
        self._is_adapted = ADAPTER in self._loaded and config.adapter_rank is not None

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn.

        Seeds are not sent: samples are not reproducible under load, and on the CPU a seed crashes the server's worker
        when the prefill of its prompt is split.
        """
        if self._convention is None:
            raise EngineError(f"{self.url} is not connected", hint="await connect first")
        check_request(request, self.capabilities, self._running)
        check_convention(request.params, self._convention)
        if request.params.first_token is not None:
            return await generate_with_first_token(request, self._generate, max_context=self.capabilities.max_context)
        return await self._generate(request)

    async def _generate(self, request: GenerateRequest, tops: dict[int, float] | None = None) -> Generation:
        running = _Running(wire_id=f"{request.request_id}-{self._client}-{next(self._numbers)}")
        limit = self.capabilities.max_context
        adapter = ADAPTER if self._is_adapted else None
        if request.adapter is not None:
            adapter = adapter_name(request.adapter)
        body = encode_request(request, wire_id=running.wire_id, max_context=limit, adapter=adapter)
        self._running[request.request_id] = running
        began = time.perf_counter()
        try:
            answer = await self._ask(request, body)
        except ServerStatusError as failure:
            raise await self._meaning(failure) from failure
        finally:
            del self._running[request.request_id]
            running.over.set()
        seconds = time.perf_counter() - began  # vLLM does not separate queueing from prefill
        if tops is not None:
            tops.update(decode_top_logprobs(answer))
        if request.images:
            check_expansion(request, answer, self.url)
        return decode_answer(answer, request.params.stop_token_ids, request.params.stop, decode_s=seconds)

    async def _ask(self, request: GenerateRequest, body: dict[str, Any]) -> Any:
        timeout_s = self._config.timeout_s
        if request.on_tokens is None:
            return await self._http.post(GENERATE, body, deadline_s=timeout_s, late=EngineError)
        events: list[Any] = []
        on_tokens = request.on_tokens

        def take(event: Any) -> None:
            events.append(event)
            for choice in event["choices"]:
                on_tokens(choice["token_ids"] or ())

        body |= {"stream": True, "stream_options": {"include_usage": True}}
        await self._http.stream(GENERATE, body, take, deadline_s=timeout_s, late=EngineError)
        return join_events(events)

    async def _meaning(self, failure: ServerStatusError) -> EngineError | UsageError:
        """Return the engine error for an error status. vLLM answers 500 if its engine has failed and it is about to
        exit.
        """
        if failure.status in (400, 422):
            return UsageError(
                f"vLLM at {self.url} cannot serve a request", got=f"{failure.status}, {failure.message!r}"
            )
        if failure.status >= 500 and not await self.is_healthy(deadline_s=self._config.health_timeout_s):
            return ServerLost(f"{self.url} has failed", got=f"{failure.status}, {failure.message!r}")
        return failure

    async def abort(self, request_id: str) -> bool:
        """End a request early, and wait until it has ended; returns False if it is not running.

        vLLM ignores unknown ids, such as those of requests that have not arrived yet, so the abort is repeated until
        the request ends.
        """
        running = self._running.get(request_id)
        if running is None:
            return False
        wait_s = FIRST_ABORT_WAIT_S
        async with asyncio.timeout(self._config.timeout_s):
            while not running.over.is_set():
                body = encode_abort(running.wire_id)
                await self._http.post(ABORT, body, deadline_s=self._config.health_timeout_s)
                try:
                    await asyncio.wait_for(running.over.wait(), wait_s)
                except TimeoutError:
                    wait_s = min(2 * wait_s, MAX_ABORT_WAIT_S)
        return True

    async def pause(self) -> None:
        """Hold all requests; their caches are kept."""
        await self._post(PAUSE)

    async def resume(self) -> None:
        """Resume; after a sleep, the memory of the cache is allocated first."""
        await self.wake_cache()
        await self._post("/resume")

    async def load_weights(self, folder: Path, version: int) -> None:
        """Load new weights from a folder while paused, clear all caches, then set the version.

        The folder must contain `lm_head.weight`, even if head and embedding are tied. After a failure (such as a
        missing folder) vLLM's weights are undefined, and its engine exits at the next request.
        """
        await self._check_paused()
        await self.from_folder(folder, version)

    async def load_adapter(self, folder: Path, version: int) -> None:
        """Load an adapter as `load_weights` does; from then on it answers all requests, including held ones."""
        await self._check_paused()
        await self.from_adapters({ADAPTER: folder}, version)
        self._is_adapted = True

    async def load_adapters(self, folders: Mapping[str, Path], version: int) -> None:
        """Load the adapters whose folder has changed; requests without an adapter use the base model."""
        await self._check_paused()
        changed = {adapter_name(name): folder for name, folder in folders.items() if self._read.get(name) != folder}
        await self.from_adapters(changed, version)
        self._is_adapted, self._read = False, dict(folders)
        self.capabilities = replace(self.capabilities, adapters=frozenset(folders))

    async def receive_weights(
        self, layouts: Sequence[TensorLayout], group: UpdateGroup, broadcast: Broadcast, version: int
    ) -> None:
        """Load new weights as `load_weights` does, from a broadcast in the group that was joined last."""
        await self._check_paused()
        await self.from_broadcast(layouts, broadcast, version)

    async def open_weights(self, shared: Sequence[SharedTensors], version: int) -> None:
        """Load new weights as `load_weights` does, from the trainer's memory."""
        if await self.workers() > 1:
            raise UsageError(f"{self.url} has its weights in several processes", hint="use another engine.transport")
        await self._check_paused()
        await self.from_memory(shared, version)

    async def _check_paused(self) -> None:
        paused = await self._http.get("/is_paused", deadline_s=self._config.health_timeout_s)
        if paused != {"is_paused": True}:
            raise EngineError(f"{self.url} is not paused", got=paused, hint="pause it before loading weights")

    async def weight_version(self) -> int:
        """Return the weight version that vLLM stamps on tokens."""
        info = await self._http.get("/weight_info", deadline_s=self._config.health_timeout_s)
        if not isinstance(info, dict) or "weight_version" not in info:
            raise EngineError(f"{self.url} does not report its weight version", got=info)
        return decode_version(info["weight_version"])

    async def load(self) -> ServerLoad:
        """Return the load reported by ``/metrics``."""
        return decode_load(await self._http.get_text("/metrics", deadline_s=self._config.health_timeout_s))

    async def is_healthy(self, *, deadline_s: float) -> bool:
        """Return True if ``/health`` returns 200 in time."""
        return await self._http.answers("/health", deadline_s=deadline_s)

    async def close(self) -> None:
        """Close the connections; vLLM ends their requests."""
        await self._http.close()
