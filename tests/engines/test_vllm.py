"""vLLM itself, on the CPU: the conformance kit, and what the kit does not ask."""

import asyncio
import copy

import pytest

from agentrl.config.schema import VLLMEngineConfig
from agentrl.errors import EngineError, UsageError
from agentrl.policy import StopReason
from agentrl.serving.vllm import VLLMServer, launch_command
from agentrl.testing import check_engine
from agentrl.testing.engine_check import Verdict

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def trained(model):
    """The trainer's copy of the model that is served; tests change it along with the server's."""
    return copy.deepcopy(model)


@pytest.fixture(scope="module")
def url(vllm_python, model_folder, started_server, tmp_path_factory):
    config = VLLMEngineConfig(max_running=64)
    log = tmp_path_factory.mktemp("logs") / "vllm.log"

    def command(port):
        return launch_command(config, python=str(vllm_python), model=model_folder, port=port, dtype="float32")

    with started_server(command, log) as address:
        yield address


@pytest.fixture
async def server(url, model):
    client = VLLMServer(url, VLLMEngineConfig(), vocab_size=model.config.vocab_size)
    await client.connect(deadline_s=240)
    yield client
    await client.close()


async def test_the_server_conforms(url, trained, engine_of, reference_of, shaken_folders, tmp_path):
    def engine():
        return engine_of(VLLMServer(url, VLLMEngineConfig(), vocab_size=trained.config.vocab_size))

    report = await check_engine(
        engine,
        reference=reference_of(trained),
        new_weights=shaken_folders(trained, tmp_path),
        tolerance=1e-4,
        settle_s=0.5,
    )
    print(report)
    report.raise_on_failure()
    assert [row.check for row in report.rows if row.verdict is Verdict.SKIPPED] == ["seeds"]
