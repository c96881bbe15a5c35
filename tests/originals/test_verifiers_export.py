"""verifiers 0.4 evaluates our environments by its own command, with our rewards."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from support.waiting import join

import agentrl

pytestmark = [pytest.mark.originals, pytest.mark.timeout(600)]
MODULE = """
from agentrl.evaluation.verifiers_export import verifiers_taskset

Taskset, Harness = verifiers_taskset("guess_number/test", tasks=6, overrides=["agent.loop=react_text"])
__all__ = ["Taskset", "Harness"]
"""


def guess(messages: list[dict[str, Any]]) -> str:
    """Halve the interval, but never find a number above 50."""
    low, high, number = 1, 100, None
    for message in messages:
        text = str(message["content"])
        if message["role"] == "assistant":
            number = int("".join(filter(str.isdigit, text)))
        elif number is not None and "higher" in text.lower():
            low = number + 1
        elif number is not None and "lower" in text.lower():
            high = number - 1
    return f"<action>{1 if low > 50 else (low + high) // 2}</action>"


class Handler(BaseHTTPRequestHandler):
    """Chat service that guesses."""

    first_seeds: ClassVar[list[int | None]] = []
    """Seed of the first turn of each episode."""

    def do_POST(self) -> None:
        """Answer a conversation."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        messages = body["messages"]
        if all(message["role"] != "assistant" for message in messages):
            Handler.first_seeds.append(body.get("seed"))
        choice = {"index": 0, "message": {"role": "assistant", "content": guess(messages)}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        fields = {"id": "1", "object": "chat.completion", "created": 0, "model": "m"}
        data = json.dumps({**fields, "choices": [choice], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_arguments: Any) -> None:
        """Say nothing."""


@pytest.fixture
def service() -> Iterator[str]:
    """Return the address of the service."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        join(thread)


async def test_their_evaluation_gives_our_rewards(service: str, tmp_path: Path) -> None:
    (tmp_path / "guess_taskset.py").write_text(MODULE)
    words = ["guess_taskset", "--model", "m", "--client.base-url", service, "--env.agent.runtime.type", "subprocess"]
    words += [
        "--num-rollouts",
        "2",
        "--no-push",
        "--no-rich",
        "--output-dir",
        str(tmp_path / "out"),
        "--run.name",
        "one",
    ]
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
    assert len(Handler.first_seeds) == len(set(Handler.first_seeds)) == 12, "rollouts of a task are sampled apart"
    (stored,) = (tmp_path / "out").rglob("traces.jsonl")
    theirs = {}
    for line in stored.read_text().splitlines():
        (trace,) = json.loads(line)["traces"]
        found = trace["rewards"]["environment_reward"]["score"], trace["metrics"]["success"]
        theirs[trace["task"]["data"]["id"]] = found
    ours = await asyncio.to_thread(
        agentrl.evaluate,
        "guess_number/test",
        model="m",
        url=service,
        loop="react_text",
        tasks=6,
        overrides={"run.directory": str(tmp_path / "ours")},
        progress=False,
    )
    expected = {one.task_id: (one.trajectory.reward, float(bool(one.trajectory.success))) for one in ours.episodes}
    assert theirs == expected
    assert len({reward for reward, _ in expected.values()}) > 1, expected
