"""Who is evaluated: an engine, a text service, the environment's expert, or a random policy."""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from agentrl.assembly.episodes import sampling_params
from agentrl.assembly.models import SCRATCH, build_renderer, load_tokenizer
from agentrl.assembly.scratch import write_scratch_model
from agentrl.assembly.training import check_rendering
from agentrl.config.schema import Config, LocalEngineConfig, OpenAIEngineConfig, ScriptedEngineConfig
from agentrl.policy import PolicyEngine
from agentrl.rollout.chat_speaker import ChatSpeaker
from agentrl.rollout.demonstrator import Demonstrator, ScriptedPolicy
from agentrl.rollout.engine_speaker import EngineSpeaker
from agentrl.rollout.speaker import Speaker
from agentrl.serving.local import LocalEngine
from agentrl.serving.openai import OpenAIEngine
from agentrl.serving.scripted import ScriptedEngine
from agentrl.training.model import load_model


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
        UsageError: the model or the service is not there.
        TemplateError: the chat template rewrites history.
    """
    if kind is not PolicyKind.ENGINE:
        yield Demonstrator(ScriptedPolicy(kind.value))
        return
    if isinstance(config.engine, OpenAIEngineConfig):
        service = OpenAIEngine(config.engine)
        await service.start()
        try:
            yield ChatSpeaker(service, sampling_params(config.sampling))
        finally:
            await service.close()
        return
    path = await _model_path(config, folder)
    renderer = build_renderer(config, load_tokenizer(path))
    check_rendering(config, renderer)
    engine = _engine(config.engine, config, path)
    await engine.start()
    try:
        yield EngineSpeaker(engine, renderer, sampling_params(config.sampling))
    finally:
        await engine.close()


def _engine(engine: LocalEngineConfig | ScriptedEngineConfig, config: Config, path: str) -> PolicyEngine:
    if isinstance(engine, ScriptedEngineConfig):
        return ScriptedEngine(engine, vocab_size=len(load_tokenizer(path)), seed=config.run.seed)
    return LocalEngine(load_model(path, dtype=config.model.dtype, device=config.model.device), engine)


async def _model_path(config: Config, folder: Path) -> str:
    if config.model.path != SCRATCH:
        return config.model.path
    made = folder / "model"
    if not made.is_dir():
        await write_scratch_model(config, made)
    return str(made)
