"""Evaluation of a policy: open it, choose the tasks, play the unfinished episodes, compute the estimates.

The policy is an engine, an OpenAI-compatible service, the environment's expert, or a random one.
"""

from __future__ import annotations

import enum
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from agentrl.builders.adapters import open_adapters
from agentrl.builders.episodes import sampling_params
from agentrl.builders.models import build_renderer, prepare_model
from agentrl.builders.servers import ServedModel, check_served, open_pool
from agentrl.config.config import Config
from agentrl.config.engines import (
    LocalEngineConfig,
    OpenAIEngineConfig,
    ScriptedEngineConfig,
    ServerEngineConfig,
    TinkerEngineConfig,
)
from agentrl.engine import ChatAnswer, PolicyEngine, SamplingParams
from agentrl.errors import EngineError, UsageError
from agentrl.evaluation.diagnosis.read import INCIDENTS_FILE
from agentrl.evaluation.panel import (
    EpisodeStore,
    EvaluatedEpisode,
    Panel,
    assignments,
    choose_indices,
    choose_tasks,
    task_digest,
)
from agentrl.evaluation.result import EvaluationResult, find_problems, summarize
from agentrl.message import Message
from agentrl.models.load import embedding_rows, load_model
from agentrl.observe.files import replace_file
from agentrl.observe.incidents import Incidents
from agentrl.remote.chat import error_message, service_session
from agentrl.render.renderer import Renderer
from agentrl.render.tokenizers import load_tokenizer
from agentrl.rollout.loop_choice import check_rendering
from agentrl.rollout.policies import ChatEpisodePolicy, EngineEpisodePolicy, EpisodePolicy
from agentrl.rollout.roles.role_policies import AdapterPolicy
from agentrl.rollout.runner import Assignment, EpisodeRunner, play_all
from agentrl.rollout.scripted_policies import ScriptedEpisodePolicy, ScriptedPolicy
from agentrl.serving.engine_checks import check_images
from agentrl.serving.local import LocalEngine
from agentrl.serving.openai import OpenAIEngine
from agentrl.serving.scripted import ScriptedEngine
from agentrl.task import TaskSource, fetch_tasks


def ignore(_: EvaluatedEpisode) -> None:
    """Ignore the episode."""


async def evaluate_panel(
    runner: EpisodeRunner,
    source: TaskSource,
    panel: Panel,
    *,
    concurrency: int,
    store: EpisodeStore | None = None,
    on_episode: Callable[[EvaluatedEpisode], None] = ignore,
    config: Config | None = None,
) -> EvaluationResult:
    """Play a panel with a runner; the same panel with a seeded engine gives the same episodes.

    Episodes in `store` are not played again; `on_episode` is called for them, too. Problems refer to `config`.

    Raises:
        UsageError: nothing to play, more tasks than the source has, a full disk, or an error that no retry can fix.
    """
    began = time.perf_counter()
    await fetch_tasks(source, choose_indices(source, panel.n_tasks, panel.seed))
    chosen = assignments(choose_tasks(source, panel.n_tasks, panel.seed), panel.samples, panel.seed)
    episodes = _find_finished(chosen, store, whole_groups=runner.scores_groups)
    for found in episodes.values():
        on_episode(found)
    on_disk = {episode.trajectory.id for episode in episodes.values()}
    left = {assignment.id: assignment for assignment in chosen if assignment.id not in episodes}
    if runner.scores_groups:  # samples of a task are scored together, so they should run together
        left = dict(sorted(left.items(), key=lambda entry: entry[1].group_id))
    async for trajectory in play_all(runner, left.values(), concurrency=concurrency):
        assignment = left[trajectory.id.rpartition(".")[0]]
        episode = EvaluatedEpisode(
            task_id=assignment.task.id,
            sample=assignment.member,
            trajectory=trajectory,
            task=task_digest(assignment.task),
            played_at=time.time(),
        )
        episodes[assignment.id] = episode
        if store is not None and episode.is_measured:
            store.add(episode)
        on_episode(episode)
    seconds = time.perf_counter() - began
    played = [episodes[assignment.id] for assignment in chosen]
    incidents = _all_incidents(runner.counters.incidents, store, whole=not on_disk)
    problems = find_problems(played, incidents, runner.scorer.definitions, config)
    result = summarize(panel, played, seconds, found=on_disk, others=runner.pool.roles)
    return replace(result, problems=problems)


def _all_incidents(own: Incidents, store: EpisodeStore | None, *, whole: bool) -> Incidents:
    """Return the failures of this run and, if it resumed from episodes on disk, those of earlier runs."""
    if store is None:
        return own
    file, found = store.path.with_name(INCIDENTS_FILE), Incidents()
    found.add_record(own.to_record())
    if not whole and file.is_file():
        with suppress(orjson.JSONDecodeError, KeyError, TypeError):  # from another version, or damaged
            found.add_record(orjson.loads(file.read_bytes()))
    replace_file(file, orjson.dumps(found.to_record()))
    return found


def _find_finished(
    chosen: Sequence[Assignment], store: EpisodeStore | None, *, whole_groups: bool
) -> dict[str, EvaluatedEpisode]:
    """Return stored episodes by id; with `whole_groups` only those of tasks whose samples are all stored."""
    if store is None:
        return {}
    found = {one.id: episode for one in chosen if (episode := store.find(one.task, one.member)) is not None}
    if not whole_groups:
        return found
    partial = {one.group_id for one in chosen if one.id not in found}
    return {one.id: found[one.id] for one in chosen if one.id in found and one.group_id not in partial}


