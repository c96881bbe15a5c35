"""Rules about tasks and splits, and about the return values and actions of an environment."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import gymnasium
from gymnasium.spaces import Text
from gymnasium.utils.env_checker import check_env as check_gymnasium

from agentrl.env import StepResult
from agentrl.errors import UsageError, described_error
from agentrl.rollout.env_returns import WrongReturn, check_reset, check_step, unpack_step
from agentrl.task import Task, TaskSource
from agentrl.testing.env_session import (
    CallFailed,
    EnvSession,
    asking,
    make_environment,
    play,
    random_policy,
    watched_calls,
)
from agentrl.testing.env_subject import Subject, until
from agentrl.testing.report import RuleFailed, RuleSkipped, RuleWarned, rule

_COLOUR = re.compile(r"\x1b\[\d+m")
_STATES_TRIED = 10
"""Maximum number of states of an episode in which every admissible action is tried."""
NONSENSE = (
    "",
    " ",
    "\n\n",
    "x" * 20_000,
    "naïve 🦆 \u202e\x00",
    "<action></action>",
    '{"name": null}',
    "-1e999",
    "9" * 5000,
)


@rule("make a task only from its number; remove an empty split from `splits`")
def has_tasks(subject: Subject) -> str:
    """Every split has tasks, and returns the same task for the same number."""
    sizes = {}
    for split in subject.spec.splits_under(subject.options):
        source = subject.spec.tasks(split, **subject.options)
        if len(source) == 0:
            raise RuleFailed(f"split {split} has no tasks")
        for index in (0, len(source) - 1):
            if repr(source[index]) != repr(subject.spec.tasks(split, **subject.options)[index]):
                raise RuleFailed(f"task {index} of {split} changes when the split is made again")
        sizes[split] = len(source)
    return ", ".join(f"{split} {size:,}" for split, size in sizes.items())


@rule("give each split its own seeds, ids and content, for example by the checksum of the opening state")
def keeps_splits_apart(subject: Subject) -> str:
    """No two splits share a task: no id, no seed with the same options, and no opening state."""
    splits = subject.spec.splits_under(subject.options)
    if len(splits) < 2:
        raise RuleSkipped("only one split")
    sources = {split: subject.spec.tasks(split, **subject.options) for split in splits}
    compared, total = _compare_tasks(sources, subject), sum(map(len, sources.values()))
    openings = _compare_openings(sources, subject)
    what = "all" if compared == total else f"{compared:,} of {total:,}"
    return f"{what} tasks compared, {openings} openings"


def _compare_tasks(sources: dict[str, TaskSource], subject: Subject) -> int:
    owners: dict[int, str] = {}
    compared = 0
    for split, source in sources.items():
        for task in until(subject.effort.split_s, _some_tasks(source, subject.effort.split_tasks)):
            compared += 1
            for what, key in _identities(task).items():
                if owners.setdefault(hash((what, key)), split) != split:
                    raise RuleFailed(f"task {task.id} of {split} has the {what} of a task in another split")
    return compared


def _identities(task: Task) -> dict[str, str]:
    start = (task.seed, sorted(task.options.items()), task.prompt)
    return {"id": task.id, "seed and options": repr(start)}


def _some_tasks(source: TaskSource, most: int) -> Iterator[Task]:
    """Return all tasks, or of many tasks the first ones and others at equal distances."""
    first = range(min(len(source), most if len(source) <= most else most // 2))
    rest = range(len(first), len(source), max(1, 2 * len(source) // most))
    return (source[index] for numbers in (first, rest) for index in numbers)


def _compare_openings(sources: dict[str, TaskSource], subject: Subject) -> int:
    """Compare openings by the key of their state; return their number (0 without keys)."""
    owners: dict[str, str] = {}
    compared, shared = 0, []
    with subject.session() as session:
        if session.find("state_key") is None:
            return 0
        for split, source in sources.items():
            tasks = _some_tasks(source, subject.effort.openings)
            for task in until(subject.effort.openings_s / len(sources), tasks):
                session.reset(task)
                compared += 1
                if owners.setdefault(str(session.call("state_key")), split) != split:
                    shared.append(f"{task.id} of {split}")
    if shared:
        raise RuleWarned(f"{len(shared)} of {compared} openings occur in another split too, such as {shared[0]}")
    return compared


class _AnyText(Text):
    """Text space with any characters; the default character set lacks even the space."""

    def contains(self, x: Any) -> bool:
        """Return True for a text that is not too long."""
        return isinstance(x, str) and len(x) <= self.max_length


class _WatchedEnvironment(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wrapper for Gymnasium's checker that watches calls and works around two of the checker's faults.

    The checker treats numpy's ``False`` as a truncation, and finds ``seed`` in ``reset(**kwargs)`` only by that name.

    Args:
        env: The environment.
        task_options: Options of resets for which the checker gives none.
    """

    def __init__(self, env: Any, task_options: Mapping[str, Any]) -> None:
        super().__init__(env)
        self._task_options = dict(task_options)

    @property
    def unwrapped(self) -> Any:
        """This object, because the checker rejects wrappers."""
        return self

    @property
    def spec(self) -> Any:
        """Spec of the environment."""
        return self.env.spec

    @spec.setter
    def spec(self, value: Any) -> None:
        """Ignore the value; the environment has the spec."""

    @property
    def _np_random(self) -> Any:
        return getattr(self.env, "_np_random", None)

    @_np_random.setter
    def _np_random(self, value: Any) -> None:
        """Ignore the value; the environment has the generator."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Start an episode; missing arguments are not passed on."""
        given: dict[str, Any] = {"seed": seed, "options": options or self._task_options or options}
        with asking("reset"):
            return self.env.reset(**{name: value for name, value in given.items() if value is not None})

    def step(self, action: Any) -> Any:
        """Take an action; numpy's booleans become Python's."""
        with asking("step"):
            result = unpack_step(self.env.step(action))
        flags = (bool(result.terminated), bool(result.truncated))
        return result.observation, result.reward, *flags, result.info


