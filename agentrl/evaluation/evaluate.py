"""Evaluation of a policy: open it, choose the tasks, play what is not finished yet, draw the estimates.

The policy is an engine, an OpenAI-compatible service, the environment's expert, or a random one.
"""

from __future__ import annotations

import enum
import logging
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from agentrl.builders.checks import check_images
from agentrl.builders.episodes import sampling_params
from agentrl.builders.models import build_renderer, check_rendering, embedding_rows, load_tokenizer, prepare_model
from agentrl.builders.role_adapters import open_adapters
from agentrl.builders.servers import ServedModel, check_served, open_pool
from agentrl.config.config import Config
from agentrl.config.engines import LocalEngineConfig, OpenAIEngineConfig, ScriptedEngineConfig, ServerEngineConfig
from agentrl.engine import ChatAnswer, PolicyEngine, SamplingParams
from agentrl.errors import EngineError, UsageError
from agentrl.evaluation.panel import EpisodeStore, EvaluatedEpisode, Panel, assignments, choose_tasks, task_digest
from agentrl.evaluation.result import EvaluationResult, find_problems, summarise
from agentrl.message import Message
from agentrl.models.load import load_model
from agentrl.observe.files import replace_file
from agentrl.observe.incidents import Incidents
from agentrl.remote.chat import error_message
from agentrl.render.renderer import Renderer
from agentrl.rollout.policies import ChatEpisodePolicy, EngineEpisodePolicy, EpisodePolicy
from agentrl.rollout.runner import Assignment, EpisodeRunner, play_all
from agentrl.rollout.scripted_policies import ScriptedEpisodePolicy, ScriptedPolicy
from agentrl.serving.local import LocalEngine
from agentrl.serving.openai import OpenAIEngine
from agentrl.serving.scripted import ScriptedEngine
from agentrl.task import TaskSource

INCIDENTS_FILE = "incidents.json"
"""Beside the episodes: what failed, counted."""


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
) -> EvaluationResult:
    """Play a panel with a runner; the same panel on a seeded engine gives the same episodes.

    Args:
        runner: Plays episodes, and retries infrastructure failures.
        source: The split's tasks.
        panel: How many of them, how often, under which seed.
        concurrency: Maximum number of episodes at once.
        store: Where finished episodes are kept, and found.
        on_episode: Called after each episode, found ones included.

    Raises:
        UsageError: nothing to play, more tasks than the source holds, a full disk, or an error that no retry can fix.
    """
    began = time.perf_counter()
    chosen = assignments(choose_tasks(source, panel.n_tasks, panel.seed), panel.samples, panel.seed)
    episodes = _finished(chosen, store, whole_groups=runner.scores_groups)
    for found in episodes.values():
        on_episode(found)
    on_disk = {episode.trajectory.id for episode in episodes.values()}
    left = {assignment.id: assignment for assignment in chosen if assignment.id not in episodes}
    if runner.scores_groups:  # the samples of a task wait for each other
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
    problems = find_problems(played, incidents, runner.scorer.definitions)
    result = summarise(panel, played, seconds, found=on_disk, others=runner.pool.roles)
    return replace(result, problems=problems)


def _all_incidents(own: Incidents, store: EpisodeStore | None, *, whole: bool) -> Incidents:
    """Return the failures of this run and, where it went on from episodes on disk, those of the runs before it."""
    if store is None:
        return own
    file, found = store.path.with_name(INCIDENTS_FILE), Incidents()
    found.add_record(own.to_record())
    if not whole and file.is_file():
        with suppress(orjson.JSONDecodeError, KeyError, TypeError):  # another version's, or damaged
            found.add_record(orjson.loads(file.read_bytes()))
    replace_file(file, orjson.dumps(found.to_record()))
    return found


def _finished(
    chosen: Sequence[Assignment], store: EpisodeStore | None, *, whole_groups: bool
) -> dict[str, EvaluatedEpisode]:
    """Return the episodes that are in the store, by id; of tasks with all samples only, where samples are compared."""
    if store is None:
        return {}
    found = {one.id: episode for one in chosen if (episode := store.find(one.task, one.member)) is not None}
    if not whole_groups:
        return found
    partial = {one.group_id for one in chosen if one.id not in found}
    return {one.id: found[one.id] for one in chosen if one.id in found and one.group_id not in partial}


