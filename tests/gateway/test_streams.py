"""Streamed answers equal the complete answers."""

import asyncio
import json
from dataclasses import replace

import aiohttp
import openai
import pytest
from support.gateway_client import DIALECTS, post

from agentrl.config.engines import ScriptedEngineConfig
from agentrl.errors import EngineError, Outcome
from agentrl.serving.scripted import Failure, ScriptedAnswer, ScriptedEngine

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
HISTORY = [{"role": "user", "text": "hm"}]
SLOW = ScriptedEngineConfig(delay_s=0.005)


async def stream(url, key, dialect, *, tools=False, retry=0, **options):
    """The pieces of text of a stream, with the time of each, and the answer in words of no dialect."""
    route, write, _, read = DIALECTS[dialect]
    body = write(HISTORY, tools) | {"stream": True} | options
    headers = {"Authorization": f"Bearer {key}", "x-stainless-retry-count": str(retry)}
    events, pieces = [], []
    async with aiohttp.ClientSession() as http, http.post(url + route, json=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        name = None
        async for line in answer.content:
            word, _, data = line.decode().strip().partition(": ")
            if word == "event":
                name = data
            elif word == "data":
                events.append((name, data))
                if text := text_of(json.loads(data)) if data != "[DONE]" else "":
                    pieces.append((asyncio.get_running_loop().time(), text))
    ended = asyncio.get_running_loop().time()
    if any(name == "error" for name, _ in events) or not events:
        return pieces, ended, None
    return pieces, ended, read(events)


def text_of(event):
    if choices := event.get("choices"):
        return choices[0]["delta"].get("content")
    if event.get("type") == "response.output_text.delta":
        return event["delta"]
    return event.get("delta", {}).get("text") if event.get("type") == "content_block_delta" else None


ANSWERS = {
    "text": ("It is so, and that is all: ünïcode ✓ 漢字 🙂.", "It is so, and that is all: ünïcode ✓ 漢字 🙂.", False),
    "thinking": ("<think>\nWhat now? 漢字\n</think>\n\nThis, then.", "This, then.", False),
    "a call": (f"I add the two.\n{CALL}", "I add the two.", True),
    "a call that breaks off": ("I add.\n" + CALL[:30], "I add.\n" + CALL[:30], True),
    "what looks like a call": ("if a < b then [1] else {2}", "if a < b then [1] else {2}", True),
}


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_pieces_come_while_the_answer_is_sampled(played, dialect, answer):
    raw, text, tools = ANSWERS[answer]

    async def play(gateway, session):
        pieces, ended, whole = await stream(gateway.url_of(session), session.key, dialect, tools=tools)
        assert "".join(piece for _, piece in pieces) == whole["text"] == text
        assert [call[1:] for call in whole["calls"]] == ([("add", {"a": 1})] if answer == "a call" else [])
        if not tools:
            assert len(pieces) > 5
            assert ended - pieces[0][0] > 0.03, "the first piece came with the last"
        results = [{"role": "tool", "text": "3", "call_id": call[0]} for call in whole["calls"]]
        follow_up = [*HISTORY, whole, *(results or [{"role": "user", "text": "go on"}])]
        route, write, *_ = DIALECTS[dialect]
        assert (await post(gateway.url_of(session) + route, session.key, write(follow_up, tools)))[0] == 200

    trajectory, script = await played(play, raw, engine=SLOW)
    assert len(trajectory.sequences) == 1
    script.check(trajectory)


async def test_each_of_several_answers_is_streamed_for_itself(played):
    """The second one begins as the first one does, and goes on."""
    texts = ["it is", "it is so, and that is all"]

    async def play(gateway, session):
        async with openai.AsyncOpenAI(base_url=f"{gateway.url_of(session)}/v1", api_key=session.key) as client:
            messages, found = [{"role": "user", "content": "hm"}], {0: "", 1: ""}
            chunks = await client.chat.completions.create(model="policy", messages=messages, n=2, stream=True)
            async for chunk in chunks:
                for choice in chunk.choices:
                    found[choice.index] += choice.delta.content or ""
        assert found == dict(enumerate(texts))

    await played(play, *texts, engine=SLOW)


@pytest.mark.parametrize("dialect", ["chat", "anthropic"])
async def test_no_part_of_a_stop_text_goes_out(played, dialect):
    name = {"chat": "stop", "anthropic": "stop_sequences"}[dialect]

    async def play(gateway, session):
        pieces, _, whole = await stream(gateway.url_of(session), session.key, dialect, **{name: ["</done>"]})
        assert "".join(piece for _, piece in pieces) == whole["text"] == "All of it </d or so"

    trajectory, script = await played(play, "All of it </d or so</done> and more", engine=SLOW)
    script.check(trajectory)


CUT = {
    "chat": ("max_tokens", lambda text: '"finish_reason": "length"' in text),
    "responses": ("max_output_tokens", lambda text: '"status":"incomplete"' in text.replace(" ", "")),
    "anthropic": ("max_tokens", lambda text: '"stop_reason":"max_tokens"' in text.replace(" ", "")),
}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_an_answer_that_is_cut_after_a_call_says_so(played, renderer, dialect, streams):
    route, write, *_ = DIALECTS[dialect]
    field, is_cut = CUT[dialect]
    tokens = len(renderer.encoder.encode(f"{CALL}\n{CALL[:30]}"))

    async def play(gateway, session):
        body = write(HISTORY, True) | {field: tokens, "stream": streams}
        headers = {"Authorization": f"Bearer {session.key}"}
        url = gateway.url_of(session) + route
        async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=headers) as answer:
            text = (await answer.text()).replace('"finish_reason":', '"finish_reason": ').replace(":  ", ": ")
        assert "add" in text
        assert is_cut(text), text

    await played(play, f"{CALL}\n{CALL}")


