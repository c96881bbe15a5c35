"""Text of played episodes, for the tokenizer of a new model."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from agentrl.agent_loop import PLAIN_TURN, AgentLoop, Answer, Conversation, Episode, TurnOptions
from agentrl.engine import StopReason
from agentrl.errors import UsageError
from agentrl.message import Message, system, user
from agentrl.reward import EnvironmentReward
from agentrl.rollout.policies import EpisodePolicy, EpisodeView, append_textual_turn, cut_characters, split_characters
from agentrl.rollout.runner import EpisodeRunner
from agentrl.rollout.scripted_policies import ScriptedPolicy, demonstrate
from agentrl.rollout.turns import derive_seed
from agentrl.task import TaskCursor
from agentrl.tool import Tool
from agentrl.trajectory import Trajectory

MAX_FAILED = 8
"""Maximum failed episodes in a row before playing stops, as each may take a whole step timeout."""
ALONE_S = 2.0
"""Seconds in which episodes are played one at a time; slow ones are played `AT_ONCE` at a time from then on."""
AT_ONCE = 32
REPORT_S = 15.0
"""Seconds between messages about the progress."""


class TextCollector(EpisodePolicy):
    """Policy that acts as a scripted policy and collects all text of its conversations."""

    def __init__(self, policy: ScriptedPolicy) -> None:
        self.policy = policy
        self._texts: dict[str, list[str]] = {}
        """Texts by the group of the episode."""

    async def play(
        self, runner: EpisodeRunner, tasks: TaskCursor, episodes: int, *, seed: int, say: Callable[[str], None]
    ) -> list[str]:
        """Play episodes and return the collected texts, in the order of the episodes.

        A loop that cannot be demonstrated is replaced; `say` gets messages about progress and failures.

        Raises:
            UsageError: no episode can be played.
        """
        if problem := runner.loop.demonstration_problem():
            say(f"{problem}: the new model's vocabulary is built from the environment's text and bare actions")
            runner.loop = RawActionLoop()
            if runner.roles is not None:
                runner.roles = replace(runner.roles, names=())
        runner.scorer = EnvironmentReward()  # rewards are not read, so no judge or reward model is used
        playing = _CorpusEpisodes(runner, tasks, episodes, seed=seed, say=say)
        await playing.play()
        texts = [text for number in range(episodes) for text in self._texts.get(_group(number), ())]
        if playing.failed is not None and not texts:
            raise UsageError(
                "no episode can be played for the vocabulary",
                got=f"{runner.spec.name}: {playing.failed.error}",
                hint=f"run: agentrl env check {shlex.quote(runner.spec.name)}",
            )
        return texts

    def open(self, episode: EpisodeView, messages: Sequence[Message], tools: Sequence[Tool]) -> Conversation:
        """Open a conversation whose messages and tools are collected."""
        texts = self._texts.setdefault(episode.turns.trajectory.group_id, [])
        texts.extend(_json(tool.schema) for tool in tools)
        conversation = _CorpusConversation(self, episode, texts)
        conversation.add(*messages)
        return conversation

    def cut(self, text: str, max_tokens: int) -> str:
        """Truncate by an estimate, as there is no tokenizer yet."""
        return cut_characters(text, max_tokens)

    def split(self, text: str, max_tokens: int) -> list[str]:
        """Split by an estimate."""
        return split_characters(text, max_tokens)


def _group(number: int) -> str:
    return f"corpus-{number}"


class _CorpusEpisodes:
    """Episodes of a corpus: one at a time while they are fast, and many at a time if they are slow."""

    def __init__(
        self, runner: EpisodeRunner, tasks: TaskCursor, episodes: int, *, seed: int, say: Callable[[str], None]
    ) -> None:
        self._runner, self._tasks, self._seed, self._say = runner, tasks, seed, say
        self._episodes = episodes
        self._numbers = iter(range(episodes))
        self._drawing = asyncio.Lock()
        self._consecutive = self._done = 0
        self.failed: Trajectory | None = None
        """First failed episode."""

    async def play(self) -> None:
        """Play all episodes, or until too many of them fail in a row."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while loop.time() - began < ALONE_S and await self._play_next():
            pass
        players = [asyncio.create_task(self._play_rest()) for _ in range(AT_ONCE)]
        try:
            pending = set(players)
            while pending:
                ended, pending = await asyncio.wait(pending, timeout=REPORT_S, return_when=asyncio.FIRST_EXCEPTION)
                for player in ended:
                    player.result()
                if pending:
                    self._say(f"episodes for the new model's vocabulary: {self._done} of {self._episodes} played")
        finally:
            for player in players:
                player.cancel()
            await asyncio.gather(*players, return_exceptions=True)

    async def _play_rest(self) -> None:
        while await self._play_next():
            pass

    async def _play_next(self) -> bool:
        """Play the next episode; return False if none is left."""
        async with self._drawing:
            if self._consecutive >= MAX_FAILED or (number := next(self._numbers, None)) is None:
                return False
            await self._tasks.fetch([self._tasks.position])
            task = self._tasks.next()
        own = derive_seed(self._seed, "corpus", number)
        self._add(await self._runner.run(task, group_id=_group(number), member=0, seed=own))
        return True

    def _add(self, played: Trajectory) -> None:
        """Count an episode, and report the first failed one and too many failures in a row."""
        self._done += 1
        if played.outcome is None or not played.outcome.is_infrastructure:
            self._consecutive = 0
            return
        if self.failed is None:
            self._say(f"an episode for the new model's vocabulary failed; others follow: {played.error}")
        self.failed, self._consecutive = self.failed or played, self._consecutive + 1
        if self._consecutive == MAX_FAILED:
            name = shlex.quote(self._runner.spec.name)
            self._say(
                f"{MAX_FAILED} episodes in a row failed; the vocabulary is built from the text collected so far. The "
                f"environment probably fails in training, too: run: agentrl env check {name}"
            )


