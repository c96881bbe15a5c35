"""Faults, and their seeded random choice."""

from __future__ import annotations

import enum
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass


class Target(enum.StrEnum):
    """Targets of faults."""

    TRAINER = "trainer"
    WORKER = "environment worker"
    SUPERVISOR = "supervisor of an environment worker"
    RANK = "rank"
    SERVER = "server"
    """The environment server, or the engine's server, of a scenario with one."""
    ANSWER = "engine answer"
    CONNECTION = "connection to the server"
    DISK = "disk"
    CLOCK = "clock"
    STORE = "trajectory store"
    METRICS = "metrics"
    CHECKPOINT = "checkpoint"


SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGSTOP", "SIGSTOP, SIGCONT")
GARBLED = (
    "id out of range",
    "negative id",
    "fractional id",
    "missing ids",
    "fewer log-probabilities",
    "missing log-probabilities",
    "NaN log-probability",
    "positive log-probability",
    "infinite log-probability",
    "fewer versions",
    "version of the future",
    "negative version",
    "too many tokens",
    "no tokens",
    "unknown stop reason",
    "negative duration",
)
"""Changes of an answer at the engine contract; `agentrl.testing.chaos.servers` has those of a server's JSON."""
ANSWERS = ("lost", "late", "failed", *GARBLED)
WAYS: dict[Target, tuple[str, ...]] = {
    Target.TRAINER: (*SIGNALS, "SIGINT twice", "SIGKILL while it saves"),
    Target.WORKER: SIGNALS,
    Target.SUPERVISOR: SIGNALS,
    Target.RANK: SIGNALS,
    Target.SERVER: ("SIGKILL", "SIGTERM", "SIGSTOP", "SIGSTOP, SIGCONT"),
    Target.ANSWER: ANSWERS,
    Target.CONNECTION: ("dropped", "refused", "frozen"),
    Target.DISK: ("full", "slow"),
    Target.CLOCK: ("forward", "back"),
    Target.STORE: ("a changed byte", "a missing end"),
    Target.METRICS: ("a changed byte", "a missing end"),
    Target.CHECKPOINT: ("a changed byte", "a missing end", "a missing file"),
}
"""Faults of each target. Files are damaged after SIGKILL, before the run is resumed."""
SERVED_ANSWERS = ("lost", "late", "failed", "truncated", *["a garbled field"] * 6)
"""Faults of an engine server's answers: a garbled field is any field of its JSON."""
MAX_EVENTS = 300
"""Maximum number of events in the ledger between two faults: about eight steps of the default runs."""
FILES = (Target.STORE, Target.METRICS, Target.CHECKPOINT)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFault:
    """Fault with the time at which it is injected."""

    target: Target
    way: str
    after_events: int
    """Number of ledger events to wait for after the previous fault."""
    delay_s: float
    """Additional seconds after these events, so that faults also hit times in which no episode runs."""
    draw: int
    """Seed of the remaining choices, such as one of several processes or a byte of a file."""


def plan_faults(
    seed: str, ways: Mapping[Target, Sequence[str]], *, most_events: int = MAX_EVENTS
) -> Iterator[PlannedFault]:
    """Yield an endless sequence of faults, with all targets equally likely, and all faults of a target.

    `ways` are the faults of each target; at most `most_events` events lie between two faults.
    """
    rng = random.Random(seed)
    decks: dict[Target, list[str]] = {}
    waiting: list[Target] = []
    while True:
        if not waiting:
            waiting = rng.sample(list(ways), len(ways))
        target = waiting.pop()
        if not decks.get(target):
            decks[target] = rng.sample(ways[target], len(ways[target]))
        yield PlannedFault(
            target=target,
            way=decks[target].pop(),
            after_events=rng.randrange(1, most_events + 1),
            delay_s=rng.choice((0.0, rng.uniform(0.0, 1.5))),
            draw=rng.getrandbits(32),
        )