SIGNS = {"chat": b": ", "responses": b": ", "anthropic": b"event: ping"}


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_stream_shows_signs_of_life_before_its_first_piece(played, renderer, monkeypatch, dialect):
    monkeypatch.setattr("agentrl.gateway.COMMENT_S", 0.01)
    route, write, *_ = DIALECTS[dialect]
    ids = [*renderer.encoder.encode("it is so"), renderer.boundary.end_id]

    async def play(gateway, session):
        headers = {"Authorization": f"Bearer {session.key}"}
        async with aiohttp.ClientSession() as http:
            body = write(HISTORY, False) | {"stream": True}
            async with http.post(gateway.url_of(session) + route, json=body, headers=headers) as answer:
                lines = (await answer.read()).split(b"\n")
        assert sum(line.startswith(SIGNS[dialect]) for line in lines) > 3
        assert sum(line.startswith(b": ") for line in lines) == 0 or dialect != "anthropic"

    await played(play, ScriptedAnswer(token_ids=ids, first_delay_s=0.2))


async def test_two_who_wait_for_one_answer_get_all_of_it(played):
    async def play(gateway, session):
        first = asyncio.create_task(stream(gateway.url_of(session), session.key, "chat"))
        await asyncio.sleep(0.06)
        second = await stream(gateway.url_of(session), session.key, "chat", retry=1)
        assert second[2] == (await first)[2]
        assert session.retries == 1

    trajectory, _ = await played(play, "It is so, and that is all there is to say.", engine=SLOW)
    assert len(trajectory.turns) == 1


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_an_engine_that_fails_in_mid_stream_is_told_and_retried(played, renderer, dialect):
    broken = ScriptedAnswer(token_ids=renderer.encoder.encode("It was not so"), failure=Failure.RAISE)

    async def play(gateway, session):
        url = gateway.url_of(session)
        pieces, _, whole = await stream(url, session.key, dialect)
        assert pieces
        assert whole is None
        pieces, _, whole = await stream(url, session.key, dialect, retry=1)
        assert "".join(piece for _, piece in pieces) == whole["text"] == "It is so"
        assert session.failure is None

    trajectory, _ = await played(play, broken, "It is so", engine=SLOW)
    assert (trajectory.outcome, len(trajectory.turns)) == (Outcome.FINISHED, 1)


async def test_a_client_that_leaves_in_mid_stream_costs_nothing(played):
    async def play(gateway, session):
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=session.key, max_retries=0) as client:
            message = {"role": "user", "content": "hm"}
            options = {"model": "policy", "messages": [message]}
            async with await client.chat.completions.create(**options, stream=True) as chunks:
                async for chunk in chunks:
                    if chunk.choices[0].delta.content:
                        break
            reply = await client.chat.completions.create(**options)
            assert reply.choices[0].message.content == "It is so, and that is all there is to say."

    trajectory, script = await played(play, "It is so, and that is all there is to say.", engine=SLOW)
    assert len(trajectory.turns) == 2
    script.check(trajectory)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_an_answer_that_another_server_sampled_anew_is_not_told_as_the_end_of_the_first(
    played, renderer, monkeypatch, dialect
):
    generate = ScriptedEngine.generate

    async def lost_and_sampled_again(engine, request):
        if request.on_tokens is not None:
            request.on_tokens(renderer.encoder.encode("It was not"))
        return await generate(engine, replace(request, on_tokens=None))

    monkeypatch.setattr(ScriptedEngine, "generate", lost_and_sampled_again)
    monkeypatch.setattr("agentrl.gateway.COMMENT_S", 3600.0)

    async def play(gateway, session):
        url = gateway.url_of(session)
        async with asyncio.timeout(60):  # the failure is told at once, not when the next comment is due
            pieces, _, whole = await stream(url, session.key, dialect)
        assert "".join(piece for _, piece in pieces) == "It was not"
        assert whole is None
        assert isinstance(session.failure, EngineError)
        pieces, _, whole = await stream(url, session.key, dialect, retry=1)
        assert "".join(piece for _, piece in pieces) == whole["text"] == "It is so"
        assert session.failure is None

    trajectory, script = await played(play, "It is so")
    assert (trajectory.outcome, len(trajectory.turns)) == (Outcome.FINISHED, 1)
    script.check(trajectory)
