"""verifiers 0.4 evaluates our environments by its own command, with our rewards."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import agentrl

pytestmark = [pytest.mark.originals, pytest.mark.timeout(600)]
MODULE = """
from agentrl.evaluation.verifiers_export import verifiers_taskset

Taskset, Harness = verifiers_taskset("guess_number/test", tasks=4, overrides=["agent.loop=react_text"])
__all__ = ["Taskset", "Harness"]
"""


def guess(messages: list[dict[str, Any]]) -> str:
    """Halve the interval, and give up on it after two answers to some first numbers."""
    low, high, number = 1, 100, 50
    for message in messages:
        if message["role"] == "user":
            words = str(message["content"]).lower()
            low, high = (number + 1, high) if "higher" in words else (low, high)
            low, high = (low, number - 1) if "lower" in words else (low, high)
        elif message["role"] == "assistant":
            number = int("".join(filter(str.isdigit, message["content"])) or 50)
    number = (low + high) // 2
    return f"<action>{number if number % 3 else 0}</action>"


@pytest.fixture
def service() -> Iterator[str]:
    """Return the address of a chat service that guesses."""
    loop, ready, where = asyncio.new_event_loop(), threading.Event(), []

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        message = {"role": "assistant", "content": guess(body["messages"])}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response(
            {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}
        )

    async def serve() -> None:
        application = web.Application()
        application.router.add_post("/v1/chat/completions", answer)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        where.append(runner.addresses[0][1])
        ready.set()

    def work() -> None:
        loop.run_until_complete(serve())
        loop.run_forever()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert ready.wait(60)
    yield f"http://127.0.0.1:{where[0]}/v1"
    loop.call_soon_threadsafe(loop.stop)
    thread.join(60)


async def test_their_evaluation_gives_our_rewards(service: str, tmp_path: Path) -> None:
    (tmp_path / "guess_taskset.py").write_text(MODULE)
    words = ["guess_taskset", "--model", "m", "--client.base-url", service, "--env.agent.runtime.type", "subprocess"]
    words += ["--no-push", "--no-rich", "--output-dir", str(tmp_path / "out"), "--run.name", "one"]
    path = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-c", "from verifiers.v1.cli.eval.main import main; main()", *words]
    process = await asyncio.create_subprocess_exec(
        *command,
        env={**os.environ, "PYTHONPATH": path, "HOME": str(tmp_path)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()[-3000:]
    (stored,) = (tmp_path / "out").rglob("traces.jsonl")
    traces = [json.loads(line) for line in stored.read_text().splitlines()]
    theirs = {
        trace["task"]["data"]["id"]: (trace["rewards"]["environment_reward"]["score"], trace["metrics"]["success"])
        for trace in traces
    }
    ours = await asyncio.to_thread(
        agentrl.evaluate,
        "guess_number/test",
        model="m",
        url=service,
        loop="react_text",
        tasks=4,
        overrides={"run.output_dir": str(tmp_path / "ours")},
        progress=False,
    )
    expected = {one.task_id: (one.trajectory.reward, float(bool(one.trajectory.success))) for one in ours.episodes}
    assert theirs == expected
    assert len({reward for reward, _ in expected.values()}) > 1, expected
