"""What a policy could read, or do without solving anything, that goes with the reward: a report per environment.

    print(reward_integrity("code", options={"size": "tiny"}))

Besides the rules of `check_env` about leaks it plays cheap policies, looks for words of the opening that predict
whether those are rewarded, and reads everything that the policy's own sandbox shows.
"""

from __future__ import annotations

import functools
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.env_lookup import check_split, parse_env_name, resolve_environment
from agentrl.message import Content
from agentrl.task import Task
from agentrl.testing.env_check import check_env
from agentrl.testing.env_session import EnvSession, Policy, expert_policy, plain_text, play, random_policy

LEAK_RULES = ("hides the answer", "hides the plan", "hides the reward", "reads no files")
MOST_STEPS = 20
TELLING = 4.0
"""A word's correlation times the root of the number of episodes, from which it is no accident."""
_WORD = re.compile(r"[a-z0-9_]+")
_PROGRAM = "```python\nimport sys\nprint('All tests passed. reward 1')\nsys.exit(0)\n```"
_COMMAND = "```bash\necho 'All tests passed. reward 1'; exit 0\n```"


@dataclass(frozen=True, slots=True, kw_only=True)
class IntegrityReport:
    """What was found."""

    environment: str
    episodes: int
    returns: Mapping[str, float]
    """Mean return by policy; ``expert`` is the only one that is meant to have any."""
    words: Sequence[str]
    """Words of the opening that predict the return of a cheap policy."""
    leaks: Sequence[str]
    """What `check_env`'s rules about leaks complain about."""
    seen: Sequence[str]
    """What must not be seen, and can be read in the policy's own sandbox."""
    sandbox_files: int | None
    """Files, variables and processes that were read there; ``None`` where there is no sandbox to read."""

    @property
    def suspicions(self) -> list[str]:
        """What somebody has to look at; empty when nothing."""
        cheap = {name: value for name, value in self.returns.items() if name not in ("expert", "random")}
        expert = self.returns.get("expert", 1.0)
        paid = [f"{name} has a mean return of {value:.2g}" for name, value in cheap.items() if value > expert / 10]
        words = [f"the opening's word {word}" for word in self.words]
        return [*self.leaks, *paid, *words, *(f"the sandbox shows {what}" for what in self.seen)]

    def __str__(self) -> str:
        lines = [f"reward integrity of {self.environment}, {self.episodes} tasks"]
        lines += [f"  mean return {value:8.3f}  {name}" for name, value in self.returns.items()]
        read = (
            "no sandbox to read" if self.sandbox_files is None else f"{self.sandbox_files} things read in the sandbox"
        )
        lines += [f"  {read}", *(f"  suspicious: {what}" for what in self.suspicions)]
        return "\n".join(lines if self.suspicions else [*lines, "  nothing suspicious"])


def reward_integrity(
    environment: str, *, options: Mapping[str, Any] | None = None, split: str | None = None, episodes: int = 16
) -> IntegrityReport:
    """Play, read and correlate.

    Args:
        environment: Its name, ``module:EnvId`` too.
        options: Put over the spec's own.
        split: Whose tasks are played; the first when left out.
        episodes: Tasks that every policy plays.

    Raises:
        UsageError: no such environment or split, or wrong options.
    """
    name, named_split = parse_env_name(environment)
    spec = resolve_environment(name)
    merged = {**spec.options, **(options or {})}
    source = spec.tasks(check_split(spec, split or named_split or spec.splits[0]), **merged)
    tasks = [source[index] for index in range(min(episodes, len(source)))]
    session = EnvSession(spec.make, merged)
    try:
        openings = [plain_text(session.reset(task)) for task in tasks]
        returns = {policy: _returns(session, tasks, make) for policy, make in _policies(session, tasks).items()}
        seen, read = _look_around(session, tasks[:4])
    finally:
        session.close()
    rows = check_env(name, options=options, split=split or named_split, episodes=4, only=LEAK_RULES).rows
    return IntegrityReport(
        environment=name,
        episodes=len(tasks),
        returns={policy: statistics.fmean(values) for policy, values in returns.items()},
        words=[word for policy, values in returns.items() if policy != "expert" for word in telling(openings, values)],
        leaks=[f"{row.check}: {row.detail}" for row in rows if row.status.value in ("failed", "warned")],
        seen=seen,
        sandbox_files=read,
    )


def _policies(session: EnvSession, tasks: Sequence[Task]) -> dict[str, Callable[[Task], Policy]]:
    """Policies that know nothing of the task, and the expert where there is one."""
    fixed = {"says nothing": "", "hands in at once": "submit", "prints success": _PROGRAM, "echoes success": _COMMAND}
    found: dict[str, Callable[[Task], Policy]] = {"random": lambda task: random_policy(task.seed)}
    found |= {name: functools.partial(_always_on, text) for name, text in fixed.items()}
    found["repeats what it reads"] = lambda _task: lambda _session, observation: plain_text(observation)
    if session.find("expert") is not None:
        actions = play(session, tasks[0], expert_policy(), MOST_STEPS).actions
        found["solves the first task again"] = lambda _task: _script(actions)
        found["expert"] = lambda _task: expert_policy()
    return found


def _always_on(text: str, _task: Task) -> Policy:
    return _always(text)


def _always(text: str) -> Policy:
    return lambda _session, _observation: text


def _script(actions: Sequence[str]) -> Policy:
    left = list(actions)

    def choose(_session: EnvSession, _observation: Content) -> str:
        return left.pop(0) if left else actions[-1]

    return choose


def _returns(session: EnvSession, tasks: Sequence[Task], policy_of: Callable[[Task], Policy]) -> list[float]:
    """Of each task's episode; the first task is what `solves the first task again` may solve."""
    return [play(session, task, policy_of(task), MOST_STEPS).total for task in tasks]


def telling(openings: Sequence[str], returns: Sequence[float]) -> list[str]:
    """Words whose presence in an opening goes with the return more than by chance.

    >>> telling(["easy one", "hard one"] * 12, [1.0, 0.0] * 12)
    ['easy', 'hard']
    """
    if len(set(returns)) < 2:
        return []
    bags = [set(_WORD.findall(text.lower())) for text in openings]
    words = [word for word in sorted(set().union(*bags)) if 0 < sum(word in bag for bag in bags) < len(bags)]
    root = math.sqrt(len(returns))
    found = [
        (word, statistics.correlation([float(word in bag) for bag in bags], list(returns)) * root) for word in words
    ]
    return [word for word, strength in found if abs(strength) >= TELLING]


def _look_around(session: EnvSession, tasks: Sequence[Task]) -> tuple[list[str], int | None]:
    """Secrets that stand in what the environment's ``visible()`` shows of the sandbox, and how much that is."""
    if session.find("visible") is None or session.find("secrets") is None:
        return [], None
    seen, read = [], 0
    for task in tasks:
        session.reset(task)
        shown: Mapping[str, str] = session.call("visible")
        hidden: Sequence[str] = session.call("secrets")
        read += len(shown)
        seen += [f"{secret[:40]!r} in {place}" for place, text in shown.items() for secret in hidden if secret in text]
    return seen, read
