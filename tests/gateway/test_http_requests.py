"""Requests as HTTP clients send them: encodings, methods, paths, keys, and the routes of OpenAI's clients for Azure."""

import asyncio
import gzip
import io
import json
from urllib.parse import urlsplit

import aiohttp
import anthropic
import openai
import pytest

CHAT = "/v1/chat/completions"
QUESTION = {"model": "p", "messages": [{"role": "user", "content": "one"}]}
BODY = json.dumps(QUESTION).encode()


async def fetch(gateway, path, *, key=None, method="POST", data=BODY, headers=None):
    """Send a request as it is; its status, headers, and body as JSON if it has one."""
    sent = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {}) | (headers or {})
    async with (
        aiohttp.ClientSession() as http,
        http.request(method, gateway.url + path, data=data, headers=sent) as answer,
    ):
        text = await answer.text()
        return answer.status, answer.headers, json.loads(text) if text else None


async def raw(gateway, head, body=b""):
    """Send bytes on a connection of their own until the server closes it; the answer."""
    address = urlsplit(gateway.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write("\r\n".join(head).encode() + b"\r\n\r\n" + body)
    try:
        return (await asyncio.wait_for(reader.read(), 60)).decode()
    finally:
        writer.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_clients_without_connections_that_stay_get_whole_answers(played, version, stream):
    async def play(gateway, session):
        body = json.dumps(QUESTION | {"stream": stream}).encode()
        head = [f"POST {CHAT} HTTP/{version}", "Host: 127.0.0.1", f"Authorization: Bearer {session.key}"]
        answer = await raw(gateway, [*head, "Connection: close", f"Content-Length: {len(body)}"], body)
        assert answer.startswith(f"HTTP/{version} 200")
        assert "it is so" in answer
        assert ("Transfer-Encoding: chunked" in answer) == (version == "1.1" and stream)

    await played(play, "it is so")


async def test_chunked_bodies_are_read(played):
    async def play(gateway, session):
        head = [f"POST {CHAT} HTTP/1.1", "Host: 127.0.0.1", f"Authorization: Bearer {session.key}", "Connection: close"]
        pieces = [BODY[:9], BODY[9:]]
        body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
        assert "it is so" in await raw(gateway, [*head, "Transfer-Encoding: chunked"], body)

    await played(play, "it is so")


@pytest.mark.parametrize(
    "sent",
    [
        b"\xef\xbb\xbf" + BODY,  # PowerShell writes a byte order mark
        b'{"model": "other", ' + BODY[1:],  # of two fields with one name, the last counts, as in OpenAI's servers
        BODY + b"\r\n",
    ],
)
async def test_unusual_json_is_read_as_others_do(played, sent):
    async def play(gateway, session):
        status, _, reply = await fetch(
            gateway, CHAT, key=session.key, data=sent, headers={"Content-Type": "text/plain"}
        )
        assert (status, reply["model"]) == (200, "p")

    await played(play, "it is so")


@pytest.mark.parametrize("coding", ["br", "zstd", "x-gzip", "gzip, gzip", "compress", "gzip, br"])
async def test_a_coding_that_is_not_read_is_named(played, coding):
    async def play(gateway, session):
        data, headers = gzip.compress(BODY), {"Content-Encoding": coding}
        status, answered, refusal = await fetch(gateway, CHAT, key=session.key, data=data, headers=headers)
        assert (status, refusal["error"]["code"]) == (415, "unsupported")
        assert (answered["Accept-Encoding"], answered["x-should-retry"]) == ("gzip, deflate", "false")
        expected = f"Content-Encoding '{coding}' is not read here: expected gzip, deflate or none"
        assert refusal["error"]["message"] == expected
        assert (await fetch(gateway, CHAT, key=session.key))[0] == 200

    await played(play, "it is so")


REFUSED = {
    "unknown coding": ({"Content-Encoding": "br"}, BODY, 415),
    "broken coding": ({"Content-Encoding": "gzip"}, BODY, 400),
    "too long": ({}, b" " * ((64 << 20) + 1), 413),
    "too long when decoded": ({"Content-Encoding": "gzip"}, gzip.compress(b" " * ((64 << 20) + 1)), 413),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_body_that_is_not_read_is_refused_in_each_dialects_form(played, name):
    headers, data, expected = REFUSED[name]

    async def play(gateway, session):
        async with aiohttp.ClientSession() as http:
            for path in (
                CHAT,
                "/v1/responses",
                "/v1/responses/input_tokens",
                "/v1/messages",
                "/v1/messages/count_tokens",
            ):
                sent = {"x-api-key": session.key, "Content-Type": "application/json"} | headers
                async with http.post(gateway.url + path, data=io.BytesIO(data), headers=sent) as answer:
                    refusal = await answer.json()
                assert answer.status == expected
                assert (refusal.get("type") == "error") == ("messages" in path)
                assert refusal["error"]["type"] in ("invalid_request_error", "request_too_large")
                assert "Content-Encoding" in refusal["error"]["message"] or expected == 413
        await fetch(gateway, CHAT, key=session.key)

    await played(play, "it is so")


@pytest.mark.parametrize("name", ["x-api-key", "api-key", "Api-Key"])
async def test_keys_are_read_from_each_vendors_header(played, name):
    async def play(gateway, session):
        assert (await fetch(gateway, CHAT, headers={name: session.key}))[0] == 200
        status, _, refusal = await fetch(gateway, CHAT, headers={name: "sk-other"})
        assert (status, refusal["error"]["message"]) == (401, "the key does not belong to a running episode")

    await played(play, "it is so")


@pytest.mark.parametrize("scheme", ["", "Basic ", "Token "])
async def test_a_key_in_another_form_is_told_the_right_one(played, scheme):
    async def play(gateway, session):
        for headers in ({"Authorization": scheme + session.key}, {}):
            status, _, refusal = await fetch(gateway, CHAT, headers=headers)
            assert status == 401
            assert "send it as Authorization: Bearer KEY, x-api-key or api-key" in refusal["error"]["message"]
        await fetch(gateway, CHAT, key=session.key)

    await played(play, "it is so")


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/v1/chat/completions/", "Did you mean /v1/chat/completions?"),
        ("/v1//chat/completions", "Did you mean /v1/chat/completions?"),
        ("//v1/messages//", "Did you mean /v1/messages?"),
        ("/chat/completions", "The base URL ends with /v1 in OpenAI's packages"),
        ("/chat/completions/", "The base URL ends with /v1 in OpenAI's packages"),
        ("/v1/completions", "send messages to /v1/chat/completions"),
        ("/v1/completions/", "send messages to /v1/chat/completions"),
        ("/v1/embeddings", "The policy makes no embeddings"),
        ("/v1/responses/compact", "Histories are not compacted here"),
        ("/v1beta/models/any:generateContent", "expected POST to one of /v1/chat/completions, /v1/responses"),
    ],
)
async def test_a_path_that_is_not_served_is_answered_with_the_right_one(played, path, hint):
    async def play(gateway, session):
        for prefix in ("", gateway.path_of(session)):
            status, _, refusal = await fetch(gateway, prefix + path, key=session.key)
            assert (status, refusal["error"]["code"]) == (404, "not_found")
            assert hint.replace("mean ", f"mean {prefix}") in refusal["error"]["message"]
        await fetch(gateway, CHAT, key=session.key)

    await played(play, "it is so")


