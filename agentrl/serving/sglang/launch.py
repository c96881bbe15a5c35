"""What starts an SGLang server; no I/O."""

from __future__ import annotations

from pathlib import Path

from agentrl.config.schema import SGLangEngineConfig
from agentrl.serving.launch.command import LaunchCommand

CPU_MODULES = Path(__file__).parent / "cpu_modules"
"""Stand-ins for packages that exist for GPUs only, for the start of SGLang's `PYTHONPATH`."""
CONTEXT_RESERVE = 6
"""SGLang takes prompts and answers that are so many tokens shorter than the context length that it is given."""
CPU_CACHE_TOKENS = 65_536
"""Key-value cache on the CPU, in tokens; SGLang would take most of the machine's memory."""


def launch_command(
    config: SGLangEngineConfig,
    *,
    python: str,
    model: str,
    port: int,
    device: str,
    dtype: str,
    max_context: int | None = None,
    host: str = "127.0.0.1",
) -> LaunchCommand:
    """The command of one server.

    Args:
        config: Sequences at once, GPUs per server, more arguments, which go last and so win.
        python: Interpreter of the environment that holds SGLang.
        model: Folder or Hugging Face name.
        port: Free port.
        device: ``cpu`` or ``cuda``.
        dtype: Number format of the weights.
        max_context: Tokens of a sequence; the model's own limit, less `CONTEXT_RESERVE`, when left out.
        host: Address to listen on.
    """
    argv = [python, "-m", "sglang.launch_server", "--model-path", model, "--host", host, "--port", str(port)]
    argv += ["--dtype", dtype, "--max-running-requests", str(config.max_running), "--enable-metrics"]
    argv += ["--skip-server-warmup", "--log-level-http", "warning"]
    env: dict[str, str] = {}
    if max_context is not None:
        argv += ["--context-length", str(max_context + CONTEXT_RESERVE)]
        env["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    if device == "cpu":
        cache = max(CPU_CACHE_TOKENS, 2 * ((max_context or 0) + CONTEXT_RESERVE))
        argv += ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
        argv += ["--disable-overlap-schedule", "--grammar-backend", "none", "--max-total-tokens", str(cache)]
        env |= {"PYTHONPATH": str(CPU_MODULES), "SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
        env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    else:
        argv += ["--tp-size", str(config.tensor_parallel)]
    return LaunchCommand(argv=[*argv, *config.arguments], env=env)
