"""A training service in a thread of this process, over a small model, and the real client."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["TINKER_TELEMETRY"] = "0"  # events would arrive after the servers of the tests have gone

import pytest
from support.models import tiny_model
from support.tokenizers import build_tokenizer
from support.waiting import join

from agentrl.cli.serve_training import read_service_config
from agentrl.render.tokenizers import load_tokenizer
from agentrl.training_service.runs import BaseWeights
from agentrl.training_service.server import TrainingServer
from agentrl.training_service.service import TrainingServiceSettings

tinker = pytest.importorskip("tinker")
KEY = "tml-of-the-tests"
ENGINE = ("engine.max_num_seqs=16", "engine.cache_tokens=4096")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose head is its embedding."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tokenizer = build_tokenizer("qwen3", vocab_size=320)
    tokenizer.save_pretrained(folder)
    tiny_model("qwen3", vocab_size=len(tokenizer)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def base_model(model_folder: Path) -> Callable[..., BaseWeights]:
    """Loads the base, with more keys of a config."""

    def load(*overrides: str) -> BaseWeights:
        config = read_service_config([f"model.path={model_folder}", "model.device=cpu", *ENGINE, *overrides])
        return BaseWeights(str(model_folder), load_tokenizer(str(model_folder)), config)

    return load


class Served:
    """A server with its thread."""

    def __init__(self, server: TrainingServer) -> None:
        self.server = server
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.wait(server.start())
        self.url = server.url

    def wait(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def close(self) -> None:
        self.wait(self.server.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        join(self._thread)
        self._loop.close()


@pytest.fixture
def serve(tmp_path: Path, base_model: Callable[..., BaseWeights]) -> Iterator[Callable[..., Served]]:
    """Starts services, each with a folder of its own, the first in ``service``."""
    served: list[Served] = []

    def start(*overrides: str, key: str | None = None, **limits: Any) -> Served:
        settings = TrainingServiceSettings(folder=tmp_path / f"service{len(served) or ''}", model_name="tiny", **limits)
        server = TrainingServer(settings, lambda: base_model(*overrides), host="127.0.0.1", port=0, key=key)
        served.append(Served(server))
        return served[-1]

    yield start
    for own in served:
        own.close()


@pytest.fixture
def client_of() -> Iterator[Callable[..., Any]]:
    """Makes clients of a server, which end with the test."""
    clients: list[Any] = []

    def make(served: Served) -> Any:
        clients.append(tinker.ServiceClient(base_url=served.url, api_key=KEY))
        return clients[-1]

    yield make
    for client in clients:
        client.close("success").result(60)


@pytest.fixture
def service(serve: Callable[..., Served], client_of: Callable[..., Any]) -> Any:
    """A client of a new server."""
    return client_of(serve())