async def test_openais_client_is_told_why_there_are_no_completions(played):
    # llama_index#15175, llama_index#20822, litellm#5784: clients that complete plain texts unless told otherwise
    async def play(gateway, session):
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=session.key) as client:
            with pytest.raises(openai.NotFoundError, match="each answer is a turn of a chat"):
                await client.completions.create(model="p", prompt="one")
        await fetch(gateway, CHAT, key=session.key)

    await played(play, "it is so")


async def test_methods_that_a_route_does_not_take_are_answered_with_those_that_it_takes(played):
    async def play(gateway, session):
        for method, path, allowed in (("GET", CHAT, "POST"), ("OPTIONS", CHAT, "POST"), ("POST", "/v1/models", "GET")):
            status, headers, refusal = await fetch(gateway, path, key=session.key, method=method, data=None)
            assert (status, headers["Allow"]) == (405, allowed)
            assert refusal["error"]["code"] == "method_not_allowed"
        preflight = {"Origin": "http://localhost:3000", "Access-Control-Request-Method": "POST"}
        status, headers, refusal = await fetch(gateway, CHAT, method="OPTIONS", data=None, headers=preflight)
        assert (status, "a web page cannot send requests" in refusal["error"]["message"]) == (405, True)
        assert not [name for name in headers if name.lower().startswith("access-control")]
        await fetch(gateway, CHAT, key=session.key)

    await played(play, "it is so")


