"""Inference servers of a run as one engine: launched, or already running.

config.engine.servers = launch         a copy of the model ─► Launcher ─► servers ─► ServerPool
config.engine.servers = [http://…, …]                                     servers ─► ServerPool
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from agentrl.builders.models import load_images
from agentrl.config.engines import LocalEngineConfig, ServerEngineConfig
from agentrl.engine import InferenceServer
from agentrl.errors import EngineError, TrainingError, UsageError
from agentrl.errors.deadlines import async_boundary
from agentrl.models.load import load_model
from agentrl.models.lora import is_adapter_folder
from agentrl.render.tokenizers import load_tokenizer
from agentrl.serving import server_kind
from agentrl.serving.launch import CommandMaker, LaunchCommand, Launcher, StartProgress, engine_python, usable_gpus
from agentrl.serving.launch.placement import server_gpus
from agentrl.serving.launch.process import THIS_MACHINE
from agentrl.serving.pool import PoolSettings, ServerPool
from agentrl.training.weights import ModelWeights
from agentrl.weights import (
    TOLERANCE,
    CollectiveTransport,
    FolderTransport,
    IpcTransport,
    Probe,
    TensorTransport,
    Transport,
    write_served_model,
)

Dtype: TypeAlias = Literal["float32", "bfloat16"]

SERVED_MODEL = "served-model"
LOGS = "logs"
BUCKET_BYTES = 128 * 2**20
"""Size of the buckets of weights that are sent to local engines in other processes."""
START_REPORT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """Model that the servers of a run serve."""

    path: str
    """Folder or name of the initial model."""
    dtype: Dtype
    vocab_size: int
    """Number of rows of the model's embedding."""


@asynccontextmanager
async def open_pool(
    section: ServerEngineConfig,
    model: ServedModel,
    folder: Path,
    *,
    version: int = 0,
    trainer_gpus: Sequence[int] = (),
    say: Callable[[str], None] = lambda _: None,
) -> AsyncIterator[ServerPool]:
    """Start or connect to a run's servers. Launched servers end with the block; others keep running.

    Args:
        section: Engine section of the config.
        model: Model for launched servers.
        folder: Folder for the served copy of the model and the servers' logs.
        version: Weight version that the first sync will send.
        trainer_gpus: GPUs of the trainer; launched servers avoid them if enough others are left.
        say: Called with the progress of the start and with messages about the servers.

    Raises:
        UsageError: no interpreter with the engine is found, there are too few GPUs, or a server is unsuitable.
        EngineError: a server does not start or does not answer.
    """
    if isinstance(section.servers, list):
        servers = [make_server(section, url, model.vocab_size) for url in section.servers]
        pool = ServerPool(servers, PoolSettings.from_config(section), version=version, say=say)
        try:
            await pool.start()
            yield pool
        finally:
            await pool.close()
        return
    launched = make_launcher(section, model.path, folder, dtype=model.dtype, trainer_gpus=trainer_gpus, say=say)
    async with launched as launcher:
        processes = await launcher.start()

        async def restart(index: int) -> InferenceServer:
            process = await launcher.restart(processes[index].name)
            server = make_server(section, process.url, model.vocab_size)
            await server.connect(deadline_s=section.start_timeout_s)
            return server

        servers = [make_server(section, process.url, model.vocab_size) for process in processes]
        pool = ServerPool(servers, PoolSettings.from_config(section), restart=restart, version=version, say=say)
        try:
            await pool.start()
            yield pool
        finally:
            await pool.close()


async def check_served(pool: ServerPool, model: ServedModel) -> None:
    """Check that servers have the weights of a model, under any version.

    Raises:
        UsageError: the servers have other weights, or different versions.
        EngineError: the servers do not answer.
    """
    versions = {server.url: await server.weight_version() for server in pool.servers}
    if len(set(versions.values())) > 1:
        got = ", ".join(f"version {version} at {url}" for url, version in versions.items())
        raise UsageError("the servers have different weights", got=got, expected="one version")
    pool.group.publish(next(iter(versions.values())))
    source = ModelWeights(load_model(model.path, dtype=model.dtype))
    try:
        deadline_s = pool.settings.connect_timeout_s
        async with async_boundary(EngineError, "the probe of the servers", deadline_s=deadline_s):
            probe = Probe.random(model.vocab_size, **TOLERANCE[model.dtype])
            await probe.compare(pool, source, version=pool.version)
    except TrainingError as error:
        raise UsageError(
            f"the servers do not serve {model.path}",
            got=f"{error.got}, expected {error.expected}",
            hint="give the model that they serve, or let agentrl launch servers",
        ) from error


