"""Snapshots."""

from __future__ import annotations

import json

from agentrl.testing.env_rules.comparing import require_equal
from agentrl.testing.env_session import EnvSession, Moment, moment_of, play, random_policy
from agentrl.testing.env_subject import Broken, Finding, Missing, Subject

_STEPS_AFTER = 10


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
