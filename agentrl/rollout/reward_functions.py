"""Rewards from plain functions: ``def reward(trajectory, task) -> float``, alone or several with weights.

Functions written for TRL, verl and verifiers are recognised by the names of their parameters, and are called as there:

=============== ==================================================================================================
``completions`` TRL: ``f(prompts, completions, **columns)``, lists of one; gives a list of one
``solution_str`` verl: ``f(data_source, solution_str, ground_truth, extra_info)``; gives a number, or ``{"score": …}``
``completion``  verifiers: ``f(prompt, completion, answer, state, info)``, any of them
=============== ==================================================================================================

A blocking function runs in a thread of its own, one call after the other; an ``async`` one runs in the
event loop, concurrently with others. An exception, or a result that is no number, is an `RewardFailure`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.errors import A_REWARD, ConfigError, EnvironmentFailure, RewardFailure, shortened
from agentrl.message import Message
from agentrl.reward import Definition, Score, Scorer, as_number, checked_score, defined_in, failures_named
from agentrl.rollout.env_pool import ThreadWorker
from agentrl.rollout.tools import all_of
from agentrl.task import Task
from agentrl.trajectory import Trajectory

DEADLINE_S = 60.0
SIGNATURE = "def reward(trajectory, task) -> float"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedReward:
    """One part of a reward."""

    name: str
    """In metrics (``reward/component/NAME``) and in ``trajectory.reward_components``."""
    weight: float
    scorer: Scorer


class WeightedSum(Scorer):
    """The weighted sum of several rewards; each is kept, unweighted, as a component under its name."""

    def __init__(self, parts: Sequence[WeightedReward]) -> None:
        self._parts = parts

    @property
    def definitions(self) -> Mapping[str, Definition]:
        """Where all parts are defined."""
        return {name: place for part in self._parts for name, place in part.scorer.definitions.items()}

    async def score(self, trajectory: Trajectory, task: Task) -> Score:
        """Return the sum over those parts that have something to say; ``None`` when none has."""
        scores = await all_of([checked_score(part.scorer, trajectory, task) for part in self._parts])
        components: dict[str, float] = {}
        total: float | None = None
        for part, score in zip(self._parts, scores, strict=True):
            components |= score.components
            if score.reward is not None:
                components[part.name] = score.reward
                total = (total or 0.0) + part.weight * score.reward
        return Score(reward=total, components=components)


class FunctionReward(Scorer):
    """A function as a scorer.

    Args:
        name: As the config names it.
        function: Blocking or a coroutine function.
        options: Keyword arguments for each call.
        thread: Runs blocking functions.
        deadline_s: Deadline of a call.

    Raises:
        ConfigError: it is not callable, or takes other arguments.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        options: Mapping[str, Any],
        thread: ThreadWorker,
        *,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._place, self._subject = defined_in(function), f"reward function {name}"
        self._where = self._subject + self._place.words
        if not callable(function) or inspect.isclass(function):
            kind = "a class" if inspect.isclass(function) else type(function).__name__
            raise ConfigError(f"{self._where} cannot be called", got=kind, expected=SIGNATURE)
        self._function, self._options, self._thread, self._deadline_s = function, options, thread, deadline_s
        self._signature = _signature(function)
        self._convention = _convention(self._signature)
        self._may_abstain = self._convention.may_abstain or _may_return_none(self._signature)
        self._check_arguments()

    def _check_arguments(self) -> None:
        try:
            if self._convention is NATIVE:
                bound = self._signature.bind(None, None, **self._options)
                if list(bound.arguments)[:2] == ["task", "trajectory"]:
                    raise TypeError("the trajectory comes first, then the task")
        except TypeError as error:
            raise ConfigError(
                f"{self._where} does not take the arguments of a reward function",
                got=f"{getattr(self._function, '__name__', 'it')}{self._signature}: {error}",
                expected=f"{SIGNATURE}, or the parameters of a function for TRL (completions), verl (solution_str) or "
                "verifiers (completion)",
                hint="see docs/reward-functions.md",
            ) from error

    @property
    def definitions(self) -> Mapping[str, Definition]:
        """Where the function is defined."""
        return {self._subject: self._place}

    async def score(self, trajectory: Trajectory, task: Task) -> Score:
        """Call the function; raise `RewardFailure` if it raises, hangs, or returns no finite number."""
        what = f"{self._where} on task {task.id}"
        with failures_named(what, self._place, subject=self._subject):
            return Score(reward=self._number(what, await self._returned(what, trajectory, task)))

    async def _returned(self, what: str, trajectory: Trajectory, task: Task) -> Any:
        if inspect.iscoroutinefunction(self._function) or inspect.iscoroutinefunction(type(self._function).__call__):
            returned = self._call_named(what, trajectory, task)
        else:
            work = functools.partial(self._call_named, what, trajectory, task)
            returned = await self._in_thread(work, what)
        if inspect.isawaitable(returned):
            returned = await self._awaited(what, returned)
        return self._convention.read(returned)

    def _call(self, trajectory: Trajectory, task: Task) -> Any:
        convention = self._convention
        if convention is NATIVE:
            return self._function(trajectory, task, **self._options)
        given = {**convention.arguments(trajectory, task), **self._options}
        takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in self._signature.parameters.values())
        names = given if takes_all else self._signature.parameters
        return self._function(**{name: given[name] for name in names if name in given})

    def _call_named(self, what: str, trajectory: Trajectory, task: Task) -> Any:
        with failures_named(what, self._place, subject=self._subject):
            return self._call(trajectory, task)

    async def _in_thread(self, work: Callable[[], Any], what: str) -> Any:
        try:
            return await self._thread.submit(work, what=what, deadline_s=self._deadline_s)
        except RewardFailure:
            raise
        except EnvironmentFailure as late:  # of the thread, which environments have, too
            raise RewardFailure(late.what, got=late.got, expected=late.expected, hint=late.hint) from late

    async def _awaited(self, what: str, work: Awaitable[Any]) -> Any:
        """Await a coroutine; one that cancels itself has failed, and does not cancel the episode."""

        async def guarded() -> Any:
            with failures_named(what, self._place, subject=self._subject):
                return await work

        task = asyncio.create_task(guarded())
        try:
            await asyncio.wait({task}, timeout=self._deadline_s)
            if not task.done():
                raise RewardFailure(f"{what} missed its deadline", got=f"no answer in {self._deadline_s:g} s")
            if task.cancelled():
                raise RewardFailure(f"{what} failed", got="a coroutine that was cancelled from within")
            return task.result()
        finally:
            task.cancel()

    def _number(self, what: str, value: Any) -> float | None:
        if value is None and self._may_abstain:
            return None
        number = as_number(value)
        if number is None:
            hint = "annotate it with -> float | None if None means that it does not apply" if value is None else None
            raise RewardFailure(
                f"{what} did not return a reward",
                got=f"{type(value).__name__} {shortened(value)}",
                expected=f"{A_REWARD}: float, int or bool",
                hint=hint,
            )
        return number


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except ValueError:  # some that are written in C tell nothing
        return inspect.Signature([inspect.Parameter("anything", inspect.Parameter.VAR_POSITIONAL)])


