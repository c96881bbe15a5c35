"""The same task is the same episode, wherever and after whatever it is played; another task is another one.

- Two plays of one task must show the same.
- Snapshots, and keys of states.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Sequence

from agentrl.env import Isolation
from agentrl.task import Task
from agentrl.testing.env_session import (
    EnvSession,
    Moment,
    moment_of,
    play,
    random_policy,
)
from agentrl.testing.env_subject import (
    Broken,
    Finding,
    Missing,
    Subject,
    Suspect,
    transcript,
    until,
)


def require_equal(first: Sequence[Moment], second: Sequence[Moment], what: str) -> None:
    """Do nothing when both show the same.

    Raises:
        Broken: names the first moment that differs.
    """
    for number, (one, other) in enumerate(zip(first, second, strict=False)):
        if repr(one) != repr(other):  # nan is not equal to itself
            raise Broken(f"{what} at observation {number}: {_difference(one, other)}")
    if len(first) != len(second):
        raise Broken(f"{what} in length: {len(first)} and {len(second)} observations")


def _difference(one: Moment, other: Moment) -> str:
    if one.observation != other.observation:
        return f"{one.observation[:60]!r} and {other.observation[:60]!r}"
    field = next(name for name in Moment._fields if repr(getattr(one, name)) != repr(getattr(other, name)))
    return f"{field} {getattr(one, field)!r} and {getattr(other, field)!r}"


_TASKS_COMPARED = 32
"""Not more: a small world may have a hundred different episodes, and that is no fault."""
_STEPS_COMPARED = 5
"""Steps in which different tasks may show that they differ; all are played by the same random policy."""


def is_deterministic(subject: Subject) -> Finding:
    """A second environment gives the same episodes."""
    second = transcript(subject.spec.make, subject.options, subject.tasks, subject.limit)
    require_equal(subject.transcript, second, "two environments differ")
    return Finding(detail=f"{len(second)} observations equal")


def is_the_same_everywhere(subject: Subject) -> Finding:
    """Another process gives the same episodes."""
    elsewhere = subject.elsewhere
    if elsewhere.unknown and subject.spec.isolation_under(subject.options) is not Isolation.PROCESS:
        hint = "" if ":" in subject.spec.name else "; name it module:EnvId to run it in worker processes"
        raise Missing(f"{elsewhere.unknown}{hint}")
    if problem := elsewhere.unknown or elsewhere.failure or elsewhere.end:
        raise Broken(problem)
    require_equal(subject.transcript, elsewhere.moments, "two processes differ")
    return Finding(detail=f"{len(elsewhere.moments)} observations equal")


def resets_completely(subject: Subject) -> Finding:
    """Nothing of an episode, finished or abandoned, shows in the next one."""
    task = subject.tasks[0]
    with subject.session() as session:
        fresh = play(session, task, random_policy(task.seed), subject.limit)
        for number, steps in enumerate((1, 0, 3, subject.limit)):
            other = subject.tasks[number % len(subject.tasks)]
            play(session, other, random_policy(other.seed + 1), steps)
        again = play(session, task, random_policy(task.seed), subject.limit)
    require_equal(fresh.moments, again.moments, "an episode depends on those before it")
    return Finding(detail="an episode is the same after others")


def differs_between_tasks(subject: Subject) -> Finding:
    """Different tasks are different episodes: a seed or an option changes what is seen, or what is hidden."""
    count = min(subject.effort.openings, _TASKS_COMPARED, len(subject.source))
    if count < 2:
        raise Missing("one task")
    seen: set[str] = set()
    with subject.session() as session:
        numbers = list(until(subject.effort.openings_s, range(count)))
        for number in numbers:
            seen.add(_evidence(session, subject.source[number], min(subject.limit, _STEPS_COMPARED)))
        if 2 * len(seen) >= len(numbers) > 1:
            return Finding(detail=f"{len(seen)} different episodes in {len(numbers)} tasks")
        hidden = {_hidden_state(session, subject.source[number]) for number in numbers}
    return _judge_hidden(len(numbers), seen, hidden)


def _judge_hidden(played: int, seen: set[str], hidden: set[str | None]) -> Finding:
    """Few tasks look different: what they hide decides."""
    different = max(len(seen), len(hidden))
    if None in hidden:
        raise Suspect(f"{played} tasks look like {len(seen)}, and their state cannot be compared: give it state_key()")
    if different == 1:
        raise Broken(f"{played} tasks are one and the same episode: do their seeds or options count?")
    if 2 * different < played:
        raise Suspect(f"only {different} different episodes in {played} tasks")
    return Finding(detail=f"{played} tasks look like {len(seen)}; they hide {len(hidden)} different states")


def _evidence(session: EnvSession, task: Task, steps: int) -> str:
    """What a task shows: its state where it can be told, else its first steps."""
    observation = session.reset(task)
    key = session.call("state_key")
    if key is not None:
        return repr((observation, key))
    return repr(play(session, task, random_policy(0), steps).moments)


def _hidden_state(session: EnvSession, task: Task) -> str | None:
    """Checksum of the attributes of an environment that begins a task; ``None`` where they are no plain data.

    Generators are left out: they differ with the seed even where nothing is drawn.
    """
    session.reset(task)
    bare = getattr(session.env, "unwrapped", session.env)
    state = {name: value for name, value in vars(bare).items() if not name.startswith("_np_random")}
    try:
        return hashlib.sha256(pickle.dumps(state)).hexdigest()
    except Exception:  # whatever an attribute raises: it is no plain data
        return None


_STEPS_AFTER = 10


def has_keys_of_its_states(subject: Subject) -> Finding:
    """`state_key()` is text, and the same for the same state: asked twice, and in another environment."""
    compared = 0
    with subject.session() as session, subject.session() as other:
        if session.find("state_key") is None:
            raise Missing("no state_key()")
        for task, played in zip(subject.tasks, subject.alone, strict=False):
            is_same = session.reset(task) == other.reset(task)
            _require_equal_keys(session, other)
            for action in played.actions:
                is_same = is_same and session.step(action).observation == other.step(action).observation
                if not is_same:  # another rule's finding
                    break
                _require_equal_keys(session, other)
                compared += 1
    return Finding(detail=f"{compared} states have the same key twice")


def _require_equal_keys(session: EnvSession, other: EnvSession) -> None:
    key = session.call("state_key")
    if not isinstance(key, str):
        raise Broken(f"state_key() gave a {type(key).__name__}, expected text")
    if session.call("state_key") != key:
        raise Broken("state_key() gives another key when it is asked twice")
    if other.call("state_key") != key:
        raise Broken("state_key() differs between two environments after the same actions")


def restores_snapshots(subject: Subject) -> Finding:
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
        if session.find("tools") and not other.find("tools"):  # a remote environment hears of them in its first reset
            other.reset(task)
        other.call("restore", json.loads(saved))
        if other.call("state_key") != key:
            raise Broken("state_key() differs after restore()")
        require_equal(here, _walk(other, task.seed), "the episode goes on differently after restore()")
    return Finding(detail=f"{len(saved)} bytes; {len(here)} steps equal after restore()")


def _walk(session: EnvSession, seed: int) -> list[Moment]:
    policy, moments = random_policy(seed + 1), list[Moment]()
    for _ in range(_STEPS_AFTER):
        action = policy(session, "")
        result = session.step(action)
        moments.append(moment_of(action, result))
        if result.done:
            break
    return moments
