"""A client that plays random sessions in any dialect: many turns, tools, forks, retries, streams, several at a time.

Histories are kept in words of no dialect: ``{"role", "text", "calls", "call_id"}``; each dialect writes them into a
body and reads answers out of replies and streams.
"""

import asyncio
import json
import random

import aiohttp

from agentrl.gateway.dialect import StreamingReply

TOOL = {"type": "object", "properties": {"a": {"type": "integer"}}}
WORDS = ("go on", "why?", "and then", "look again", "one two three", "ünïcode ✓ 漢字", "  padded  ", "a\nb")


async def post(url, key, body, headers=()):
    """Post JSON with a key; the status and the answer."""
    headers = {"Authorization": f"Bearer {key}", **dict(headers)}
    async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=headers) as answer:
        return answer.status, await answer.json()


def chat_body(history, tools):
    messages = []
    for said in history:
        message = {"role": said["role"], "content": said["text"] or None}
        if said["role"] == "tool":
            message = {"role": "tool", "content": said["text"], "tool_call_id": said["call_id"]}
        elif said.get("calls"):
            message["tool_calls"] = [
                {"id": id_, "type": "function", "function": {"name": name, "arguments": json.dumps(args)}}
                for id_, name, args in said["calls"]
            ]
        elif message["content"] is None:
            message["content"] = ""
        messages.append(message)
    body = {"model": "policy", "messages": messages}
    if tools:
        body["tools"] = [{"type": "function", "function": {"name": "add", "parameters": TOOL}}]
    return body


