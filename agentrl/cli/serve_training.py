"""`agentrl serve-training`: a server for the public ``tinker`` client, with a model on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.help_pages import examples
from agentrl.cli.server import LOCAL, Host, Port, read_token, serve_until_stopped
from agentrl.config import Config, load_config
from agentrl.config.engines import LocalEngineConfig
from agentrl.errors import UsageError, did_you_mean
from agentrl.models.lora import PEFT
from agentrl.observe.model_folder import check_fetchable, find_model
from agentrl.remote.server import ServerSettings
from agentrl.render.tokenizers import load_tokenizer
from agentrl.training_service import (
    ALPHA,
    KEY_PREFIX,
    KEY_VARIABLE,
    TINKER,
    BaseWeights,
    TrainingServer,
    TrainingServiceSettings,
)

app = typer.Typer()

KEYS = (
    "model.path",
    "model.dtype",
    "model.device",
    "model.lora.alpha",
    "engine.max_num_seqs",
    "engine.max_context",
    "engine.cache_tokens",
    "engine.prefill_tokens",
    "engine.lanes",
    "engine.timeout_s",
    "trainer.tokens_per_micro_batch",
    "trainer.share_prefixes",
    "trainer.lanes",
    "trainer.gradient_checkpointing",
)
"""Supported config keys."""


@app.command(
    epilog=examples(
        "agentrl serve-training model.path=smollm2-135m-instruct",
        "agentrl serve-training model.path=Qwen/Qwen2.5-0.5B-Instruct model.dtype=bfloat16 --port 8400",
        "agentrl serve-training model.path=runs/latest --host 0.0.0.0 --token-file key.txt",
    )
)
def serve_training(
    overrides: Annotated[list[str], typer.Argument(metavar="KEY=VALUE...", help=f"Keys: {', '.join(KEYS)}.")],
    host: Host = "127.0.0.1",
    port: Port = 8400,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            help=f"File with the clients' key, which begins with {KEY_PREFIX}; required if the host is not local.",
            show_default=False,
        ),
    ] = None,
    folder: Annotated[
        Path, typer.Option(help="Folder of checkpoints; those from earlier servers are available.")
    ] = Path("runs/training-service"),
    all_weights: Annotated[
        bool, typer.Option("--all-weights", help="Train all weights, in a copy for each client, instead of adapters.")
    ] = False,
    max_runs: Annotated[int, typer.Option(min=1, help="Maximum number of concurrent training clients.")] = 16,
    max_engines: Annotated[
        int, typer.Option(min=1, help="Maximum number of engines for sampling in memory, each with its own weights.")
    ] = 4,
    lease_s: Annotated[
        float, typer.Option("--lease", min=1, help="Seconds without a heartbeat after which a client's runs end.")
    ] = 1800.0,
) -> None:
    """Serve training and sampling to the tinker client; stop with Ctrl-C.

    Prints the address for TINKER_BASE_URL. Checkpoints outlive the server; runs do not.
    """
    config = read_service_config(overrides)
    TINKER.load()
    PEFT.load()
    key = _read_key(token_file, host)
    path = find_model(config.model.path)
    check_fetchable(path)
    settings = TrainingServiceSettings(
        folder=folder.resolve(),
        model_name=config.model.path,
        all_weights=all_weights,
        alpha=(config.model.lora.alpha if config.model.lora else None) or ALPHA,
        most_runs=max_runs,
        most_engines=max_engines,
        lease_s=lease_s,
    )
    serve_until_stopped(
        TrainingServer(
            settings, lambda: BaseWeights(path, load_tokenizer(path), config), host=host, port=port, key=key
        ),
        ServerSettings(host=host, port=port, token=key),
        open_to_all="train and sample here",
        usage=f"{config.model.path} is served: TINKER_BASE_URL={{url}} {KEY_VARIABLE}="
        + ("your key" if key else f"{KEY_PREFIX}local"),
    )


def _read_key(file: Path | None, host: str) -> str | None:
    """Read the clients' key from a file; the environment variable holds the key of another service.

    Raises:
        UsageError: no file for a host that is not local, or the file does not hold a key.
    """
    if file is None:
        if host not in LOCAL:
            raise UsageError(
                "non-local host without a token",
                got=f"--host {host}",
                expected="--token-file with a key, or --host 127.0.0.1",
            )
        return None
    key = read_token(file, KEY_VARIABLE)
    if key is None or not key.startswith(KEY_PREFIX):
        raise UsageError(
            "the client does not accept this key",
            got="another prefix",
            expected=f"a token that begins with {KEY_PREFIX}",
        )
    return key


def read_service_config(overrides: Sequence[str]) -> Config:
    """Read the config of a service from overrides.

    Raises:
        ConfigError: a key or a value is wrong.
        UsageError: a key is not supported, or the model is missing.
    """
    keys = [word.partition("=")[0] for word in overrides]
    for word, key in zip(overrides, keys, strict=True):
        if "=" not in word or key not in KEYS:
            raise UsageError(
                f"unsupported key {key}", expected=f"one of {', '.join(KEYS)}", hint=did_you_mean(key, KEYS)
            )
    if "model.path" not in keys:
        raise UsageError("no model to serve", expected="model.path=MODEL")
    # a config needs an environment, which is not used here
    config = load_config(None, ["environment=none", *overrides])
    if config.model.path == "scratch":
        raise UsageError("a scratch model cannot be served", expected="model.path with a folder or a name")
    assert isinstance(config.engine, LocalEngineConfig)
    return config
