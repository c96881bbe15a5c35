"""The commands of both engines."""

import pytest

from agentrl.config.engines import SGLangEngineConfig, VLLMEngineConfig
from agentrl.serving.sglang import launch_command as sglang_command
from agentrl.serving.vllm import launch_command as vllm_command


@pytest.mark.parametrize(
    ("make", "config"), [(vllm_command, VLLMEngineConfig()), (sglang_command, SGLangEngineConfig())]
)
def test_a_server_is_asked_for_its_health_where_it_listens(make, config, tmp_path):
    command = make(config, python="py", model=tmp_path, port=81, dtype="float32", host="192.0.2.7")
    assert command.argv[command.argv.index("--host") + 1] == command.host == "192.0.2.7"