@rule("fix the reported error; every other rule needs an episode")
def plays_an_episode(subject: Subject) -> str:
    """`reset(seed=..., options=...)` and `step` return valid values in time, and do not end the process."""
    try:
        with subject.session() as session:
            if subject.plays_elsewhere and subject.elsewhere.end:
                raise RuleFailed(subject.elsewhere.end)
            played = play(session, subject.tasks[0], random_policy(subject.tasks[0].seed), subject.limit)
    except (RuleFailed, UsageError, WrongReturn):
        raise
    except Exception as error:
        raise RuleFailed(f"{watched_calls().raised} raised {described_error(error)}") from error
    return f"{len(played.results)} steps"


@rule("print to standard error, or log; standard output is for the results of commands")
def keeps_standard_output_clean(subject: Subject) -> str:
    """Standard output stays empty: commands write their results there."""
    elsewhere = subject.elsewhere
    if elsewhere.output:
        raise RuleWarned(f"playing writes {elsewhere.output.splitlines()[0][:60]!r} to standard output")
    if elsewhere.unknown:
        raise RuleSkipped(elsewhere.unknown)
    return "nothing written"


@rule("follow the message; pass `seed` to `super().reset(seed=seed)`")
def keeps_gymnasium_rules(subject: Subject) -> str:
    """Gymnasium's own checker reports nothing; `Text` spaces may contain any characters."""
    env = make_environment(subject.spec.make, subject.options)
    if not isinstance(env, gymnasium.Env):
        raise RuleSkipped("an AsyncEnv is not a gymnasium.Env")
    watched = _WatchedEnvironment(env.unwrapped, subject.tasks[0].options if subject.tasks else {})
    for name in ("observation_space", "action_space"):
        space = getattr(watched, name, None)
        if isinstance(space, Text):
            setattr(watched, name, _AnyText(space.max_length))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            check_gymnasium(watched, skip_render_check=True)
        except AssertionError as error:
            raise RuleFailed(str(error)) from error
    return "; ".join(_COLOUR.sub("", str(warning.message)) for warning in caught) or "no warnings"


