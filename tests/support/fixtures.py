"""Fixtures that tests of engines and of whole runs share."""

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import hypothesis
import pytest
import torch

from agentrl.builders import scratch
from agentrl.config import load_config
from agentrl.engine import GenerateRequest, SamplingParams
from agentrl.rollout import env_pool
from agentrl.runs.start import start_run
from agentrl.sandbox.orphan_guard import OrphanGuard
from support.forks import ForkServer
from support.reference import model_reference

# Sums in the same order everywhere, and as many busy threads as tests that run at the same time.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
scratch.EPISODES = 64  # enough for the tokenizer of a new model
os.fsync = lambda descriptor: None  # no test cuts the power, and short runs mostly wait for the disk

# How fast this machine is says nothing about the code: no deadline for an example, none for making the first ones.
hypothesis.settings.register_profile(
    "any machine", hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
)
hypothesis.settings.load_profile("any machine")

WORLDS = Path(__file__).parents[1] / "worlds"

LETTERS = "letters:Letters"
OWN_WORLDS = {LETTERS, "guests:SPEC"}
TINY_RUN = (
    f"environment={{name: {LETTERS}, isolation: inline}}",
    "agent={loop: react_text, options: {format: plain, explain: false}, max_answer_tokens: 8, max_tokens: 256}",
    "model.scratch={layers: 1, hidden_size: 32, heads: 2, kv_heads: 1, vocab_size: 300, max_context: 256}",
    "model.scratch.initializer_range=0.2",
    "engine={max_num_seqs: 8, cache_tokens: 8192}",
    "algorithm.group_size=3",
    "trainer={steps: 4, tasks_per_step: 2, learning_rate: 1e-2, mini_batches: 2}",
    "checkpoint.every=2",
)
"""A run of about a second: a model of 20,000 weights writes letters."""


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """What environments would keep in the user's cache folder goes into a folder of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTRL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _corpora_are_written_once():
    """Many tests have the same world, whose episodes the tokenizer of a new model is trained on."""
    write, written = scratch.scratch_corpus, {}

    async def corpus(config, say=lambda _: None, waits=None):
        name = "" if config.environments else config.sole_environment.name
        if ":" in name and name not in OWN_WORLDS:  # a test may have a world of this name for itself
            return await write(config, say=say, waits=waits)
        key = (config.run.seed, config.model_dump_json(include={"environment", "environments", "agent"}))
        if key not in written:
            written[key] = await write(config, say=say, waits=waits)
        return written[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scratch, "scratch_corpus", corpus)
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_orphan_guard():
    """Pools of environments start a guard process each; tests make thousands of pools, which share one here."""
    guard = OrphanGuard()

    class SharedGuard:
        start = guard.start

        def close(self):
            """Leave it to the others."""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(env_pool, "OrphanGuard", SharedGuard)
        yield
    guard.close()


SERVER = pytest.StashKey[ForkServer | None]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    """Fork the server of Python programs before the first test: nothing has computed with torch yet."""
    if SERVER not in item.config.stash:
        is_used = any("fork_server" in getattr(other, "fixturenames", ()) for other in item.session.items)
        item.config.stash[SERVER] = ForkServer() if is_used else None


def pytest_sessionfinish(session):
    if server := session.config.stash.get(SERVER, None):
        server.close()


@pytest.fixture(scope="session")
def fork_server(request):
    """The server of Python programs in forks."""
    return request.config.stash[SERVER]


@pytest.fixture
def start_python(fork_server):
    """Start Python programs in forks; those that still run when the test ends are killed."""
    with contextlib.ExitStack() as programs:

        def start(*words, **options):
            program = fork_server.start(*words, **options)
            programs.callback(program.close)
            return program

        yield start


@contextlib.contextmanager
def tiny_runs(folder):
    """A function that starts the folder of a tiny run with some overrides."""

    def start(*overrides, name="run"):
        fixed = [f"run.directory={folder / 'runs'}", f"run.name={name}"]
        return start_run(load_config(None, [*TINY_RUN, *fixed, *overrides]), kind="test")

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(WORLDS)
        yield start
    sys.modules.pop("letters", None)


@pytest.fixture
def tiny_run(tmp_path):
    """Start the folder of a tiny run with some overrides."""
    with tiny_runs(tmp_path) as start:
        yield start


@pytest.fixture
def tiny_words():
    """The overrides of a tiny run, and where its world lies, for a program of its own."""

    def words(*overrides):
        return {"worlds": str(WORLDS), "overrides": [*TINY_RUN, *overrides]}

    return words


@pytest.fixture
def request_of() -> Callable[..., GenerateRequest]:
    """Build a request whose request id and session are its name."""

    def build(prompt: Sequence[int], name: str = "r", session: str | None = None, **params) -> GenerateRequest:
        settings = SamplingParams(**params)
        return GenerateRequest(prompt_ids=prompt, params=settings, session_id=session or name, request_id=name)

    return build


@pytest.fixture(scope="session")
def reference_of():
    """Log-probabilities of a model by a full forward pass."""
    return model_reference