def _may_return_none(signature: inspect.Signature) -> bool:
    annotation = signature.return_annotation
    words = annotation if isinstance(annotation, str) else str(annotation)
    return ("None" in words or "Optional" in words) and words not in ("None", "<class 'NoneType'>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Convention:
    """Calling convention of one library's functions."""

    arguments: Callable[[Trajectory, Task], dict[str, Any]]
    """All arguments on offer, by parameter name."""
    read: Callable[[Any], Any]
    """Extracts the number from the returned value."""
    may_abstain: bool = False


def _convention(signature: inspect.Signature) -> Convention:
    return next((found for marker, found in CONVENTIONS.items() if marker in signature.parameters), NATIVE)


def _trl_arguments(trajectory: Trajectory, task: Task) -> dict[str, Any]:
    prompt, completion = _split(trajectory)
    columns = {"ground_truth": task.ground_truth, **task.columns}
    return {
        **{name: [value] for name, value in columns.items()},
        "prompts": [prompt],
        "completions": [completion],
        "completion_ids": [[int(i) for s in trajectory.sequences for i in s.token_ids[s.loss_mask]]],
        "trainer_state": None,
    }


def _only(returned: Any) -> Any:
    if isinstance(returned, str | Mapping) or not hasattr(returned, "__len__") or len(returned) != 1:
        raise TypeError(f"it returned {shortened(returned)}, expected a list of one number for the one episode")
    return returned[0]


def _verl_arguments(trajectory: Trajectory, task: Task) -> dict[str, Any]:
    return {
        "data_source": task.columns.get("data_source", task.type),
        "solution_str": trajectory.completions[-1] if trajectory.completions else "",
        "ground_truth": task.ground_truth,
        "extra_info": task.columns.get("extra_info"),
    }


def _verifiers_arguments(trajectory: Trajectory, task: Task) -> dict[str, Any]:
    prompt, completion = _split(trajectory)
    found = {"prompt": prompt, "completion": completion, "answer": task.ground_truth, "info": dict(task.columns)}
    return {**found, "task": task.type or "", "state": dict(found)}


def _split(trajectory: Trajectory) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The messages up to the policy's first answer, and from there on, as dictionaries with roles and contents."""
    whole = {id(answer): text for answer, text in zip(trajectory.answers, trajectory.completions, strict=True)}
    messages = trajectory.messages
    first = next((i for i, message in enumerate(messages) if message.role == "assistant"), len(messages))
    written = [_written(message, whole.get(id(message))) for message in messages]
    return written[:first], written[first:]


def _written(message: Message, completion: str | None) -> dict[str, Any]:
    """Write a message as TRL does: an answer without tool calls is the whole text, thinking included."""
    if completion is None or message.tool_calls:
        return message.to_template()
    return {"role": message.role, "content": completion}


NATIVE = Convention(arguments=lambda trajectory, task: {}, read=lambda returned: returned)
CONVENTIONS: Mapping[str, Convention] = {
    "completions": Convention(arguments=_trl_arguments, read=_only, may_abstain=True),
    "solution_str": Convention(
        arguments=_verl_arguments, read=lambda found: found["score"] if isinstance(found, Mapping) else found
    ),
    "completion": Convention(arguments=_verifiers_arguments, read=lambda returned: returned),
}
"""By a parameter that only functions of this library have."""
