"""What tests against real inference servers share: one server of each engine for the whole session, tiny models.

A missing engine is a failure here, not a skip: `make test-engines` sets them up.
"""

import asyncio
import contextlib
import copy
import itertools
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import torch
from support.models import tiny_model
from support.tokenizers import build_tokenizer

from agentrl.config.engines import SGLangEngineConfig, VLLMEngineConfig
from agentrl.errors import EngineError
from agentrl.serving.launch import LaunchCommand, ServerProcess, engine_python
from agentrl.serving.launch.guard import descendants
from agentrl.serving.launch.resources import reserve_port
from agentrl.serving.sglang import SGLangServer
from agentrl.serving.sglang import launch_command as sglang_command
from agentrl.serving.vllm import VLLMServer
from agentrl.serving.vllm import launch_command as vllm_command
from agentrl.testing import ServerEngine
from agentrl.testing.engine_subject import EngineProbe
from agentrl.training.weights import ModelWeights
from agentrl.weights import write_served_model

MAX_CONTEXT = 1024
START_S = 540
GONE_S = 120
TOLERANCE = 1e-4
"""Between log-probabilities of a server and of transformers, both float32."""
KEY_VARIABLE = "AGENTRL_TEST_KEY"
CONFIGS = {"vllm": VLLMEngineConfig, "sglang": SGLangEngineConfig}
CLIENTS = {"vllm": VLLMServer, "sglang": SGLangServer}
COMMANDS = {"vllm": vllm_command, "sglang": sglang_command}
KILLS = "kills_a_server"
"""Fixture of tests that are run last: a server that they kill takes its time to start again."""


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: KILLS in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def vllm_python() -> str:
    return engine_python("vllm", None)


@pytest.fixture(scope="session")
def sglang_python() -> str:
    return engine_python("sglang", None)


def servable_model(*, tied: bool):
    """A tiny model that the servers can compute on a CPU: vLLM's kernels there ask for a head size of at least 32."""
    size = len(build_tokenizer("qwen3"))
    return tiny_model(vocab_size=size, hidden_size=64, heads=2, kv_heads=1, max_context=MAX_CONTEXT, tied=tied)


@pytest.fixture(scope="session")
def model():
    """A tiny model whose output head is its embedding."""
    return servable_model(tied=True)


@pytest.fixture(scope="session")
def model_folder(model, tmp_path_factory) -> Path:
    """The model as servers load it."""
    folder = tmp_path_factory.mktemp("models") / "start"
    write_served_model(model, build_tokenizer("qwen3"), folder)
    return folder


@pytest.fixture(scope="session")
def processes() -> list[ServerProcess]:
    """The servers that were started, each the leader of its process group; the last one runs."""
    return []


@pytest.fixture(scope="session")
def started_server(processes):
    """Starts a server on a free port and waits until it is ready; its address. It ends with the block."""

    @contextmanager
    def start(command_of: Callable[[int], LaunchCommand], log: Path) -> Iterator[str]:
        reservation = reserve_port()
        port = reservation.port
        server = ServerProcess(command_of(port), name=log.stem, port=port, log=log)
        processes.append(server)
        try:
            asyncio.run(server.wait_ready(deadline_s=START_S))
            yield server.url
        finally:
            asyncio.run(server.close())
            reservation.release()

    return start