class _CorpusConversation(Conversation):
    def __init__(self, collector: TextCollector, episode: EpisodeView, texts: list[str]) -> None:
        self._collector = collector
        self._episode = episode
        self._texts = texts

    def add(self, *messages: Message) -> None:
        """Collect the text of messages."""
        self._texts.extend(text for message in messages for text in _texts_of(message))

    def fork(self, messages: Sequence[Message]) -> Conversation:
        """Open another conversation for a rewritten history."""
        return self._collector.open(self._episode, messages, ())

    async def generate(self, *, prefill: str = "", options: TurnOptions = PLAIN_TURN) -> Answer:
        """Act, and collect the answer."""
        turns = self._episode.turns
        seed = turns.begin_turn(is_counted=not options.for_environment)
        message, _ = await demonstrate(self._collector.policy, self._episode, seed, options)
        turn = append_textual_turn(turns, StopReason.STOP, options.role)
        turns.record(turn, prompt_tokens=0, answer_tokens=0, trained=options.trained)
        self.add(message)
        return Answer(message=message, raw_text=message.text, is_scripted=True)


class RawActionLoop(AgentLoop):
    """Agent loop with raw actions, used in place of a loop without `demonstrate`."""

    async def run(self, episode: Episode) -> None:
        """Play one episode."""
        observation = await episode.reset()
        conversation = episode.open([system(episode.spec.instructions), user(observation)])
        while not (result := await episode.step((await conversation.generate()).text)).done:
            conversation.add(user(result.observation))

    def demonstrate(self, action: str) -> Message:
        """Return the action as an assistant message."""
        return Message(role="assistant", content=action)


def _texts_of(message: Message) -> Iterator[str]:
    """Yield a message's text, and its tool calls in the format of the new model's template."""
    yield message.text
    for call in message.tool_calls:
        yield _json({"name": call.name, "arguments": dict(call.arguments)})


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
