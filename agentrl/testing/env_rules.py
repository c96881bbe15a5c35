"""The rules of an environment, one function each: it says what it found, or raises `Broken` or `Missing`."""

from __future__ import annotations

import json
import math
import re
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
from gymnasium.spaces import Text
from gymnasium.utils.env_checker import check_env as check_gymnasium

from agentrl.env import AsyncEnv, Isolation
from agentrl.errors import EnvironmentFailure
from agentrl.testing.env_session import (
    EnvSession,
    Moment,
    Played,
    Policy,
    expert_policy,
    moment_of,
    play,
    random_policy,
)
from agentrl.testing.env_subject import Broken, Missing, Subject
from agentrl.testing.env_transcript import transcript, transcript_of_new_process

_COLOUR = re.compile(r"\x1b\[\d+m")
INLINE_STEP_MS = 2.0
"""Median milliseconds of a step from which an environment must not run inside the event loop."""


class _AnyText(Text):
    """Text of any characters: a space's default character set has not even a blank."""

    def contains(self, x: Any) -> bool:
        """Text that is not too long."""
        return isinstance(x, str) and len(x) <= self.max_length


def keeps_gymnasium_rules(subject: Subject) -> str:
    """Gymnasium's own checker finds nothing; `Text` spaces may hold any characters."""
    env = subject.spec.make(**subject.options)
    if not isinstance(env, gymnasium.Env):
        raise Missing("an AsyncEnv is no gymnasium.Env")
    bare = env.unwrapped
    for name in ("observation_space", "action_space"):
        space = getattr(bare, name, None)
        if isinstance(space, Text):
            setattr(bare, name, _AnyText(space.max_length))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            check_gymnasium(bare, skip_render_check=True)
        except AssertionError as error:
            raise Broken(str(error)) from error
    return "; ".join(_COLOUR.sub("", str(warning.message)) for warning in caught) or "no complaints"


def has_tasks(subject: Subject) -> str:
    """Every split has tasks, and no two splits share one."""
    sizes = {}
    owners: dict[str, str] = {}
    for split in subject.spec.splits:
        source = subject.spec.tasks(split, **subject.options)
        sizes[split] = len(source)
        for index in range(min(len(source), 1000)):
            task = source[index]
            if owners.setdefault(repr((task.seed, sorted(task.options.items()))), split) != split:
                raise Broken(f"task {task.id} of {split} is also one of another split")
    return ", ".join(f"{split} {size:,}" for split, size in sizes.items())


def is_deterministic(subject: Subject) -> str:
    """A second environment gives the same episodes."""
    first, second = (transcript(subject.spec.make, subject.options, subject.tasks, subject.limit) for _ in range(2))
    _require_equal(first, second, "two environments differ")
    return f"{len(first)} observations equal"


def is_the_same_everywhere(subject: Subject) -> str:
    """Another process gives the same episodes."""
    arguments = (subject.spec.make, subject.options, subject.tasks, subject.limit)
    try:
        elsewhere = transcript_of_new_process(*arguments)
    except EnvironmentFailure as error:
        if subject.spec.isolation_under(subject.options) is Isolation.PROCESS:
            raise Broken(f"{error.what}: {error.got}") from error
        raise Missing(f"{error.what}: {error.got}; name it module:EnvId to run it in worker processes") from error
    _require_equal(transcript(*arguments), elsewhere, "two processes differ")
    return f"{len(elsewhere)} observations equal"


def resets_completely(subject: Subject) -> str:
    """Nothing of an episode, finished or not, shows in the next one."""
    task = subject.tasks[0]
    with subject.session() as session:
        fresh = play(session, task, random_policy(task.seed), subject.limit)
        for other, steps in zip(subject.tasks, (1, 3, subject.limit), strict=False):
            play(session, other, random_policy(other.seed + 1), steps)
        again = play(session, task, random_policy(task.seed), subject.limit)
    _require_equal(fresh.moments, again.moments, "an episode depends on those before it")
    return "an episode is the same after others"


def speaks_properly(subject: Subject) -> str:
    """Observations are text or parts, flags are booleans, rewards are finite, returns are in the stated range."""
    low, high = subject.spec.reward_range
    played = subject.play_randomly()
    for episode in played:
        for result in episode.results:
            if not isinstance(result.observation, str | tuple):
                raise Broken(f"an observation is a {type(result.observation).__name__}, not text or parts")
            if not math.isfinite(result.reward):
                raise Broken(f"a reward is {result.reward}")
            if type(result.terminated).__name__ != "bool" or type(result.truncated).__name__ != "bool":
                raise Broken("terminated and truncated must be True or False")
        if episode.done and not low <= episode.total <= high:
            raise Broken(f"a return is {episode.total:g}, outside {low:g} to {high:g}")
    return f"returns {min(e.total for e in played):g} to {max(e.total for e in played):g}"


def ends_properly(subject: Subject) -> str:
    """The last observation belongs to the episode that ended, not to a next one."""
    ended = [episode for episode in subject.play_randomly() if episode.done]
    if not ended:
        raise Missing(f"no random episode ended within {subject.limit} steps")
    told_apart = [episode for episode in ended if len(episode.moments) > 2]
    if told_apart and all(episode.moments[-1].observation == episode.moments[0].observation for episode in told_apart):
        raise Broken("the last observation of every episode is its first one again: does the environment reset?")
    return f"{len(ended)} episodes ended with an observation of their own"


