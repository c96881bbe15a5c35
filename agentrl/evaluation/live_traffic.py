"""Gateway without tasks: a model or a service answers the clients' requests, and all sessions are recorded.

request to /s/NAME/v1 ──► session NAME, one episode ──► idle for some time ──► episodes, conversations, prompts
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import TracebackType
from typing import Any

from agentrl.agent_loop import AgentLoop, Episode
from agentrl.config.config import Config
from agentrl.errors import EnvironmentFailure, described_error
from agentrl.evaluation.panel import EvaluatedEpisode
from agentrl.gateway import Gateway, GatewaySession, Verify
from agentrl.observe.console import note
from agentrl.observe.files import JsonLinesWriter, writing
from agentrl.remote.chat import as_openai
from agentrl.rollout.budget import EpisodeLimits
from agentrl.rollout.env_pool import EnvPool
from agentrl.rollout.live import LIVE
from agentrl.rollout.policies import EpisodePolicy
from agentrl.rollout.runner import EpisodeRunner
from agentrl.task import Task
from agentrl.trajectory import Trajectory

EPISODES = "episodes.jsonl"
CONVERSATIONS = "conversations.jsonl"
PROMPTS = "prompts.jsonl"
DEFAULT = "default"
"""Session name for requests whose path names no session. Unrelated clients share it, so it might never be idle. After
the idle time or `MAX_ANSWERS` answers, new conversations go to another session, and this one ends once it is idle."""
MAX_ANSWERS = 256
NO_LIMIT = 1 << 30


class LiveTraffic:
    """Server that answers clients with a policy; each session is an episode that ends after idle time.

    A session ends after `idle_s` seconds without a request, and is recorded in `folder`, if there is one. Without
    `key`, all clients are accepted.
    """

    def __init__(
        self,
        policy: EpisodePolicy,
        config: Config,
        *,
        folder: Path | None,
        idle_s: float,
        host: str = "127.0.0.1",
        port: int = 0,
        key: str | None = None,
    ) -> None:
        self.ended = 0
        """Number of sessions that have ended."""
        self.answers = 0
        """Number of answers in ended sessions."""
        self.failure: Exception | None = None
        """Error of the first session that could not be recorded; other sessions continue."""
        self.gateway = Gateway(host=host, port=port, key=key, opener=self._open)
        self._loop = _Sessions(idle_s)
        most = config.agent.max_answer_tokens
        limits = EpisodeLimits(max_turns=NO_LIMIT, max_tokens=NO_LIMIT, max_answer_tokens=most)
        self._runner = EpisodeRunner(
            pool=EnvPool(LIVE, max_concurrent=NO_LIMIT), loop=self._loop, policy=policy, limits=limits
        )
        self._count = 0
        self._playing: dict[str, asyncio.Task[None]] = {}
        """Tasks of the episodes that accept new conversations, by session name."""
        self._numbers: dict[str, int] = {}
        """Numbers of these episodes by session name."""
        self._tasks: set[asyncio.Task[None]] = set()
        """Tasks of all episodes."""
        self._full: list[GatewaySession] = []
        """Sessions of `DEFAULT` that accept no new conversations."""
        self._idle_s = idle_s
        self._folder = folder
        self._episodes = None if folder is None else JsonLinesWriter(folder / EPISODES)

    async def __aenter__(self) -> LiveTraffic:
        await self.gateway.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End and record all sessions, and stop listening.

        Raises:
            Exception: the first `failure`.
        """
        self._loop.end_all()
        try:
            while self._tasks:  # a request may open another session meanwhile
                await asyncio.wait(self._tasks)
        finally:
            await self.gateway.close()
            await self._runner.close()
            if self._episodes is not None:
                self._episodes.close()
        if self.failure is not None:
            raise self.failure

    async def _open(self, name: str | None, verify: Verify) -> list[GatewaySession]:
        name = name or DEFAULT
        while True:
            if name not in self._playing:
                await verify()
            if name not in self._playing:  # still not, after the check
                self._begin(name)
            number, playing = self._numbers[name], self._playing[name]
            session = await self._loop.session_of(number)
            if self._loop.is_over:
                return [session]
            if session.is_over:
                await asyncio.shield(playing)  # the session has just ended, and its name is reused
            elif name == DEFAULT and (session.answers >= MAX_ANSWERS or session.age_s >= self._idle_s):
                self._set_aside(number, session)
            else:
                return [session, *(self._full_sessions() if name == DEFAULT else ())]

    def _begin(self, name: str) -> None:
        self._count += 1
        self._numbers[name] = self._count
        task = self._playing[name] = asyncio.create_task(self._play(name, self._count))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _set_aside(self, number: int, session: GatewaySession) -> None:
        """Stop the session of `DEFAULT` with this number from accepting new conversations."""
        if self._numbers.get(DEFAULT) == number:  # another request may have done this while this one waited
            del self._playing[DEFAULT], self._numbers[DEFAULT]
            self._full.append(session)

    def _full_sessions(self) -> list[GatewaySession]:
        self._full = [session for session in self._full if not session.is_over]
        return self._full[::-1]

    async def _play(self, name: str, number: int) -> None:
        task = Task(id=name, environment=LIVE.name, seed=number)
        session: GatewaySession | None = None
        try:
            try:
                trajectory = await self._runner.run(task, group_id=f"{name}-{number}", member=0, seed=number)
            finally:
                session = self._loop.forget(number)
                if self._numbers.get(name) == number:
                    del self._playing[name], self._numbers[name]
            if session is not None and session.answers:
                self._keep(name, number, trajectory, session)
        except Exception as error:
            self.failure = self.failure or error
            note(f"session {name} was not recorded: {described_error(error)}")

    def _keep(self, name: str, number: int, trajectory: Trajectory, session: GatewaySession) -> None:
        """Record the conversations of a session that has ended."""
        self.ended += 1
        self.answers += session.answers
        if self._folder is None or self._episodes is None:
            return
        self._episodes.append(EvaluatedEpisode(task_id=name, sample=number, trajectory=trajectory).to_record())
        for messages, tools in session.conversations():
            rows = [as_openai(message, keep_reasoning=True) for message in messages]
            first = next(index for index, message in enumerate(messages) if message.role == "assistant")
            conversation = {"messages": rows, "tools": [dict(tool) for tool in tools], "session": name}
            _append(self._folder / CONVERSATIONS, conversation)
            _append(self._folder / PROMPTS, {"prompt": rows[:first]})


