"""What tests against real inference servers share: interpreters, tiny models, started servers.

A missing engine is a failure here, not a skip: `make test-engines` sets them up.
"""

import asyncio
import itertools
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from agentrl.policy import EngineMetrics, GenerateRequest, PolicyEngine, SamplingParams
from agentrl.server import InferenceServer
from agentrl.serving.launch import LaunchCommand
from agentrl.testing.models import tiny_model
from agentrl.testing.tokenizers import build_tokenizer

ENGINES = Path("~/.cache/agentrl/engines").expanduser()
LOG_TAIL = 4000
MAX_CONTEXT = 1024
START_S = 540
STOP_S = 20
READ_LOAD_S = 0.05


def engine_python(name: str) -> Path:
    """Interpreter of an engine: AGENTRL_VLLM_PYTHON, AGENTRL_SGLANG_PYTHON, or the one that make engines made."""
    variable = f"AGENTRL_{name.upper()}_PYTHON"
    python = Path(os.environ.get(variable, ENGINES / name / "bin" / "python"))
    assert python.exists(), f"{python} does not exist: run make engines, or set {variable}"
    return python


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    return engine_python("vllm")


@pytest.fixture(scope="session")
def sglang_python() -> Path:
    return engine_python("sglang")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """The servers need the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def servable_model(*, tied: bool):
    """A tiny model that the servers can compute on a CPU: vLLM's kernels there ask for a head size of at least 32."""
    size = len(build_tokenizer("qwen3"))
    return tiny_model(vocab_size=size, hidden_size=64, heads=2, kv_heads=1, max_context=MAX_CONTEXT, tied=tied)


def save_model(model, folder: Path) -> Path:
    """Write a model as trainers hand it over: the output head in its own right, also when it is the embedding."""
    folder.mkdir(parents=True)
    config = model.config.to_dict() | {"tie_word_embeddings": False, "architectures": [type(model).__name__]}
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name: parameter.detach().clone() for name, parameter in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    build_tokenizer("qwen3").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session", params=["untied", "tied"])
def model(request):
    """A tiny model, once with a head of its own and once with a head that is its embedding."""
    return servable_model(tied=request.param == "tied")


@pytest.fixture(scope="session")
def model_folder(model, tmp_path_factory) -> Path:
    """The model as servers load it."""
    return save_model(model, tmp_path_factory.mktemp("models") / "start")


@contextmanager
def started(command: LaunchCommand, log: Path) -> Iterator[subprocess.Popen]:
    """A server in a process group of its own, which ends with the block; a failure shows the end of its log."""
    environment = {**os.environ, **command.env}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command.argv, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield process
    except BaseException:
        print(log.read_text(errors="replace")[-LOG_TAIL:])
        raise
    finally:
        _end(process)


@pytest.fixture(scope="session")
def processes() -> list[subprocess.Popen]:
    """The servers that were started, each the leader of its process group; the last one runs."""
    return []


@pytest.fixture(scope="session")
def started_server(processes):
    """Starts a server on a free port and waits until it is ready; its address."""

    @contextmanager
    def start(command_of: Callable[[int], LaunchCommand], log: Path) -> Iterator[str]:
        port = free_port()
        command = command_of(port)
        with started(command, log) as process:
            processes.append(process)
            _wait_ready(process, f"http://127.0.0.1:{port}{command.health}")
            yield f"http://127.0.0.1:{port}"

    return start


def _wait_ready(process: subprocess.Popen, health: str) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        assert process.poll() is None, f"the server ended with exit code {process.returncode}"
        with suppress(OSError), urllib.request.urlopen(health, timeout=10):
            return
        time.sleep(0.2)
    raise AssertionError(f"the server was not ready in {START_S} s")


def _end(process: subprocess.Popen) -> None:
    try:
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(STOP_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class ServerEngine(PolicyEngine):
    """One server as an engine, for the conformance kit; its weights are folders."""

    def __init__(self, server: InferenceServer) -> None:
        self.server = server
        self._version = 0
        self._paused = False
        self._metrics = EngineMetrics()
        self._watch: asyncio.Task[None] | None = None

    @property
    def version(self):
        return self._version

    async def start(self):
        await self.server.connect(deadline_s=START_S)
        self.capabilities = self.server.capabilities
        self._version = await self.server.weight_version()
        self._watch = asyncio.ensure_future(self._read_load())

    async def _read_load(self):
        while True:
            load = await self.server.load()
            self._metrics = EngineMetrics(
                running=load.running, waiting=load.waiting, sampled_tokens=load.sampled_tokens
            )
            await asyncio.sleep(READ_LOAD_S)

    async def generate(self, request):
        return await self.server.generate(request)

    async def abort(self, request_id):
        return await self.server.abort(request_id)

    async def pause(self):
        await self.server.pause()
        self._paused = True

    async def resume(self):
        await self.server.resume()
        self._paused = False

    async def update_weights(self, weights, version):
        if not (held := self._paused):
            await self.pause()
        await self.server.load_weights(weights["folder"], version)
        self._version = version
        if not held:
            await self.resume()

    async def end_session(self, session_id):
        return

    def metrics(self):
        return self._metrics

    async def close(self):
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
        await self.server.close()


@pytest.fixture(scope="session")
def engine_of() -> Callable[[InferenceServer], PolicyEngine]:
    """Make an engine of a server."""
    return ServerEngine


@pytest.fixture(scope="session")
def shaken_folders():
    """Changes a model's weights in place, as training does, and writes them: a folder each time."""

    def build(model, root: Path, scale: float = 0.02):
        generator = torch.Generator().manual_seed(0)
        numbers = itertools.count()

        def shake() -> dict[str, Path]:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
            return {"folder": save_model(model, root / f"weights-{next(numbers)}")}

        return shake

    return build


@pytest.fixture
def request_of() -> Callable[..., GenerateRequest]:
    """Build a request whose request id and session are its name."""

    def build(prompt: Sequence[int], name: str = "r", session: str | None = None, **params) -> GenerateRequest:
        settings = SamplingParams(**params)
        return GenerateRequest(prompt_ids=prompt, params=settings, session_id=session or name, request_id=name)

    return build


@pytest.fixture(scope="session")
def reference_of():
    """Log-probabilities of a model by a full forward pass, without any cache."""

    def build(model):
        @torch.no_grad()
        def logprobs(ids: Sequence[int], temperature: float) -> list[float]:
            logits = model(torch.tensor([list(ids)])).logits[0] / temperature
            chosen = torch.tensor(ids)[1:, None]
            return torch.log_softmax(logits, -1)[:-1].gather(1, chosen)[:, 0].tolist()

        return logprobs

    return build
