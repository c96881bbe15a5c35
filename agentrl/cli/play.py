"""Manual play of an environment, in the terminal or in a browser on this machine."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import importlib.resources
import itertools
import shlex
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from aiohttp import web
from rich.text import Text
from yarl import URL

from agentrl.cli.arguments import json_pairs
from agentrl.env import AnyEnv, EnvironmentSpec, maybe_await, optional_part
from agentrl.errors import UsageError
from agentrl.message import Content, ImagePart, TextPart, ToolCall, user
from agentrl.observe.console import note, out
from agentrl.remote.listening import IDLE_CONNECTION_S, is_own_host, read_body
from agentrl.remote.wire import Refusal
from agentrl.rollout.env_returns import WrongReturn, check_tools
from agentrl.rollout.tools import tool_session
from agentrl.task import Task, copy_options
from agentrl.tool import Tool, ToolResult

KEYS = "? lists the actions, ! lets the expert act if used from the first turn, q quits"
TOOL_KEYS = "? lists the tools, /TOOL KEY=VALUE … calls one"
HOST = "127.0.0.1"
LOCAL = frozenset({HOST, "localhost"})
MAX_ACTION_BYTES = 2**20
"""Maximum bytes of a request."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def play_in_terminal(spec: EnvironmentSpec, env: AnyEnv, task: Task) -> None:
    """Read actions from standard input until the episode ends or the user quits."""
    with asyncio.Runner() as runner:
        try:
            runner.run(_play(spec, env, task))
        finally:
            runner.run(maybe_await(env.close()))


async def _play(spec: EnvironmentSpec, env: AnyEnv, task: Task) -> None:
    show = functools.partial(format_observation, numbers=itertools.count())
    observation, _ = await maybe_await(env.reset(seed=task.seed, options=copy_options(task.options)))
    expert = await _expert_of(env)
    try:
        tools = {tool.name: tool for tool in check_tools(optional_part(env, "tools"))}
    except WrongReturn as error:
        raise UsageError(str(error)) from error
    info: dict[str, Any] = {}
    total, turns, done = 0.0, 0, False
    out.print(Text(f"{spec.name}, task {task.id} ({f'{TOOL_KEYS}; {KEYS}' if tools else KEYS})\n", style="dim"))
    out.print(show(observation))
    while not done:
        action = _ask()
        if action is None:
            return
        if action == "?":
            out.print("\n".join([*await actions_of(env), *map(tool_line, tools.values())]))
            continue
        if action.startswith("/") and tools:
            result = await _call_tool(action, tools)
            out.print(result.text)
            total, turns, done = total + result.reward, turns + 1, result.stop or result.truncated
            info = info if result.success is None else {**info, "success": result.success}
            continue
        if action == "!" and expert is None:
            out.print("The environment has no expert, or it was not used from the first turn.")
            continue
        if action == "!" and expert is not None:
            action = str(await maybe_await(expert.act(observation)))
            out.print(Text(f"> {action}", style="cyan"))
        else:
            expert = None  # the expert does not know the user's actions
        observation, reward, terminated, truncated, info = await maybe_await(env.step(action))
        total, turns, done = total + float(reward), turns + 1, terminated or truncated
        out.print(show(observation))
    out.print(Text(ending(info, total, turns), style="bold"))


def ending(info: dict[str, Any], total: float, turns: int) -> str:
    """Describe the end of an episode: its success, return and turns."""
    verdict = "The end." if "success" not in info else "Solved." if info["success"] else "Not solved."
    return f"{verdict} Return {total:g} after {turns} turns."


def _ask() -> str | None:
    try:
        line = input("> ").strip()
    except EOFError:
        return None
    return None if line == "q" else line


async def actions_of(env: AnyEnv) -> list[str]:
    """Return the actions that the environment accepts now, or its hint."""
    method = optional_part(env, "admissible_actions")
    if method is None:
        return [str(optional_part(env, "action_hint") or "This environment does not list its actions.")]
    return list(await maybe_await(method()))


def tool_line(tool: Tool) -> str:
    """Describe a tool's call and purpose in one line: ``/search query=… [limit=…]   Search the library.``."""
    function = tool.schema["function"]
    required = function["parameters"].get("required", [])
    words = [f"{name}=…" if name in required else f"[{name}=…]" for name in function["parameters"]["properties"]]
    sentence = " ".join(function["description"].split()).partition(". ")[0].rstrip(".")
    return f"{' '.join([f'/{tool.name}', *words])}   {sentence}."