SERVICE_CHECK_S = 10.0
"""Deadline in seconds of the check's connection, and of its answer."""
NO_CHAT = (404, 405, 501)
"""HTTP statuses of servers without a chat endpoint at the address."""
BASE_ADDRESS = "give the service's base address including /v1: --url http://127.0.0.1:8000/v1"


async def check_service(config: OpenAIEngineConfig) -> None:
    """Check before the first episode that a service answers, by sending a chat without messages.

    A service that refuses the request is a chat service and passes.

    Raises:
        UsageError: the address has no chat endpoint or no such model.
        EngineError: the address cannot be reached.
    """
    timeout = aiohttp.ClientTimeout(total=None, connect=SERVICE_CHECK_S, sock_read=SERVICE_CHECK_S)
    url = f"{config.url.rstrip('/')}/chat/completions"
    body = {"model": config.model, "messages": [], "max_tokens": 1}
    try:
        async with (
            service_session(config.url, config.api_key_variable, timeout) as session,
            session.post(url, json=body) as response,
        ):
            if response.status in NO_CHAT:
                _raise_no_chat(config, url, response.status, error_message(await response.text(errors="replace")))
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise EngineError(
            f"the service at {config.url} cannot be reached", got=error, hint=f"start it, or {BASE_ADDRESS}"
        ) from error
    except aiohttp.ClientError:
        return  # a server answers; if it fails with real requests too, the episodes report that


class ChatServiceWithHints(OpenAIEngine):
    """Client of a chat service that adds hints to refusals."""

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        request_id: str,
        *,
        json_schema: Mapping[str, Any] | None = None,
    ) -> ChatAnswer:
        """Answer a conversation as `OpenAIEngine` does; raise a `UsageError` if the service does not support tools."""
        try:
            return await super().chat(messages, tools, params, request_id, json_schema=json_schema)
        except EngineError as error:
            reply = str(error.got)
            if "tool-call-parser" in reply or "enable-auto-tool-choice" in reply:
                raise UsageError(
                    f"{self.config.url} does not support tool calls",
                    got=reply,
                    hint="set agent.loop=react_text, which needs none; or start vLLM with --enable-auto-tool-choice "
                    "--tool-call-parser NAME",
                ) from error
            if "context length" in reply:
                raise EngineError(
                    f"the context of {self.config.url} is too small for the episode",
                    got=reply,
                    hint="set agent.max_tokens to its context length, or lower agent.max_answer_tokens",
                ) from error
            raise


def _raise_no_chat(config: OpenAIEngineConfig, url: str, status: int, reply: str) -> None:
    is_named = re.search(rf"(?<!\w){re.escape(config.model)}(?!\w)", reply) is not None
    if status == 404 and is_named and not reply.lstrip().startswith("<"):
        raise UsageError(
            f"{config.url} does not serve model {config.model!r}",
            got=f"{status}, {reply!r}",
            hint="--model is the name that the service uses for the model; on a server started by agentrl serve "
            "--engine vllm it is policy",
        )
    raise UsageError(
        f"no chat service found at {config.url}",
        got=f"{status} from {url}, {reply!r}",
        expected="an OpenAI-compatible service",
        hint=BASE_ADDRESS,
    )


_log = logging.getLogger(__name__)


class PolicyKind(enum.StrEnum):
    """Kinds of policies that can be evaluated."""

    ENGINE = "engine"
    EXPERT = "expert"
    RANDOM = "random"


@asynccontextmanager
async def open_policy(
    config: Config, kind: PolicyKind, folder: Path, *, trains: bool = False
) -> AsyncIterator[EpisodePolicy]:
    """Open the policy, and release it after the block.

    A model from scratch is written to `folder`. `trains` is True if the sampled tokens will be trained on.

    Raises:
        UsageError: the model does not exist, or the service's address has no chat endpoint.
        EngineError: the service or a server cannot be reached.
        TemplateError: the chat template rewrites history.
    """
    if kind is not PolicyKind.ENGINE:
        yield ScriptedEpisodePolicy(ScriptedPolicy(kind.value))
        return
    check_images(config)
    if isinstance(config.engine, OpenAIEngineConfig):
        await check_service(config.engine)
        service = ChatServiceWithHints(config.engine)
        await service.start()
        try:
            yield ChatEpisodePolicy(service, sampling_params(config.sampling))
        finally:
            await service.close()
        return
    path = await prepare_model(config, folder / "model")
    renderer = build_renderer(config, path, load_tokenizer(path))
    check_rendering(config, renderer, say=_log.warning)
    if config.named_adapters:
        async with open_adapters(config, path, folder, renderer, say=_log.warning) as found:
            yield AdapterPolicy(found.engine, renderer, sampling_params(config.sampling), adapters=found.roles)
        return
    replays = trains and config.trainer.router_replay
    async with _open_engine(config.engine, config, path, folder, renderer, routed_experts=replays) as engine:
        yield EngineEpisodePolicy(engine, renderer, sampling_params(config.sampling), trains=trains)


@asynccontextmanager
async def _open_engine(
    section: LocalEngineConfig | ScriptedEngineConfig | ServerEngineConfig | TinkerEngineConfig,
    config: Config,
    path: str,
    folder: Path,
    renderer: Renderer,
    *,
    routed_experts: bool,
) -> AsyncIterator[PolicyEngine]:
    if isinstance(section, TinkerEngineConfig):
        raise UsageError(
            "engine tinker samples only within the run that it trains",
            got="engine=tinker",
            expected="engine=local, vllm or sglang, with a model whose weights are on this machine",
        )
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
        decode = renderer.encoder.decode
        engine = LocalEngine(model, section, reader=renderer.images, decode=decode, routed_experts=routed_experts)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()
