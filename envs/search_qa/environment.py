"""Question answering with search as environments, with the built-in retriever or an HTTP retriever."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

import gymnasium
from gymnasium.spaces import Text

from agentrl.env import AnyEnv, AsyncEnv
from agentrl.errors import UsageError
from agentrl.message import Message, ToolCall
from agentrl.remote.retrieval import RetrievalService, list_passages
from agentrl.tool import Tool

from ..task_ids import TRAIN, asked_task
from .episode import SearchEpisode, Step
from .expert import SearchExpert
from .library import index_of
from .options import ENVIRONMENT, RewardKind, SearchOptions, parse_options
from .protocol import BRACKETS, TAGS, MoveKind, Protocol
from .tasks import SearchTasks, question_of, split_of


def make_search_qa(**options: Any) -> AnyEnv:
    """Create the environment for the options; with a ``url``, it uses an HTTP retriever.

    Raises:
        UsageError: an option is not valid.
    """
    return SearchQA(**options) if options.get("url") is None else RemoteSearchQA(**options)


def make_search_react(**options: Any) -> AnyEnv:
    """Create the same with ReAct's actions, ``search[words]`` and ``finish[answer]``, and without tools.

    Raises:
        UsageError: an option is not valid.
    """
    return SearchQA(BRACKETS, **options) if options.get("url") is None else RemoteSearchQA(BRACKETS, **options)


def tool_message(action: str) -> Message:
    """Return the assistant message of a text action, with a call of the tool for a search."""
    move = TAGS.read(action)
    if move.kind is not MoveKind.SEARCH:
        return Message(role="assistant", content=action)
    return Message(role="assistant", tool_calls=(ToolCall(name="search", arguments={"query": move.text}),))


class SearchQA(gymnasium.Env[str, str]):
    """Environment in which the policy searches and answers a question, with Search-R1's text protocol.

    An action is ``<search> words </search>`` or ``<answer> answer </answer>``; the answer ends the episode. `reset`
    takes the option ``task_id``; without it the seed draws a training question.

    Args:
        protocol: Form of the actions.
        options: Options of `parse_options`, without ``url``.
    """

    def __init__(self, protocol: Protocol = TAGS, /, **options: Any) -> None:
        self.action_hint = protocol.action_hint
        self.options = parse_options(**options)
        self.protocol = protocol.with_reminder(self.options.remind)
        if self.options.url is not None:
            raise UsageError(
                "this class uses the built-in retriever", got="url", hint="use make_search_qa, or RemoteSearchQA"
            )
        self.observation_space = Text(16384, charset=string.printable)
        self.action_space = Text(256, charset=string.printable)
        self.tools: tuple[Tool, ...] = ()
        if protocol is TAGS and self.options.reward is not RewardKind.RANK:
            self.tools = (Tool(self.search, name="search", inline=True),)
            self.tool_message = tool_message
        self._episode: SearchEpisode | None = None

    @property
    def episode(self) -> SearchEpisode:
        """The current episode.

        Raises:
            UsageError: `reset` was not called yet.
        """
        return _begun(self._episode)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Ask a question.

        Raises:
            UsageError: an option is unknown, or the task does not exist.
        """
        super().reset(seed=seed)
        drawn = int(self.np_random.integers(2**31)) if seed is None else seed
        self._episode = _begin(self.options, drawn, options or {}, self.protocol)
        return _first_texts(self._episode)

    def step(self, action: str) -> Step:
        """Search, or answer.

        Raises:
            UsageError: the episode is over.
        """
        move = self.episode.read(action)
        return self.episode.take(move, self._find(move.text) if move.kind is MoveKind.SEARCH else ())

    def search(self, query: str) -> str:
        """Searches for passages.

        Args:
            query: What to look for: names and a few words.
        """
        self.episode.begin_search(query)
        return list_passages(self._find(query))

    def _find(self, query: str) -> tuple[Any, ...]:
        index = index_of(split_of(self.episode.question.id), self.options)
        return index.search(query, self.options.topk)

    def expert(self) -> SearchExpert:
        """Return a policy that solves every generated question, and knows the answer to those of files."""
        return _expert(self._episode, self.options, self.protocol)

    def state_key(self) -> str:
        """Return a key of the question and of the queries."""
        return self.episode.key()

    def snapshot(self) -> dict[str, Any]:
        """Return the episode as JSON types."""
        return self.episode.to_plain()

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Continue from a snapshot, in this environment or another one with the same options."""
        self._episode = SearchEpisode.from_plain(snapshot, self.options, self.protocol)


class RemoteSearchQA(AsyncEnv):
    """`SearchQA` with an HTTP retriever, whose failures are environment failures.

    Args:
        protocol: Form of the actions.
        options: Options of `parse_options`, with ``url``.
    """

    def __init__(self, protocol: Protocol = TAGS, /, **options: Any) -> None:
        self.action_hint = protocol.action_hint
        self.options = parse_options(**options)
        self.protocol = protocol.with_reminder(self.options.remind)
        if self.options.url is None:
            raise UsageError("search_qa has no retriever", expected="option url")
        self.service = RetrievalService(self.options.url, topk=self.options.topk, timeout_s=self.options.timeout_s)
        self.tools: tuple[Tool, ...] = ()
        if protocol is TAGS and self.options.reward is not RewardKind.RANK:
            self.tools = (Tool(self.search, name="search"),)
            self.tool_message = tool_message
        self._episode: SearchEpisode | None = None

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Ask a question; without a ``task_id`` and a seed, the first one.

        Raises:
            UsageError: an option is unknown, or the task does not exist.
        """
        self._episode = _begin(self.options, seed or 0, options or {}, self.protocol)
        return _first_texts(self._episode)

    async def step(self, action: str) -> Step:
        """Search, or answer.

        Raises:
            UsageError: the episode is over.
            EnvironmentFailure: the retriever failed.
        """
        episode = _begun(self._episode)
        move = episode.read(action)
        return episode.take(move, await self.service.search(move.text) if move.kind is MoveKind.SEARCH else ())

    async def search(self, query: str) -> str:
        """Searches for passages.

        Args:
            query: What to look for: names and a few words.
        """
        _begun(self._episode).begin_search(query)
        return list_passages(await self.service.search(query))

    def expert(self) -> SearchExpert:
        """Return a policy that solves generated questions, if the retriever finds their passages; see `SearchQA`."""
        return _expert(self._episode, self.options, self.protocol)

    def state_key(self) -> str:
        """Return a key of the question and of the queries."""
        return _begun(self._episode).key()

    def snapshot(self) -> dict[str, Any]:
        """Return the episode as JSON types."""
        return _begun(self._episode).to_plain()

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Continue from a snapshot."""
        self._episode = SearchEpisode.from_plain(snapshot, self.options, self.protocol)

    async def close(self) -> None:
        """Close the connections."""
        await self.service.close()


def _expert(episode: SearchEpisode | None, options: SearchOptions, protocol: Protocol) -> SearchExpert:
    return SearchExpert(protocol, None if options.questions is None else _begun(episode).question.golden[0])


def _begun(episode: SearchEpisode | None) -> SearchEpisode:
    if episode is None:
        raise UsageError("the search_qa environment has no episode yet", expected="reset before anything else")
    return episode


def _begin(environment: SearchOptions, seed: int, options: Mapping[str, Any], protocol: Protocol) -> SearchEpisode:
    task_id = asked_task(options, ENVIRONMENT) or SearchTasks(TRAIN, environment).draw(seed)
    return SearchEpisode(question_of(task_id, environment), environment, protocol)


def _first_texts(episode: SearchEpisode) -> tuple[str, dict[str, Any]]:
    asked = f"Question: {episode.question.text}"
    return episode.protocol.remind(asked), {"success": False, "task_type": episode.question.type, "goal": asked}
