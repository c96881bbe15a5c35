"""The transcript of an episode, made here or in a new process: both must be the same."""

from __future__ import annotations

import base64
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from agentrl.task import Task
from agentrl.testing.env_calls import LONG_CALL, CallFailed, asking, run_watched, watched_calls
from agentrl.testing.env_session import EnvSession, Moment, play, random_policy

_SAID = 200
"""Bytes of the standard output that are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """What came of playing in a new process."""

    moments: Sequence[Moment] = ()
    said: str = ""
    """The beginning of what was written to standard output there."""
    unknown: str = ""
    """Why the process does not know the environment."""
    failure: str = ""
    """What the environment raised there."""
    end: str = ""
    """How it ended the process, or which call did not return."""


def transcript(make: Callable[..., Any], options: Mapping[str, Any], tasks: Sequence[Task], steps: int) -> list[Moment]:
    """What random play of some tasks shows, one after the other in one environment."""
    return _play_all(EnvSession(make, options), tasks, steps)


def _play_all(session: EnvSession, tasks: Sequence[Task], steps: int) -> list[Moment]:
    try:
        return [
            moment for task in tasks for moment in play(session, task, random_policy(task.seed), limit=steps).moments
        ]
    finally:
        session.close()


def transcript_of_new_process(
    make: Callable[..., Any], options: Mapping[str, Any], tasks: Sequence[Task], steps: int
) -> Elsewhere:
    """`transcript`, made by a new Python process with other hash seeds, which ends whatever the environment does."""
    calls = watched_calls()
    try:
        request = base64.b64encode(pickle.dumps((calls.limit_s, list(tasks), steps))) + b"\n"
        request += base64.b64encode(pickle.dumps((make, dict(options))))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        return Elsewhere(unknown=f"the environment cannot be sent to a new process: {error}")
    path = os.pathsep.join(entry for entry in sys.path if entry)
    with tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as errors:
        asked.write(request)
        asked.seek(0)
        child = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import main; main()"],
            stdin=asked,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, "PYTHONPATH": path},
        )
        calls.processes.append(child)
        with child:
            answer = b"" if child.stdout is None else child.stdout.readline()
        if answer:
            found = json.loads(answer)
            return Elsewhere(**found | {"moments": [Moment(*row) for row in found.get("moments", ())]})
        errors.seek(0)
        reason = errors.read().decode(errors="replace").strip().splitlines()[-1:]
    said = f": {reason[0]}" if reason else ""
    return Elsewhere(end=f"the environment ended the process that played it (exit code {child.returncode}){said}")


def main() -> None:
    """Answer the request on standard input with a line of JSON, and leave, whatever threads there are."""
    answer = os.dup(1)
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 1)
        limit, request = (base64.b64decode(line) for line in sys.stdin.buffer.read().splitlines())
        limit_s, tasks, steps = pickle.loads(limit)
        try:
            found = run_watched(lambda: _play_requested(request, tasks, steps), limit_s)
        except CallFailed as failed:
            found = {"end": str(failed)}
        except KeyboardInterrupt:
            os._exit(1)
        with suppress(ValueError):  # the environment may have closed it
            sys.stdout.flush()
        found["said"] = os.pread(said.fileno(), _SAID, 0).decode(errors="replace")
    with os.fdopen(answer, "w") as stream:
        stream.write(f"{json.dumps(found)}\n")
    os._exit(0)


def _play_requested(request: bytes, tasks: Sequence[Task], steps: int) -> dict[str, Any]:
    try:
        with asking("importing the environment", times=LONG_CALL):
            make, options = pickle.loads(request)
        session = EnvSession(make, options)
    except CallFailed:
        raise
    except Exception as error:
        return {"unknown": f"a new process cannot make the environment: {type(error).__name__}: {error}"}
    try:
        return {"moments": _play_all(session, tasks, steps)}
    except CallFailed:
        raise
    except Exception as error:
        return {"failure": f"{type(error).__name__}: {error}"}
