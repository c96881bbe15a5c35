"""Rewards from plain functions, ``def reward(trajectory, task) -> float``, and weighted sums of them.

Functions written for TRL, verl and verifiers are called as in these libraries (`reward_conventions`).

Blocking functions run in a separate thread, one call after another; ``async`` functions run concurrently in the event
loop. An exception, or a result that is not a number, is a `RewardFailure`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.config.environment import AgentConfig
from agentrl.config.function_options import convert_options, unknown_option
from agentrl.errors import (
    A_REWARD,
    ConfigError,
    RewardFailure,
    SourceLocation,
    bounded_reward,
    is_addressed_to,
    running_task,
    shorten,
    with_location,
)
from agentrl.errors.deadlines import async_boundary
from agentrl.errors.foreign import await_or_abandon
from agentrl.registry import Kind, lookup
from agentrl.reward import Score, Scorer, checked_score, defined_in, failures_named, weighted
from agentrl.rollout.env_workers import ThreadWorker
from agentrl.rollout.reward_conventions import (
    CONVENTIONS,
    EXPECTED,
    NATIVE,
    TRL,
    VERIFIERS,
    Convention,
    is_reversed,
    library_of,
)
from agentrl.rollout.tools import gather_in_order
from agentrl.task import Task, TaskSource, copy_containers
from agentrl.trajectory import Trajectory

REWARD_DEADLINE_S = 60.0
SIGNATURE = "def reward(trajectory, task) -> float"
_BY_NAME = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedReward:
    """One part of a reward."""

    name: str
    """Name in metrics (``reward/component/NAME``) and in ``trajectory.reward_components``."""
    weight: float
    scorer: Scorer


class WeightedSum(Scorer):
    """Weighted sum of several rewards; each unweighted reward is recorded as a component under its name."""

    def __init__(self, parts: Sequence[WeightedReward]) -> None:
        self._parts = parts

    @property
    def definitions(self) -> Mapping[str, SourceLocation | None]:
        """Source locations of all parts."""
        return {name: location for part in self._parts for name, location in part.scorer.definitions.items()}

    @property
    def functions(self) -> Sequence[FunctionReward]:
        """Parts that are functions."""
        return [part.scorer for part in self._parts if isinstance(part.scorer, FunctionReward)]

    async def score(self, trajectory: Trajectory, task: Task) -> Score:
        """Return the weighted sum over the parts that return a reward; ``None`` if no part does."""
        scores = await gather_in_order([checked_score(part.scorer, trajectory, task) for part in self._parts])
        components: dict[str, float] = {}
        sources: dict[str, float] = {}
        total: float | None = None
        for part, score in zip(self._parts, scores, strict=True):
            components |= score.components
            if score.reward is not None:
                components[part.name] = score.reward
                total = (total or 0.0) + part.weight * score.reward
                sources |= weighted(score.sources or {part.name: score.reward}, part.weight)
        return Score(reward=total, components=components, sources=sources)


class FunctionReward(Scorer):
    """Scorer that calls a function.

    Blocking functions run in `thread`; each call gets the `options`.

    Raises:
        ConfigError: the function is not callable, or takes other arguments.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        options: Mapping[str, Any],
        thread: ThreadWorker,
        *,
        deadline_s: float = REWARD_DEADLINE_S,
    ) -> None:
        self._location, self._subject = defined_in(function), f"reward function {name}"
        self._where = with_location(self._subject, self._location)
        if not callable(function) or inspect.isclass(function):
            raise _not_callable(self._where, function)
        self._function, self._options, self._thread, self._deadline_s = function, options, thread, deadline_s
        self._signature = _signature(function)
        self._convention = self._find_convention()
        if self._convention is VERIFIERS and isinstance(options.get("parser"), str):
            self._options = {**options, "parser": lookup(Kind.REWARD, options["parser"])}
        self._may_abstain = self._convention.may_abstain or _may_return_none(self._signature)
        self._check_arguments()

    def _find_convention(self) -> Convention:
        library = library_of(self._signature)
        if library is not None:
            return CONVENTIONS[library]
        if is_reversed(self._signature):
            raise self._misfit("the trajectory must come first, then the task")
        if next(iter(self._signature.parameters), None) == "self":
            raise self._misfit("this is a method of the class; make an object of it, and give the object's method")
        raise self._misfit("the names of its parameters match no known signature")

    def _check_arguments(self) -> None:
        """Check that a function takes its convention's arguments and its options; convert those of shipped ones."""
        parameters = self._signature.parameters
        if self._convention is TRL and "environments" in self.required_columns:
            raise ConfigError(
                f"{self._where} needs TRL's environments",
                got=f"{getattr(self._function, '__name__', 'it')}{self._signature}",
                expected="completions, prompts, completion_ids or columns: the objects may be in other processes here",
                hint="let the environment give the reward, by its method get_reward() or its attribute reward, and "
                "remove the function from agent.reward",
            )
        if self._convention is NATIVE and not _takes_any_name(self._signature):
            named = [name for name, parameter in list(parameters.items())[2:] if parameter.kind in _BY_NAME]
            for name in self._options:
                if name not in named:
                    raise unknown_option(self._where, name, named)
        if _is_shipped(self._function):
            self._options = convert_options(self._subject, self._function, self._options)
        try:
            if self._convention is NATIVE:
                self._signature.bind(None, None, **self._options)
            elif not _takes_any_name(self._signature):
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
        """Source location of the function."""
        return {self._subject: self._location}

    async def score(self, trajectory: Trajectory, task: Task) -> Score:
        """Call the function; raise `RewardFailure` if it raises, hangs, or does not return a finite number."""
        what = f"{self._where} on task {task.id}"
        with failures_named(what, self._location, subject=self._subject):
            return Score(reward=self._number(what, await self._run(what, trajectory, task)))

    async def _run(self, what: str, trajectory: Trajectory, task: Task) -> Any:
        if inspect.iscoroutinefunction(self._function) or inspect.iscoroutinefunction(type(self._function).__call__):
            returned = self._call_named(what, trajectory, task)
        else:
            work = functools.partial(self._call_named, what, trajectory, task)
            returned = await self._thread.submit(work, what=what, deadline_s=self._deadline_s, failure=RewardFailure)
        if inspect.isawaitable(returned):
            returned = await self._await_result(what, returned)
        return self._convention.read(returned)

    def _call(self, trajectory: Trajectory, task: Task) -> Any:
        convention, options = self._convention, copy_containers(self._options)
        if convention is NATIVE:
            return self._function(trajectory, task, **options)
        given = {**convention.arguments(trajectory, task), **options}
        takes_all = _takes_any_name(self._signature)
        names = given if takes_all else self._signature.parameters
        return self._function(**{name: given[name] for name in names if name in given})

    @property
    def required_columns(self) -> Sequence[str]:
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
        """Check that a task's row has every column that the function needs; a null counts as a value.

        Raises:
            ConfigError: the row lacks columns.
        """
        columns = {*task.columns, *(("ground_truth",) if task.ground_truth is not None else ())}
        aliases = {"ground_truths", "answer" if self._convention is VERIFIERS else "ground_truth"}
        known = columns | (aliases if "ground_truth" in columns else set())
        if self._convention is VERIFIERS and task.ground_truth is None and task.columns.get("answer") is None:
            known -= {"answer"}
        missing = [name for name in self.required_columns if name not in known]
        if missing:
            raise ConfigError(
                f"{self._where} needs columns that task {task.id} does not have",
                got=f"the columns {', '.join(sorted(columns)) or 'prompt only'}",
                expected=", ".join(missing),
                hint="rename the columns of the file, give the function's parameters defaults, or write null where a "
                "column does not apply",
            )

    def _call_named(self, what: str, trajectory: Trajectory, task: Task) -> Any:
        with failures_named(what, self._location, subject=self._subject):
            return self._call(trajectory, task)

    async def _await_result(self, what: str, work: Awaitable[Any]) -> Any:
        """Await a coroutine; if it cancels itself, it has failed, and the episode is not cancelled."""

        async def run() -> Any:
            with failures_named(what, self._location, subject=self._subject):
                return await work

        caller = running_task()
        async with async_boundary(RewardFailure, what, deadline_s=self._deadline_s):
            try:
                return await await_or_abandon(run(), what)
            except asyncio.CancelledError as error:
                if is_addressed_to(caller, error):
                    raise
                raise RewardFailure(f"{what} failed", got="a coroutine that was cancelled from within") from error

    def _number(self, what: str, value: Any) -> float | None:
        if value is None and self._may_abstain:
            return None
        number = bounded_reward(value)
        if number is None:
            hint = "annotate it with -> float | None if None means that it does not apply" if value is None else None
            raise RewardFailure(
                f"{what} did not return a reward",
                got=f"{type(value).__name__} {shorten(value)}",
                expected=f"{A_REWARD}: float, int or bool",
                hint=hint,
            )
        return number


