"""A client that only asks the server, calls the tool and appends messages: the limit of any framework that uses HTTP.

python rollout_bare.py URL FOLDER
"""

from __future__ import annotations

import asyncio
import json

import aiohttp
import orjson
from side import Play, serve
from work import FOUND, QUESTION, TOOLS, look


async def make(url: str, _folder: str) -> Play:
    """Prepare the client."""
    timeout = aiohttp.ClientTimeout(total=None)
    http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)
    headers = {"Content-Type": "application/json"}

    async def play_one(number: int) -> bool:
        messages: list[dict[str, object]] = [{"role": "user", "content": QUESTION.format(number)}]
        while True:
            body = orjson.dumps({"model": "policy", "messages": messages, "tools": TOOLS})
            async with http.post(f"{url}/v1/chat/completions", data=body, headers=headers) as answer:
                answer.raise_for_status()
                message = orjson.loads(await answer.read())["choices"][0]["message"]
            messages.append(message)
            if "tool_calls" not in message:
                return bool(message["content"] == FOUND)
            for call in message["tool_calls"]:
                text = look(**json.loads(call["function"]["arguments"]))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})

    async def play(episodes: int, at_once: int) -> int:
        numbers = iter(range(episodes))

        async def play_some() -> int:
            ended = 0
            for number in numbers:
                ended += await play_one(number)
            return ended

        return sum(await asyncio.gather(*(play_some() for _ in range(at_once))))

    return play


if __name__ == "__main__":
    serve(make)
