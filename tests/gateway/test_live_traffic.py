"""The gateway alone: any client, sessions by name, what was said kept as episodes, conversations and prompts."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest
from support.gateway_client import post
from support.models import tiny_model
from support.tokenizers import build_tokenizer

from agentrl.cli import main
from agentrl.config import load_config
from agentrl.engine import SamplingParams
from agentrl.env.lookup import resolve_environment
from agentrl.errors import UsageError
from agentrl.evaluation.live_traffic import LiveTraffic
from agentrl.evaluation.panel import read_episodes
from agentrl.message import ImagePart, Message, TextPart
from agentrl.remote.chat import as_openai
from agentrl.rollout.policies import EngineEpisodePolicy
from agentrl.serving.scripted import ScriptedEngine
from agentrl.training.chat_file import read_chats
from agentrl.weights import write_served_model

CHAT = "/v1/chat/completions"
CONFIG = load_config(None, ["environment=guess_number"])
ADD = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}


def user(text):
    return {"role": "user", "content": text}


def body(*messages, **options):
    return {"model": "any", "messages": list(messages), **options}


@pytest.fixture
def traffic(renderer, tmp_path):
    """Make live traffic that answers so; with the requests that its engine gets."""

    def make(*answers, **options):
        requests = []

        def script(request):
            requests.append(request)
            answer = answers[(len(requests) - 1) % len(answers)]
            return [*renderer.encoder.encode(answer), renderer.boundary.end_id]

        engine = ScriptedEngine(script=script, vocab_size=400, max_context=1000)
        policy = EngineEpisodePolicy(engine, renderer, SamplingParams())
        options = {"folder": tmp_path, "idle_s": 60} | options
        return LiveTraffic(policy, CONFIG, **options), requests

    return make


def rows(path):
    return [json.loads(line) for line in path.read_text().split("\n") if line]


async def test_each_name_is_a_session_that_is_kept(traffic, tmp_path):
    live, _ = traffic("it is so")
    async with live:
        url = live.gateway.url
        _, reply = await post(url + "/s/a" + CHAT, "", body(user("one")))
        history = [user("one"), reply["choices"][0]["message"], user("two")]
        assert (await post(url + "/s/a" + CHAT, "", body(*history)))[0] == 200
        assert (await post(url + "/s/b" + CHAT, "", body(user("one"))))[0] == 200
        assert (await post(url + CHAT, "", body(user("three"), tools=[ADD])))[0] == 200
    assert (live.ended, live.answers) == (3, 4)
    episodes = list(read_episodes(tmp_path / "episodes.jsonl"))
    assert sorted((one.task_id, len(one.trajectory.turns)) for one in episodes) == [("a", 2), ("b", 1), ("default", 1)]
    kept = {(row["session"], len(row["messages"]), len(row["tools"])) for row in rows(tmp_path / "conversations.jsonl")}
    assert kept == {("a", 4, 0), ("b", 2, 0), ("default", 2, 1)}
    assert len(read_chats(tmp_path / "conversations.jsonl")) == 3, "agentrl sft reads them"
    prompts = [row["prompt"] for row in rows(tmp_path / "prompts.jsonl")]
    assert sorted([(m["role"], m["content"]) for m in prompt] for prompt in prompts) == [
        [("user", "one")],
        [("user", "one")],
        [("user", "three")],
    ], "no answer is part of a prompt"


async def test_what_is_recorded_is_read_as_conversations_and_as_prompts(traffic, tmp_path):
    live, _ = traffic("so\u2028it is")
    asked = "one\u2028two\u0085three"
    async with live:
        messages = [{"role": "system", "content": "Be\u2029brief."}, user(asked)]
        assert (await post(live.gateway.url + CHAT, "", body(*messages)))[0] == 200
        assert (await post(live.gateway.url + "/s/b" + CHAT, "", body(user("next"))))[0] == 200
    first, _ = read_chats(tmp_path / "conversations.jsonl")
    assert [message.text for message in first.messages] == ["Be\u2029brief.", asked, "so\u2028it is"]
    tasks = resolve_environment("prompts").tasks("test", files={"test": str(tmp_path / "prompts.jsonl")})
    assert [[m.text for m in task.messages] for task in tasks] == [["Be\u2029brief.", asked], ["next"]]


async def test_a_prompt_is_what_came_before_the_first_answer(traffic, tmp_path):
    live, _ = traffic("it is so")
    async with live:
        url = live.gateway.url + CHAT
        start = [{"role": "system", "content": "Be brief."}, user("one"), user("and two")]
        _, reply = await post(url, "", body(*start))
        await post(url, "", body(*start, reply["choices"][0]["message"], user("three")))
    (conversation,) = rows(tmp_path / "conversations.jsonl")
    (prompt,) = rows(tmp_path / "prompts.jsonl")
    assert prompt == {"prompt": start}
    assert [message["role"] for message in conversation["messages"]] == [
        *("system", "user", "user", "assistant", "user", "assistant")
    ]


async def test_branches_are_conversations_of_their_own(traffic, tmp_path):
    live, _ = traffic("it is so")
    async with live:
        url = live.gateway.url + CHAT
        _, reply = await post(url, "", body(user("one")))
        for text in ("two", "another two"):
            await post(url, "", body(user("one"), reply["choices"][0]["message"], user(text)))
    ends = sorted(row["messages"][2]["content"] for row in rows(tmp_path / "conversations.jsonl"))
    assert ends == ["another two", "two"]


async def test_the_client_decides_the_sampling(traffic):
    live, requests = traffic("it is so")
    async with live:
        await post(live.gateway.url + CHAT, "", body(user("one"), temperature=0, top_p=0.5))
        await post(live.gateway.url + CHAT, "", body(user("two")))
    found = [(request.params.temperature, request.params.top_p) for request in requests]
    assert found == [(0, 0.5), (1.0, 1.0)]


async def test_a_session_that_was_idle_ends_and_its_name_begins_anew(traffic, tmp_path):
    live, _ = traffic("it is so", idle_s=0.1)
    async with live:
        for _ in range(2):
            assert (await post(live.gateway.url + CHAT, "", body(user("one"))))[0] == 200
            async with asyncio.timeout(10):
                while "default" in live._playing:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
    assert len(list(read_episodes(tmp_path / "episodes.jsonl"))) == 2


async def test_a_conversation_that_does_not_fit_ends_nothing(traffic):
    live, _ = traffic("it is so")
    async with live:
        status, said = await post(live.gateway.url + CHAT, "", body(user("word " * 2000)))
        assert (status, said["error"]["param"]) == (400, "messages")
        assert (await post(live.gateway.url + CHAT, "", body(user("one"))))[0] == 200


async def test_only_those_with_the_key_get_in(traffic):
    live, requests = traffic("it is so", key="the key")
    async with live:
        for key in ("", "another", "ä"):
            assert (await post(live.gateway.url + CHAT, key, body(user("one"))))[0] == 401
        assert not requests
        assert (await post(live.gateway.url + CHAT, "the key", body(user("one"))))[0] == 200


FOREIGN = {
    "a page of another site": {"Origin": "https://site.example.com"},
    "a page of no site": {"Origin": "null"},
    "a page of another machine": {"Origin": "http://192.0.2.7:8080"},
    "a name that was made to lead here": {"Host": "site.example.com"},
}


async def status_of(url, method, headers, text):
    async with aiohttp.ClientSession() as http:
        headers = {"Content-Type": "text/plain", **headers}  # which browsers send without asking first
        async with http.request(method, url, data=text, headers=headers) as answer:
            return answer.status, (await answer.json()).get("error")


@pytest.mark.parametrize("route", [CHAT, "/s/a/v1/messages", "/v1/messages/count_tokens", "/v1/models"])
@pytest.mark.parametrize("page", FOREIGN)
async def test_without_a_key_no_page_of_another_site_gets_in(traffic, page, route):
    live, requests = traffic("it is so")
    method = "GET" if route.endswith("models") else "POST"
    text = json.dumps(body(user("one"), max_tokens=5))
    async with live:
        status, error = await status_of(live.gateway.url + route, method, FOREIGN[page], text)
        assert (status, "--key-variable" in error["message"]) == (403, True)
        assert not requests
        own = {"Origin": "http://localhost:3000", "Host": "localhost"}
        assert (await status_of(live.gateway.url + route, method, own, text))[0] == 200


async def test_with_the_key_it_does_not_matter_who_sends_it(traffic):
    live, _ = traffic("it is so", key="the key")
    async with live:
        headers = {**FOREIGN["a page of another site"], "Authorization": "Bearer the key"}
        assert (await status_of(live.gateway.url + CHAT, "POST", headers, json.dumps(body(user("one")))))[0] == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "example.org"])
def test_others_need_a_key(host, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["gateway", "--model", "any", "--host", host])
    assert ended.value.code == 2
    assert "--key-variable" in capsys.readouterr().err


PLAIN = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{{ '<|im_start|>assistant\n' if add_generation_prompt else '' }}"""