def accepts_admissible_actions(subject: Subject) -> str:
    """Every action that is called admissible is understood."""
    tried = 0
    with subject.session() as session:
        for task in subject.tasks:
            session.reset(task)
            walk = random_policy(task.seed)
            for _ in range(min(subject.limit, 10)):
                tried += _try_admissible(session)
                if session.step(walk(session, "")).done:
                    break
    return f"{tried} actions accepted"


def _try_admissible(session: EnvSession) -> int:
    actions = session.call("admissible_actions")
    if actions is None:
        raise Missing("no admissible_actions()")
    if session.find("restore") is None:
        raise Missing("no snapshot() and restore() to try them all from one state")
    here = session.call("snapshot")
    for action in actions:
        if session.step(action).info.get("valid") is False:
            raise Broken(f"{action!r} is called admissible, but not accepted")
        session.call("restore", here)
    return len(actions)


def restores_snapshots(subject: Subject) -> str:
    """A snapshot is plain data, and an episode goes on from it in another environment as it did here."""
    task = subject.tasks[0]
    with subject.session() as session, subject.session() as other:
        if session.find("snapshot") is None or session.find("restore") is None:
            raise Missing("no snapshot() and restore()")
        for steps in (3, 2, 1, 0):  # an episode may be over after one step
            if not play(session, task, random_policy(task.seed), limit=steps).done:
                break
        key, saved = session.call("state_key"), json.dumps(session.call("snapshot"))
        here = _walk(session, task.seed)
        other.call("restore", json.loads(saved))
        if other.call("state_key") != key:
            raise Broken("state_key() differs after restore()")
        _require_equal(here, _walk(other, task.seed), "the episode goes on differently after restore()")
    return f"{len(saved)} bytes; {len(here)} steps equal after restore()"


def _walk(session: EnvSession, seed: int) -> list[Moment]:
    policy, moments = random_policy(seed + 1), list[Moment]()
    for _ in range(10):
        action = policy(session, "")
        result = session.step(action)
        moments.append(moment_of(action, result))
        if result.done:
            break
    return moments


def is_solved_by_its_expert(subject: Subject) -> str:
    """The expert reaches the stated score."""
    with subject.session() as session:
        if session.find("expert") is None:
            raise Missing("no expert()")
    return _score(subject, "expert", subject.play(lambda _task: expert_policy()))


def survives_mistakes(subject: Subject) -> str:
    """The expert's mistakes change nothing: it reaches its score with them, too."""
    with subject.session() as session:
        session.reset(subject.tasks[0])
        if session.find("expert") is None or not hasattr(session.call("expert"), "mistake"):
            raise Missing("no mistake() of an expert")
    return _score(subject, "expert", subject.play(lambda task: expert_policy(mistakes=0.2, seed=task.seed)))


def has_a_random_score(subject: Subject) -> str:
    """The random policy's success, the lower bound; nothing can be wrong with it."""
    return _score(subject, "random", subject.play_randomly())


def _score(subject: Subject, policy: str, played: Sequence[Played]) -> str:
    verdicts = [episode.is_solved(subject.spec) for episode in played]
    steps = statistics.fmean(len(episode.results) for episode in played)
    if None in verdicts:
        return f"mean return {statistics.fmean(e.total for e in played):g}, {steps:.1f} steps; no success to tell"
    solved = sum(map(bool, verdicts))
    if policy == "expert" and subject.spec.scores.get(policy) == 1 and solved < len(played):
        failed = [task.id for task, verdict in zip(subject.tasks, verdicts, strict=True) if not verdict]
        raise Broken(f"the expert is said to solve everything, but not {', '.join(failed[:3])}")
    return f"{solved} of {len(played)} solved, {steps:.1f} steps on average"


def is_as_fast_as_it_says(subject: Subject) -> str:
    """Inside the event loop only what takes far less than a model's turn may run."""
    resets, steps = [], []
    with subject.session() as session:
        for task in subject.tasks:
            start = time.perf_counter()
            session.reset(task)
            resets.append(1000 * (time.perf_counter() - start))
            steps += _timed_steps(session, random_policy(task.seed), min(subject.limit, 20))
    step = statistics.median(steps)
    is_inline = subject.spec.isolation_under(subject.options) is Isolation.INLINE
    if is_inline and not isinstance(session.env, AsyncEnv) and step > INLINE_STEP_MS:
        raise Broken(f"a step takes {step:.2f} ms: declare isolation THREAD or PROCESS")
    return f"reset {statistics.median(resets):.3f} ms, step {step:.3f} ms (medians)"


def _timed_steps(session: EnvSession, policy: Policy, count: int) -> list[float]:
    """Milliseconds of each step of random play."""
    times: list[float] = []
    for _ in range(count):
        action = policy(session, "")
        start = time.perf_counter()
        done = session.step(action).done
        times.append(1000 * (time.perf_counter() - start))
        if done:
            break
    return times


def _require_equal(first: Sequence[Moment], second: Sequence[Moment], what: str) -> None:
    for number, (one, other) in enumerate(zip(first, second, strict=False)):
        if repr(one) != repr(other):  # nan is not equal to itself
            raise Broken(f"{what} at observation {number}: {one.observation[:60]!r} and {other.observation[:60]!r}")
    if len(first) != len(second):
        raise Broken(f"{what} in length: {len(first)} and {len(second)} observations")


RULES: tuple[Callable[[Subject], str], ...] = (
    keeps_gymnasium_rules,
    has_tasks,
    is_deterministic,
    is_the_same_everywhere,
    resets_completely,
    speaks_properly,
    ends_properly,
    accepts_admissible_actions,
    restores_snapshots,
    is_solved_by_its_expert,
    survives_mistakes,
    has_a_random_score,
    is_as_fast_as_it_says,
)
"""In the order of the report."""
