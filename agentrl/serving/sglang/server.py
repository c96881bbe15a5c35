"""SGLang servers: the command that starts one, and the client of one, which checks the server before use."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agentrl.config.engines import ServerEngineConfig, SGLangEngineConfig
from agentrl.engine import (
    Broadcast,
    Capabilities,
    GenerateRequest,
    Generation,
    InferenceServer,
    ServerLoad,
    SharedTensors,
    StopReason,
    TensorLayout,
    TensorPart,
    UpdateGroup,
)
from agentrl.errors import EngineError, UsageError
from agentrl.serving.first_token import generate_with_first_token
from agentrl.serving.http import CLEANUP_S, HttpSession, ServerStatusError, decode_version
from agentrl.serving.launch import LaunchCommand
from agentrl.serving.launch.process import SAFE_PATH, THIS_MACHINE
from agentrl.serving.request import check_request
from agentrl.serving.sglang import start_with_key
from agentrl.serving.sglang.wire import (
    GRAMMAR,
    VOCABULARY_PROBE,
    check_answers,
    check_routes,
    check_settings,
    check_updates,
    decode_answer,
    decode_checksums,
    decode_context,
    decode_load,
    decode_top_logprobs,
    decode_vocabulary,
    encode_broadcast,
    encode_probe,
    encode_request,
    encode_tensors,
    encode_update,
    needs_flush,
    tokens_left,
)

BEGIN = "/begin_weight_update"
END = "/end_weight_update"
LEAVING_S = 10.0
HEALTH_PROBE_S = 5.0
"""Minimum seconds for the probe once the server answers."""
ABORT_WAITS_S = (0.5, 2.0, 8.0)
"""Seconds to wait for an aborted request after each attempt; then it ends without the server's answer. Aborts are
repeated because one may arrive before its request, and SGLang drops those of requests that arrived during a pause."""
CPU_MODULES = Path(__file__).parent / "cpu_modules"
"""Folder of placeholders for packages that exist for GPUs only."""
CONTEXT_RESERVE = 6
"""Tokens by which SGLang's maximum for prompt and answer is below the context length that it is given."""
CPU_CACHE_TOKENS = 65_536
"""Tokens in the key-value cache on the CPU; by default, SGLang would use most of the machine's memory."""


