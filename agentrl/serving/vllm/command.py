"""Command line and environment variables of a vLLM server."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from agentrl.config.engines import VLLMEngineConfig
from agentrl.serving.launch import LaunchCommand
from agentrl.serving.launch.process import RETURN_ROUTES, SAFE_PATH, THIS_MACHINE
from agentrl.serving.vllm.wire import PROCESSED, WORKER_EXTENSION

MODULE = "vllm.entrypoints.openai.api_server"
SERVED_NAME = "policy"
RECEIVER = "agentrl"
"""Name of the weight transfer engine in the server's workers: `agentrl_vllm_receiver` in `WORKER_PATH`."""
WORKER_PATH = Path(__file__).parent / "worker"
"""Folder of the modules that the server's workers import."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts as the maximum rank of adapters."""
CPU_CACHE_GIB = 2
"""Size of a server's key-value cache on a CPU; on a GPU, vLLM uses a share of its memory."""
BINDING = "VLLM_CPU_OMP_THREADS_BIND"
"""Variable with the cores on which a server computes. By default vLLM uses one core of each pair, minus one for its
other processes, so on a machine with two cores it computes on one."""


def launch_command(
    config: VLLMEngineConfig,
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

    Args:
        config: Sizes and additional arguments.
        python: Interpreter of an environment with vLLM.
        model: Hugging Face folder. It must contain the output head (``lm_head.weight``), or weight updates reach only
            the embedding.
        port: Port on `host`.
        dtype: ``float32`` or ``bfloat16``.
        host: Address of this machine on which the server listens.
        gpus: GPUs of this server; without any, it runs on the CPU.
        api_key: API key of the server, passed in the environment, so that other users of the machine cannot see it.
        python_path: PYTHONPATH of this process, appended to the server's.
    """
    argv = [
        python,
        "-m",
        MODULE,
        *("--model", str(model)),
        *("--served-model-name", SERVED_NAME),
        *("--host", host),
        *("--port", str(port)),
        *("--dtype", dtype),
        *("--max-num-seqs", str(config.max_num_seqs)),
        *("--tensor-parallel-size", str(config.tensor_parallel)),
        *("--logprobs-mode", PROCESSED),
        *("--worker-extension-cls", WORKER_EXTENSION),
        *("--weight-transfer-config", f'{{"backend": "{RECEIVER}"}}'),
        *("--hf-overrides", '{"tie_word_embeddings": false}'),
        *("--generation-config", "vllm"),
        "--enable-scale-out",
        "--enable-prompt-tokens-details",
    ]
    if config.max_context is not None:
        argv += ["--max-model-len", str(config.max_context)]
    env = {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(WORKER_PATH), python_path))),
        SAFE_PATH: "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_SERVER_DEV_MODE": "1",
    }
    if config.adapter_rank is not None:
        rank = next(rank for rank in RANKS if rank >= config.adapter_rank)
        argv += ["--enable-lora", "--max-loras", str(config.max_adapters), "--max-lora-rank", str(rank)]
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if RETURN_ROUTES in config.arguments:
        env["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the old runner does not report routed experts
    if gpus and config.sleep:
        argv.append("--enable-sleep-mode")
    if not gpus:
        argv.append("--enforce-eager")
        env |= {"CUDA_VISIBLE_DEVICES": "", "VLLM_CPU_KVCACHE_SPACE": str(CPU_CACHE_GIB)}
        if host == THIS_MACHINE and config.tensor_parallel == 1 and BINDING not in os.environ:
            env[BINDING] = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    if api_key is not None:
        env["VLLM_API_KEY"] = api_key
    return LaunchCommand(argv=[*argv, *config.arguments], env=env, host=host)
