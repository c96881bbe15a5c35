"""Tasks of Inspect (https://inspect.aisi.org.uk, the package ``inspect-ai``): its data, solvers, tools and scorers."""

from __future__ import annotations

import functools
import json
import math
import string
from collections.abc import Mapping
from typing import Any, TypeAlias

from gymnasium.spaces import Text

from agentrl import registry
from agentrl.env import AsyncEnv, EnvironmentSpec, Isolation
from agentrl.errors import EnvironmentFailure, ToolError, UsageError, described_error
from agentrl.task import Task
from agentrl.tool import Tool, ToolResult

from ..served_tools import ServedTool
from .inspect_run import INSPECT, FinishedSample, InspectPrompt, InspectRun, SampleEpisode, leave, shared_run

Step: TypeAlias = tuple[str, float, bool, bool, dict[str, Any]]
EVERY = 10
"""Every tenth sample belongs to the test split."""
SPLITS = ("train", "test")


class InspectEnvironment(AsyncEnv):
    """Task of Inspect; an observation is the text of the messages since the last answer.

    The task's own solvers write the prompts. The tools that they offer are tools of the episode. The score of the first
    scorer is the reward.

    Args:
        task: ``module:function`` or ``./file.py:function`` of a task.
        scorer: Name of the scorer whose score is the reward; the first one if left out.
        success_from: Minimum reward that counts as solved.
        arguments: Arguments of the task's function.

    Raises:
        UsageError: the package is not installed, or the task cannot be created.
    """

    def __init__(
        self, *, task: str | None = None, scorer: str | None = None, success_from: float = 1.0, **arguments: Any
    ) -> None:
        self._task, self._name = load_task(task, arguments), str(task)
        self._key = json.dumps([task, arguments], sort_keys=True)
        self._scorer, self._success_from = scorer, success_from
        self._run: InspectRun | None = None
        self._episode: SampleEpisode | None = None
        self._is_lost = False
        """True if the prompt after the last answer was not awaited: the next answer would be for an unseen prompt."""
        self._shown = 0
        self._calls = 0
        self.tools: list[Tool] = []
        self.action_space = Text(64, charset=string.ascii_letters + string.digits)
        """Space of a random policy's answers."""

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start the sample of the option ``index``; without it, that of the seed.

        Raises:
            UsageError: another task is being played in this process.
            EnvironmentFailure: the sample failed before its first prompt.
        """
        self._abandon()
        self._is_lost = False
        if self._run is None:
            self._run = shared_run(self._name, self._key, self._task)
        index = (options or {}).get("index", (seed or 0) % len(self._task.dataset))
        self._episode, self._shown, self._calls = self._run.begin(index), 0, 0
        prompt = await self._run.next_prompt(self._episode)
        if isinstance(prompt, FinishedSample):
            raise EnvironmentFailure(f"a sample of {self._name} ended before its first prompt", got=prompt.error)
        self.tools = [
            ServedTool(one.name, one.description, one.parameters.model_dump(exclude_none=True), self._call_tool)
            for one in prompt.tools
        ]
        return self._text(prompt), {}

    async def step(self, action: str) -> Step:
        """Answer the latest prompt in text.

        Raises:
            UsageError: the episode is over.
            EnvironmentFailure: the sample failed.
        """
        output = INSPECT.load("inspect_ai.model").ModelOutput.from_content("policy", action)
        text, reward, is_over, info = await self._answer(output)
        return text, reward, is_over, False, info

    async def close(self) -> None:
        """End the sample, and with the last environment the evaluation."""
        self._abandon()
        run, self._run = self._run, None
        if run is not None:
            await leave(run)

    async def _call_tool(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        self._calls += 1
        make = INSPECT.load("inspect_ai.model").ModelOutput.for_tool_call
        output = make("policy", name, dict(arguments), tool_call_id=f"call_{self._calls}", content="")
        text, reward, is_over, info = await self._answer(output)
        if not info["valid"]:
            raise ToolError(text)
        return ToolResult(text, reward=reward, stop=is_over, success=info.get("success"))

    async def _answer(self, output: Any) -> tuple[str, float, bool, dict[str, Any]]:
        """Give an answer; return what follows, the reward, whether the episode is over, and the info."""
        if self._is_lost:
            raise EnvironmentFailure(
                f"the sample of {self._name} was abandoned",
                got="a call that was not awaited to its end",
                hint="raise agent.tool_timeout_s or environment.step_timeout_s",
            )
        if self._run is None or self._episode is None:
            raise UsageError(f"the episode of {self._name} is over", expected="reset before the next step")
        self._episode.answers.put_nowait(output)
        try:
            prompt = await self._run.next_prompt(self._episode)
        except BaseException:
            self._is_lost = True
            self._abandon()
            raise
        if isinstance(prompt, InspectPrompt):  # no success yet: a call may still end the episode
            failed = getattr(prompt.messages[-1], "error", None)
            return self._text(prompt), 0.0, False, {"valid": failed is None}
        self._episode = None
        if prompt.error is not None:
            raise EnvironmentFailure(f"a sample of {self._name} failed", got=prompt.error)
        components = score_numbers(prompt.scores)
        reward = self._reward(components)
        if not math.isfinite(reward):
            raise EnvironmentFailure(f"a sample of {self._name} was not scored", got=f"a score of {reward}")
        components = {name: value for name, value in components.items() if math.isfinite(value)}
        info = {"valid": True, "success": reward >= self._success_from, "reward_components": components}
        return f"The end. Score: {reward:g}.", reward, True, info

    def _reward(self, components: Mapping[str, float]) -> float:
        name = self._scorer or next(iter(components), "")
        if name not in components:
            expected = ", ".join(components) or "a task with a scorer whose scores are single values"
            raise UsageError(f"task {self._name} does not have this score", got=name or "none", expected=expected)
        return components[name]

    def _text(self, prompt: InspectPrompt) -> str:
        """Return the new part of a prompt: all of it if the history was shortened."""
        shown, self._shown = self._shown, len(prompt.messages)
        new = prompt.messages[shown:] if shown <= len(prompt.messages) else prompt.messages
        texts = [_text_of(message) for message in new if not shown or message.role != "assistant"]
        return "\n\n".join(filter(None, texts))

    def _abandon(self) -> None:
        episode, self._episode = self._episode, None
        if episode is not None and self._run is not None:
            self._run.abandon(episode)


def _text_of(message: Any) -> str:
    error = getattr(message, "error", None)
    return str(message.text if error is None else error.message)


def score_numbers(scores: Mapping[str, Any]) -> dict[str, float]:
    """Return scores as numbers: "C" is 1, "P" 0.5, "I" 0; entries of a record are named ``SCORER.ENTRY``."""
    to_float = INSPECT.load("inspect_ai.scorer").value_to_float()
    found = {}
    for name, value in scores.items():
        entries = {f"{name}.{key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value}
        found.update({key: float(to_float(one)) for key, one in entries.items() if not isinstance(one, list)})
    return found


def load_task(task: str | None, arguments: Mapping[str, Any]) -> Any:
    """Return a task; equal arguments return the same object.

    Raises:
        UsageError: the package is not installed, or the task cannot be created.
    """
    if not task or ":" not in task:
        raise UsageError(
            "the Inspect task is not set", got=task, expected="environment.options={task: my_tasks:arithmetic}"
        )
    return _load_task(task, json.dumps(arguments, sort_keys=True))


@functools.lru_cache(maxsize=8)
def _load_task(reference: str, arguments: str) -> Any:
    inspect = INSPECT.load()
    make = registry.load(reference)
    try:
        made = make(**json.loads(arguments))
    except Exception as error:  # of the user's function
        raise UsageError(f"Inspect task {reference} cannot be created", got=described_error(error)) from error
    if not isinstance(made, inspect.Task) or not len(made.dataset):
        raise UsageError(f"{reference} is not an Inspect task with samples", got=type(made).__name__)
    return made


class InspectTasks:
    """The samples of a split as tasks."""

    def __init__(self, split: str, *, task: str | None = None, scorer: str | None = None, **arguments: Any) -> None:
        if split not in SPLITS:
            raise UsageError("environment inspect has no such split", got=split, expected=" or ".join(SPLITS))
        arguments.pop("success_from", None)
        size = len(load_task(task, arguments).dataset)
        is_test = split == "test"
        self.split = split
        self._indices = [index for index in range(size) if (index % EVERY == EVERY - 1) == is_test]

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, place: int) -> Task:
        if not 0 <= place < len(self):
            raise IndexError(place)
        index = self._indices[place]
        return Task(id=f"{self.split}-{index}", environment="inspect", seed=index, options={"index": index})


SPEC = EnvironmentSpec(
    name="inspect",
    make=InspectEnvironment,
    tasks=InspectTasks,
    splits=SPLITS,
    description="Inspect tasks (inspect-ai) with their solvers, tools and scorers. Options: task (required), scorer.",
    instructions="Answer in the form that the task requires.",
    isolation=Isolation.INLINE,
    success_threshold=1.0,
    extra=INSPECT,
)