def launch_command(
    config: SGLangEngineConfig,
    *,
    python: str,
    model: Path,
    port: int,
    dtype: str,
    host: str = THIS_MACHINE,
    gpus: Sequence[int] = (),
    api_key: str | None = None,
    python_path: str = "",
) -> LaunchCommand:
    """Build the command that starts one server.

    Arguments are as for `agentrl.serving.vllm.launch_command`. Without `config.max_context`, the context is the model's
    minus `CONTEXT_RESERVE`.
    """
    argv = [
        python,
        *(("-m", "sglang.launch_server") if api_key is None else (start_with_key.__file__,)),
        *("--model-path", str(model)),
        *("--host", host),
        *("--port", str(port)),
        *("--dtype", dtype),
        *("--max-running-requests", str(config.max_num_seqs)),
        *("--tp-size", str(config.tensor_parallel)),
        *("--log-level-http", "warning"),
        "--skip-server-warmup",
        "--enable-metrics",
    ]
    env = {SAFE_PATH: "1", "HF_HUB_OFFLINE": "1"}
    if api_key is not None:
        env[start_with_key.VARIABLE] = api_key
    if config.max_context is not None:
        argv += ["--context-length", str(config.max_context + CONTEXT_RESERVE)]
        env["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    if gpus and config.sleep:
        argv.append("--enable-memory-saver")
    if not gpus:
        argv += _cpu_arguments(config)
        env |= {"PYTHONPATH": os.pathsep.join(filter(None, (str(CPU_MODULES), python_path)))}
        env |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
        env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return LaunchCommand(argv=[*argv, *config.arguments], env=env, host=host)


def _cpu_arguments(config: SGLangEngineConfig) -> list[str]:
    cache = max(CPU_CACHE_TOKENS, 2 * ((config.max_context or 0) + CONTEXT_RESERVE))
    return [
        *("--device", "cpu"),
        *("--attention-backend", "torch_native"),
        *("--sampling-backend", "pytorch"),
        *("--grammar-backend", GRAMMAR),
        *("--max-total-tokens", str(cache)),
        "--disable-overlap-schedule",
        "--sleep-on-idle",  # otherwise its scheduler keeps a core busy that the trainer needs
    ]


class SGLangUpdates:
    """Part of `SGLangServer` that updates weights. Errors are those of `agentrl.serving.http.HttpSession`.

    Args:
        http: Connections to the server.
        timeout_s: Timeout of one request.
        has_sessions: Send a begin and an end around an update in parts: SGLang requires it since 0.5.21, and has no
            such routes before.
        workers: Number of processes that hold weights.
    """

    def __init__(self, http: HttpSession, *, timeout_s: float, has_sessions: bool = False, workers: int = 1) -> None:
        self._http = http
        self._timeout_s = timeout_s
        self._has_sessions = has_sessions
        self._workers = workers

    async def workers(self) -> int:
        """Return the number of processes that hold weights."""
        return self._workers

    async def from_folder(self, folder: Path, version: int) -> None:
        """Load weights from a folder."""
        await self._post("/update_weights_from_disk", encode_update(folder, version))

    async def from_tensors(self, parts: Sequence[TensorPart], version: int) -> None:
        """Send tensors; the last part sets the version and clears the caches."""
        async with self._session():
            for number, part in enumerate(parts):
                last = version if number == len(parts) - 1 else None
                body = encode_tensors(await part(), workers=self._workers, version=last)
                await self._post("/update_weights_from_tensor", body)

    async def from_broadcast(
        self, layouts: Sequence[TensorLayout], group: UpdateGroup, broadcast: Broadcast, version: int
    ) -> None:
        """Load broadcast weights; the last broadcast sets the version and clears the caches."""
        async with self._session():
            for number, layout in enumerate(layouts):
                last = version if number == len(layouts) - 1 else None
                body = encode_broadcast(layout, group=group.name, version=last)
                await asyncio.gather(self._post("/update_weights_from_distributed", body), broadcast(number))

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[None]:
        """Open an update session around the block; it is closed after a failure, too."""
        if not self._has_sessions:
            yield
            return
        try:
            await self._post(BEGIN, {})
        except ServerStatusError:  # a trainer that died left a session open
            await self._post(END, {})
            await self._post(BEGIN, {})
        try:
            yield
        except BaseException:
            with suppress(EngineError):
                await self._http.post(END, {}, deadline_s=CLEANUP_S)
            raise
        await self._post(END, {})

    async def join_group(self, group: UpdateGroup) -> None:
        """Let the server's workers join a process group."""
        body = {
            "master_address": group.address,
            "master_port": group.port,
            "rank_offset": 1,
            "world_size": group.size,
            "group_name": group.name,
            "backend": group.backend,
        }
        await self._post("/init_weights_update_group", body)

    async def leave_group(self, group: UpdateGroup) -> None:
        """Let the server's workers leave a process group, as SGLang does not leave groups by itself."""
        body = {"group_name": group.name}
        await self._http.post("/destroy_weights_update_group", body, deadline_s=LEAVING_S, late=EngineError)

    async def checksums(self) -> Mapping[str, str]:
        """Return the checksums of the weights, by name.

        Empty with several workers, as each has a part of every tensor. On a GPU the checksums are not SHA-256.
        """
        answer = await self._post("/weights_checker", {"action": "checksum"})
        return decode_checksums(answer) if self._workers == 1 else {}

    async def sleep(self) -> None:
        """Release the memory of weights and cache; on a CPU, SGLang keeps it."""
        await self._post("/release_memory_occupation", {})

    async def wake_up(self) -> None:
        """Allocate the memory again."""
        await self._post("/resume_memory_occupation", {})

    async def _post(self, route: str, body: Mapping[str, Any]) -> Any:
        return await self._http.post(route, body, deadline_s=self._timeout_s, late=EngineError)


@dataclass(slots=True, eq=False)
class RunningRequest:
    """Running request and its tokens so far."""

    request: GenerateRequest
    wire_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Request id at the server. SGLang aborts all requests whose ids start with the aborted one, so all ids have the
    same length."""
    tops: dict[int, float] | None = None
    """Receives the most probable first tokens, if they are requested."""
    answer: Generation | None = None
    """Tokens from finished calls of ``/generate``."""
    task: asyncio.Task[Generation] | None = None
    is_sent: bool = False
    """True while the server has the request; False while it waits for the end of a pause."""
    aborted: bool = False

    @property
    def sampled_ids(self) -> list[int]:
        """Token ids sampled so far."""
        return [] if self.answer is None else self.answer.token_ids

    @property
    def routed_experts_from(self) -> int | None:
        """Position of the first token whose routed experts are requested and not received yet."""
        first = self.request.routed_experts_from
        if first is None or self.answer is None or self.answer.routed_experts is None:
            return first
        return first + len(self.answer.routed_experts)

    def finish(self, stop_reason: StopReason) -> Generation:
        """Return the answer sampled so far as the final answer."""
        if self.answer is None:
            return Generation(token_ids=[], logprobs=[], versions=[], stop_reason=stop_reason)
        return replace(self.answer, stop_reason=stop_reason)


class SGLangServer(SGLangUpdates, InferenceServer):
    """Client of one SGLang server.

    SGLang's seeds do not make samples reproducible, so `capabilities.seeded` is False. An abort returns the tokens so
    far; for a request held by a pause, only up to the last multiple of 50.

    `vocab_size` is required of the model; any size is accepted by default.
    """

    def __init__(self, url: str, config: ServerEngineConfig, *, vocab_size: int | None = None) -> None:
        super().__init__(HttpSession(url, api_key_variable=config.api_key_variable), timeout_s=config.timeout_s)
        self.url = self._http.url
        self._config = config
        self._vocab_size = vocab_size
        self._calls: dict[str, RunningRequest] = {}
        self._going = asyncio.Event()
        self._going.set()
        self._endings: set[asyncio.Task[None]] = set()

    async def connect(self, *, deadline_s: float) -> None:
        """Wait until the server answers, check it, and read its capabilities. A paused server is resumed."""
        until = time.monotonic() + deadline_s
        is_attached = self._config.servers != "launch"
        await self._http.wait_until_up("/model_info", "SGLang", deadline_s=deadline_s, is_attached=is_attached)
        found = await self._probe(max(HEALTH_PROBE_S, until - time.monotonic()))
        if self._vocab_size not in (None, found.vocab_size):
            raise UsageError(
                f"the SGLang server at {self.url} serves a model with another vocabulary",
                got=f"{found.vocab_size} ids",
                expected=f"{self._vocab_size} ids",
            )
        limit = min(found.max_context, self._config.max_context or found.max_context)
        self.capabilities = replace(found, max_context=limit)
        self._going.set()

    async def _probe(self, limit_s: float) -> Capabilities:
        http = self._http
        model = await http.get("/model_info", deadline_s=limit_s)
        info = await http.get("/server_info", deadline_s=limit_s)
        version = str(info.get("version"))
        openapi = await http.get("/openapi.json", deadline_s=limit_s)
        check_routes(self.url, openapi, version)
        check_settings(self.url, info, model)
        check_updates(self.url, openapi, info, self._config)
        await http.post("/continue_generation", {}, deadline_s=limit_s)
        plain = await http.post("/generate", encode_probe(1.0), deadline_s=limit_s)
        sharpened = await http.post("/generate", encode_probe(0.5), deadline_s=limit_s)
        check_answers(self.url, plain, sharpened, version)
        try:
            answer = str(await http.post("/generate", VOCABULARY_PROBE, deadline_s=limit_s))
        except ServerStatusError as failure:
            answer = failure.message
        self._has_sessions, self._workers = BEGIN in openapi["paths"], int(info.get("tp_size") or 1)
        return Capabilities(
            max_context=decode_context(info),
            vocab_size=decode_vocabulary(answer),
            routed_experts=bool(info.get("enable_return_routed_experts")),
            structures=info.get("grammar_backend") == GRAMMAR,
            first_tokens=True,
        )

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn."""
        check_request(request, self.capabilities, self._calls)
        if request.params.first_token is not None:
            return await generate_with_first_token(request, self._generate, max_context=self.capabilities.max_context)
        return await self._generate(request)

    async def _generate(self, request: GenerateRequest, tops: dict[int, float] | None = None) -> Generation:
        call = self._calls[request.request_id] = RunningRequest(request, tops=tops)
        call.task = asyncio.ensure_future(self._sample(call))
        try:
            await asyncio.wait([call.task])
        except asyncio.CancelledError:
            ending = asyncio.ensure_future(self._abandon(call, call.task))
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)
            raise
        finally:
            del self._calls[request.request_id]
        if call.task.cancelled():  # the abort ended it: the server did not answer, or did not have the request
            return call.finish(StopReason.ABORT)
        return call.task.result()

    async def _sample(self, call: RunningRequest) -> Generation:
        request, most = call.request, self.capabilities.max_context
        while tokens_left(request, most, len(call.sampled_ids)) > 0:
            await self._going.wait()
            call.is_sent = True
            body = encode_request(
                request,
                wire_id=call.wire_id,
                max_context=most,
                sampled=call.sampled_ids,
                routed_experts_from=call.routed_experts_from,
            )
            try:
                answer = await self._ask(call, body)
            except ServerStatusError as failure:
                if failure.status == 400 and request.params.structure is not None:
                    raise UsageError(f"{self.url} rejects a structured request", got=failure.message) from failure
                raise
            call.is_sent = False
            stops = request.params.stop_token_ids, request.params.stop
            part = decode_answer(answer, *stops, routed_experts_from=call.routed_experts_from)
            if call.tops is not None:
                call.tops.update(decode_top_logprobs(answer))
            call.answer = part.generation if call.answer is None else call.answer.followed_by(part.generation)
            if call.answer.stop_reason is StopReason.ABORT and not call.aborted:
                raise EngineError(
                    f"{self.url} aborted request {request.request_id} without being asked to",
                    got=answer["meta_info"]["finish_reason"],
                )
            if call.aborted:
                return call.finish(StopReason.ABORT if part.continues else part.generation.stop_reason)
            if not part.continues:
                return call.answer
            if request.params.structure is not None:
                call.answer = None  # a structure must be sampled from its beginning
        return call.finish(StopReason.LENGTH)

    async def _ask(self, call: RunningRequest, body: dict[str, Any]) -> Any:
        on_tokens = call.request.on_tokens
        if on_tokens is None:
            return await self._post("/generate", body)
        answer: Any = {"output_ids": []}

        def take(event: Any) -> None:  # an event contains all tokens so far
            nonlocal answer
            seen, answer = len(answer["output_ids"]), event
            on_tokens(event["output_ids"][seen:])

        streamed = body | {"stream": True}
        await self._http.stream("/generate", streamed, take, deadline_s=self._config.timeout_s, late=EngineError)
        return answer

    async def abort(self, request_id: str) -> bool:
        """End a request early and wait until it has ended; returns False if it is not running."""
        call = self._calls.get(request_id)
        if call is None or call.task is None or call.task.done():
            return False
        await self._end(call, call.task)
        return True

    async def _end(self, call: RunningRequest, task: asyncio.Task[Generation]) -> None:
        call.aborted = True
        if call.is_sent:
            for wait_s in ABORT_WAITS_S:
                await self._http.post("/abort_request", {"rid": call.wire_id}, deadline_s=self._config.health_timeout_s)
                await asyncio.wait([task], timeout=wait_s)
                if task.done():
                    return
        task.cancel()
        await asyncio.wait([task])

    async def _abandon(self, call: RunningRequest, task: asyncio.Task[Generation]) -> None:
        try:
            await self._end(call, task)
        except EngineError:
            task.cancel()  # no caller waits for it, and the next request will fail in the same way
        await asyncio.gather(task, return_exceptions=True)

    async def pause(self) -> None:
        """Remove all requests from the cache and hold them; after this returns, nothing is sampled."""
        self._going.clear()
        try:
            await self._http.post("/pause_generation", {"mode": "retract"}, deadline_s=self._config.timeout_s)
            # SGLang answers the pause before its scheduler stops; the scheduler answers this request only after it has
            # stopped
            await self._http.get("/server_info", deadline_s=self._config.timeout_s)
        except BaseException:
            self._going.set()
            raise

    async def resume(self) -> None:
        """Resume; held requests are prefilled again with the current weights."""
        await self._http.post("/continue_generation", {}, deadline_s=self._config.timeout_s)
        self._going.set()

    async def load_weights(self, folder: Path, version: int) -> None:
        """Load new weights from a folder while paused, and clear the cache."""
        await self._update(lambda: self.from_folder(folder, version))

    async def load_tensors(self, parts: Sequence[TensorPart], version: int) -> None:
        """Load new weights as `load_weights` does, from tensors in the requests."""
        await self._update(lambda: self.from_tensors(parts, version))

    async def open_weights(self, shared: Sequence[SharedTensors], version: int) -> None:
        """Load new weights as `load_weights` does, from the trainer's memory."""
        if self._workers > 1:
            raise UsageError(f"{self.url} has its weights in several processes", hint="use another engine.transport")
        await self.load_tensors([tensors.part for tensors in shared], version)

    async def receive_weights(
        self, layouts: Sequence[TensorLayout], group: UpdateGroup, broadcast: Broadcast, version: int
    ) -> None:
        """Load new weights as `load_weights` does, from a broadcast."""
        await self._update(lambda: self.from_broadcast(layouts, group, broadcast, version))

    async def _update(self, update: Callable[[], Awaitable[None]]) -> None:
        try:
            await update()
        except ServerStatusError as failure:
            if not needs_flush(failure.message):
                raise EngineError(f"{self.url} rejected the weights", got=failure.message) from failure
            # the weights are new, but the cache and the reported version are old: retry
            await self.pause()
            await update()

    async def weight_version(self) -> int:
        """Return the weight version that the server reports; 0 for the initial weights."""
        model = await self._http.get("/model_info", deadline_s=self._config.health_timeout_s)
        return decode_version(str(model.get("weight_version")))

    async def load(self) -> ServerLoad:
        """Return the current load of the server."""
        limit_s = self._config.health_timeout_s
        loads, metrics = await asyncio.gather(
            self._http.get("/v1/loads", deadline_s=limit_s), self._http.get_text("/metrics", deadline_s=limit_s)
        )
        return decode_load(loads, metrics, paused=not self._going.is_set())

    async def is_healthy(self, *, deadline_s: float) -> bool:
        """Return True if the scheduler answers in time. Works during a pause, unlike SGLang's health route."""
        return await self._http.answers("/server_info", deadline_s=deadline_s)

    async def close(self) -> None:
        """Close the connections; running requests raise `EngineError`, and SGLang ends them within seconds."""
        await self._http.close()
        self._going.set()
        await asyncio.gather(*self._endings)
