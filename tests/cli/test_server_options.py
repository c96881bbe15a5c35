"""Options of the serving commands reach the server under their own names; all values differ."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.models import tiny_model
from support.tokenizers import build_tokenizer

from agentrl.cli import env, gateway, sandbox, serve_training
from agentrl.config.config import Config
from agentrl.evaluation.live_traffic import LiveTraffic
from agentrl.remote.server import EnvironmentServer, ServerSettings
from agentrl.remote.server.sandboxes import SandboxServer
from agentrl.sandbox.spec import DEFAULT_LIMITS
from agentrl.training_service.server import TrainingServer
from agentrl.training_service.service import TrainingServiceSettings

Cli = Callable[..., Any]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The servers that a command made, with their settings; none is started."""
    found: list[Any] = []

    def keep(server: Any, settings: ServerSettings, **words: str) -> None:
        found.extend((server, settings, words))

    for module in (env, sandbox, serve_training):
        monkeypatch.setattr(module, "serve_until_stopped", keep)
    return found


@pytest.fixture
def token(tmp_path: Path) -> Path:
    """A file with a token that every server takes."""
    file = tmp_path / "token.txt"
    file.write_text("tml-of-the-tests\n")
    return file


def test_options_of_an_environment_server(agentrl: Cli, served: list[Any], token: Path) -> None:
    ended = agentrl(
        *("env", "serve", "guess_number", "low=3", "--host", "localhost", "--port", "8123"),
        *("--token-file", str(token), "--max-sessions", "5", "--lease", "7", "--workers", "6"),
        *("--reset-timeout", "11", "--step-timeout", "13"),
    )
    assert ended.code == 0, ended.err
    server, settings, words = served
    assert isinstance(server, EnvironmentServer)
    assert settings == ServerSettings(
        host="localhost",
        port=8123,
        token="tml-of-the-tests",
        max_sessions=5,
        lease_s=7.0,
        workers=6,
        reset_timeout_s=11.0,
        step_timeout_s=13.0,
    )
    assert server.settings == settings
    assert (server.spec.name, server._options["low"]) == ("guess_number", 3)
    assert words["usage"] == "guess_number is served: agentrl env play {url}"


def test_options_of_a_sandbox_server(agentrl: Cli, served: list[Any], token: Path) -> None:
    ended = agentrl(
        *("sandbox", "serve", "--type", "http", "--set", "url=http://127.0.0.1:1", "--set", "limits.seconds=9"),
        *("--host", "localhost", "--port", "8124", "--token-file", str(token)),
        *("--max-sessions", "5", "--lease", "7"),
    )
    assert ended.code == 0, ended.err
    server, settings, _ = served
    assert isinstance(server, SandboxServer)
    assert settings == ServerSettings(
        host="localhost", port=8124, token="tml-of-the-tests", max_sessions=5, lease_s=7.0
    )
    assert server.settings == settings
    assert (server.spec.type, server.spec.url) == ("http", "http://127.0.0.1:1")
    assert (server.spec.limits.seconds, server.spec.limits.processes) == (9, DEFAULT_LIMITS.processes)


@pytest.fixture
def model(workplace: Path) -> str:
    """The folder of a small model."""
    tokenizer = build_tokenizer("qwen3")
    tiny_model(vocab_size=len(tokenizer)).save_pretrained("tiny")
    tokenizer.save_pretrained("tiny")
    return "tiny"


def test_options_of_a_training_server(
    agentrl: Cli, served: list[Any], token: Path, model: str, workplace: Path
) -> None:
    pytest.importorskip("tinker")
    ended = agentrl(
        *("serve-training", f"model.path={model}", "model.lora.alpha=24", "--host", "localhost", "--port", "8125"),
        *("--token-file", str(token), "--folder", "kept", "--all-weights", "--max-runs", "3", "--max-engines", "2"),
        *("--lease", "7"),
    )
    assert ended.code == 0, ended.err
    server, settings, words = served
    assert isinstance(server, TrainingServer)
    assert server.service.settings == TrainingServiceSettings(
        folder=workplace / "kept",
        model_name=model,
        all_weights=True,
        alpha=24.0,
        most_runs=3,
        most_engines=2,
        lease_s=7.0,
    )
    assert (settings.host, settings.port, settings.token) == ("localhost", 8125, "tml-of-the-tests")
    assert (server._host, server._port, server._key) == ("localhost", 8125, "tml-of-the-tests")
    assert words["usage"] == "tiny is served: TINKER_BASE_URL={url} TINKER_API_KEY=your key"


def test_a_training_server_keeps_its_defaults(agentrl: Cli, served: list[Any], model: str, workplace: Path) -> None:
    pytest.importorskip("tinker")
    ended = agentrl("serve-training", f"model.path={model}")
    assert ended.code == 0, ended.err
    server, settings, words = served
    expected = TrainingServiceSettings(folder=workplace / "runs" / "training-service", model_name=model)
    assert server.service.settings == expected
    assert (settings.port, settings.token) == (8400, None)
    assert words["usage"].endswith("TINKER_API_KEY=tml-local")


@pytest.mark.parametrize("records", [True, False])
def test_options_of_the_gateway(
    agentrl: Cli, workplace: Path, monkeypatch: pytest.MonkeyPatch, *, records: bool
) -> None:
    opened: list[tuple[Config, dict[str, Any]]] = []

    class Traffic(LiveTraffic):
        def __init__(self, policy: Any, config: Config, **options: Any) -> None:
            super().__init__(policy, config, **options)
            opened.append((config, options))

        async def __aenter__(self) -> LiveTraffic:
            raise KeyboardInterrupt

    @asynccontextmanager
    async def no_policy(*_: Any) -> AsyncIterator[object]:
        yield object()

    monkeypatch.setattr(gateway, "LiveTraffic", Traffic)
    monkeypatch.setattr(gateway, "open_policy", no_policy)
    monkeypatch.setenv("KEY_OF_TEST", "secret")
    ended = agentrl(
        *("gateway", "--model", "their-model", "--engine", "openai", "--url", "http://127.0.0.1:1/v1"),
        *("--host", "0.0.0.0", "--port", "8126", "--key-variable", "KEY_OF_TEST", "--idle", "17"),
        *(("--record", "kept") if records else ()),
        "agent.max_answer_tokens=33",
    )
    assert ended.code == 130, ended.err
    ((config, options),) = opened
    assert (config.engine.type, config.engine.url, config.engine.model) == (  # type: ignore[union-attr]
        *("openai", "http://127.0.0.1:1/v1", "their-model"),
    )
    assert config.agent.max_answer_tokens == 33
    folder = Path("kept") if records else None
    assert options == {"folder": folder, "idle_s": 17.0, "host": "0.0.0.0", "port": 8126, "key": "secret"}
    assert (workplace / "kept").is_dir() == records


def test_a_session_limit_is_kept(agentrl: Cli, served: list[Any]) -> None:
    """The settings that arrive are those that the server obeys."""
    agentrl("env", "serve", "guess_number", "--max-sessions", "1")
    server = served[0]

    async def play() -> None:
        await server.start()
        try:
            async with aiohttp.ClientSession() as http:
                statuses = []
                for name in ("first-one", "second-one"):
                    async with http.put(f"{server.url}/v1/sessions/{name}", json={}) as answer:
                        statuses.append(answer.status)
            assert statuses == [200, 503]
        finally:
            await server.close()

    asyncio.run(play())
