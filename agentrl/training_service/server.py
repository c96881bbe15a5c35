"""The routes of the ``tinker`` client, and errors in the client's format.

The client does not retry after status 400, 404 or 410; it retries after 408, 409, 429 and 5xx.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias, TypeVar

import orjson
from aiohttp import web

from agentrl.errors import UsageError, described_error
from agentrl.errors.foreign import run_in_own_thread
from agentrl.remote.listening import Handler, Listener, is_own_page, own_names, read_bytes_of
from agentrl.training_service import requests
from agentrl.training_service.futures import UnknownResult
from agentrl.training_service.runs import BaseWeights
from agentrl.training_service.service import NotFound, Service, TrainingServiceSettings, texts
from agentrl.training_service.sessions import Busy, ServedRun
from agentrl.training_service.store import SAMPLER, TRAINING, CheckpointInfo, StoredCheckpoint
from agentrl.training_service.wire import MEDIA_TYPE

_log = logging.getLogger(__name__)
B = TypeVar("B", bound=requests.Body)
Answer: TypeAlias = Mapping[str, Any] | None
PREFIX = "/api/v1"
HEALTH = f"{PREFIX}/healthz"
KEY_HEADER = "X-API-Key"
KEY_PREFIX = "tml-"
"""Prefix of every key that the client accepts."""
KEY_VARIABLE = "TINKER_API_KEY"
"""Environment variable from which the client reads its key."""
MAX_BODY_BYTES = 64 << 20
MAX_TELEMETRY_BYTES = 4 << 20
MAX_CONNECTIONS = 4096
LONG_POLL_S = 20.0
"""Maximum seconds for which a request waits for a result; the client's timeout is 45 s."""
PAGE = 20
CLIENT_CONFIG = {
    "pjwt_auth_enabled": False,
    "proto_compress_fwdbwd": False,
    "use_pyqwest_transport": False,
    "sample_use_retrieve_futures": False,
    "sample_join_sampling_session": False,
    "custom_loss_server_side": False,
}
"""Client features that this server disables."""