@rule("return values as the message says, because runs reject all others; state the true `reward_range`")
def returns_valid_values(subject: Subject) -> str:
    """Runs accept the values that `reset`, `step` and `final_reward` return, and returns are in the stated range."""
    low, high = subject.spec.reward_range
    played = subject.random_episodes
    with subject.session() as session:
        check_reset(session.start(subject.tasks[0]))
        session.call("final_reward")
    for episode in played:
        for result in episode.results:
            check_step((result.observation, result.reward, result.terminated, result.truncated, result.info))
        if episode.done and not low <= episode.total <= high:
            raise RuleFailed(f"a return is {episode.total:g}, outside the range {low:g} to {high:g}")
    return f"returns {min(e.total for e in played):g} to {max(e.total for e in played):g}"


@rule("return the episode's last observation, and wait for `reset`; state `max_turns` if nothing ends an episode")
def ends_properly(subject: Subject) -> str:
    """The last observation belongs to the episode that ended, not to the next one."""
    ended = [episode for episode in subject.random_episodes if episode.done]
    if not ended and subject.spec.turns_under(subject.options) is None and not _expert_ends(subject):
        raise RuleWarned(f"no episode ended within {subject.limit} steps, and no limit is stated: does it ever end?")
    if not ended:
        raise RuleSkipped(f"no random episode ended within {subject.limit} steps")
    told_apart = [episode for episode in ended if len(episode.moments) > 2]
    if told_apart and all(episode.moments[-1].observation == episode.moments[0].observation for episode in told_apart):
        raise RuleFailed(
            "the last observation of every episode equals its first one: does the environment reset itself?"
        )
    return f"{len(ended)} episodes ended with their own observation"


def _expert_ends(subject: Subject) -> bool:
    with suppress(RuleSkipped):
        return any(episode.done for episode in subject.expert_episodes)
    return False


@rule("list only actions that `step` accepts in this state, and at least one until the episode ends")
def accepts_admissible_actions(subject: Subject) -> str:
    """Every action that is listed as admissible is accepted, and at least one is listed until the episode ends."""
    tried = 0
    with subject.session() as session:
        can_restore = session.find("snapshot") is not None and session.find("restore") is not None
        for task in subject.tasks:
            session.reset(task)
            rng = random.Random(task.seed)
            for _ in range(min(subject.limit, _STATES_TRIED)):
                actions = _admissible(session)
                tried += _try_all(session, actions) if can_restore else 1
                if _take(session, rng.choice(actions)).done:
                    break
    how = "" if can_restore else ", one in each state: trying all needs snapshot() and restore()"
    return f"{tried} actions accepted{how}"


def _admissible(session: EnvSession) -> list[str]:
    if session.find("admissible_actions") is None:
        raise RuleSkipped("no admissible_actions()")
    actions = session.call("admissible_actions")
    if actions is None:
        raise RuleSkipped("admissible_actions() returns None")
    if not actions:
        raise RuleFailed("admissible_actions() is empty before the episode has ended")
    return list(actions)


def _try_all(session: EnvSession, actions: Sequence[str]) -> int:
    here = session.call("snapshot")
    for action in actions:
        _take(session, action)
        session.call("restore", here)
    return len(actions)


def _take(session: EnvSession, action: str) -> StepResult:
    result = session.step(action)
    if result.info.get("valid") is False:
        raise RuleFailed(f"{action!r} is listed as admissible but not accepted")
    return result


@rule('answer an invalid action with an explanation, and set `info["valid"] = False`')
def answers_invalid_actions(subject: Subject) -> str:
    """No action raises an exception: invalid actions of a model get an observation."""
    with subject.session() as session:
        for text in NONSENSE:
            session.reset(subject.tasks[0])
            try:
                result = session.step(text)
            except (CallFailed, WrongReturn):
                raise
            except Exception as error:
                raise RuleFailed(f"the action {text[:20]!r} raises {type(error).__name__}: {error}") from error
            if not isinstance(result.observation, str | tuple):
                raise RuleFailed(f"the action {text[:20]!r} is answered by a {type(result.observation).__name__}")
    return f"{len(NONSENSE)} texts answered"
