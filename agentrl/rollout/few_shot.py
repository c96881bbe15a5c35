"""Few-shot examples (``agent.few_shot_turns``): turns of the environment's expert at the start of every prompt.

The runner wraps the policy of each episode (`FewShotExamples.wrap`). The episode and its trajectory do not contain the
examples; only the conversations of the wrapped policy, which the model reads, contain them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from agentrl.agent_loop import PLAIN_TURN, Answer, Conversation, TurnOptions
from agentrl.errors import TemplateError, UsageError
from agentrl.message import Content, ContentPart, Message, TextPart, system, user
from agentrl.render.chat_template import ToolSchema
from agentrl.render.renderer import Renderer
from agentrl.reward import EnvironmentReward
from agentrl.rollout.events import RolloutObserver
from agentrl.rollout.policies import EpisodePolicy, EpisodeView
from agentrl.rollout.runner import EpisodeRunner
from agentrl.rollout.scripted_policies import ScriptedEpisodePolicy, ScriptedPolicy
from agentrl.task import Task, TaskSource, fetch_tasks
from agentrl.tool import Tool
from agentrl.trajectory import Trajectory

NEXT = "Here is the next task."
"""Text between the end of an example and the following task."""
ANNOUNCED = "Here are some examples from other tasks. Your own task comes after them."
MAX_EPISODES = 20
"""Maximum number of the expert's episodes to search for turns."""
ENDED = "This example ends here."
"""Text answer after an example's last tool result, if the chat template requires one."""


class FewShotExamples:
    """Examples of a run: the first turns of the expert's episodes on the first tasks."""

    def __init__(self, count: int, tasks: TaskSource) -> None:
        self.count = count
        self._tasks = tasks
        self._lock = asyncio.Lock()
        self._played_tasks: set[str] = set()
        self._known: dict[str | None, list[Message]] = {}

    async def wrap(self, runner: EpisodeRunner, task: Task) -> FewShotPolicy:
        """Return the runner's policy, with prompts that begin with examples from other tasks; see `messages`."""
        return FewShotPolicy(runner.policy, await self.messages(runner, task))

    async def messages(self, runner: EpisodeRunner, task: Task) -> list[Message]:
        """Return the example turns in order, except those of `task`; the first call lets the expert play.

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
        expert.observer, expert.scorer, expert.policy_wrapper = recorder, EnvironmentReward(), None
        found: list[Message] = []
        episodes = min(MAX_EPISODES, len(self._tasks))
        for number in range(episodes):
            await fetch_tasks(self._tasks, [number])
            task = self._tasks[number]
            if task.id == left_out:
                continue
            if left_out is None:
                self._played_tasks.add(task.id)
            await expert.run(task, group_id=f"few-shot/{number}", member=0, seed=0)
            for conversation in recorder.take():
                turns = _first_turns(conversation, self.count - _count_answers(found))
                found = join_messages(found, _close(turns, renderer))
            if _count_answers(found) == self.count:
                return found
        raise UsageError(
            "the expert's episodes have too few turns",
            got=f"{_count_answers(found)} in {episodes} episodes",
            expected=f"agent.few_shot_turns={self.count}",
            hint="lower agent.few_shot_turns",
        )


class FewShotPolicy(EpisodePolicy):
    """Policy whose prompts begin with examples; roles with their own policies have none."""

    def __init__(self, policy: EpisodePolicy, examples: Sequence[Message]) -> None:
        self._policy = policy
        self._examples = examples

    def open(self, episode: EpisodeView, messages: Sequence[Message], tools: Sequence[Tool]) -> Conversation:
        """Return a conversation of the policy that begins with the examples."""
        opened = self._policy.open(episode, with_examples(messages, self._examples), tools)
        return FewShotConversation(opened, self._examples)

    @property
    def reads_images(self) -> bool:
        """True if the policy does."""
        return self._policy.reads_images

    def cut(self, text: str, max_tokens: int) -> str:
        """Cut as the policy does."""
        return self._policy.cut(text, max_tokens)

    def split(self, text: str, max_tokens: int) -> list[str]:
        """Split as the policy does."""
        return self._policy.split(text, max_tokens)

    def write_answer(self, message: Message) -> str:
        """Return an answer as the policy's model writes it."""
        return self._policy.write_answer(message)

    def for_role(self, name: str, *, of_environment: bool = False) -> EpisodePolicy:
        """Return the policy of a role, without examples."""
        return self._policy.for_role(name, of_environment=of_environment)

    def count(self, messages: Sequence[Message], schemas: Sequence[ToolSchema]) -> int:
        """Count the tokens of a prompt without the examples."""
        return self._policy.count(messages, schemas)

    async def end(self, episode: EpisodeView) -> None:
        """Release what the policy keeps for an episode."""
        await self._policy.end(episode)


class FewShotConversation(Conversation):
    """Conversation of a policy whose prompt begins with examples."""

    def __init__(self, conversation: Conversation, examples: Sequence[Message]) -> None:
        self._conversation = conversation
        self._examples = examples

    def add(self, *messages: Message) -> None:
        """Append messages."""
        self._conversation.add(*messages)

    async def generate(self, *, prefill: str = "", options: TurnOptions = PLAIN_TURN) -> Answer:
        """Let the policy take a turn."""
        return await self._conversation.generate(prefill=prefill, options=options)

    def fork(self, messages: Sequence[Message]) -> Conversation:
        """Return a conversation with a rewritten history after the same examples."""
        forked = self._conversation.fork(with_examples(messages, self._examples))
        return FewShotConversation(forked, self._examples)


def with_examples(messages: Sequence[Message], examples: Sequence[Message]) -> Sequence[Message]:
    """Insert examples after a conversation's system message, which then announces them."""
    opening = [message for message in messages[:1] if message.role == "system"]
    announced = [system(f"{message.text}\n\n{ANNOUNCED}") for message in opening]
    return [*announced, *join_messages(examples, messages[len(opening) :])]


def join_messages(first: Sequence[Message], then: Sequence[Message]) -> list[Message]:
    """Concatenate messages; two adjacent user messages become one, because chat templates expect alternating roles."""
    if not (first and then and first[-1].role == then[0].role == "user"):
        return [*first, *then]
    last, following = first[-1].content, then[0].content
    parts = [*_parts(last), TextPart(text=f"\n\n{NEXT}\n"), *_parts(following)]
    texts = [part.text for part in parts if isinstance(part, TextPart)]
    return [*first[:-1], user("".join(texts) if len(texts) == len(parts) else tuple(parts)), *then[1:]]


def _parts(content: Content) -> tuple[ContentPart, ...]:
    return (TextPart(text=content),) if isinstance(content, str) else content


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


def _count_answers(messages: Sequence[Message]) -> int:
    return sum(message.role == "assistant" and message.content != ENDED for message in messages)


def _close(turns: list[Message], renderer: Renderer | None) -> list[Message]:
    """End an example with a text answer if the chat template refuses a user message after a tool result (Mistral)."""
    if renderer is None or not turns or turns[-1].role != "tool":
        return turns
    try:
        renderer.template.render([*turns, user("x")], generation_prompt=True)
    except TemplateError:
        return [*turns, Message(role="assistant", content=ENDED)]
    return turns


def _first_turns(conversation: Sequence[Message], count: int) -> list[Message]:
    """Return the first `count` turns of a conversation and the messages after the last one, without system message."""
    found: list[Message] = []
    for message in conversation:
        if message.role == "assistant" and _count_answers(found) == count:
            break
        if message.role != "system":
            found.append(message)
    return found if _count_answers(found) else []