def chat_answer(reply):
    message = reply["choices"][0]["message"]
    calls = [
        (call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls") or []
    ]
    return {"role": "assistant", "text": message["content"] or "", "calls": calls}


def chat_streamed(events):
    text, calls = "", []
    for _, data in events:
        if data == "[DONE]":
            break
        for choice in json.loads(data)["choices"]:
            text += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls", []):
                if "id" in call:
                    calls.append([call["id"], call["function"]["name"], ""])
                calls[-1][2] += call["function"]["arguments"]
    return {"role": "assistant", "text": text, "calls": [(i, name, json.loads(args)) for i, name, args in calls]}


def responses_body(history, tools):
    items = []
    for said in history:
        if said["role"] == "tool":
            items.append({"type": "function_call_output", "call_id": said["call_id"], "output": said["text"]})
            continue
        if said["text"] or not said.get("calls"):
            items.append({"role": said["role"], "content": said["text"]})
        for id_, name, args in said.get("calls", []):
            items.append({"type": "function_call", "call_id": id_, "name": name, "arguments": json.dumps(args)})
    body = {"model": "policy", "input": items, "store": False}
    if tools:
        body["tools"] = [{"type": "function", "name": "add", "parameters": TOOL, "strict": False}]
    return body


def responses_answer(reply):
    text = "".join(part["text"] for item in reply["output"] if item["type"] == "message" for part in item["content"])
    calls = [
        (item["call_id"], item["name"], json.loads(item["arguments"]))
        for item in reply["output"]
        if item["type"] == "function_call"
    ]
    return {"role": "assistant", "text": text, "calls": calls}


def responses_streamed(events):
    ends = ("response.completed", "response.incomplete")
    (final,) = [json.loads(data)["response"] for name, data in events if name in ends]
    return responses_answer(final)


def anthropic_body(history, tools):
    body = {"model": "policy", "max_tokens": 256, "messages": []}
    for said in history:
        if said["role"] == "system":
            body["system"] = said["text"]
            continue
        role, blocks = said["role"], []
        if role == "tool":
            role = "user"
            blocks.append({"type": "tool_result", "tool_use_id": said["call_id"], "content": said["text"]})
        elif said["text"] or not said.get("calls"):
            blocks.append({"type": "text", "text": said["text"]})
        for id_, name, args in said.get("calls", []):
            blocks.append({"type": "tool_use", "id": id_, "name": name, "input": args})
        last = body["messages"][-1] if body["messages"] else None
        if said["role"] == "tool" and last and last["role"] == "user" and last["content"][0]["type"] == "tool_result":
            last["content"] += blocks
        else:
            body["messages"].append({"role": role, "content": blocks})
    if tools:
        body["tools"] = [{"name": "add", "input_schema": TOOL}]
    return body


def anthropic_answer(reply):
    text = "".join(block["text"] for block in reply["content"] if block["type"] == "text")
    calls = [(block["id"], block["name"], block["input"]) for block in reply["content"] if block["type"] == "tool_use"]
    return {"role": "assistant", "text": text, "calls": calls}


def anthropic_streamed(events):
    blocks = []
    for _, data in events:
        event = json.loads(data)
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            blocks[-1]["text"] = blocks[-1].get("text", "") + delta.get("text", "")
            blocks[-1]["json"] += delta.get("partial_json", "")
    for block in blocks:
        block["input"] = json.loads(block["json"] or "{}")
    return anthropic_answer({"content": blocks})


DIALECTS = {
    "chat": ("/v1/chat/completions", chat_body, chat_answer, chat_streamed),
    "responses": ("/v1/responses", responses_body, responses_answer, responses_streamed),
    "anthropic": ("/v1/messages", anthropic_body, anthropic_answer, anthropic_streamed),
}


class RandomClient:
    """Plays one session.

    Args:
        http: An aiohttp session.
        url: Of the gateway's session.
        key: Of the session.
        dialect: A name in `DIALECTS`.
        seed: Decides everything.
    """

    def __init__(self, http, url, key, dialect, seed):
        self.route, self._write, self._read, self._read_stream = DIALECTS[dialect]
        self._http, self._url, self._key = http, url, key
        self._random = random.Random(seed)
        self.answers = 0

    async def play(self, turns):
        draw = self._random
        tools = draw.random() < 0.5
        history = [{"role": "system", "text": draw.choice(WORDS)}] if draw.random() < 0.7 else []
        history.append({"role": "user", "text": draw.choice(WORDS)})
        kept = [list(history)]
        for _ in range(turns):
            kind = draw.random()
            if kind < 0.15:
                history = list(draw.choice(kept))
                history.append({"role": "user", "text": f"another way {draw.random()}"})
            elif kind < 0.25 and len(history) > 4:
                history = [*history[:2], {"role": "user", "text": "in short: much was said"}]
            if history[-1]["role"] == "assistant":
                history = [*history, {"role": "user", "text": draw.choice(WORDS)}]
            if draw.random() < 0.1:
                await asyncio.gather(*(self.ask(history, tools, retries=False) for _ in range(3)))
            answer = await self.ask(history, tools)
            history = [*history, answer]
            results = [{"role": "tool", "text": str(draw.random()), "call_id": call[0]} for call in answer["calls"]]
            history += results or [{"role": "user", "text": draw.choice(WORDS)}]
            kept.append(list(history))

    async def ask(self, history, tools, *, retries=True):
        body = self._write(history, tools)
        streamed, retried = self._random.random() < 0.3, self._random.random() < 0.15
        if streamed:
            body["stream"] = True
        self.answers += 1
        found = await self._post(body, 0)
        if retried and retries:
            assert await self._post(body, 1) == found, "a retry gets the same answer"
        return found

    async def _post(self, body, retry):
        headers = {"Authorization": f"Bearer {self._key}", "x-stainless-retry-count": str(retry)}
        async with self._http.post(self._url + self.route, json=body, headers=headers) as answer:
            text = await answer.text()
            assert answer.status == 200, text
        if not body.get("stream"):
            return self._read(json.loads(text))
        events = []
        for block in text.split("\n\n"):
            lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
            if "data" in lines:
                events.append((lines.get("event"), lines["data"]))
        return self._read_stream(events)


def events_of(dialect, asked, reply):
    """The events of a reply that is whole already."""
    growing = StreamingReply(reply)
    growing.end(reply)

    async def collect():
        return [event async for event in dialect.events(asked, growing)]

    return asyncio.run(collect())
