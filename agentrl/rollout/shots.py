"""Few-shot examples (``agent.few_shot_turns``): turns of the environment's expert that every prompt begins with."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from agentrl.errors import TemplateError, UsageError
from agentrl.message import Message, user
from agentrl.render.renderer import Renderer
from agentrl.reward import EnvironmentReward
from agentrl.rollout.few_shot import join_messages
from agentrl.rollout.runner import EpisodeRunner
from agentrl.rollout.scripted_policies import ScriptedEpisodePolicy, ScriptedPolicy
from agentrl.rollout.waits import RolloutObserver
from agentrl.task import Task, TaskSource
from agentrl.trajectory import Trajectory

MAX_EPISODES = 20
"""Maximum number of the expert's episodes to search for turns."""


class Shots:
    """Turns of the expert for every prompt of a run: the first turns of its episodes on the first tasks.

    Args:
        count: Number of turns.
        tasks: Tasks of the training split that the expert plays.
    """

    def __init__(self, count: int, tasks: TaskSource) -> None:
        self.count = count
        self._tasks = tasks
        self._lock = asyncio.Lock()
        self._played_tasks: set[str] = set()
        self._known: dict[str | None, list[Message]] = {}

    async def messages(self, runner: EpisodeRunner, task: Task) -> list[Message]:
        """Return the messages of the turns in order; the first call lets the expert play.

        Args:
            runner: Plays the expert's episodes.
            task: Task of the prompt, whose turns are never shown.

        Raises:
            UsageError: the environment has no expert, or the expert's episodes have too few turns.
        """
        async with self._lock:
            if None not in self._known:
                self._known[None] = await self._play(runner, None)
            own = task.id if task.id in self._played_tasks else None
            if own not in self._known:
                self._known[own] = await self._play(runner, own)
            return self._known[own]

    async def _play(self, runner: EpisodeRunner, left_out: str | None) -> list[Message]:
        recorder = _MessageRecorder()
        renderer = getattr(runner.policy, "renderer", None)
        expert = runner.with_policy(ScriptedEpisodePolicy(ScriptedPolicy.EXPERT, renderer))
        expert.observer, expert.scorer, expert.shots = recorder, EnvironmentReward(), None
        found: list[Message] = []
        episodes = min(MAX_EPISODES, len(self._tasks))
        for number in range(episodes):
            task = self._tasks[number]
            if task.id == left_out:
                continue
            if left_out is None:
                self._played_tasks.add(task.id)
            await expert.run(task, group_id=f"shots/{number}", member=0, seed=0)
            for conversation in recorder.take():
                turns = _turns(conversation, self.count - _answers(found))
                found = join_messages(found, _close(turns, renderer))
            if _answers(found) == self.count:
                return found
        raise UsageError(
            "the expert has too few turns to show",
            got=f"{_answers(found)} in {episodes} episodes",
            expected=f"agent.few_shot_turns={self.count}",
            hint="lower agent.few_shot_turns",
        )


class _MessageRecorder(RolloutObserver):
    """Recorder of the messages of episodes that end."""

    def __init__(self) -> None:
        self._conversations: list[list[Message]] = []

    def on_end(self, trajectory: Trajectory) -> None:
        """Keep an episode's messages; answers without calls keep their whole text, including thinking."""
        answers = zip(trajectory.answers, trajectory.completions, strict=True)
        written = {id(answer): replace(answer, content=text, reasoning=None) for answer, text in answers}
        self._conversations += [
            [message if message.tool_calls else written.get(id(message), message) for message in messages]
            for messages in trajectory.conversations
        ]

    def take(self) -> list[list[Message]]:
        """Return the conversations recorded since the last call."""
        taken, self._conversations = self._conversations, []
        return taken


def _answers(messages: Sequence[Message]) -> int:
    return sum(message.role == "assistant" and message.content != ENDED for message in messages)


ENDED = "This example ends here."
"""Text answer after an example's last tool result, if the chat template requires one."""


def _close(turns: list[Message], renderer: Renderer | None) -> list[Message]:
    """End an example with a text answer if the chat template refuses a user message after a tool result (Mistral)."""
    if renderer is None or not turns or turns[-1].role != "tool":
        return turns
    try:
        renderer.template.render([*turns, user("x")], generation_prompt=True)
    except TemplateError:
        return [*turns, Message(role="assistant", content=ENDED)]
    return turns


def _turns(conversation: Sequence[Message], count: int) -> list[Message]:
    """Return the first `count` turns of a conversation and the messages after the last one, without system message."""
    found: list[Message] = []
    for message in conversation:
        if message.role == "assistant" and _answers(found) == count:
            break
        if message.role != "system":
            found.append(message)
    return found if _answers(found) else []