async def test_a_websocket_is_refused_with_the_status_that_codex_expects(played):
    # openai/codex#43353, llxprt-code#3047: after 426 Codex posts its request at once, after others it connects again
    async def play(gateway, session):
        headers = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
        status, _, refusal = await fetch(
            gateway, "/v1/responses", key=session.key, method="GET", data=None, headers=headers
        )
        assert (status, "there are no WebSockets here" in refusal["error"]["message"]) == (426, True)
        await fetch(gateway, CHAT, key=session.key)

    await played(play, "it is so")


@pytest.mark.parametrize("method", ["HEAD", "GET"])
async def test_a_base_url_answers_the_probes_of_agents(played, method):
    # headroom#2032, CLIProxyAPI#5905: Claude Code takes a base URL that answers 404 or 405 for a dead server
    async def play(gateway, session):
        for path in ("/", "/api/hello", gateway.path_of(session), gateway.path_of(session) + "/api/hello"):
            status, _, body = await fetch(gateway, path, method=method, data=None)
            assert (status, body) == (200, {"status": "ok"} if method == "GET" else None)
        await fetch(gateway, CHAT, key=session.key)

    await played(play, "it is so")


async def test_refused_routes_are_told_in_the_format_of_the_client(played):
    # vllm#57997: one endpoint, two formats of errors
    async def play(gateway, session):
        async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key=session.key, max_retries=0) as client:
            with pytest.raises(anthropic.NotFoundError) as refused:
                await client.messages.batches.list()
            assert (refused.value.body["type"], refused.value.body["error"]["type"]) == ("error", "not_found_error")
        async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key="sk-other", max_retries=0) as client:
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await client.models.list()
            assert refused.value.body["type"] == "error"
        await fetch(gateway, CHAT, key=session.key)

    await played(play, "it is so")


@pytest.mark.parametrize("deployment", [None, "my-model", "org/model"])
async def test_openais_client_for_azure_works_with_the_gateway_as_its_endpoint(played, deployment):
    async def play(gateway, session):
        for endpoint in (gateway.url, gateway.url_of(session)):
            async with openai.AsyncAzureOpenAI(
                azure_endpoint=endpoint,
                azure_deployment=deployment,
                api_key=session.key,
                api_version="2025-01-01",
                max_retries=0,
            ) as client:
                reply = await client.chat.completions.create(model="p", messages=QUESTION["messages"])
                assert reply.choices[0].message.content == "it is so"
                if deployment is None:
                    assert (await client.responses.create(model="p", input="one")).output_text == "it is so"
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/openai/v1", api_key=session.key) as client:
            assert (await client.chat.completions.create(model="p", messages=QUESTION["messages"])).model == "p"

    await played(play, "it is so")


async def test_the_deployment_in_a_path_is_the_model_of_a_request_without_one(played):
    async def play(gateway, session):
        path = "/openai/deployments/my-model/chat/completions?api-version=2025-01-01"
        data = json.dumps({"messages": QUESTION["messages"]}).encode()
        for sent, model in ((data, "my-model"), (BODY, "p")):
            status, _, reply = await fetch(gateway, path, data=sent, headers={"api-key": session.key})
            assert (status, reply["model"]) == (200, model)

    await played(play, "it is so")
