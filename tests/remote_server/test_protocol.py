"""The protocol on the wire: numbers, repetitions, refusals, leases, tokens."""

from __future__ import annotations

import dataclasses
import json
import urllib.error
import urllib.request
from typing import Any, NamedTuple

import pytest
from served_worlds import STAIRS, Stairs

from agentrl.errors import UsageError
from agentrl.remote.wire import MAX_REQUEST_BYTES
from agentrl.tool import Tool

SESSION = "/v1/sessions/client-0001"


class Said(NamedTuple):
    status: int
    body: Any

    @property
    def kind(self) -> str:
        return str(self.body["error"]["kind"])

    @property
    def message(self) -> str:
        return str(self.body["error"]["message"])


def ask(url: str, method: str, route: str, body: Any = None, *, token: str | None = None, **headers: str) -> Said:
    data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    sent = {"Content-Type": "application/json"} if data is not None else {}
    sent |= {} if token is None else {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(url + route, data=data, headers=sent | headers, method=method)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
            return Said(answer.status, json.loads(answer.read()))
    except urllib.error.HTTPError as error:
        with error:
            return Said(error.code, json.loads(error.read()))


class Client:
    """A session, call by call."""

    def __init__(self, url: str, session: str = SESSION) -> None:
        self.url, self.session = url, session
        self.opened = ask(url, "PUT", session, {})

    def call(self, number: int, method: str, **arguments: Any) -> Said:
        return ask(self.url, "POST", f"{self.session}/{method}", {"number": number, **arguments})


@pytest.fixture
def client(serve: Any) -> Client:
    opened = Client(serve(STAIRS).url)
    assert opened.call(1, "reset", seed=3, options={}).body["observation"] == "stairs 3"
    return opened


def test_a_transcript_as_the_documentation_shows_it(client: Client) -> None:
    told = ask(client.url, "GET", "/health").body
    assert told == {"protocol": "agentrl-environment", "versions": [1], "status": "ok"}
    info = ask(client.url, "GET", "/v1/info").body
    assert (info["version"], info["spec"]["name"], info["spec"]["reward_range"]) == (1, "stairs", [None, 1.0])
    assert info["parts"] == ["action_space", "expert", "final_reward", "restore", "snapshot", "state_key", "tools"]
    page = ask(client.url, "GET", "/v1/tasks/train?start=248&count=100").body
    assert page["total"] == 250
    assert [task["id"] for task in page["tasks"]] == ["train-248", "train-249"]
    stepped = client.call(2, "step", action="up")
    assert stepped == Said(
        200,
        {
            "observation": "step 1",
            "reward": 0.0,
            "terminated": False,
            "truncated": False,
            "info": {"success": False, "valid": True},
            "state_key": "1",
        },
    )
    assert client.call(3, "call_tool", name="look_around", arguments={"far": True}).body == {
        "text": "1 steps below you"
    }
    assert ask(client.url, "DELETE", client.session).status == 200
    assert ask(client.url, "DELETE", client.session).status == 200
    assert client.call(4, "step", action="up").kind == "session"


def test_repeated_request_is_answered_again_and_executed_once(client: Client) -> None:
    before = Stairs.steps
    first = client.call(2, "step", action="up")
    assert client.call(2, "step", action="up") == first
    assert Stairs.steps == before + 1
    failed = client.call(3, "step", action="fail")
    assert client.call(3, "step", action="fail") == failed
    assert Stairs.steps == before + 2
    assert failed.status == 500
    assert (
        "step of environment stairs (task seed 3, step 2) failed: got RuntimeError: the stairs broke. It was raised in"
        in failed.message
    )


@pytest.mark.parametrize(
    ("number", "method", "arguments", "words"),
    [
        (1, "step", {"action": "up"}, "number 1 was used for a different request"),
        (1, "reset", {"seed": 4, "options": {}}, "number 1 was used for a different request"),
        (3, "step", {"action": "up"}, "the request has number 3, expected 2, or 1 to repeat the last one"),
        (0, "step", {"action": "up"}, "the request has number 0"),
    ],
)
def test_a_wrong_number_changes_nothing(
    client: Client, number: int, method: str, arguments: dict[str, Any], words: str
) -> None:
    before = Stairs.steps
    said = client.call(number, method, **arguments)
    assert (said.status, said.kind) == (409, "number")
    assert words in said.message
    assert Stairs.steps == before
    assert client.call(2, "step", action="up").body["observation"] == "step 1"


@pytest.mark.parametrize(
    ("method", "arguments", "kind", "words"),
    [
        ("step", {}, "request", "'action' of the request is None, expected of type str"),
        ("step", {"action": 5}, "request", "'action' of the request is 5"),
        ("reset", {"seed": "x", "options": {}}, "request", "'seed' of the request is 'x'"),
        ("reset", {"seed": True, "options": {}}, "request", "'seed' of the request is True"),
        ("reset", {"seed": 1, "options": []}, "request", "expected an object"),
        ("reset", {"seed": 1, "options": {"impossible": 1}}, "usage", "there are no such stairs: got impossible"),
        ("expert_action", {"observation": [{}]}, "request", "not an observation: KeyError('image')"),
        ("web_page", {}, "usage", "the environment has no web_page()"),
        (
            "call_tool",
            {"name": "fly", "arguments": {}},
            "tool",
            "unknown tool 'fly', expected look_around, stumble",
        ),
        ("call_tool", {"name": "look_around", "arguments": {}}, "tool", "wrong arguments for look_around"),
        ("call_tool", {"name": "look_around", "arguments": {"far": False}}, "tool", "there is nothing near"),
        ("call_tool", {"name": "stumble", "arguments": {}}, "tool", "stumble failed (ValueError)"),
        ("step", {"action": "unsendable"}, "environment", "TypeError: a object has no JSON form"),
    ],
)
def test_errors_have_their_kind(client: Client, method: str, arguments: dict[str, Any], kind: str, words: str) -> None:
    said = client.call(2, method, **arguments)
    assert said.kind == kind
    assert words in said.message


def test_malformed_requests_are_rejected(client: Client) -> None:
    def refused(method: str, route: str, body: Any = None, **headers: str) -> str:
        said = ask(client.url, method, route, body, **headers)
        assert said.status in (400, 404, 405, 413)
        assert said.kind in ("request", "usage")
        return said.message

    assert "Not Found" in refused("GET", "/v2/info")
    assert "Method Not Allowed" in refused("POST", "/v1/info", {})
    assert "unknown method 'fly'" in refused("POST", f"{SESSION}/fly", {"number": 2})
    assert "is not valid JSON" in refused("POST", f"{SESSION}/step", b"{")
    assert "expected an object" in refused("POST", f"{SESSION}/step", [])
    assert "expected application/json" in refused("POST", f"{SESSION}/step", b"{}", **{"Content-Type": "text/plain"})
    assert "'number' of the request is None" in refused("POST", f"{SESSION}/step", {"action": "up"})
    assert "is not a valid name of a session" in refused("PUT", "/v1/sessions/short", {})
    assert "'start' of the query is '-1'" in refused("GET", "/v1/tasks/train?start=-1")
    assert "unknown split 'fall', expected one of train, valid, test" in refused("GET", "/v1/tasks/fall")
    assert "the test split is not here" in refused("GET", "/v1/tasks/test")
    assert "Too Large" in refused("POST", f"{SESSION}/step", b" " * (MAX_REQUEST_BYTES + 1))


def test_sessions_are_limited_and_opening_is_idempotent(serve: Any) -> None:
    running = serve(STAIRS, max_sessions=1)
    client = Client(running.url)
    client.call(1, "reset", seed=3, options={})
    assert ask(running.url, "PUT", SESSION, {}).status == 200
    full = ask(running.url, "PUT", "/v1/sessions/client-0002", {})
    assert (full.status, full.kind, full.message) == (503, "busy", "all 1 sessions are in use")
    assert client.call(2, "step", action="up").status == 200
    ask(running.url, "DELETE", SESSION)
    assert ask(running.url, "PUT", "/v1/sessions/client-0002", {}).status == 200


def test_an_abandoned_session_is_closed_and_its_environment_used_again(serve: Any) -> None:
    running = serve(STAIRS)
    made = Stairs.made
    client = Client(running.url)
    client.call(1, "reset", seed=3, options={})
    running.expire()
    said = client.call(2, "step", action="up")
    assert (said.status, said.kind) == (404, "session")
    assert "idle for 900 s" in said.message
    assert running.count() == 0
    other = Client(running.url, "/v1/sessions/client-0002")
    assert other.call(1, "reset", seed=4, options={}).status == 200
    assert Stairs.made == made


def test_request_number_cannot_be_reused_for_another_method(client: Client) -> None:
    first = client.call(2, "state_key")
    assert first.status == 200
    assert client.call(2, "snapshot").kind == "number"
    assert client.call(2, "state_key") == first


@pytest.mark.parametrize("action", ["fail", "unsendable"])
def test_an_environment_that_failed_is_not_used_again(serve: Any, action: str) -> None:
    running = serve(STAIRS)
    made, closed = Stairs.made, Stairs.closed
    client = Client(running.url)
    client.call(1, "reset", seed=3, options={})
    client.call(2, "step", action=action)
    ask(running.url, "DELETE", SESSION)
    Client(running.url, "/v1/sessions/client-0002")
    assert (Stairs.made, Stairs.closed) == (made + 1, closed + 1)


def test_token_is_required_except_for_health(serve: Any) -> None:
    running = serve(STAIRS, token="secret")
    assert ask(running.url, "GET", "/health").status == 200
    for token, words in ((None, "no token"), ("secreu", "wrong token"), ("", "wrong token"), ("\xe9", "wrong token")):
        said = ask(running.url, "GET", "/v1/info", token=token)
        assert (said.status, said.kind, said.message) == (401, "token", words)
    assert ask(running.url, "PUT", SESSION, {}, token="no").status == 401
    assert ask(running.url, "GET", "/v1/info", token="secret").status == 200


class Locked(Stairs):
    """Has another tool in every episode."""

    def reset(self, **words: Any) -> tuple[str, dict[str, Any]]:
        own = Tool(self.look_around, name=f"look_{words['seed']}", inline=True)
        self.tools = (own,)  # type: ignore[assignment]
        return super().reset(**words)


def test_tools_of_an_earlier_episode_are_removed(serve: Any) -> None:
    client = Client(serve(dataclasses.replace(STAIRS, make=Locked)).url)
    for number, seed in ((1, 3), (3, 4)):
        assert client.call(number, "reset", seed=seed, options={}).status == 200
        said = client.call(number + 1, "call_tool", name="look_3", arguments={"far": True})
        assert (said.status == 200) == (seed == 3), said
    assert "expected look_4" in said.message


def test_server_options_override_the_specs(serve: Any) -> None:
    spec = dataclasses.replace(STAIRS, make=lambda height, width: Stairs(), options={"height": 1, "width": 2})
    told = ask(serve(spec, {"height": 3}).url, "GET", "/v1/info").body
    assert told["spec"]["options"] == {"height": 3, "width": 2}


def test_the_options_are_the_servers(serve: Any) -> None:
    running = serve(STAIRS)
    told = ask(running.url, "PUT", SESSION, {"fingerprint": "of another"})
    assert told.kind == "usage"
    assert "its options or its version have changed" in told.message
    with pytest.raises(UsageError, match=r"cannot listen on 127\.0\.0\.1"):
        serve(STAIRS, port=int(running.url.rpartition(":")[2]))


def test_closing_the_server_closes_its_environments(serve: Any) -> None:
    made, closed = Stairs.made, Stairs.closed
    running = serve(STAIRS)
    for number in range(3):
        client = Client(running.url, f"/v1/sessions/client-000{number}")
        client.call(1, "reset", seed=3, options={})
    running.close()
    assert Stairs.made - made == Stairs.closed - closed == 3
