"""Who is evaluated: an engine, a text service, the environment's expert, or a random policy."""

from __future__ import annotations

import enum
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from agentrl.assembly.checks import check_images
from agentrl.assembly.episodes import sampling_params
from agentrl.assembly.models import SCRATCH, build_renderer, embedding_rows, load_tokenizer
from agentrl.assembly.scratch import write_scratch_model
from agentrl.assembly.servers import ServedModel, check_served, open_pool
from agentrl.assembly.training import check_rendering
from agentrl.config.engines import LocalEngineConfig, OpenAIEngineConfig, ScriptedEngineConfig, ServerEngineConfig
from agentrl.config.schema import Config
from agentrl.evaluation.service import HintingService, check_service
from agentrl.image import ImageReader
from agentrl.policy import PolicyEngine
from agentrl.rollout.chat_speaker import ChatSpeaker
from agentrl.rollout.demonstrator import Demonstrator, ScriptedPolicy
from agentrl.rollout.engine_speaker import EngineSpeaker
from agentrl.rollout.speaker import Speaker
from agentrl.serving.local import LocalEngine
from agentrl.serving.openai import OpenAIEngine
from agentrl.serving.scripted import ScriptedEngine
from agentrl.training.models.loading import load_model

_log = logging.getLogger(__name__)


class PolicyKind(enum.StrEnum):
    """Who plays."""

    ENGINE = "engine"
    EXPERT = "expert"
    RANDOM = "random"


@asynccontextmanager
async def open_speaker(config: Config, kind: PolicyKind, folder: Path) -> AsyncIterator[Speaker]:
    """The policy, ready to play; released afterwards.

    Args:
        config: Engine, model and sampling.
        kind: Who plays.
        folder: Where a scratch model is made, if the config asks for one.

    Raises:
        UsageError: the model is not there, or there is no chat at the service's address.
        EngineError: the service or a server cannot be reached.
        TemplateError: the chat template rewrites history.
    """
    if kind is not PolicyKind.ENGINE:
        yield Demonstrator(ScriptedPolicy(kind.value))
        return
    check_images(config)
    if isinstance(config.engine, OpenAIEngineConfig):
        await check_service(config.engine)
        service = HintingService(OpenAIEngine(config.engine), config.engine.url)
        await service.start()
        try:
            yield ChatSpeaker(service, sampling_params(config.sampling))
        finally:
            await service.close()
        return
    path = await _model_path(config, folder)
    renderer = build_renderer(config, path, load_tokenizer(path))
    check_rendering(config, renderer)
    async with _open_engine(config.engine, config, path, folder, renderer.images) as engine:
        yield EngineSpeaker(engine, renderer, sampling_params(config.sampling))


@asynccontextmanager
async def _open_engine(
    section: LocalEngineConfig | ScriptedEngineConfig | ServerEngineConfig,
    config: Config,
    path: str,
    folder: Path,
    reader: ImageReader | None,
) -> AsyncIterator[PolicyEngine]:
    if isinstance(section, ServerEngineConfig):
        served = ServedModel(path=path, dtype=config.model.dtype, vocab_size=embedding_rows(path))
        async with open_pool(section, served, folder, say=_log.warning) as pool:
            if section.servers != "launch":
                await check_served(pool, served)
            yield pool
        return
    if isinstance(section, ScriptedEngineConfig):
        engine: PolicyEngine = ScriptedEngine(section, vocab_size=len(load_tokenizer(path)), seed=config.run.seed)
    else:
        model = load_model(path, dtype=config.model.dtype, device=config.model.device)
        engine = LocalEngine(model, section, reader=reader)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def _model_path(config: Config, folder: Path) -> str:
    if config.model.path != SCRATCH:
        return config.model.path
    made = folder / "model"
    if not made.is_dir():
        await write_scratch_model(config, made)
    return str(made)
