"""A person plays an environment in a browser, at an address that only this machine can reach."""

from __future__ import annotations

import importlib.resources
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from yarl import URL

from agentrl.cli.play import ending
from agentrl.env import AnyEnv, EnvironmentSpec, optional_part, settled
from agentrl.env_server.listening import IDLE_S, is_own_host, read_body
from agentrl.env_server.refusal import Refusal
from agentrl.errors import UsageError
from agentrl.message import Content, ImagePart, user
from agentrl.observe.console import note
from agentrl.task import Task

HOST = "127.0.0.1"
LOCAL = frozenset({HOST, "localhost"})
LARGEST_ACTION = 2**20
"""Bytes of a request."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def play_in_browser(spec: EnvironmentSpec, env: AnyEnv, task: Task, *, port: int) -> None:
    """Serve the page until the person stops it with Ctrl-C.

    Raises:
        UsageError: something else listens on the port.
    """
    try:
        web.run_app(
            make_application(spec, env, task),
            host=HOST,
            port=port,
            keepalive_timeout=IDLE_S,
            print=lambda text: note(str(text)),
        )
    except OSError as error:
        raise UsageError(
            f"cannot listen on port {port}", got=error, hint="choose another: --port 0 takes any"
        ) from error


def make_application(spec: EnvironmentSpec, env: AnyEnv, task: Task) -> web.Application:
    """The page, and what it asks for: ``POST /start`` and ``POST /act``, both answered with the view as JSON."""
    game = _Game(spec, env, task)
    application = web.Application(middlewares=[_own_page_only])
    application.add_routes(
        [web.get("/", _send_page), web.post("/start", game.start), web.post("/act", game.act)],
    )
    application.on_cleanup.append(game.close)
    return application


@web.middleware
async def _own_page_only(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer the page that was served here, not one of another site in the same browser."""
    origin = request.headers.get("Origin", "")
    if not (is_own_host(request.host, LOCAL) and (not origin or _host_of(origin) in LOCAL)):
        raise web.HTTPForbidden(text="this page answers on this machine only")
    return await handler(request)


def _host_of(address: str) -> str | None:
    try:
        return URL(address).host
    except ValueError:
        return None


async def _send_page(_request: web.Request) -> web.Response:
    page = importlib.resources.files(__package__).joinpath("web_play.html").read_text(encoding="utf-8")
    return web.Response(text=page, content_type="text/html")


class _Game:
    """One episode after the other of one task."""

    def __init__(self, spec: EnvironmentSpec, env: AnyEnv, task: Task) -> None:
        self._spec, self._env, self._task = spec, env, task
        self._total, self._turns = 0.0, 0
        self._ending: str | None = None
        """How the episode ended; empty while it goes on, ``None`` before the first."""

    async def start(self, _request: web.Request) -> web.Response:
        """Begin an episode."""
        observation, _ = await settled(self._env.reset(seed=self._task.seed, options=dict(self._task.options)))
        self._total, self._turns, self._ending = 0.0, 0, ""
        return await self._view(observation)

    async def act(self, request: web.Request) -> web.Response:
        """Take the action in ``{"action": …}``."""
        if self._ending is None:
            return web.json_response({"problem": "no episode has begun: POST /start"}, status=409)
        if self._ending:
            return web.json_response({"problem": f"the episode is over: {self._ending}"}, status=409)
        try:
            action = str((await read_body(request, LARGEST_ACTION))[1]["action"])
        except (Refusal, KeyError):
            return web.json_response({"problem": 'expected JSON such as {"action": "look"}'}, status=400)
        observation, reward, terminated, truncated, info = await settled(self._env.step(action))
        self._total, self._turns = self._total + float(reward), self._turns + 1
        self._ending = ending(info, self._total, self._turns) if terminated or truncated else ""
        return await self._view(observation)

    async def close(self, _application: web.Application) -> None:
        """Close the environment."""
        await settled(self._env.close())

    async def _view(self, observation: Content) -> web.Response:
        make_page, list_actions = (optional_part(self._env, name) for name in ("web_page", "admissible_actions"))
        view: dict[str, Any] = {
            "title": f"{self._spec.name}, task {self._task.id}",
            "text": user(observation).text,
            "images": [part.data_url for part in observation if isinstance(part, ImagePart)],
            "page": None if make_page is None else await settled(make_page()),
            "actions": [] if list_actions is None or self._ending else list(await settled(list_actions())),
            "turns": self._turns,
            "ending": self._ending,
        }
        return web.json_response(view)