def _not_callable(where: str, found: object) -> ConfigError:
    """Return the error for a class, or an object that is not a function; it says what to give instead of a class."""
    if not inspect.isclass(found):
        return ConfigError(f"{where} cannot be called", got=type(found).__name__, expected=SIGNATURE)
    hint = "write a function; or a class whose __call__ takes the same arguments, and give an object of it"
    if inspect.isfunction(inspect.getattr_static(found, "__call__", None)):
        hint = f"make an object of the class, reward = {found.__name__}(), and give that instead"
    elif hasattr(found, "score"):
        hint = "derive the class from agentrl.reward.Scorer"
    return ConfigError(f"{where} cannot be called", got="a class", expected=SIGNATURE, hint=hint)


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except ValueError:  # some functions written in C have no signature
        return inspect.Signature([inspect.Parameter("anything", inspect.Parameter.VAR_POSITIONAL)])


def _takes_any_name(signature: inspect.Signature) -> bool:
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in signature.parameters.values())


def _is_shipped(function: Callable[..., Any]) -> bool:
    return str(getattr(function, "__module__", "")).startswith("agentrl.")


def _may_return_none(signature: inspect.Signature) -> bool:
    annotation = signature.return_annotation
    words = annotation if isinstance(annotation, str) else str(annotation)
    return ("None" in words or "Optional" in words) and words not in ("None", "<class 'NoneType'>")