def make_transport(section: ServerEngineConfig | LocalEngineConfig, shared_folder: Path) -> Transport:
    """Make the transport that sends weights to the servers of a config.

    Args:
        section: Engine section. Local engines in other processes receive broadcasts.
        shared_folder: Folder for weights that are sent through the disk.
    """
    if isinstance(section, LocalEngineConfig):
        return CollectiveTransport(bucket_bytes=BUCKET_BYTES)
    bucket_bytes = section.bucket_mib * 2**20
    match section.transport:
        case "shared_memory":
            return FolderTransport.shared_memory()
        case "disk":
            return FolderTransport(shared_folder)
        case "collective":
            return CollectiveTransport(bucket_bytes=bucket_bytes)
        case "cuda_ipc":
            return IpcTransport(bucket_bytes=bucket_bytes)
        case "tensor":
            return TensorTransport(bucket_bytes=bucket_bytes)


def make_launcher(
    section: ServerEngineConfig,
    model: str,
    folder: Path,
    *,
    dtype: Dtype,
    trainer_gpus: Sequence[int] = (),
    say: Callable[[str], None],
    ports: Sequence[int] | None = None,
    host: str = THIS_MACHINE,
    names: Sequence[str] | None = None,
) -> Launcher:
    """Make the launcher of a config's servers, without starting them.

    Args:
        section: Engine section of the config.
        model: Folder or name of the model; if head and embedding are tied, a copy with a separate head is written.
        folder: Folder for that copy and the servers' logs.
        dtype: Data type of the weights.
        trainer_gpus: GPUs of the trainer; servers avoid them if enough others are left.
        say: Called with the progress of the start.
        ports: Port of each server; free ports by default.
        host: Address on which the servers listen.
        names: Names of the servers; ``server-0`` and so on by default.

    Raises:
        UsageError: no interpreter with the engine is found, there are too few GPUs, the model does not exist, or the
            API key is not set.
    """
    return Launcher(
        _command_maker(section, model, folder, dtype=dtype, host=host),
        gpus=server_gpus(section, len(usable_gpus(os.environ)), trainer_gpus),
        cpus=section.cpus,
        logs=folder / LOGS,
        start_timeout_s=section.start_timeout_s,
        on_progress=StartupLog(say),
        ports=ports,
        names=names,
    )


def _command_maker(section: ServerEngineConfig, model: str, folder: Path, *, dtype: Dtype, host: str) -> CommandMaker:
    """Return the function that builds each server's command.

    Raises:
        UsageError: no interpreter with the engine is found, the model does not exist, or the API key is not set.
    """
    kind = server_kind(section)
    python = engine_python(kind.name, section.python)
    key = _api_key(section)
    served = untie_embeddings(model, folder / SERVED_MODEL, dtype=dtype)

    def command(port: int, gpus: Sequence[int]) -> LaunchCommand:
        return kind.command(
            section,
            python=python,
            model=served,
            port=port,
            dtype=dtype,
            host=host,
            gpus=gpus,
            api_key=key,
            python_path=os.environ.get("PYTHONPATH", ""),
        )

    return command


def untie_embeddings(found: str, copy: Path, *, dtype: Dtype) -> Path:
    """Return the path of a model with a separate output head: `found` itself, or a copy written to `copy`."""
    settings, is_whole = Path(found) / "config.json", not is_adapter_folder(found)
    if (
        is_whole
        and settings.is_file()
        and json.loads(settings.read_text(encoding="utf-8")).get("tie_word_embeddings") is False
    ):
        return Path(found)
    model = load_model(found, dtype=dtype, device="cpu")
    text = model.config.get_text_config()  # which may leave this to the whole model's section
    if is_whole and not getattr(text, "tie_word_embeddings", model.config.tie_word_embeddings):
        return Path(found)
    write_served_model(model, load_tokenizer(found), copy)
    if (images := load_images(found)) is not None:
        images.processor.save_pretrained(copy)
    return copy


def make_server(section: ServerEngineConfig, url: str, vocab_size: int) -> InferenceServer:
    """Make the client of a server."""
    return server_kind(section).client(url, section, vocab_size=vocab_size)


def _api_key(section: ServerEngineConfig) -> str | None:
    variable = section.api_key_variable
    if variable is None:
        return None
    if not (key := os.environ.get(variable)):
        raise UsageError(f"the environment variable {variable} is not set", expected="the API key of the servers")
    return key


class StartupLog:
    """Log of the servers' starts, with a message every `START_REPORT_S` seconds per server."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._reported: dict[str, float] = {}

    def __call__(self, progress: StartProgress) -> None:
        """Report the progress of a server, unless its last message is recent."""
        if progress.seconds - self._reported.get(progress.name, 0.0) >= START_REPORT_S:
            self._reported[progress.name] = progress.seconds
            line = f": {progress.line}" if progress.line else ""
            self._say(f"{progress.name} is starting, {progress.seconds:.0f} s{line}")
