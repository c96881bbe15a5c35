"""Snapshots, and keys of states."""

from __future__ import annotations

import json

from agentrl.testing.env_rules.comparing import require_equal
from agentrl.testing.env_session import EnvSession, Moment, moment_of, play, random_policy
from agentrl.testing.env_subject import Broken, Finding, Missing, Subject

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
