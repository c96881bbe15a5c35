"""Rewards from plain functions: ``def reward(trajectory, task) -> float``, alone or several with weights.

Functions written for TRL, verl and verifiers are recognised by the names of their parameters (`reward_signatures`), and
are called as there:

========== ======================================================================================================
TRL        ``f(prompts, completions, **columns)``, lists of one; gives a list of one. Prompts and completions are
           texts where the row's prompt is text, and lists of messages otherwise
verl       ``f(data_source, solution_str, ground_truth, extra_info)``; gives a number, or ``{"score": …}``.
           With ``solution_strs``, the same with lists of one, as verl's manager of batches calls it
verifiers  ``f(prompt, completion, answer, state, info, task, parser)``, and columns, any of them
========== ======================================================================================================

A blocking function runs in a thread of its own, one call after the other; an ``async`` one runs in the
event loop, concurrently with others. An exception, or a result that is not a number, is a `RewardFailure`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.errors import (
    A_REWARD,
    ConfigError,
    EnvironmentFailure,
    RewardFailure,
    SourceLocation,
    shortened,
    with_location,
)
from agentrl.message import Message
from agentrl.registry import Kind, lookup
from agentrl.reward import Score, Scorer, as_number, checked_score, defined_in, failures_named
from agentrl.rollout.env_pool import ThreadWorker
from agentrl.rollout.reward_signatures import EXPECTED, Library, is_reversed, library_of
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
    def definitions(self) -> Mapping[str, SourceLocation | None]:
        """Where all parts are defined."""
        return {name: place for part in self._parts for name, place in part.scorer.definitions.items()}

    @property
    def functions(self) -> Sequence[FunctionReward]:
        """The parts that are functions."""
        return [part.scorer for part in self._parts if isinstance(part.scorer, FunctionReward)]

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
        self._where = with_location(self._subject, self._place)
        if not callable(function) or inspect.isclass(function):
            kind = "a class" if inspect.isclass(function) else type(function).__name__
            raise ConfigError(f"{self._where} cannot be called", got=kind, expected=SIGNATURE)
        self._function, self._options, self._thread, self._deadline_s = function, options, thread, deadline_s
        self._signature = _signature(function)
        self._convention = self._found_convention()
        if self._convention is VERIFIERS and isinstance(options.get("parser"), str):
            self._options = {**options, "parser": lookup(Kind.REWARD, options["parser"])}
        self._may_abstain = self._convention.may_abstain or _may_return_none(self._signature)
        self._check_arguments()

    def _found_convention(self) -> Convention:
        library = library_of(self._signature)
        if library is not None:
            return CONVENTIONS[library]
        if is_reversed(self._signature):
            raise self._misfit("the trajectory comes first, then the task")
        raise self._misfit("the names of its parameters do not say which arguments it takes")

    def _check_arguments(self) -> None:
        """Check that the function takes the arguments of its convention, and all of the options."""
        parameters = self._signature.parameters
        try:
            if self._convention is NATIVE:
                self._signature.bind(None, None, **self._options)
            elif not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
                for name in self._options:
                    if name not in parameters:
                        raise TypeError(f"got an unexpected keyword argument '{name}'")
        except TypeError as error:
            raise self._misfit(error) from error

    def _misfit(self, reason: object) -> ConfigError:
        return ConfigError(
            f"{self._where} does not take the arguments of a reward function",
            got=f"{getattr(self._function, '__name__', 'it')}{self._signature}: {reason}",
            expected=EXPECTED,
            hint="see docs/reward-functions.md; a decorator that hides the parameters needs functools.wraps",
        )

    @property
    def definitions(self) -> Mapping[str, SourceLocation | None]:
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

    @property
    def needed(self) -> Sequence[str]:
        """Names of the parameters that only a task's row can fill."""
        if self._convention is NATIVE:
            return ()
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return [
            name
            for name, parameter in self._signature.parameters.items()
            if parameter.default is inspect.Parameter.empty
            and parameter.kind not in variable
            and name not in self._options
            and name not in self._convention.always
        ]

    def check_columns(self, task: Task) -> None:
        """Check that a task's row has every column that the function needs; a null is a value.

        Raises:
            ConfigError: it lacks some.
        """
        columns = {*task.columns, *(("ground_truth",) if task.ground_truth is not None else ())}
        aliases = {"ground_truths", "answer" if self._convention is VERIFIERS else "ground_truth"}
        known = columns | (aliases if "ground_truth" in columns else set())
        if self._convention is VERIFIERS and task.ground_truth is None and task.columns.get("answer") is None:
            known -= {"answer"}
        missing = [name for name in self.needed if name not in known]
        if missing:
            raise ConfigError(
                f"{self._where} needs columns that task {task.id} does not have",
                got=f"the columns {', '.join(sorted(columns)) or 'prompt alone'}",
                expected=", ".join(missing),
                hint="rename the columns of the file, give the function's parameters defaults, or write null where a "
                "column does not apply",
            )

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
    always: frozenset[str] = frozenset()
    """Arguments that do not depend on the columns of the task's row."""
    may_abstain: bool = False