CHECK_S = 10.0
"""Deadline of the check's connection, and of its answer."""
NO_CHAT = (404, 405, 501)
"""Status codes of servers that have no chat at the address."""
BASE_ADDRESS = "give the service's base address, up to and with /v1: --url http://127.0.0.1:8000/v1"


async def check_service(config: OpenAIEngineConfig) -> None:
    """Send a chat without messages to a service, to know before the first episode whether it is there.

    Refusals of that request are fine, for they come from a chat service.

    Raises:
        UsageError: the address has no such chat or no such model.
        EngineError: nothing listens there.
    """
    timeout = aiohttp.ClientTimeout(total=None, connect=CHECK_S, sock_read=CHECK_S)
    key = os.environ.get(config.api_key_variable)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    url = f"{config.url.rstrip('/')}/chat/completions"
    body = {"model": config.model, "messages": [], "max_tokens": 1}
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
            session.post(url, json=body) as response,
        ):
            if response.status in NO_CHAT:
                _raise_no_chat(config, url, response.status, error_message(await response.text(errors="replace")))
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise EngineError(
            f"the service at {config.url} cannot be reached", got=error, hint=f"start it, or {BASE_ADDRESS}"
        ) from error
    except aiohttp.ClientError:
        return  # it is there, and may do better with a real request; if not, the episodes say so


class ChatServiceWithHints(OpenAIEngine):
    """Client of a service that explains its refusals by what to set."""

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        request_id: str,
        *,
        json_schema: Mapping[str, Any] | None = None,
    ) -> ChatAnswer:
        """Answer a conversation, as `OpenAIEngine` does; that a service takes no tools is a `UsageError`."""
        try:
            return await super().chat(messages, tools, params, request_id, json_schema=json_schema)
        except EngineError as error:
            said = str(error.got)
            if "tool-call-parser" in said or "enable-auto-tool-choice" in said:
                raise UsageError(
                    f"{self.config.url} takes no tool calls",
                    got=said,
                    hint="set agent.loop=react_text, which needs none; or start vLLM with --enable-auto-tool-choice "
                    "--tool-call-parser NAME",
                ) from error
            if "context length" in said:
                raise EngineError(
                    f"{self.config.url} has a smaller context than the episode needs",
                    got=said,
                    hint="set agent.max_tokens to its context, or agent.max_answer_tokens lower",
                ) from error
            raise


def _raise_no_chat(config: OpenAIEngineConfig, url: str, status: int, said: str) -> None:
    is_named = re.search(rf"(?<!\w){re.escape(config.model)}(?!\w)", said) is not None
    if status == 404 and is_named and not said.lstrip().startswith("<"):
        raise UsageError(
            f"{config.url} does not know model {config.model!r}",
            got=f"{status}, {said!r}",
            hint="--model is the service's own name of the model; a server that agentrl serve --engine vllm started "
            "calls it policy",
        )
    raise UsageError(
        f"there is no chat service at {config.url}",
        got=f"{status} from {url}, {said!r}",
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
async def open_policy(config: Config, kind: PolicyKind, folder: Path) -> AsyncIterator[EpisodePolicy]:
    """Open the policy, ready to play; released afterwards.

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
            yield EngineEpisodePolicy(found.engine, renderer, sampling_params(config.sampling), adapters=found.roles)
        return
    async with _open_engine(config.engine, config, path, folder, renderer) as engine:
        yield EngineEpisodePolicy(engine, renderer, sampling_params(config.sampling), trains=False)


@asynccontextmanager
async def _open_engine(
    section: LocalEngineConfig | ScriptedEngineConfig | ServerEngineConfig,
    config: Config,
    path: str,
    folder: Path,
    renderer: Renderer,
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
        engine = LocalEngine(model, section, reader=renderer.images, decode=renderer.encoder.decode)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()
