"""What an environment's own sandbox shows to the programs of the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentrl.testing.env_session import EnvSession
from agentrl.testing.env_subject import Broken, Finding, Missing, Subject

LOOKED_AT = 4
"""Tasks."""


def keeps_secrets_out_of_the_sandbox(subject: Subject) -> Finding:
    """No hidden test and no solution can be read where the policy acts, neither at first nor after a step.

    ``visible()`` gives the texts of what can be read there by place, ``secrets()`` the texts that must not be.
    """
    read = 0
    with subject.session() as session:
        if session.find("visible") is None or session.find("secrets") is None:
            raise Missing("no visible() and secrets(), which tell of a sandbox")
        tasks = subject.tasks[:LOOKED_AT]
        for task in tasks:
            session.reset(task)
            read += _look(session)
            if not session.step("").done:
                read += _look(session)
    return Finding(detail=f"{read} things read, {len(tasks)} tasks", figures={"read": float(read)})


def _look(session: EnvSession) -> int:
    """How much is shown.

    Raises:
        Broken: a secret.
    """
    shown: Mapping[str, str] = session.call("visible")
    secrets: Sequence[str] = session.call("secrets")
    for place, text in shown.items():
        for secret in filter(str.strip, secrets):
            if secret in text:
                raise Broken(f"{place} shows {secret[:60]!r}")
    return len(shown)
