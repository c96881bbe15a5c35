"""The transcript of an episode, made here or in a new process: both must be the same."""

from __future__ import annotations

import base64
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentrl.errors import EnvironmentFailure
from agentrl.task import Task
from agentrl.testing.env_session import EnvSession, Moment, play, random_policy


def transcript(make: Callable[..., Any], options: Mapping[str, Any], tasks: Sequence[Task], steps: int) -> list[Moment]:
    """What random play of some tasks shows, one after the other in one environment."""
    session = EnvSession(make, options)
    try:
        return [
            moment for task in tasks for moment in play(session, task, random_policy(task.seed), limit=steps).moments
        ]
    finally:
        session.close()


def transcript_of_new_process(
    make: Callable[..., Any], options: Mapping[str, Any], tasks: Sequence[Task], steps: int
) -> list[Moment]:
    """`transcript`, made by a new Python process with other hash seeds.

    Raises:
        EnvironmentFailure: the process failed; an environment that is not importable by name is one reason.
    """
    try:
        request = base64.b64encode(pickle.dumps((make, dict(options), list(tasks), steps)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise EnvironmentFailure("the environment cannot be sent to a new process", got=error) from error
    path = os.pathsep.join(entry for entry in sys.path if entry)
    child = subprocess.run(
        [sys.executable, "-m", "agentrl.testing.env_transcript"],
        input=request,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    if child.returncode:
        reason = child.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise EnvironmentFailure("a new process could not play the environment", got=" ".join(reason))
    return [Moment(*row) for row in json.loads(child.stdout.splitlines()[-1])]


def main() -> None:
    """Answer the request on standard input with a line of JSON."""
    request = pickle.loads(base64.b64decode(sys.stdin.buffer.read()))
    print(json.dumps(transcript(*request)))


if __name__ == "__main__":
    main()
