"""Text of played episodes, for the tokenizer of a new model."""

from __future__ import annotations

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

MAX_FAILED = 8
"""Maximum failed episodes in a row before playing stops, as each may take a whole step timeout."""


class TextCollector(EpisodePolicy):
    """Policy that acts as a scripted policy and collects all text of its conversations.

    Args:
        policy: Scripted policy.
    """

    def __init__(self, policy: ScriptedPolicy) -> None:
        self.policy = policy
        self.texts: list[str] = []

    async def play(
        self, runner: EpisodeRunner, tasks: TaskCursor, episodes: int, *, seed: int, say: Callable[[str], None]
    ) -> list[str]:
        """Play episodes and return the collected texts.

        Args:
            runner: Runner with this policy; its loop is replaced if it cannot be demonstrated.
            tasks: Tasks to play.
            episodes: Number of episodes.
            seed: Seed of the episodes.
            say: Called with a message for the user when an episode fails.

        Raises:
            UsageError: no episode can be played.
        """
        if problem := runner.loop.demonstration_problem():
            say(f"{problem}: the new model's vocabulary is built from the environment's text and bare actions")
            runner.loop = RawActionLoop()
            if runner.roles is not None:
                runner.roles = replace(runner.roles, names=())
        runner.scorer = EnvironmentReward()  # rewards are not read, so no judge or reward model is used
        failed, consecutive = None, 0
        for number in range(episodes):
            own = derive_seed(seed, "corpus", number)
            await tasks.fetch([tasks.position])
            played = await runner.run(tasks.next(), group_id=f"corpus-{number}", member=0, seed=own)
            if played.outcome is None or not played.outcome.is_infrastructure:
                consecutive = 0
                continue
            if failed is None:
                say(f"an episode for the new model's vocabulary failed; others follow: {played.error}")
            failed, consecutive = failed or played, consecutive + 1
            if consecutive >= MAX_FAILED:
                say(f"{consecutive} episodes in a row failed; the vocabulary is built from the text collected so far")
                break
        if failed is not None and not self.texts:
            raise UsageError(
                "no episode can be played for the vocabulary",
                got=f"{runner.spec.name}: {failed.error}",
                hint=f"run: agentrl env check {shlex.quote(runner.spec.name)}",
            )
        return self.texts

    def open(self, episode: EpisodeView, messages: Sequence[Message], tools: Sequence[Tool]) -> Conversation:
        """Open a conversation whose messages and tools are collected."""
        self.texts.extend(_json(tool.schema) for tool in tools)
        conversation = _RecordedConversation(self, episode)
        conversation.add(*messages)
        return conversation

    def cut(self, text: str, max_tokens: int) -> str:
        """Truncate by an estimate, as there is no tokenizer yet."""
        return cut_characters(text, max_tokens)

    def split(self, text: str, max_tokens: int) -> list[str]:
        """Split by an estimate."""
        return split_characters(text, max_tokens)


class _RecordedConversation(Conversation):
    def __init__(self, collector: TextCollector, episode: EpisodeView) -> None:
        self._collector = collector
        self._episode = episode

    def add(self, *messages: Message) -> None:
        """Collect the text of messages."""
        self._collector.texts.extend(text for message in messages for text in _texts_of(message))

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