def _append(path: Path, row: dict[str, Any]) -> None:
    line = json.dumps(row, ensure_ascii=False) + "\n"
    with writing(path), path.open("ab") as file:
        file.write(line.encode(errors="backslashreplace"))  # lone surrogates become escapes, as JSON writes them


class _Sessions(AgentLoop):
    """Agent loop that keeps one session per episode open until it is idle."""

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self._reported_settings: set[str] = set()
        self._sessions: dict[int, asyncio.Future[GatewaySession]] = {}
        """Sessions by the number of their episode, which is the seed of its task."""
        self._is_over = asyncio.Event()

    async def run(self, episode: Episode) -> None:
        """Keep one session open."""
        await episode.reset()
        session = GatewaySession(episode, steps=False, is_live=True, warned=self._reported_settings)
        self._future_of(episode.task.seed).set_result(session)
        try:
            while not self._is_over.is_set() and (left := self._idle_s - session.idle_s) > 0:
                try:
                    await asyncio.wait_for(self._is_over.wait(), left)
                except TimeoutError:
                    continue
        finally:
            await session.close()

    async def session_of(self, number: int) -> GatewaySession:
        """Wait until the session with this number is open."""
        return await asyncio.shield(self._future_of(number))

    @property
    def is_over(self) -> bool:
        """True if no more sessions are opened."""
        return self._is_over.is_set()

    def forget(self, number: int) -> GatewaySession | None:
        """Remove and return a session that has ended; ``None`` if it was never open."""
        future = self._sessions.pop(number, None)
        if future is None:
            return None
        if not future.done():  # requests may wait for it
            future.set_exception(EnvironmentFailure("the session could not be opened", got=f"number {number}"))
            future.exception()  # mark it as retrieved if no request waits
            return None
        return future.result()

    def end_all(self) -> None:
        """End all sessions."""
        self._is_over.set()

    def _future_of(self, number: int) -> asyncio.Future[GatewaySession]:
        if number not in self._sessions:
            self._sessions[number] = asyncio.get_running_loop().create_future()
        return self._sessions[number]
