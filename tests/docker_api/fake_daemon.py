"""A Docker API over a unix socket: images, containers, and in each container a supervisor that echoes commands."""

from __future__ import annotations

import asyncio
import itertools
import json
import marshal
import struct
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from agentrl.sandbox.supervisor import ANSWER, REQUEST

FRAME = struct.Struct(">BxxxI")


@dataclass
class FakeContainer:
    config: dict[str, Any]
    requests: list[dict[str, Any]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    started: asyncio.Event = field(default_factory=asyncio.Event)
    writer: asyncio.StreamWriter | None = None
    state: str = "created"

    def say(self, stream: int, data: bytes) -> None:
        assert self.writer is not None
        for piece in (data[: len(data) // 2], data[len(data) // 2 :]):  # frames end anywhere
            self.writer.write(FRAME.pack(stream, len(piece)) + piece)

    def end(self, words: str = "") -> None:
        self.state = "exited"
        if self.writer is not None:
            self.say(2, words.encode())
            self.writer.close()


class FakeDaemon:
    """Its attributes decide what it answers; what it was asked for can be looked at."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.images: dict[str, dict[str, Any]] = {"known": image()}
        self.to_pull: dict[str, list[dict[str, Any]]] = {}
        self.containers: dict[str, FakeContainer] = {}
        self.asked: list[str] = []
        self.refusals: dict[str, tuple[int, str]] = {}
        """Beginning of ``METHOD /path``: status and message."""
        self.hold = asyncio.Event()
        self.hold.set()
        self.content: bytes | None = None
        """Of the images' working folders, as a tar file."""
        self.component = "Engine"
        self.security: list[str] = ["name=seccomp"]
        self.first_words: Callable[[FakeContainer], None] = lambda container: None
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def running(self) -> list[FakeContainer]:
        return [one for one in self.containers.values() if one.state == "running"]

    async def end(self) -> None:
        """Hang up on everybody."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            await self._serve(reader, writer)
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            method, target, _ = head[0].split(" ")
            size = next((int(line.split(":")[1]) for line in head if line.lower().startswith("content-length")), 0)
            body = await reader.readexactly(size)
            parts = urlsplit(target)
            path = unquote(parts.path.removeprefix("/v1.40").removeprefix("/v1.41"))
            asked = f"{method} {path}"
            self.asked.append(asked)
            if asked.endswith("/attach"):
                await self._attach(self.containers[path.split("/")[2]], reader, writer)
                return
            await self.hold.wait()
            query = {name: values[0] for name, values in parse_qs(parts.query).items()}
            status, answer = self._answer(asked, query, json.loads(body) if body else {})
            content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            writer.write(f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n".encode())
            if path.endswith("/archive") and status == 200:
                writer.write(b"X-Docker-Container-Path-Stat: e30=\r\n")
            if path == "/images/create" and status == 200:
                writer.write(b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(content), content))
            else:
                writer.write(f"Content-Length: {len(content)}\r\n\r\n".encode() + content)
            await writer.drain()

    def _answer(self, asked: str, query: dict[str, str], body: dict[str, Any]) -> tuple[int, Any]:
        for beginning, (status, message) in self.refusals.items():
            if asked.startswith(beginning):
                return status, {"message": message}
        method, path = asked.split(" ", 1)
        words = path.strip("/").split("/")
        match method, words[0], words[-1]:
            case "GET", "version", _:
                return 200, {"Version": "fake", "ApiVersion": "1.41", "Components": [{"Name": self.component}]}
            case "GET", "info", _:
                return 200, {"SecurityOptions": self.security}
            case "GET", "images", _:
                found = self.images.get(path.removeprefix("/images/").removesuffix("/json"))
                return (404, {"message": "No such image"}) if found is None else (200, found)
            case "POST", "images", _:
                return self._pull(f"{query['fromImage']}:{query['tag']}")
            case "POST", "containers", "create":
                identity = f"c{next(self._numbers)}"
                self.containers[identity] = FakeContainer(body)
                return 201, {"Id": identity}
            case "GET", "containers", "archive":
                return (404, {"message": "no such file"}) if self.content is None else (200, self.content)
            case "GET", "containers", _:
                return 200, self._list(json.loads(query["filters"])["label"][0])
            case "POST", _, "start":
                self.containers[words[1]].state = "running"
                self.containers[words[1]].started.set()
                return 204, b""
            case "DELETE", _, _:
                found = self.containers.pop(words[1], None)
                if found is not None:
                    found.end()
                return (404, {"message": "No such container"}) if found is None else (204, b"")
        raise AssertionError(asked)

    def _pull(self, name: str) -> tuple[int, Any]:
        if name not in self.to_pull:
            return 404, {"message": f"pull access denied for {name}"}
        self.images[name.removesuffix(":latest")] = self.images[name] = image()
        return 200, "\n".join(json.dumps(line) for line in self.to_pull[name]).encode()

    def _list(self, label: str) -> list[dict[str, Any]]:
        name, _, value = label.partition("=")
        return [
            {"Id": identity, "Labels": one.config["Labels"]}
            for identity, one in self.containers.items()
            if name in one.config["Labels"] and value in ("", one.config["Labels"][name])
        ]

    async def _attach(
        self, container: FakeContainer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        container.writer = writer
        writer.write(b"HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n")
        await container.started.wait()
        for _ in range(2):
            (size,) = struct.unpack("<I", await reader.readexactly(4))
            container.settings = marshal.loads(await reader.readexactly(size))
        self.first_words(container)
        if container.state == "running":
            container.say(1, ANSWER.pack(0, 0, 0, 0.0, 0, 0))
        try:
            while True:
                await self._hear(container, reader)
        finally:
            container.state = "exited"

    async def _hear(self, container: FakeContainer, reader: asyncio.StreamReader) -> None:
        head, body = REQUEST.unpack(await reader.readexactly(REQUEST.size))
        request = marshal.loads(await reader.readexactly(head))
        container.requests.append(request)
        content = await reader.readexactly(body)
        if request["method"] == "start" and request.get("argv") != ["hang"]:
            out = " ".join(request.get("argv", [])).encode() + content
            container.say(1, ANSWER.pack(request["number"], 0, 0, 0.1, len(out), 0) + out)


def image(**config: Any) -> dict[str, Any]:
    return {"Id": "sha256:1", "Config": {"Env": ["PATH=/opt/bin:/bin", "COLOUR=blue"], **config}}


@asynccontextmanager
async def fake_daemon(folder: Path):
    """A daemon that listens in a folder."""
    daemon = FakeDaemon(f"unix://{folder}/docker.sock")
    server = await asyncio.start_unix_server(daemon.serve, folder / "docker.sock")
    try:
        yield daemon
    finally:
        server.close()
        daemon.hold.set()
        await daemon.end()