class TrainingServer:
    """HTTP server of one service.

    Without a key, the ``Host`` of requests must be this machine.
    """

    def __init__(
        self,
        settings: TrainingServiceSettings,
        load: Callable[[], BaseWeights],
        *,
        host: str,
        port: int,
        key: str | None,
    ) -> None:
        self.service = Service(settings, load)
        self._host, self._port, self._key = host, port, key
        self._listener: Listener | None = None
        self.url = ""

    async def start(self) -> None:
        """Load the model, then listen.

        Raises:
            UsageError: the model cannot be loaded, or the port is taken.
        """
        await self.service.start()
        self._listener = Listener(self._application(), most_connections=MAX_CONNECTIONS)
        self.url = await self._listener.start(self._host, self._port)

    async def close(self) -> None:
        """Stop listening and close the service, whether or not it was started."""
        if self._listener is not None:
            await self._listener.close()
        await self.service.close()

    def _application(self) -> web.Application:
        service = self.service
        application = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_answer_errors, self._guard()])
        post = application.router.add_post
        post(f"{PREFIX}/create_session", _direct_handler(requests.CreateSession, service.create_session))
        post(f"{PREFIX}/session_heartbeat", _direct_handler(requests.SessionHeartbeat, self._heartbeat))
        post(f"{PREFIX}/get_info", _direct_handler(requests.ModelOnly, service.info))
        post(f"{PREFIX}/create_sampling_session", _direct_handler(requests.CreateSamplingSession, service.new_sampler))
        post(f"{PREFIX}/weights_info", _direct_handler(requests.WeightsInfo, self._weights_info))
        post(f"{PREFIX}/cancel_future", _direct_handler(requests.CancelFuture, self._cancel))
        post(f"{PREFIX}/create_model", self._queued_handler(requests.CreateModel, service.create_model))
        post(f"{PREFIX}/unload_model", self._queued_handler(requests.ModelOnly, service.unload))
        post(f"{PREFIX}/optim_step", self._queued_handler(requests.OptimStep, service.optim_step))
        post(f"{PREFIX}/save_weights", self._queued_handler(requests.SaveWeights, service.save))
        post(
            f"{PREFIX}/save_weights_for_sampler",
            self._queued_handler(requests.SaveForSampler, service.save_for_sampler),
        )
        post(f"{PREFIX}/asample", self._queued_handler(requests.SampleRequest, service.sample))
        post(f"{PREFIX}/load_weights", self._load_weights)
        post(f"{PREFIX}/forward_backward", self._forward_backward)
        post(f"{PREFIX}/retrieve_future", self._retrieve)
        post(f"{PREFIX}/sessions/{{session}}/finish", self._finish)
        post(f"{PREFIX}/client/config", _client_config)
        post(f"{PREFIX}/client/dynamic_config", _constant_handler({"sample_cancel_enabled": True}))
        post(f"{PREFIX}/telemetry", _telemetry)
        self._add_views(application.router)
        application.router.add_route("*", "/{rest:.*}", _unknown)
        return application

    def _add_views(self, router: web.UrlDispatcher) -> None:
        router.add_get(HEALTH, _constant_handler({"status": "ok"}))
        router.add_get(f"{PREFIX}/get_server_capabilities", self._capabilities)
        router.add_get(f"{PREFIX}/samplers/{{sampler}}", self._sampler)
        router.add_get(f"{PREFIX}/sessions/{{session}}", self._session)
        router.add_get(f"{PREFIX}/training_runs", self._runs)
        router.add_get(f"{PREFIX}/training_runs/{{run}}", self._run)
        router.add_get(f"{PREFIX}/checkpoints", self._checkpoints)
        router.add_get(f"{PREFIX}/training_runs/{{run}}/checkpoints", self._checkpoints)
        router.add_delete(f"{PREFIX}/training_runs/{{run}}/checkpoints/{{kind}}/{{name}}", self._delete)

    def _guard(self) -> Any:
        wanted = None if self._key is None else self._key.encode()
        names = own_names(self._host)

        @web.middleware
        async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
            if wanted is None and not is_own_page(request, names):
                return _error(403, "without a key this server accepts only requests to its own names")
            sent = request.headers.get(KEY_HEADER, "").encode(errors="surrogateescape")
            if wanted is not None and request.path != HEALTH and not hmac.compare_digest(sent, wanted):
                return _error(401, f"wrong {KEY_HEADER}: set {KEY_VARIABLE} to the server's key")
            return await handler(request)

        return check

    def _queued_handler(self, kind: type[B], begin: Callable[[B, bytes], Answer]) -> Handler:
        """Make the handler of a request whose result the client fetches later."""

        async def answer(request: web.Request) -> web.StreamResponse:
            raw, body = await _read(request)
            try:
                return _json(begin(requests.read(kind, body), raw))
            except UsageError as error:
                self.service.refuse(body, raw, error)
                raise

        return answer

    async def _load_weights(self, request: web.Request) -> web.StreamResponse:
        raw, body = await _read(request)
        try:
            if "session_id" in body:
                return _json(self.service.create_from_weights(requests.read(requests.CreateFromWeights, body), raw))
            return _json(self.service.load(requests.read(requests.LoadWeights, body), raw))
        except UsageError as error:
            self.service.refuse(body, raw, error)
            raise

    async def _forward_backward(self, request: web.Request) -> web.StreamResponse:
        if request.content_type != MEDIA_TYPE:
            raise UsageError(
                "forward_backward is not a protocol buffer",
                got=request.content_type,
                expected=MEDIA_TYPE,
                hint="update tinker",
            )
        raw = await read_bytes_of(request, MAX_BODY_BYTES)
        return _json(self.service.forward_backward(raw))

    async def _retrieve(self, request: web.Request) -> web.StreamResponse:
        _, body = await _read(request)
        request_id = requests.read(requests.RetrieveFuture, body).request_id
        result = await self.service.futures.fetch(request_id, wait_s=LONG_POLL_S)
        if result is None:
            retry = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
            return web.Response(body=orjson.dumps(retry), status=408, content_type="application/json")
        return web.Response(body=result.body, content_type=result.media_type)

    async def _finish(self, request: web.Request) -> web.StreamResponse:
        _, body = await _read(request)
        requests.read(requests.FinishSession, body)
        self.service.finish(request.match_info["session"])
        return web.Response(status=204)

    def _heartbeat(self, body: requests.SessionHeartbeat) -> Answer:
        self.service.session(body.session_id)
        return {"type": "session_heartbeat"}

    def _cancel(self, body: requests.CancelFuture) -> Answer:
        self.service.futures.cancel(body.request_id)
        return {}

    def _weights_info(self, body: requests.WeightsInfo) -> Answer:
        settings = self.service.store.find(body.tinker_path).about.settings
        return {
            "base_model": self.service.settings.model_name,
            "is_lora": settings.rank is not None,
            "lora_rank": settings.rank,
            "train_attn": settings.train_attn,
            "train_mlp": settings.train_mlp,
            "train_unembed": settings.train_unembed,
        }

    async def _capabilities(self, request: web.Request) -> web.StreamResponse:
        model = {
            "model_name": self.service.settings.model_name,
            "max_context_length": self.service.base.max_context,
            "trainable": True,
            "sampleable": True,
        }
        return _json({"supported_models": [model]})

    async def _sampler(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["sampler"]
        path = self.service.sampler(name).path
        return _json({"sampler_id": name, "base_model": self.service.settings.model_name, "model_path": path})

    async def _session(self, request: web.Request) -> web.StreamResponse:
        session = self.service.session(request.match_info["session"])
        metadata = texts(session.metadata)
        return _json({"training_run_ids": list(session.runs), "sampler_ids": [], "user_metadata": metadata})

    async def _runs(self, request: web.Request) -> web.StreamResponse:
        found, page = list(self.service.runs()), _page(request)
        rows = [self._describe_run(run) for run in found[page.start : page.stop]]
        return _json({"training_runs": rows, "cursor": _cursor(page, len(found))})

    async def _run(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["run"]
        try:
            return _json(self._describe_run(self.service.run(name)))
        except NotFound:
            stored = await run_in_own_thread(self.service.store.list, name)
            if not stored:
                raise
            return _json(_describe_ended_run(name, stored[-1].about))

    def _describe_run(self, run: ServedRun) -> dict[str, Any]:
        rank = run.training.settings.rank
        return {
            "training_run_id": run.id,
            "base_model": self.service.settings.model_name,
            "model_owner": "agentrl",
            "is_lora": rank is not None,
            "lora_rank": rank,
            "last_request_time": run.last_request.isoformat(),
            "user_metadata": texts(run.metadata),
        }

    async def _checkpoints(self, request: web.Request) -> web.StreamResponse:
        found = await run_in_own_thread(self.service.store.list, request.match_info.get("run"))
        if "run" in request.match_info:
            return _json({"checkpoints": [_describe_checkpoint(saved) for saved in found]})
        page = _page(request)
        rows = [_describe_checkpoint(saved) for saved in found[::-1][page.start : page.stop]]
        return _json({"checkpoints": rows, "cursor": _cursor(page, len(found))})

    async def _delete(self, request: web.Request) -> web.StreamResponse:
        run, kind, name = (request.match_info[part] for part in ("run", "kind", "name"))
        await run_in_own_thread(self.service.store.delete, f"tinker://{run}/{kind}/{name}")
        return web.Response(status=204)


def _describe_ended_run(name: str, about: CheckpointInfo) -> dict[str, Any]:
    """Describe a run that has ended, by its newest checkpoint."""
    return {
        "training_run_id": name,
        "base_model": about.base_model,
        "model_owner": "agentrl",
        "is_lora": about.settings.rank is not None,
        "lora_rank": about.settings.rank,
        "last_request_time": about.created,
        "user_metadata": about.run_metadata,
    }


def _describe_checkpoint(saved: StoredCheckpoint) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{saved.kind}/{saved.name}",
        "checkpoint_type": {TRAINING: "training", SAMPLER: "sampler"}[saved.kind],
        "time": saved.about.created,
        "tinker_path": saved.path,
        "size_bytes": saved.bytes,
        "expires_at": saved.about.expires,
        "user_metadata": saved.about.user_metadata,
    }


def _page(request: web.Request) -> range:
    """Read the requested range of a list."""
    offset = _count(request, "offset", 0)
    return range(offset, offset + _count(request, "limit", PAGE))


def _cursor(page: range, total: int) -> dict[str, int]:
    return {"offset": page.start, "limit": len(page), "total_count": total}


def _count(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name, str(default))
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise UsageError(f"{name} is not a number", got=text[:20], expected="a whole number")
    return int(text)


def _direct_handler(kind: type[B], answer: Callable[[B], Answer | Awaitable[Answer]]) -> Handler:
    """Make the handler of a request that is answered immediately."""

    async def handle(request: web.Request) -> web.StreamResponse:
        _, body = await _read(request)
        found = answer(requests.read(kind, body))
        return _json(await found if isinstance(found, Awaitable) else found)

    return handle


async def _read(request: web.Request) -> tuple[bytes, dict[str, Any]]:
    if request.content_type != "application/json":  # pages of other sites cannot send this type without permission
        raise UsageError("the request is not JSON", got=request.content_type, expected="application/json")
    raw = await read_bytes_of(request, MAX_BODY_BYTES)
    return raw, requests.read_object(raw)


def _constant_handler(data: Mapping[str, Any]) -> Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        return _json(data)

    return answer


async def _client_config(request: web.Request) -> web.StreamResponse:
    response = _json(CLIENT_CONFIG)
    response.force_close()  # the client does not reuse this connection but leaves it open
    return response


async def _telemetry(request: web.Request) -> web.StreamResponse:
    await read_bytes_of(request, MAX_TELEMETRY_BYTES)  # the client's events are discarded
    return _json({"status": "accepted"})


async def _unknown(request: web.Request) -> web.StreamResponse:
    return _error(400, f"{request.method} {request.path} is not supported here: see docs/training-service.md")


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Return errors in the client's format."""
    try:
        return await handler(request)
    except (NotFound, UnknownResult) as error:
        return _error(410 if request.path.endswith("/session_heartbeat") else 404, str(error))
    except UsageError as error:
        return _error(400, str(error))
    except Busy as error:
        return _error(429, str(error))
    except web.HTTPRequestEntityTooLarge:
        return _error(413, f"the request is larger than {MAX_BODY_BYTES >> 20} MiB")
    except web.HTTPException as error:
        accepted = {name: error.headers[name] for name in ("Accept-Encoding", "Allow") if name in error.headers}
        return _error(error.status, error.reason, accepted)
    except Exception as error:
        _log.exception("a request to the training service failed")
        return _error(500, described_error(error))


def _error(status: int, text: str, headers: Mapping[str, str] | None = None) -> web.Response:
    is_final = status < 500 and status != 429
    category = "user" if is_final else "server"
    headers = {**(headers or {}), **({"x-should-retry": "false"} if is_final else {})}
    body = orjson.dumps({"error": text, "category": category})
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


def _json(data: Answer) -> web.Response:
    return web.Response(body=orjson.dumps(data), content_type="application/json")