async def _call_tool(line: str, tools: Mapping[str, Tool]) -> ToolResult:
    """Call a tool as the user wrote it; return the result that the policy would read, or one that explains an error."""
    try:
        name, *words = shlex.split(line.removeprefix("/"))
        arguments = json_pairs(words)
    except (ValueError, UsageError) as error:
        return ToolResult(f"Error: {error}. Write /TOOL KEY=VALUE, with quotes around values with spaces.")
    async with tool_session() as session:
        called = await session.carry_out(ToolCall(name=name, arguments=arguments), tools)
    rules_stop = called.tool is not None and called.tool.rules.stop and not called.failed
    return dataclasses.replace(called.result, stop=called.result.stop or rules_stop)


async def _expert_of(env: AnyEnv) -> Any:
    method = optional_part(env, "expert")
    return None if method is None else await maybe_await(method())


def format_observation(content: Content, numbers: Iterator[int]) -> str:
    """Return an observation as text for the terminal; images are saved to files, and shown as path and description."""
    if isinstance(content, str):
        return content
    return "\n".join(p.text.rstrip() if isinstance(p, TextPart) else _save_image(p, next(numbers)) for p in content)


def _save_image(image: ImagePart, number: int) -> str:
    path = _folder() / f"{number}.{image.media_type.rpartition('/')[2]}"
    path.write_bytes(image.data)
    return f"[image: {path}]\n{image.alternative}".rstrip()


@functools.cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="agentrl-play-"))


def play_in_browser(spec: EnvironmentSpec, env: AnyEnv, task: Task, *, port: int) -> None:
    """Serve the page until Ctrl-C.

    Raises:
        UsageError: the port is in use.
    """
    try:
        web.run_app(
            make_application(spec, env, task),
            host=HOST,
            port=port,
            keepalive_timeout=IDLE_CONNECTION_S,
            print=lambda text: note(str(text)),
        )
    except OSError as error:
        raise UsageError(
            f"cannot listen on port {port}", got=error, hint="choose another; --port 0 takes a free one"
        ) from error


def make_application(spec: EnvironmentSpec, env: AnyEnv, task: Task) -> web.Application:
    """Return the web application: the page, ``POST /start`` and ``POST /act``, which both return the view as JSON."""
    game = _Game(spec, env, task)
    application = web.Application(middlewares=[_own_page_only])
    application.add_routes([web.get("/", _send_page), web.post("/start", game.start), web.post("/act", game.act)])
    application.on_cleanup.append(game.close)
    return application


@web.middleware
async def _own_page_only(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer only requests from this application's page, not from other sites in the same browser."""
    origin = request.headers.get("Origin", "")
    if not (is_own_host(request.host, LOCAL) and (not origin or _host_of(origin) in LOCAL)):
        raise web.HTTPForbidden(text="this page works only on this machine")
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
    """Consecutive episodes of one task."""

    def __init__(self, spec: EnvironmentSpec, env: AnyEnv, task: Task) -> None:
        self._spec, self._env, self._task = spec, env, task
        self._total, self._turns = 0.0, 0
        self._ending: str | None = None
        """Description of the episode's end; empty during the episode, ``None`` before the first."""

    async def start(self, _request: web.Request) -> web.Response:
        """Start an episode."""
        options = copy_options(self._task.options)
        observation, _ = await maybe_await(self._env.reset(seed=self._task.seed, options=options))
        self._total, self._turns, self._ending = 0.0, 0, ""
        return await self._view(observation)

    async def act(self, request: web.Request) -> web.Response:
        """Take the action in ``{"action": …}``."""
        if self._ending is None:
            return web.json_response({"problem": "no episode has started: POST /start"}, status=409)
        if self._ending:
            return web.json_response({"problem": f"the episode is over: {self._ending}"}, status=409)
        try:
            action = str((await read_body(request, MAX_ACTION_BYTES))[1]["action"])
        except (Refusal, KeyError):
            return web.json_response({"problem": 'expected JSON such as {"action": "look"}'}, status=400)
        observation, reward, terminated, truncated, info = await maybe_await(self._env.step(action))
        self._total, self._turns = self._total + float(reward), self._turns + 1
        self._ending = ending(info, self._total, self._turns) if terminated or truncated else ""
        return await self._view(observation)

    async def close(self, _application: web.Application) -> None:
        """Close the environment."""
        await maybe_await(self._env.close())

    async def _view(self, observation: Content) -> web.Response:
        make_page, list_actions = (optional_part(self._env, name) for name in ("web_page", "admissible_actions"))
        view: dict[str, Any] = {
            "title": f"{self._spec.name}, task {self._task.id}",
            "text": user(observation).text,
            "images": [part.data_url for part in observation if isinstance(part, ImagePart)],
            "page": None if make_page is None else await maybe_await(make_page()),
            "actions": [] if list_actions is None or self._ending else list(await maybe_await(list_actions())),
            "turns": self._turns,
            "ending": self._ending,
        }
        return web.json_response(view)