def find_reward(config: AgentConfig, thread: ThreadWorker) -> Scorer:
    """Build the scorer of ``agent.reward``: a single scorer, or the weighted sum of several rewards.

    Functions that block run in `thread`.

    Raises:
        UnknownNameError: a reward function does not exist.
        ConfigError: an object is not a reward function, does not accept an option, or has the name of another one.
    """
    entries = [{"name": entry} if isinstance(entry, str) else entry for entry in config.reward]
    found = [_make_scorer(entry, thread) for entry in entries]
    if len(found) == 1 and not isinstance(found[0], FunctionReward) and entries[0].get("weight", 1) == 1:
        return found[0]
    labels = reward_labels([str(entry["name"]) for entry in entries])
    return WeightedSum(
        [
            WeightedReward(name=label, weight=float(entry.get("weight", 1.0)), scorer=scorer)
            for label, entry, scorer in zip(labels, entries, found, strict=True)
        ]
    )


def _make_scorer(entry: Mapping[str, Any], thread: ThreadWorker) -> Scorer:
    name = str(entry["name"])
    options = {key: value for key, value in entry.items() if key not in ("name", "weight")}
    target = lookup(Kind.REWARD, name)
    if isinstance(target, Scorer):
        if options:
            raise ConfigError(f"reward {name} does not accept options", got=", ".join(options), expected="none")
        return target
    if inspect.isclass(target) and issubclass(target, Scorer):
        try:
            return target(**options)
        except TypeError as error:
            raise ConfigError(f"options of reward {name} are invalid", got=error) from error
    return FunctionReward(name, target, options, thread)


def reward_labels(names: Sequence[str]) -> list[str]:
    """Return short names of rewards, or full ones where the short ones are equal."""
    short = [name.rpartition(":")[2].rpartition(".")[2] for name in names]
    return [name if short.count(label) > 1 else label for name, label in zip(names, short, strict=True)]


def check_columns(agent: AgentConfig, tasks: Callable[[], TaskSource]) -> None:
    """Check that tasks have the columns that reward functions request as parameters.

    `tasks` is called only if a function requests columns. All rows of a file are checked, or the first generated task.

    Raises:
        UnknownNameError: a reward function does not exist.
        ConfigError: an object is not a reward function, or a task lacks a column.
        UsageError: the tasks cannot be read.
    """
    scorer = find_reward(agent, ThreadWorker())
    asking = [one for one in scorer.functions if one.required_columns] if isinstance(scorer, WeightedSum) else []
    if not asking:
        return
    source = tasks()
    has_rows = isinstance(source, list) or getattr(source, "has_rows", False)
    for number in range(len(source) if has_rows else 1):
        for function in asking:
            function.check_columns(source[number])
