"""Evaluation by Inspect that runs while episodes are played; each episode is a sample.

Inspect runs its own solvers, tools, sandboxes and scorers. Its model is `_policy_model`, which passes each prompt on to
the episode of its sample and waits for the answer. Samples are added during the evaluation (Inspect's `SampleSource`),
because a process can run only one evaluation at a time.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import itertools
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.errors import EnvironmentFailure, UsageError
from agentrl.registry import Extra

INSPECT = Extra(name="inspect", module="inspect_ai")
KEY = "agentrl_episode"
"""Key of a sample's store under which the episode's key is saved."""
PROVIDER = "agentrl"
"""Name of the policy in Inspect."""
MAX_SAMPLES = 100_000
"""Maximum number of concurrent episodes; the run's own limit is lower."""


class AbandonedEpisode(Exception):
    """The episode ended before its sample; raised in the sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectPrompt:
    """Prompt of a solver for the model."""

    messages: Sequence[Any]
    tools: Sequence[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedSample:
    """Scores of a sample, and the error that ended it."""

    scores: Mapping[str, Any]
    error: str | None


@dataclass(slots=True)
class SampleEpisode:
    """The channel between an episode and its sample."""

    number: int
    prompts: asyncio.Queue[InspectPrompt | FinishedSample] = field(default_factory=asyncio.Queue)
    answers: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    is_solved: bool = False
    """True when the solvers have ended; later prompts come from scorers."""


class InspectRun:
    """An evaluation of one task; it belongs to one event loop.

    Args:
        name: Name of the task, for messages.
        key: Name of the task with its arguments.
        task: The task.
        previous: An evaluation of this process that may still be ending; this one waits for its end.
    """

    def __init__(self, name: str, key: str, task: Any, previous: InspectRun | None = None) -> None:
        self._inspect = INSPECT.load()
        self.name = name
        self._key, self._loop = key, asyncio.get_running_loop()
        self.users = 0
        """Environments that play this task."""
        self._dataset = task.dataset
        self._episodes: dict[int, SampleEpisode] = {}
        self._numbers = itertools.count(1)
        self._wanted: list[tuple[int, SampleEpisode]] = []
        """Samples that were not yet passed to the evaluation."""
        self._wake = asyncio.Event()
        self._context: contextvars.Context | None = None
        """Context in which samples can be added; ``None`` while the evaluation waits for samples."""
        self._is_ending = False
        self._task = self._make_task(task)
        ending = None if previous is None or previous._loop is not self._loop else previous._running
        self._running: asyncio.Task[None] = asyncio.create_task(self._run(ending), name=f"inspect {name}")

    @property
    def has_ended(self) -> bool:
        """True if no sample can be added any more."""
        return self._is_ending or self._running.done() or self._loop.is_closed()

    def is_usable(self, key: str) -> bool:
        """Return True if the evaluation is of the task with this key, and of this event loop."""
        return key == self._key and self._loop is asyncio.get_running_loop()

    def begin(self, index: int) -> SampleEpisode:
        """Start a sample of the dataset.

        Raises:
            EnvironmentFailure: the evaluation has ended.
        """
        self._check()
        episode = SampleEpisode(next(self._numbers))
        self._episodes[episode.number] = episode
        self._wanted.append((index, episode))
        if self._context is not None:
            self._context.run(self._add_samples)
        self._wake.set()
        return episode

    async def next_prompt(self, episode: SampleEpisode) -> InspectPrompt | FinishedSample:
        """Wait for the next prompt of a sample, or its end.

        Raises:
            EnvironmentFailure: the evaluation has ended.
        """
        prompt = asyncio.create_task(episode.prompts.get())
        try:
            await asyncio.wait({prompt, self._running}, return_when=asyncio.FIRST_COMPLETED)
            if prompt.done():
                return prompt.result()
        finally:
            prompt.cancel()
        self._check()
        raise AssertionError("unreachable")

    def abandon(self, episode: SampleEpisode) -> None:
        """End a sample whose episode is over."""
        if self._episodes.pop(episode.number, None) is not None:
            episode.answers.put_nowait(AbandonedEpisode("the episode was abandoned"))

    async def close(self) -> None:
        """End the evaluation, after its running samples."""
        for episode in list(self._episodes.values()):
            self.abandon(episode)
        self._is_ending = True
        self._wake.set()
        await asyncio.wait({self._running})

    def _check(self) -> None:
        if not self._running.done():
            return
        error = None if self._running.cancelled() else self._running.exception()
        raise EnvironmentFailure(f"the evaluation of {self.name} by Inspect has ended", got=repr(error)) from error

    def _add_samples(self) -> None:
        """Add the requested samples to the evaluation; called in its context."""
        wanted, self._wanted = self._wanted, []
        for index, episode in wanted:
            self._inspect.enqueue_sample(self._dataset[index].model_copy(deep=True), epoch=episode.number)

    async def _next_samples(self) -> list[Any] | None:
        """Wait until samples are requested; Inspect calls this when none is running."""
        self._context = None
        while not self._wanted:
            if self._is_ending:
                return None
            self._wake.clear()
            await self._wake.wait()
        self._add_samples()
        self._context = contextvars.copy_context()
        return []

    async def _finish(self, sample: Any) -> None:
        """Pass the scores of a sample to its episode."""
        episode = self._episodes.pop(sample.epoch, None)
        if episode is not None:
            error = None if sample.error is None else sample.error.message
            scores = {name: score.value for name, score in (sample.scores or {}).items()}
            episode.prompts.put_nowait(FinishedSample(scores=scores, error=error))

    def _make_task(self, task: Any) -> Any:
        """Return the task with the samples that episodes request; its solvers mark their start and end."""

        def begin() -> Any:
            async def solve(state: Any, generate: Any) -> Any:
                state.store.set(KEY, state.epoch)
                return state

            return solve

        def end() -> Any:
            async def solve(state: Any, generate: Any) -> Any:
                if (episode := self._episodes.get(state.epoch)) is not None:
                    episode.is_solved = True
                return state

            return solve

        source = self._inspect.SampleSource.from_samples(
            [], next_samples=self._next_samples, sample_complete=self._finish
        )
        solver = self._inspect.solver.solver
        solvers = [solver(begin)(), task.solver, solver(end)()]
        changes = {"dataset": source, "solver": solvers, "model": None, "epochs": 1}
        return self._inspect.task_with(copy.copy(task), **changes)  # a copy, because task_with changes its argument

    async def _run(self, ending: asyncio.Task[None] | None) -> None:
        if ending is not None:
            await asyncio.wait({ending})
        INSPECT.load("inspect_ai.util._display").init_display_type("none")
        with tempfile.TemporaryDirectory(prefix="agentrl-inspect-") as folder:
            await self._inspect.eval_async(
                self._task,
                model=_policy_model(self._answer),
                log_dir=folder,
                log_level="error",
                log_realtime=False,
                max_samples=MAX_SAMPLES,
                fail_on_error=False,
                ctl_server=False,
                acp_server=False,
            )

    async def _answer(self, messages: Sequence[Any], tools: Sequence[Any]) -> Any:
        """Pass a prompt on to the episode of the running sample, and wait for its answer."""
        episode = self._episodes.get(self._inspect.util.store().get(KEY))
        if episode is None:
            raise AbandonedEpisode("the episode was abandoned")
        if episode.is_solved:
            raise UsageError(
                f"a scorer of {self.name} calls the model that it scores",
                expected="scorers that do not call it",
                hint="give the task's scorer a model of its own: model_graded_qa(model=…)",
            )
        episode.prompts.put_nowait(InspectPrompt(messages=list(messages), tools=list(tools)))
        answer = await episode.answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer


def _policy_model(answer: Any) -> Any:
    """Create an Inspect model whose answers come from `answer`."""
    model = INSPECT.load("inspect_ai.model")

    @model.modelapi(name=PROVIDER)
    class PolicyModel(model.ModelAPI):  # type: ignore[name-defined, misc]
        async def generate(self, input: Any, tools: Any, tool_choice: Any, config: Any) -> Any:
            return await answer(input, tools)

        def max_connections(self) -> int:
            return MAX_SAMPLES

        def connection_key(self) -> str:
            return PROVIDER

    return model.get_model(f"{PROVIDER}/policy", memoize=False)


_current: InspectRun | None = None
"""The evaluation of this process."""


def shared_run(name: str, key: str, task: Any) -> InspectRun:
    """Return this loop's evaluation of a task; it starts with its first user.

    Raises:
        UsageError: an evaluation of another task is running.
    """
    global _current
    if _current is None or _current.has_ended:
        _current = InspectRun(name, key, task, _current)
    if not _current.is_usable(key):
        raise UsageError(
            "a process can play only one Inspect task at a time",
            got=f"{name} while {_current.name} is being played",
            hint="play the tasks in separate runs",
        )
    _current.users += 1
    return _current


async def leave(run: InspectRun) -> None:
    """Release an evaluation; its last user ends it."""
    run.users -= 1
    if not run.users:
        await run.close()
