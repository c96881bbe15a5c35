"""Environment that records its resets and steps in a ledger outside the run's folder."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import resource
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, SupportsFloat

import gymnasium

from agentrl.env import EnvironmentSpec, Isolation, optional_part
from agentrl.env.lookup import resolve_environment, spec_of
from agentrl.errors import UsageError

IDENTITY_BITS = 31
UNIT = 2.0**-40
"""Smallest unit of `LedgerEnv` rewards: the fraction that identifies an episode is a multiple of it, below 2^-9."""


class Ledger:
    """Append-only file of events, one JSON object per line; any number of processes may write to it."""

    def __init__(self, path: str | Path) -> None:
        self._path = path

    def append(self, event: str, **values: Any) -> None:
        """Write an event and sync it to disk, ignoring the process's limit on file sizes."""
        # clock_gettime, because a fault may move this process's time.time
        head = {"event": event, "pid": os.getpid(), "time": time.clock_gettime(time.CLOCK_REALTIME)}
        line = json.dumps({**head, **values}).encode() + b"\n"
        with _without_file_size_limit():
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(descriptor, line)
                os.fdatasync(descriptor)
            finally:
                os.close(descriptor)


def read_ledger(path: Path) -> list[dict[str, Any]]:
    """Read the events of a ledger; an incomplete last line of a killed process is ignored."""
    if not path.exists():
        return []
    *lines, _ = path.read_bytes().split(b"\n")
    return [json.loads(line) for line in lines if line]


@contextmanager
def _without_file_size_limit() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if soft == hard:
        yield
        return
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class Words(gymnasium.Env[str, str]):
    """Default environment: write vowels for three turns. Observations depend on the task and on all actions."""

    observation_space = action_space = gymnasium.spaces.Text(100)
    action_hint = "some letters"
    TURNS = 3

    def __init__(self, *, step_s: float = 0.0) -> None:
        self._step_s = step_s
        self._state, self._turn, self._vowels = "", 0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode; its text is derived from the seed."""
        super().reset(seed=seed)
        self._turn, self._vowels = 0, 0
        self._state = _digest(f"{seed}")
        return f"Write a. {self._state}", {}

    def step(self, action: str) -> tuple[str, SupportsFloat, bool, bool, dict[str, Any]]:
        """Take an action; the reward is a multiple of 1/256, so that sums of rewards are exact."""
        time.sleep(self._step_s)
        self._turn += 1
        self._state = _digest(f"{self._state} {self._turn} {action}")
        vowels = sum(letter in "aeiou" for letter in action)
        self._vowels += vowels
        reward = round(256 * vowels / (1 + len(action))) / 256
        info = {"success": self._vowels >= self.TURNS}
        return f"More. {self._state}", reward, self._turn == self.TURNS, False, info


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]


class LedgerEnv(gymnasium.Wrapper[str, str, str, str]):
    """Wrapper that records each reset and step in a ledger, and makes the return of each episode unique.

    The last reward of an episode gets a random fraction below 2^-9. Rewards should be multiples of 1/256 or so, because
    the sum of an episode's rewards must be exact.

    By default, it wraps `Words`.
    """

    def __init__(self, *, ledger: str, environment: str | None = None, **options: Any) -> None:
        super().__init__(Words(**options) if environment is None else _make(environment, options))
        self._ledger = Ledger(ledger)
        self._episode, self._seed, self._turn, self._return = "", 0, 0, 0.0
        if optional_part(self.env, "snapshot") is not None and optional_part(self.env, "restore") is not None:
            self.snapshot, self.restore = self._snapshot, self._restore

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode."""
        observation, info = self.env.reset(seed=seed, options=options)
        self._episode, self._seed, self._turn, self._return = secrets.token_hex(8), seed or 0, 0, 0.0
        self._ledger.append("reset", episode=self._episode, seed=self._seed, observation=observation)
        return observation, info

    def step(self, action: str) -> tuple[str, SupportsFloat, bool, bool, dict[str, Any]]:
        """Take an action."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._turn += 1
        reward = float(reward)
        if terminated or truncated:
            reward += (1 + secrets.randbits(IDENTITY_BITS)) * UNIT
        self._return += reward
        self._ledger.append(
            "step",
            episode=self._episode,
            seed=self._seed,
            turn=self._turn,
            action=action,
            observation=observation,
            total=self._return,
            terminated=bool(terminated),
            truncated=bool(truncated),
            success=None if "success" not in info else bool(info["success"]),
        )
        return observation, reward, terminated, truncated, info

    def _snapshot(self) -> Any:
        return self._episode, self._seed, self._turn, self._return, self.env.get_wrapper_attr("snapshot")()

    def _restore(self, state: Any) -> None:
        """Restore a state; the ledger gets a new episode with the same first turns."""
        before, self._seed, self._turn, self._return, inner = state
        self.env.get_wrapper_attr("restore")(inner)
        self._episode = secrets.token_hex(8)
        self._ledger.append("restore", episode=self._episode, before=before, turns=self._turn)


def record_environment(environment: str | None, *, ledger: str, **options: Any) -> EnvironmentSpec:
    """Return the spec of an environment inside a `LedgerEnv`; `environment` is its name, or ``None`` for `Words`.

    Raises:
        UnknownNameError: no such environment.
    """
    base = spec_of(Words) if environment is None else resolve_environment(environment)
    options = {**base.options, **options}
    make = functools.partial(LedgerEnv, ledger=ledger, environment=environment)
    return dataclasses.replace(base, make=make, options=options, isolation=Isolation.PROCESS)


def _make(name: str, options: Mapping[str, Any]) -> gymnasium.Env[str, str]:
    spec = resolve_environment(name)
    env = spec.make(**options)
    if not isinstance(env, gymnasium.Env):
        raise UsageError(
            f"the ledger cannot wrap environment {name}",
            got=f"the class {type(env).__name__}",
            expected="a gymnasium.Env",
        )
    return env
