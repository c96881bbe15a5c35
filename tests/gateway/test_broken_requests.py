"""Requests and answers that are not valid JSON, broken encodings, and clients that disconnect."""

import asyncio
import contextlib
import gzip
import http.client
import json
import logging
import zlib
from urllib.parse import urlsplit

import aiohttp
import pytest
from support.gateway_client import DIALECTS, post

from agentrl import gateway
from agentrl.config.engines import ScriptedEngineConfig
from agentrl.gateway.dialect import BadRequest
from agentrl.remote.listening import DEEPEST
from agentrl.rollout.budget import EpisodeLimits

CHAT = "/v1/chat/completions"
QUESTION = {"model": "policy", "messages": [{"role": "user", "content": "one"}]}
PLACES = {
    "chat": lambda schema: [{"type": "function", "function": {"name": "add", "parameters": schema}}],
    "responses": lambda schema: [{"type": "function", "name": "add", "parameters": schema}],
    "anthropic": lambda schema: [{"name": "add", "input_schema": schema}],
}


def nested(levels):
    schema = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize("levels", [DEEPEST, 300, 900])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_deep_schemas_are_refused_before_anything_is_sampled(played, dialect, levels):
    route, write, *_ = DIALECTS[dialect]

    async def play(gateway, session):
        body = write([{"role": "user", "text": "one"}], False)
        status, said = await post(gateway.url + route, session.key, body | {"tools": PLACES[dialect](nested(levels))})
        assert (status, "more than 100 levels" in said["error"]["message"]) == (400, True)
        fits = body | {"tools": PLACES[dialect](nested(DEEPEST - 10))}
        assert (await post(gateway.url + route, session.key, fits))[0] == 200

    trajectory, _ = await played(play, "it is so")
    assert len(trajectory.turns) == 1


DEEP = '<tool_call>\n{"name": "add", "arguments": {"a": ' + "[" * 400 + "]" * 400 + "}}\n</tool_call>"


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_deep_call_of_the_policy_comes_as_text_and_comes_back(played, dialect, stream):
    route, written, read, read_stream = DIALECTS[dialect]

    def write(history):
        return written(history, True) | ({"max_tokens": 2000} if dialect == "anthropic" else {})

    async def play(gateway, session):
        history = [{"role": "user", "text": "one"}]
        if stream:
            headers = {"Authorization": f"Bearer {session.key}"}
            body = write(history) | {"stream": True}
            async with (
                aiohttp.ClientSession() as http,
                http.post(gateway.url + route, json=body, headers=headers) as got,
            ):
                blocks = [
                    dict(line.split(": ", 1) for line in block.splitlines())
                    for block in (await got.text()).split("\n\n")
                ]
            answer = read_stream([(block.get("event"), block["data"]) for block in blocks if block])
        else:
            status, reply = await post(gateway.url + route, session.key, write(history))
            assert status == 200, reply
            answer = read(reply)
        assert (answer["text"], answer["calls"]) == (DEEP, [])
        history += [answer, {"role": "user", "text": "go on"}]
        assert (await post(gateway.url + route, session.key, write(history)))[0] == 200

    limits = EpisodeLimits(max_answer_tokens=2000)
    trajectory, _ = await played(play, DEEP, "it is so", limits=limits)
    assert len(trajectory.turns) == 2


WHOLE = json.dumps(QUESTION).encode()
ENCODED = {
    "gzip": ("gzip", gzip.compress(WHOLE), 200),
    "not gzip": ("gzip", WHOLE, 400),
    "gzip that ends early": ("gzip", gzip.compress(WHOLE)[:-12], 400),
    "gzip of too much": ("gzip", gzip.compress(b" " * (65 << 20)), 413),
    "deflate": ("deflate", zlib.compress(WHOLE), 200),
    "deflate without a header": ("deflate", zlib.compress(WHOLE)[2:-4], 200),
    "not deflate": ("deflate", WHOLE, 400),
    "more than deflate": ("deflate", zlib.compress(WHOLE) + b"{}", 400),
    "two members of gzip": ("gzip", gzip.compress(WHOLE[:9]) + gzip.compress(WHOLE[9:]), 200),
    "gzip that is padded": ("gzip", gzip.compress(WHOLE) + bytes(8), 200),
    "gzip with a spelling": ("GZip", gzip.compress(WHOLE), 200),
    "nothing": ("gzip", b"", 400),
    "one that is not known here": ("br", WHOLE, 415),
}


@pytest.mark.parametrize("name", ENCODED)
async def test_encoded_bodies_are_read_or_refused(played, caplog, name):
    coding, data, expected = ENCODED[name]

    async def play(gateway, session):
        headers = {"Authorization": f"Bearer {session.key}", "Content-Encoding": coding}
        async with aiohttp.ClientSession() as http, http.post(gateway.url + CHAT, data=data, headers=headers) as answer:
            assert answer.status == expected

    with caplog.at_level(logging.INFO):
        await played(play, "it is so")
    assert "Traceback" not in caplog.text


BROKEN = {
    "not JSON": ({}, b"{", 400, True),
    "not gzip": ({"Content-Encoding": "gzip"}, WHOLE, 400, True),
    "gzip that ends early": ({"Content-Encoding": "gzip"}, gzip.compress(WHOLE)[:-12], 400, True),
    "unknown coding": ({"Content-Encoding": "br"}, WHOLE, 415, True),
    "too long": ({"Content-Length": str(65 << 20)}, b"", 413, False),
    "a broken chunk": ({"Transfer-Encoding": "chunked"}, b"Z\r\n{", 400, False),
    "foreign key": ({"Authorization": "Bearer other", "Content-Length": "99"}, b"{", 401, False),
}
"""Headers, body, expected status, and whether the connection stays open."""


