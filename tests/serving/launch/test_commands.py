"""The commands of both engines."""

import json
import os
import subprocess
import sys

import aiohttp
import pytest

from agentrl.config.engines import SGLangEngineConfig, VLLMEngineConfig
from agentrl.serving.sglang import launch_command as sglang_command
from agentrl.serving.sglang import start_with_key
from agentrl.serving.vllm import launch_command as vllm_command


@pytest.mark.parametrize(
    ("make", "config"), [(vllm_command, VLLMEngineConfig()), (sglang_command, SGLangEngineConfig())]
)
def test_a_server_is_asked_for_its_health_where_it_listens(make, config, tmp_path):
    command = make(config, python="py", model=tmp_path, port=81, dtype="float32", host="192.0.2.7")
    assert command.argv[command.argv.index("--host") + 1] == command.host == "192.0.2.7"


ENGINE = """
import aiohttp, json, sys
print(json.dumps([aiohttp.__file__, sys.argv[1:3]]))
"""


@pytest.mark.parametrize("api_key", [None, "secret"])
@pytest.mark.parametrize(
    ("make", "config", "module"),
    [
        (vllm_command, VLLMEngineConfig(), "vllm/entrypoints/openai/api_server.py"),
        (sglang_command, SGLangEngineConfig(), "sglang/launch_server.py"),
    ],
)
def test_files_in_the_current_folder_hide_no_packages_from_a_server(make, config, module, api_key, tmp_path):
    for name in ("vllm", "sglang", "aiohttp", "runpy", "asyncio"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('hidden')")
    installed = tmp_path / "installed"  # a program in the place of the engine
    file = installed / module
    file.parent.mkdir(parents=True)
    file.write_text(ENGINE)
    command = make(
        config,
        python=sys.executable,
        model=tmp_path,
        port=81,
        dtype="float32",
        api_key=api_key,
        python_path=str(installed),
    )
    found = subprocess.run(
        command.argv, env={**os.environ, **command.env}, cwd=tmp_path, capture_output=True, text=True
    )
    path, words = json.loads(found.stdout)
    assert path == aiohttp.__file__
    assert words[1] == str(tmp_path)
    assert start_with_key.VARIABLE not in command.env or "secret" not in " ".join(command.argv)