class SessionServers:
    """One server of each engine, started when it is asked for, and again when it has been killed."""

    def __init__(self, start, processes, model_folder: Path, logs: Path, stack: ExitStack) -> None:
        self._start, self._processes, self._stack = start, processes, stack
        self._model_folder, self._logs = model_folder, logs
        self._running: dict[str, ServerProcess] = {}

    def url(self, engine: str) -> str:
        """The address of a server that is ready."""
        running = self._running.get(engine)
        if running is None or running.code is not None:
            self._stack.enter_context(
                self._start(lambda port: self._command(engine, port), self._logs / f"{engine}.log")
            )
            running = self._running[engine] = self._processes[-1]
        return running.url

    def _command(self, engine: str, port: int) -> LaunchCommand:
        config = CONFIGS[engine](max_num_seqs=64, max_context=MAX_CONTEXT)
        keys = {"python": engine_python(engine, None), "model": self._model_folder, "port": port, "dtype": "float32"}
        return COMMANDS[engine](config, **keys, api_key="secret")

    def kill(self, engine: str) -> None:
        """SIGKILL to its process group."""
        os.killpg(self._running[engine].pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def session_servers(started_server, processes, model_folder, tmp_path_factory) -> Iterator[SessionServers]:
    with ExitStack() as stack:
        yield SessionServers(started_server, processes, model_folder, tmp_path_factory.mktemp("logs"), stack)


@pytest.fixture
def url(engine, session_servers) -> str:
    """The address of the session's server of the test's engine."""
    return session_servers.url(engine)


@pytest.fixture
def client_of(engine, url, model, monkeypatch):
    """Make a client of it."""
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    config = CONFIGS[engine](api_key_variable=KEY_VARIABLE)

    def make(*, vocab_size=model.config.vocab_size):
        return CLIENTS[engine](url, config, vocab_size=vocab_size)

    return make


@pytest.fixture
async def server(client_of):
    """A connected client of it."""
    client = client_of()
    await client.connect(deadline_s=START_S)
    yield client
    await client.close()


@pytest.fixture
def trained(request, model):
    """The trainer's copy of the model, with an untied head where the test asks for it; tests change it."""
    return servable_model(tied=False) if getattr(request, "param", "tied") == "untied" else copy.deepcopy(model)


@pytest.fixture
async def probe(client_of, trained, reference_of, shaken_folders, tmp_path):
    """The session's server, which serves the weights of `trained` now, and ways to watch it."""
    probe = EngineProbe(
        factory=lambda: ServerEngine(client_of()),
        reference=reference_of(trained),
        new_weights=shaken_folders(trained, tmp_path / "weights", 0.005),
        tolerance=TOLERANCE,
        sampling=ServerEngine.sampling,
    )
    await probe.start()
    await probe.until_idle()  # what the test before left would be held during the update
    await probe.update()
    yield probe
    with contextlib.suppress(EngineError):
        await probe.engine.resume()  # a test that failed during a pause fails alone
    await probe.engine.close()


@pytest.fixture(scope="session")
def shaken_folders():
    """Changes a model's weights in place, as training does, and writes them: a folder each time."""

    def build(model, root: Path, scale: float = 0.02):
        generator = torch.Generator().manual_seed(0)
        noise = scale * torch.randn(2 * max(parameter.numel() for parameter in model.parameters()), generator=generator)
        numbers = itertools.count()

        def shake() -> dict[str, Path]:
            with torch.no_grad():
                for parameter in model.parameters():
                    start = int(torch.randint(noise.numel() - parameter.numel(), (), generator=generator))
                    parameter.add_(noise[start : start + parameter.numel()].view_as(parameter))
            number = next(numbers)
            shutil.rmtree(root / f"weights-{number - 2}", ignore_errors=True)  # real models fill a disk
            folder = root / f"weights-{number}"
            write_served_model(model, build_tokenizer("qwen3"), folder)
            return {"folder": folder}

        return shake

    return build


def _words_of(pid: int) -> list[bytes]:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return []


def find_launched(root: int) -> dict[str, int]:
    """The launched servers below a process: their first processes by address."""
    found = {}
    for guard in descendants(root):
        words = _words_of(guard)
        with suppress(OSError, StopIteration):
            if any(word.endswith(b"guard.py") for word in words):
                children = map(int, Path(f"/proc/{guard}/task/{guard}/children").read_text().split())
                leader = next(child for child in children if os.getsid(child) == child)
                found[f"http://127.0.0.1:{words[words.index(b'--port') + 1].decode()}"] = leader
    return found


@pytest.fixture(scope="session")
def launched_by() -> Callable[[int], dict[str, int]]:
    return find_launched


@pytest.fixture(scope="session")
def leader_of() -> Callable[[str], int]:
    """The first process of the launched server at an address."""
    return lambda url: find_launched(os.getpid())[url]


def _is_alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


@pytest.fixture(scope="session")
def all_gone() -> Callable[[Sequence[int]], bool]:
    """Wait until processes are gone; ``False`` when some never go, which are killed then."""

    def wait(pids: Sequence[int]) -> bool:
        end = time.monotonic() + GONE_S
        while left := [pid for pid in pids if _is_alive(pid)]:
            if time.monotonic() > end:
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
                return False
            time.sleep(0.05)
        return True

    return wait


class LearningWeights(ModelWeights):
    """A trainer whose weights change on command, and that remembers all of them."""

    def __init__(self, model):
        super().__init__(model)
        self._past = {}
        self._generator = torch.Generator().manual_seed(0)

    def remember(self, version):
        """The weights are those of a version now."""
        self._past[version] = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    @torch.no_grad()
    def learn(self, version):
        """Change them into those of a version."""
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=self._generator))
        self.remember(version)

    def largest_difference(self, prompt, answer):
        """Of an answer's log-probabilities from those of the versions that its tokens claim; all are known ones."""
        worst, now = 0.0, {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        for version in set(answer.versions):
            self.model.load_state_dict(self._past[version])
            expected = self.token_logprobs(prompt, answer.token_ids)
            found = zip(answer.versions, answer.logprobs, expected, strict=True)
            worst = max(worst, *(abs(got - right) for stamp, got, right in found if stamp == version))
        self.model.load_state_dict(now)
        return worst


@pytest.fixture(scope="session")
def learning() -> Callable[..., LearningWeights]:
    """Make a trainer of a model."""
    return LearningWeights