@pytest.mark.parametrize("name", BROKEN)
async def test_a_client_that_keeps_its_connection_learns_when_it_is_closed(played, name):
    extra, data, expected, stays = BROKEN[name]

    def talk(url, key):
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
        connection.putrequest("POST", CHAT)
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"} | extra
        if "Content-Length" not in headers and "Transfer-Encoding" not in headers:
            headers["Content-Length"] = str(len(data))
        for header, value in headers.items():
            connection.putheader(header, value)
        connection.connect()
        send, parts = connection.send, []
        connection.send = parts.append
        connection.endheaders(data)
        connection.send = send
        send(b"".join(parts))  # at once: aiohttp tells a handler of a broken chunk only if it came with the headers
        refusal = connection.getresponse()
        refusal.read()
        assert (refusal.status, refusal.will_close) == (expected, not stays)
        was_kept = connection.sock is not None
        body, headers = json.dumps(QUESTION), {"Authorization": f"Bearer {key}"}
        connection.request("POST", CHAT, body, headers)  # connects again if the answer announced the close
        answer = connection.getresponse()
        answer.read()
        connection.close()
        return was_kept, answer.status

    async def play(gateway, session):
        assert await asyncio.to_thread(talk, gateway.url, session.key) == (stays, 200)

    await played(play, "it is so")


LEAVING = {
    "within the head": b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127",
    "within the body": b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{",
    "within an encoded body": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: 99\r\n\r\n{",
    "within a chunk": b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n9\r\n{",
    "after a broken chunk": b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZ\r\n{",
    "before the answer": None,
    "within a stream": None,
}


@pytest.mark.parametrize("when", LEAVING)
async def test_clients_that_leave_write_no_traceback(played, caplog, when):
    async def play(gateway, session):
        address = urlsplit(gateway.url)
        data = LEAVING[when]
        if data is None:
            body = json.dumps({**QUESTION, "stream": when == "within a stream"}).encode()
            head = (
                f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nAuthorization: Bearer {session.key}"
            )
            data = head.encode() + b"\r\n\r\n" + body
        elif b"chunk" in data or b"Length" in data:
            data = data.replace(b"Host: x", b"Host: x\r\nAuthorization: Bearer " + session.key.encode())
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(data)
        if when == "within a stream":
            assert b"200" in await asyncio.wait_for(reader.readline(), 60)
        await asyncio.sleep(0.05)
        writer.transport.abort()
        status, _ = await post(gateway.url + CHAT, session.key, QUESTION)
        assert status == 200

    with caplog.at_level(logging.INFO):
        trajectory, _ = await played(play, "it is so, and that is all", engine=ScriptedEngineConfig(delay_s=0.01))
    assert "Traceback" not in caplog.text
    assert len(trajectory.turns) == 1 + (LEAVING[when] is None)


SHOWN = {"type": "base64", "media_type": "image/png", "data": "eA=="}
FUNCTION = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
GRAMMAR = {"syntax": "lark", "definition": "start: /x/"}
PNG = "data:image/png;base64,eA=="
WHOLE_REQUESTS = {
    "chat": {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": PNG}}],
            },
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}},
                    {"id": "2", "type": "custom", "custom": {"name": "patch", "input": "x"}},
                ],
            },
            {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "r"}]},
        ],
        "tools": [
            {"type": "function", "function": FUNCTION},
            {"type": "custom", "custom": {"name": "patch", "format": {"type": "grammar", "grammar": GRAMMAR}}},
        ],
        "tool_choice": {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "add"}}]},
        },
        "stop": ["x"],
        "stream_options": {"include_usage": True},
    },
    "responses": {
        "input": [
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "x"}, {"type": "input_image", "image_url": PNG}],
            },
            {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "r"},
            {"type": "custom_tool_call", "call_id": "2", "name": "patch", "input": "x"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]},
        ],
        "tools": [
            {"type": "function", **FUNCTION},
            {"type": "custom", "name": "patch", "format": {"type": "grammar", **GRAMMAR}},
        ],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]},
        "text": {"format": {"type": "text"}},
    },
    "anthropic": {
        "max_tokens": 5,
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {
                "role": "user",
                "content": [{"type": "image", "source": SHOWN}],
            },
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "add", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "r"}]},
        ],
        "tools": [{"name": "add", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "tool", "name": "add"},
    },
}
ODD_VALUES = (None, True, -1, 1.5, "", "x", [], {}, [[]], [{}], {"a": []})


def with_each_value(value):
    """Copies of JSON with one part replaced by an odd value."""
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            for changed in (*ODD_VALUES, *with_each_value(part)):
                copy = dict(value) if isinstance(value, dict) else list(value)
                copy[key] = changed
                yield copy


@pytest.mark.parametrize("dialect", gateway.DIALECTS, ids=lambda dialect: dialect.name)
def test_no_value_of_any_field_is_an_error_of_the_server(dialect):
    whole = {"model": "policy", **WHOLE_REQUESTS[dialect.name]}
    dialect.read(whole, {})
    for body in with_each_value(whole):
        with contextlib.suppress(BadRequest):
            dialect.read(body, {})
