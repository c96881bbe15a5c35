"""Command line and environment variables of an SGLang server."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from agentrl.config.engines import SGLangEngineConfig
from agentrl.serving.launch import LaunchCommand
from agentrl.serving.launch.process import SAFE_PATH, THIS_MACHINE
from agentrl.serving.sglang import start_with_key
from agentrl.serving.sglang.wire import GRAMMAR

CPU_MODULES = Path(__file__).parent / "cpu_modules"
"""Folder of placeholders for packages that exist for GPUs only."""
CONTEXT_RESERVE = 6
"""Tokens by which SGLang's maximum for prompt and answer is below the context length that it is given."""
CPU_CACHE_TOKENS = 65_536
"""Tokens in the key-value cache on the CPU; by default, SGLang would use most of the machine's memory."""


def launch_command(
    config: SGLangEngineConfig,
    *,
    python: str,
    model: Path,
    port: int,
    dtype: str,
    host: str = THIS_MACHINE,
    gpus: Sequence[int] = (),
    api_key: str | None = None,
    python_path: str = "",
) -> LaunchCommand:
    """Build the command that starts one server.

    Arguments are as for `agentrl.serving.vllm.launch_command`. Without `config.max_context`, the context is the model's
    minus `CONTEXT_RESERVE`.
    """
    argv = [
        python,
        *(("-m", "sglang.launch_server") if api_key is None else (start_with_key.__file__,)),
        *("--model-path", str(model)),
        *("--host", host),
        *("--port", str(port)),
        *("--dtype", dtype),
        *("--max-running-requests", str(config.max_num_seqs)),
        *("--tp-size", str(config.tensor_parallel)),
        *("--log-level-http", "warning"),
        "--skip-server-warmup",
        "--enable-metrics",
    ]
    env = {SAFE_PATH: "1", "HF_HUB_OFFLINE": "1"}
    if api_key is not None:
        env[start_with_key.VARIABLE] = api_key
    if config.max_context is not None:
        argv += ["--context-length", str(config.max_context + CONTEXT_RESERVE)]
        env["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    if gpus and config.sleep:
        argv.append("--enable-memory-saver")
    if not gpus:
        argv += _cpu_arguments(config)
        env |= {"PYTHONPATH": os.pathsep.join(filter(None, (str(CPU_MODULES), python_path)))}
        env |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
        env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return LaunchCommand(argv=[*argv, *config.arguments], env=env, host=host)


def _cpu_arguments(config: SGLangEngineConfig) -> list[str]:
    cache = max(CPU_CACHE_TOKENS, 2 * ((config.max_context or 0) + CONTEXT_RESERVE))
    return [
        *("--device", "cpu"),
        *("--attention-backend", "torch_native"),
        *("--sampling-backend", "pytorch"),
        *("--grammar-backend", GRAMMAR),
        *("--max-total-tokens", str(cache)),
        "--disable-overlap-schedule",
        "--sleep-on-idle",  # otherwise its scheduler keeps a core busy that the trainer needs
    ]
