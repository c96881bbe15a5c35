"""`agentrl serve` with a program in place of an engine: start, output and shutdown."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from support.models import tiny_model
from support.tokenizers import build_tokenizer

from agentrl.cli import serve
from agentrl.serving.launch import ServerProcess

Cli = Callable[..., Any]

PROGRAM = """
import http.server, json, os, signal, sys
from pathlib import Path

words, folder, plan = sys.argv[1:], Path(os.environ["FAKE_FOLDER"]), os.environ.get("FAKE_PLAN")
(folder / f"{os.getpid()}.json").write_text(json.dumps(words))
if plan == "exits":
    sys.exit("no such model")
if plan == "interrupts":
    os.kill(int(os.environ["FAKE_TARGET"]), signal.SIGINT)
    signal.pause()

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *words):
        pass

http.server.HTTPServer(("127.0.0.1", int(words[words.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A program that takes an interpreter's command line and behaves like a server."""
    program = tmp_path / "python"
    program.write_text(f"#!{sys.executable}\n{PROGRAM}")
    program.chmod(0o755)
    (tmp_path / "started").mkdir()
    monkeypatch.setenv("FAKE_FOLDER", str(tmp_path / "started"))
    monkeypatch.setenv("FAKE_TARGET", str(os.getpid()))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return str(program)


@pytest.fixture
def model(workplace: Path) -> Path:
    """A folder that passes for a model."""
    folder = workplace / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text('{"tie_word_embeddings": false}')
    return folder


def started(workplace: Path) -> dict[int, list[str]]:
    """The command lines of the servers that were started, by process."""
    return {int(path.stem): json.loads(path.read_text()) for path in (workplace / "started").iterdir()}


def alive(workplace: Path) -> list[int]:
    return [pid for pid in started(workplace) if Path(f"/proc/{pid}").exists()]


def when_ready(monkeypatch: pytest.MonkeyPatch, act: Callable[[ServerProcess], None]) -> None:
    """Do something to the first server once the addresses are printed."""
    printed = serve.print_addresses

    def and_then(servers: Sequence[ServerProcess]) -> None:
        printed(servers)
        act(servers[0])

    monkeypatch.setattr(serve, "print_addresses", and_then)


@pytest.mark.parametrize(("engine", "module"), [("vllm", "vllm.entrypoints"), ("sglang", "sglang.launch_server")])
def test_servers_are_started_named_and_ended_by_ctrl_c(
    agentrl: Cli, workplace: Path, python: str, model: Path, monkeypatch: pytest.MonkeyPatch, engine: str, module: str
) -> None:
    running = []

    def interrupt(server: ServerProcess) -> None:
        running.extend(alive(workplace))
        os.kill(os.getpid(), signal.SIGINT)

    when_ready(monkeypatch, interrupt)
    words = ("--engine", engine, "--model", str(model), "--replicas", "2", "--python", python, "--folder", "served")
    ended = agentrl("serve", *words, "engine.max_num_seqs=7")
    assert ended.code == 0, ended.err
    addresses = ended.out.split()
    assert len(addresses) == 2
    assert f"engine.servers=[{','.join(addresses)}]" in ended.err
    commands = started(workplace)
    assert sorted(running) == sorted(commands)
    assert alive(workplace) == []
    for words_of_server in commands.values():
        assert module in words_of_server[1]
        assert str(model) in words_of_server
        assert "7" in words_of_server
    ports = {words_of_server[words_of_server.index("--port") + 1] for words_of_server in commands.values()}
    assert {f"http://127.0.0.1:{port}" for port in ports} == set(addresses)
    assert sorted(path.name for path in (workplace / "served" / "logs").iterdir()) == ["server-0.log", "server-1.log"]


def test_the_longest_context_and_the_first_port_are_those_that_are_given(
    agentrl: Cli, workplace: Path, python: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    when_ready(monkeypatch, lambda server: os.kill(os.getpid(), signal.SIGINT))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    words = ("--python", python, "--folder", "served", "--max-context", "77", "--port", str(port))
    ended = agentrl("serve", "--engine", "vllm", "--model", str(model), *words)
    assert ended.code == 0, ended.err
    (started_with,) = started(workplace).values()
    assert started_with[started_with.index("--max-model-len") + 1] == "77"
    assert ended.out.split() == [f"http://127.0.0.1:{port}"]


def test_ctrl_c_before_they_are_ready_ends_them_too(
    agentrl: Cli, workplace: Path, python: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_PLAN", "interrupts")
    ended = agentrl("serve", "--engine", "vllm", "--model", str(model), "--python", python)
    assert (ended.code, ended.out) == (0, ""), ended.err
    assert len(started(workplace)) == 1
    assert alive(workplace) == []


def test_the_end_of_a_server_is_told_and_ends_the_others(
    agentrl: Cli, workplace: Path, python: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    when_ready(monkeypatch, lambda server: os.kill(server.pid, signal.SIGKILL))
    ended = agentrl("serve", "--engine", "vllm", "--model", str(model), "--python", python, "--replicas", "2")
    assert ended.code == 1
    assert "server-0 ended: got exit code 137" in ended.err
    assert len(started(workplace)) == 2
    assert alive(workplace) == []


def test_a_server_that_does_not_start_shows_its_log(
    agentrl: Cli, workplace: Path, python: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_PLAN", "exits")
    ended = agentrl("serve", "--engine", "vllm", "--model", str(model), "--python", python)
    assert ended.code == 1
    assert re.search(r"server-0 did not start: got exit code 1.*server-0\.log, ends with:\s+no such model", ended.err)


def test_a_tied_model_is_served_with_a_head_of_its_own(
    agentrl: Cli, workplace: Path, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = build_tokenizer("qwen3")
    tiny_model(vocab_size=len(tokenizer), tied=True).save_pretrained("tied")
    tokenizer.save_pretrained("tied")
    names: list[str] = []

    def look(server: ServerProcess) -> None:
        with safe_open(next(Path("served/served-model").glob("*.safetensors")), framework="numpy") as weights:
            names.extend(weights.keys())
        os.kill(os.getpid(), signal.SIGINT)

    when_ready(monkeypatch, look)
    ended = agentrl("serve", "--engine", "vllm", "--model", "./tied", "--python", python, "--folder", "served")
    assert ended.code == 0, ended.err
    (words,) = started(workplace).values()
    assert Path(words[words.index("--model") + 1]) == Path("served/served-model")
    assert "lm_head.weight" in names
    assert not Path("served/served-model").exists()  # nobody needs it any more


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--gpus 0", "cannot use any GPU"),
        ("--tensor-parallel 3", "this process cannot use any: got 3"),
        ("engine.servers=[http://a]", "ignored with addresses in engine.servers"),
        ("engine=local", "no server to launch"),
        ("engine.max_num_seq=3", "did you mean engine.max_num_seqs?"),
        ("engine.api_key_variable=NO_SUCH_KEY", "NO_SUCH_KEY is not set"),
        ("--python nowhere", "engine.python is not a program"),
        ("--model ./nowhere", "no model found in ./nowhere"),
    ],
)
def test_what_cannot_be_served_is_told_before_anything_starts(
    agentrl: Cli, workplace: Path, python: str, model: Path, words: str, message: str
) -> None:
    ended = agentrl("serve", "--engine", "vllm", "--model", str(model), "--python", python, *words.split())
    assert ended.code == 2
    assert message in ended.err
    assert started(workplace) == {}


def test_a_folder_that_cannot_be_made_is_told(agentrl: Cli, workplace: Path, python: str, model: Path) -> None:
    (workplace / "file").write_text("")
    done = agentrl("serve", "--engine", "vllm", "--model", str(model), "--python", python, "--folder", "file/x")
    assert done.code == 2
    assert "cannot create the folder file/x: got Not a directory" in done.err


def test_a_port_in_use_is_told(agentrl: Cli, workplace: Path, python: str, model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        ended = agentrl("serve", "--engine", "sglang", "--model", str(model), "--python", python, "--port", port)
    assert ended.code == 2
    assert f"port {port} is in use" in ended.err


def test_the_doctor_tells_which_engines_can_be_launched(
    agentrl: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTRL_ENGINES", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    python = tmp_path / "vllm-1" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    (tmp_path / "vllm-1" / ".installed").touch()
    told = "".join(agentrl("doctor").out.split())
    assert f"vllmservers{python}" in told
    assert "sglangserversnotinstalled;toinstall:makeengines" in told