@pytest.mark.slow
@pytest.mark.parametrize("template", [None, PLAIN])
async def test_the_command_answers_and_keeps(template, tmp_path):
    tokenizer = build_tokenizer("qwen3")
    if template is not None:  # it shows no tools, so a shipped one takes its place
        tokenizer.chat_template = template
    write_served_model(tiny_model(vocab_size=len(tokenizer)), tokenizer, tmp_path / "model")
    words = ["gateway", "--model", str(tmp_path / "model"), "--record", str(tmp_path / "kept")]
    program = [str(Path(sys.executable).with_name("agentrl")), *words]
    process = subprocess.Popen(  # noqa: ASYNC220
        program, stdout=subprocess.PIPE, text=True, env=os.environ | {"NO_COLOR": "1"}
    )
    try:
        url = process.stdout.readline().strip().removeprefix("OPENAI_BASE_URL=")
        status, _ = await post(url + "/chat/completions", "", body(user("one"), max_tokens=5, tools=[ADD]))
        assert status == 200
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 0
    assert len(rows(tmp_path / "kept" / "conversations.jsonl")) == 1
    with pytest.raises(SystemExit) as ended:
        main(["view", str(tmp_path / "kept"), "--terminal"])
    assert ended.value.code == 0


async def test_a_session_that_cannot_be_kept_is_told_and_holds_up_no_other(traffic, tmp_path):
    live, _ = traffic("it is so")
    (tmp_path / "conversations.jsonl").mkdir()
    await live.gateway.start()
    for name in ("a", "b"):
        assert (await post(f"{live.gateway.url}/s/{name}{CHAT}", "", body(user("one"))))[0] == 200
    with pytest.raises(UsageError, match="cannot write"):
        await live.close()
    assert live.ended == 2
    assert len(list(read_episodes(tmp_path / "episodes.jsonl"))) == 2


def test_images_are_kept_in_conversations():
    image = ImagePart(data=b"\x89PNG\r\n\x1a\n", media_type="image/png")
    row = as_openai(Message(role="user", content=[TextPart(text="see"), image]), keep_reasoning=True)
    assert [part["type"] for part in row["content"]] == ["text", "image_url"]
    assert row["content"][1]["image_url"]["url"].startswith("data:image/png;base64,")
