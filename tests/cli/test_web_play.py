"""Playing an environment in a browser: the page, its two requests, and clicks."""

from __future__ import annotations

import html
import re
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from agentrl.cli import env as env_command
from agentrl.cli.play import make_application, play_in_browser
from agentrl.env.lookup import resolve_environment
from agentrl.errors import UsageError

Open = Callable[..., Any]


@pytest.fixture
async def open_game() -> AsyncIterator[Open]:
    """Opens the game of an environment; the function that it gives posts a request and returns the answer."""
    clients: list[TestClient[Any, Any]] = []

    async def open_it(name: str, **options: Any) -> Callable[..., Any]:
        spec = resolve_environment(name)
        task = spec.tasks("test", **options)[0]
        client = TestClient(TestServer(make_application(spec, spec.make(**options), task)))
        clients.append(client)
        await client.start_server()
        page = await client.get("/")
        assert "<script>" in await page.text()

        async def post(path: str, **body: Any) -> Any:
            answer = await client.post(path, json=body)
            return answer.status, await answer.json()

        return post

    yield open_it
    for client in clients:
        await client.close()


async def test_a_game_is_played_to_its_end_and_again(open_game: Open) -> None:
    post = await open_game("guess_number")
    assert (await post("/act", action="5"))[0] == 409
    _, view = await post("/start")
    assert view["text"] == "I think of a number from 1 to 100. Guess."
    assert (view["title"], view["page"], view["actions"], view["turns"]) == ("guess_number, task test-0", None, [], 0)
    for number in range(10):
        status, view = await post("/act", action=f"-{number}")
        assert (status, view["turns"]) == (200, number + 1)
    assert view["ending"] == "Not solved. Return 0 after 10 turns."
    assert "episode is over" in (await post("/act", action="5"))[1]["problem"]
    assert (await post("/start"))[1]["ending"] == ""


@pytest.mark.parametrize("sent", [b"X", b"{}", b"[1]"])
async def test_what_is_no_action_is_refused(sent: bytes) -> None:
    spec = resolve_environment("guess_number")
    async with TestClient(TestServer(make_application(spec, spec.make(), spec.tasks("test")[0]))) as client:
        assert "no episode has started" in (await (await client.post("/act", json={"action": "5"})).json())["problem"]
        assert (await client.post("/start")).status == 200
        answer = await client.post("/act", data=sent)
        assert (answer.status, "action" in (await answer.json())["problem"]) == (400, True)


@pytest.mark.parametrize("header", ["Host", "Origin"])
async def test_other_sites_are_refused(header: str) -> None:
    spec = resolve_environment("guess_number")
    async with TestClient(TestServer(make_application(spec, spec.make(), spec.tasks("test")[0]))) as client:
        sites = {"Host": "evil.example", "Origin": "http://evil.example"}
        assert (await client.post("/start", headers={header: sites[header]})).status == 403
        assert (await client.post("/start", headers={"Origin": "http://localhost:8089"})).status == 200


def test_a_port_that_is_taken_is_named() -> None:
    spec = resolve_environment("guess_number")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"cannot listen on port {port}.*--port 0 takes a free one"):
            play_in_browser(spec, spec.make(), spec.tasks("test")[0], port=port)


async def test_a_shop_is_a_page_whose_elements_say_what_a_click_means(open_game: Open) -> None:
    post = await open_game("webshop", products=300)
    _, view = await post("/start")
    assert 'data-action="search[{}]"' in view["page"]
    _, view = await post("/act", action="search[body lotion]")
    while not view["ending"]:
        meant = [html.unescape(action) for action in re.findall(r'data-action="([^"]*)"', view["page"])]
        assert sorted(meant) == sorted(view["actions"])
        wanted = "click[buy now]"
        _, view = await post("/act", action=wanted if wanted in meant else meant[2])
    assert "Your score" in view["page"]
    assert "data-action" not in view["page"]


def test_the_option_web_opens_the_page(agentrl: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    monkeypatch.setattr(env_command, "play_in_browser", lambda *given, port: opened.append((*given, port)))
    assert agentrl("env", "play", "guess_number", "--web", "--port", "0").code == 0
    spec, _, task, port = opened[0]
    assert (spec.name, task.id, port) == ("guess_number", "train-0", 0)


async def test_a_page_shows_images(open_game: Open) -> None:
    post = await open_game("sokoban", observation="image")
    _, view = await post("/start")
    assert view["text"].startswith("In the picture a wall is dark grey")
    assert [address[:22] for address in view["images"]] == ["data:image/png;base64,"]
    assert (await post("/act", action="up"))[1]["images"] != []