def _trl_arguments(trajectory: Trajectory, task: Task) -> dict[str, Any]:
    conversation = _split(trajectory)
    is_text = task.prompt is not None and not task.messages
    columns = {"ground_truth": task.ground_truth, **task.columns}
    return {
        **{name: [value] for name, value in columns.items()},
        "prompts": [task.prompt if is_text else conversation.prompt],
        "completions": [_text(trajectory, conversation.completion) if is_text else conversation.completion],
        "completion_ids": [[int(i) for s in trajectory.sequences for i in s.token_ids[s.loss_mask]]],
        "trainer_state": TrainerState(global_step=_newest_version(trajectory)),
        "log_metric": _ignored,
        "log_extra": _ignored,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """What functions for TRL read of the trainer."""

    global_step: int
    """Training step of the newest weights that sampled the episode; 0 where nothing was sampled."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"trainer_state.{name} is not known where rewards are computed, only trainer_state.global_step is: give "
            "the function a parameter with a default value, and set it as an option in agent.reward"
        )


def _newest_version(trajectory: Trajectory) -> int:
    versions = [int(found.max()) for s in trajectory.sequences if (found := s.versions[s.loss_mask]).size]
    return max(versions, default=0)


def _ignored(_name: str, _value: Any) -> None:
    """Take what a function for TRL wants to be logged."""


def _text(trajectory: Trajectory, completion: Sequence[Mapping[str, Any]]) -> str:
    """Return a completion as text: the one answer, or all that was said from the first answer on."""
    if len(completion) == len(trajectory.completions) == 1:
        return trajectory.completions[0]
    return "\n".join(str(message["content"]) for message in completion)


def _only(returned: Any) -> Any:
    if isinstance(returned, str | Mapping) or not hasattr(returned, "__len__") or len(returned) != 1:
        raise TypeError(f"it returned {shortened(returned)}, expected a list of one number for the one episode")
    return returned[0]


def _score(returned: Any) -> Any:
    return returned["score"] if isinstance(returned, Mapping) else returned


def _verl_arguments(trajectory: Trajectory, task: Task) -> dict[str, Any]:
    source, extra = task.columns.get("data_source"), task.columns.get("extra_info")
    return {
        "data_source": task.type if source is None else source,
        "solution_str": trajectory.completions[-1] if trajectory.completions else "",
        "ground_truth": task.ground_truth,
        "extra_info": {} if extra is None else extra,
    }


def _verl_batch_arguments(trajectory: Trajectory, task: Task) -> dict[str, Any]:
    found = _verl_arguments(trajectory, task)
    plural = {"data_source": "data_sources", "solution_str": "solution_strs", "ground_truth": "ground_truths"}
    return {plural.get(name, "extra_infos"): [value] for name, value in found.items()}


def _verifiers_arguments(trajectory: Trajectory, task: Task) -> dict[str, Any]:
    conversation = _split(trajectory)
    columns = {name: value for name, value in task.columns.items() if value is not None}
    truth = "" if task.ground_truth is None else task.ground_truth
    found = {
        "prompt": conversation.prompt,
        "completion": conversation.completion,
        "answer": columns.get("answer", truth),
        "info": _information(columns),
        "task": columns.get("task", task.type or "default"),
    }
    steps = [{"completion": [m]} for m in conversation.completion if m["role"] == "assistant"]
    state = {**found, "id": task.id, "input": dict(columns), "turn": len(steps), "trajectory": steps}
    return {**columns, **found, "state": state, "parser": AnswerParser()}


def _information(columns: Mapping[str, Any]) -> Any:
    """Return the column ``info``, which may be JSON text, or else all columns."""
    info = columns.get("info", dict(columns))
    return json.loads(info) if isinstance(info, str) else info


class AnswerParser:
    """Parser that functions of verifiers get where their options name none: it returns texts as they are."""

    def parse(self, text: str) -> str:
        """Return the text."""
        return text

    def get_assistant_messages(self, completion: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return the answers of a completion."""
        return [message for message in completion if message["role"] == "assistant"]

    def parse_answer(self, completion: str | Sequence[Mapping[str, Any]]) -> str | None:
        """Return the text of the last answer; ``None`` without one."""
        if isinstance(completion, str):
            return self.parse(completion)
        answers = self.get_assistant_messages(completion)
        return self.parse(str(answers[-1]["content"])) if answers else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitConversation:
    """A conversation as messages with roles and contents."""

    prompt: list[dict[str, Any]]
    """Up to the policy's first answer."""
    completion: list[dict[str, Any]]


def _split(trajectory: Trajectory) -> SplitConversation:
    whole = {id(answer): text for answer, text in zip(trajectory.answers, trajectory.completions, strict=True)}
    messages = trajectory.messages
    first = next((i for i, message in enumerate(messages) if id(message) in whole), len(messages))
    written = [_written(message, whole.get(id(message))) for message in messages]
    return SplitConversation(prompt=written[:first], completion=written[first:])


def _written(message: Message, completion: str | None) -> dict[str, Any]:
    """Write a message as TRL does: an answer without tool calls is the whole text, thinking included."""
    if completion is None or message.tool_calls:
        return message.to_template()
    return {"role": message.role, "content": completion}


NATIVE = Convention(arguments=lambda trajectory, task: {}, read=lambda returned: returned)
VERIFIERS = Convention(
    arguments=_verifiers_arguments,
    read=lambda returned: returned,
    always=frozenset({"prompt", "completion", "state", "info", "task", "parser"}),
)
CONVENTIONS: Mapping[Library, Convention] = {
    "agentrl": NATIVE,
    "trl": Convention(
        arguments=_trl_arguments,
        read=_only,
        always=frozenset({"prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra"}),
        may_abstain=True,
    ),
    "verl": Convention(
        arguments=_verl_arguments, read=_score, always=frozenset({"data_source", "solution_str", "extra_info"})
    ),
    "verl_batch": Convention(
        arguments=_verl_batch_arguments,
        read=lambda returned: _score(_only(returned)),
        always=frozenset({"data_sources", "solution_strs", "extra_infos"}),
    ),
    "verifiers": VERIFIERS,
}
