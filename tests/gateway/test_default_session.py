"""Clients that know nothing of each other share the default session: it is kept and stays fast while they go on."""

import asyncio
import json

import pytest
from support.gateway_client import DIALECTS, post

from agentrl.config import load_config
from agentrl.engine import SamplingParams
from agentrl.evaluation import live_traffic
from agentrl.evaluation.live_traffic import LiveTraffic
from agentrl.rollout.policies import EngineEpisodePolicy
from agentrl.serving.scripted import ScriptedEngine

CHAT = "/v1/chat/completions"
CONFIG = load_config(None, ["environment=guess_number"])


@pytest.fixture
def traffic(renderer, tmp_path):
    def make(**options):
        def script(request):
            return [*renderer.encoder.encode("it is so"), renderer.boundary.end_id]

        policy = EngineEpisodePolicy(ScriptedEngine(script=script, vocab_size=400), renderer, SamplingParams())
        return LiveTraffic(policy, CONFIG, folder=tmp_path, **{"idle_s": 60} | options)

    return make


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def asked(text, history=()):
    return {"model": "any", "messages": [*history, {"role": "user", "content": text}]}


async def answered(live, body, path=CHAT):
    status, reply = await post(live.gateway.url + path, "", body)
    assert status == 200, reply
    return reply


async def test_it_is_kept_while_requests_never_cease(traffic, tmp_path):
    live = traffic(idle_s=0.15)
    async with live:
        async with asyncio.timeout(20):
            number = 0
            while len(rows(tmp_path / "conversations.jsonl")) < 3:
                number += 1
                await answered(live, asked(f"question {number}"))
    questions = [row["messages"][0]["content"] for row in rows(tmp_path / "conversations.jsonl")]
    assert sorted(questions) == sorted(f"question {n + 1}" for n in range(number)), "each once"


@pytest.mark.parametrize("tools", [[], [{"type": "function", "function": {"name": "look", "description": "Look."}}]])
async def test_its_conversations_go_on_where_they_began(traffic, tmp_path, monkeypatch, tools):
    monkeypatch.setattr(live_traffic, "MAX_ANSWERS", 2)
    live = traffic()

    async def answer(*words):
        return (await answered(live, asked(*words) | {"tools": tools}))["choices"][0]["message"]

    async with live:
        first = await answer("one")
        for number in range(5):
            await answer(f"question {number}")
        await answer("and then?", [{"role": "user", "content": "one"}, first])
        await answer("one")
    sizes = {}
    for row in rows(tmp_path / "episodes.jsonl"):
        sizes[row["sample"]] = [len(sequence["turns"]) for sequence in row["trajectory"]["sequences"]]
    assert sizes == {1: [2, 1], 2: [1, 1], 3: [1, 1], 4: [1]}
    texts = [[message["content"] for message in row["messages"]] for row in rows(tmp_path / "conversations.jsonl")]
    assert ["one", "it is so", "and then?", "it is so"] in texts


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_stored_reply_and_a_retry_are_found_in_earlier_sessions(traffic, monkeypatch, dialect):
    monkeypatch.setattr(live_traffic, "MAX_ANSWERS", 1)
    live = traffic()
    route, write, *_ = DIALECTS[dialect]
    body = write([{"role": "user", "text": "one"}], False) | ({"store": True} if dialect == "responses" else {})
    async with live:
        first = await answered(live, body, route)
        await answered(live, write([{"role": "user", "text": "two"}], False), route)
        headers = {"x-stainless-retry-count": "1"}
        assert (await post(live.gateway.url + route, "", body, headers))[1]["id"] == first["id"]
        if dialect == "responses":
            await answered(live, {"model": "m", "input": "go on", "previous_response_id": first["id"]}, route)


async def test_a_named_session_stays_one(traffic, tmp_path, monkeypatch):
    monkeypatch.setattr(live_traffic, "MAX_ANSWERS", 2)
    live = traffic()
    async with live:
        for number in range(5):
            await answered(live, asked(f"question {number}"), f"/s/mine{CHAT}")
    assert [row["sample"] for row in rows(tmp_path / "episodes.jsonl")] == [1]
