"""Result of an evaluation as a record and as JSON: estimates with their intervals."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from statistics import NormalDist, fmean, variance
from typing import Any

import numpy as np

from agentrl.config.config import Config
from agentrl.config.overrides import PROMPTS
from agentrl.env.lookup import ADDRESS, parse_env_name, resolve_environment
from agentrl.errors import AgentRLError, Outcome, SourceLocation
from agentrl.evaluation.diagnosis.finding import Finding, rank, top
from agentrl.evaluation.diagnosis.rules import apply_rules
from agentrl.evaluation.diagnosis.summary import EpisodeCounts, RunSummary
from agentrl.evaluation.panel import EvaluatedEpisode, Panel, panel_hash
from agentrl.observe.console import html_table
from agentrl.observe.incidents import Incidents
from agentrl.observe.secrets import hide_secrets
from agentrl.trajectory import Turn

CONFIDENCE = 0.95
RESAMPLES = 2000
UNTYPED = "all"
_WITHOUT_SUCCESS = (
    "success is unknown because the environment does not report it: return {'success': True or False} as the info of "
    "the last step, or register the environment with a reward_threshold"
)
_TRL_WITHOUT_SUCCESS = (
    "success is unknown because a class for TRL has only rewards: read the mean reward, or name a spec with a "
    "threshold as the environment: SPEC = dataclasses.replace(agentrl.env.lookup.spec_of({}), success_threshold=1.0)"
)
_PROMPTS_WITHOUT_SUCCESS = (
    "success is unknown because prompts have only rewards: read the mean reward; of a reward function that returns 1 "
    "for a right answer and 0 for a wrong one, it is the share of right answers"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanInterval:
    """Mean with its confidence interval at level `CONFIDENCE`; the bounds are NaN if they cannot be estimated."""

    mean: float
    low: float
    high: float

    @property
    def is_bounded(self) -> bool:
        """True if the interval could be estimated."""
        return not math.isnan(self.low)

    def to_json(self) -> dict[str, float | None]:
        """Return the numbers; bounds that cannot be estimated are ``None``."""
        bounded = self.is_bounded
        return {"mean": self.mean, "low": self.low if bounded else None, "high": self.high if bounded else None}


def wilson_interval(successes: float, trials: float) -> MeanInterval:
    """Return Wilson's score interval for a proportion (Wilson 1927).

    Both arguments may be fractions: `clustered_success` passes an effective number of trials.

    >>> estimate = wilson_interval(8, 10)
    >>> round(estimate.low, 3), round(estimate.high, 3)
    (0.49, 0.943)
    """
    if not 0 <= successes <= trials or trials == 0:
        raise ValueError(f"{successes} successes of {trials} trials is not a proportion")
    z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
    share = successes / trials
    spread = z * math.sqrt(share * (1 - share) / trials + (z / (2 * trials)) ** 2)
    scale = 1 + z * z / trials
    centre = share + z * z / (2 * trials)
    low = 0.0 if successes == 0 else (centre - spread) / scale
    high = 1.0 if successes == trials else (centre + spread) / scale
    return MeanInterval(mean=share, low=low, high=high)


def clustered_success(successes_by_task: Sequence[Sequence[bool]]) -> MeanInterval:
    """Estimate success over all episodes, with a Wilson interval that accounts for correlated samples of a task.

    With one sample per task this is Wilson's interval. With more samples, the effective number of trials, ``p (1 - p) /
    (variance of the task means / number of tasks)`` (Kish 1965, the design effect), replaces the number of trials; it
    is limited to between the number of tasks and the number of episodes. Tasks without samples are ignored.

    Raises:
        ValueError: no samples at all.
    """
    tasks = [samples for samples in successes_by_task if samples]
    episodes = [solved for samples in tasks for solved in samples]
    if not episodes:
        raise ValueError("no finished episode: nothing to estimate")
    share = fmean(episodes)
    trials = _effective_trials(tasks, share, len(episodes))
    estimate = wilson_interval(share * trials, trials)
    return replace(estimate, mean=share)


def _effective_trials(tasks: Sequence[Sequence[bool]], share: float, episodes: int) -> float:
    if len(tasks) in (1, episodes) or share in (0.0, 1.0):
        return len(tasks)  # one sample each, or the agreement within tasks cannot be measured
    between = variance([fmean(samples) for samples in tasks]) / len(tasks)
    if between == 0:
        return episodes
    return min(max(share * (1 - share) / between, len(tasks)), episodes)


def bootstrap_mean(values: Sequence[float], *, seed: int = 0) -> MeanInterval:
    """Estimate a mean with a percentile bootstrap interval (Efron 1979), for quantities that are not proportions.

    `values` has one value per independent unit (the mean of a task's samples, not the samples). Equal values do not
    show how much others would differ, so their interval is not estimated.
    """
    if not values:
        raise ValueError("no values: nothing to estimate")
    data = np.asarray(values, dtype=np.float64)
    if data.min() == data.max():
        return MeanInterval(mean=float(data[0]), low=math.nan, high=math.nan)
    picks = np.random.default_rng(seed).integers(0, len(data), size=(RESAMPLES, len(data)))
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(data[picks].mean(axis=1), [tail, 100 - tail])
    return MeanInterval(mean=float(data.mean()), low=float(low), high=float(high))


def pass_at_k(samples: int, successes: int, k: int) -> float:
    """Return the unbiased probability that at least one of `k` samples solves the task (Chen et al. 2021, eq. 1).

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    _check_k(samples, successes, k)
    return 1 - math.comb(samples - successes, k) / math.comb(samples, k)


def pass_hat_k(samples: int, successes: int, k: int) -> float:
    """Return the unbiased probability that all of `k` samples solve the task (pass^k; Yao et al. 2024, tau-bench).

    >>> pass_hat_k(4, 3, 2)
    0.5
    """
    _check_k(samples, successes, k)
    return math.comb(successes, k) / math.comb(samples, k)


def _check_k(samples: int, successes: int, k: int) -> None:
    if not 0 <= successes <= samples or not 1 <= k <= samples:
        raise ValueError(f"k = {k} with {successes} successes of {samples} samples")


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeResult:
    """Result on one type of task."""

    n_tasks: int
    success: MeanInterval | None
    reward: float | None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class EvaluationResult:
    """Result of one policy on one panel."""

    panel: Panel
    episodes: Sequence[EvaluatedEpisode]
    """All episodes in the panel's order, including infrastructure failures."""
    success: MeanInterval | None
    """Success over measured episodes; ``None`` if the environment never reported success."""
    reward: MeanInterval | None
    by_task_type: Mapping[str, TypeResult]
    outcomes: Mapping[Outcome, int]
    pass_at_k: Mapping[int, float]
    pass_hat_k: Mapping[int, float]
    turns: float
    """Mean number of turns per episode."""
    tokens: float
    """Mean number of tokens per episode that the policy sampled, a scripted policy wrote, or a service reported."""
    seconds: float
    """Wall-clock time of this run; reused episodes take no time."""
    tokens_per_s: float
    """Tokens per second written in this run; 0 if all episodes were reused."""
    panel_hash: str | None = None
    """Digest of the tasks and seeds, see `panel_hash` in `agentrl.evaluation.panel`; ``None`` in older results."""
    problems: Sequence[Finding] = ()
    """At most three problems that need attention, the most severe one first."""
    reused: int = 0
    """Number of episodes that an earlier run of the same evaluation played."""
    reused_since: float | None = None
    """Time of the end of the first reused episode, in seconds since 1970."""

    @property
    def advice_on_success(self) -> str | None:
        """Advice on an unknown success; ``None`` if it is known, or nothing was measured."""
        if self.success is not None or self.reward is None:
            return None
        name = parse_env_name(self.panel.environment).name
        if name == PROMPTS:
            return _PROMPTS_WITHOUT_SUCCESS
        is_trl = False
        with suppress(AgentRLError):  # of a stored evaluation, whose environment may be gone
            is_trl = not ADDRESS.fullmatch(name) and bool(resolve_environment(name).reset_columns)
        return _TRL_WITHOUT_SUCCESS.format(name.rpartition(":")[2]) if is_trl else _WITHOUT_SUCCESS

    @property
    def failures(self) -> int:
        """Number of episodes with an infrastructure failure after all retries; estimates exclude them."""
        return sum(not episode.is_measured for episode in self.episodes)

    @property
    def retries(self) -> int:
        """Number of attempts beyond the first, summed over all episodes."""
        return sum(episode.trajectory.attempt for episode in self.episodes)

    @property
    def repaired_calls(self) -> int:
        """Number of tool calls in measured episodes that were read although they are not in the model's notation."""
        return sum(turn.repaired_calls for e in self.episodes if e.is_measured for turn in e.trajectory.turns)

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``--json FILE``."""
        return {
            "env": self.panel.environment,
            "policy": self.panel.policy,
            "model": self.panel.model,
            "n_tasks": self.panel.n_tasks,
            "samples": self.panel.samples,
            "seed": self.panel.seed,
            "panel_hash": self.panel_hash,
            "success": None if self.success is None else self.success.to_json(),
            "reward": None if self.reward is None else self.reward.to_json(),
            "by_task_type": {name: asdict(found) for name, found in self.by_task_type.items()},
            "outcomes": {outcome.value: count for outcome, count in self.outcomes.items()},
            "failed": self.failures,
            "retries": self.retries,
            "repaired_calls": self.repaired_calls,
            "pass_at_k": {str(k): value for k, value in self.pass_at_k.items()},
            "pass_hat_k": {str(k): value for k, value in self.pass_hat_k.items()},
            "turns": self.turns,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_s": self.tokens_per_s,
            "problems": [problem.to_json() for problem in self.problems],
            "reused": self.reused,
            "reused_since": None if self.reused_since is None else _time_text(self.reused_since),
            "settings": hide_secrets(self.panel.settings),
        }

    def __str__(self) -> str:
        policy = self.panel.model or self.panel.policy
        success = "success unknown" if self.success is None else f"success {estimate_text(self.success)}"
        reward = "no reward" if self.reward is None else f"reward {self.reward.mean:.3f}"
        reused = f" ({self.reused_words})" if self.reused else ""
        return f"{policy} on {self.panel.environment}: {success}, {reward}, {len(self.episodes)} episodes{reused}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return a small table for notebooks."""
        success = "unknown" if self.success is None else estimate_text(self.success)
        rows = {
            "policy": self.panel.model or self.panel.policy,
            "environment": self.panel.environment,
            "success (95 % interval)": success,
            "mean reward": "none" if self.reward is None else f"{self.reward.mean:.3f}",
            "episodes": f"{len(self.episodes)}{f' ({self.reused_words})' if self.reused else ''}",
            "panel": self.panel_hash or "unknown",
        }
        return html_table(rows)

    @property
    def reused_words(self) -> str:
        """Number of reused episodes and the time of the first one; empty if none was reused."""
        if not self.reused or self.reused_since is None:
            return ""
        since = f"{self.reused} of {len(self.episodes)} reused, played since {_time_text(self.reused_since)}"
        return f"{since}; some changes cannot be detected: --fresh plays all episodes again"


def summarize(
    panel: Panel,
    episodes: Sequence[EvaluatedEpisode],
    seconds: float,
    *,
    found: Container[str] = (),
    others: Container[str] = (),
) -> EvaluationResult:
    """Compute the estimates from the episodes; infrastructure failures are only counted.

    `found` are the ids of trajectories that this run found on disk; `others` are roles of the environment, whose turns
    and tokens are not the agent's.
    """
    turns = {id(episode): _own_turns(episode, others) for episode in episodes}
    earlier = [episode for episode in episodes if episode.trajectory.id in found]
    played = sum(_tokens(turns[id(episode)]) for episode in episodes if episode.trajectory.id not in found)
    measured = [episode for episode in episodes if episode.is_measured]
    by_type: dict[str, list[EvaluatedEpisode]] = defaultdict(list)
    for episode in measured:
        by_type[episode.trajectory.task_type or UNTYPED].append(episode)
    return EvaluationResult(
        panel=panel,
        episodes=episodes,
        success=_success(measured),
        reward=_reward(measured, panel.seed),
        by_task_type={name: _type_result(found) for name, found in sorted(by_type.items())},
        outcomes=dict(Counter(e.trajectory.outcome for e in episodes if e.trajectory.outcome is not None)),
        pass_at_k=_over_tasks(measured, panel.samples, pass_at_k),
        pass_hat_k=_over_tasks(measured, panel.samples, pass_hat_k),
        turns=_mean([float(len(turns[id(episode)])) for episode in measured]),
        tokens=_mean([float(_tokens(turns[id(episode)])) for episode in measured]),
        seconds=seconds,
        tokens_per_s=played / seconds if seconds > 0 else 0.0,
        panel_hash=panel_hash(episodes, panel.seed),
        reused=len(earlier),
        reused_since=min((episode.played_at for episode in earlier), default=None),
    )


def find_problems(
    episodes: Sequence[EvaluatedEpisode],
    incidents: Incidents,
    definitions: Mapping[str, SourceLocation | None],
    config: Config | None = None,
) -> tuple[Finding, ...]:
    """Return the most severe problems of an evaluation.

    `definitions` has the places of the reward functions by their name in messages; it is empty if the environment gives
    the rewards. With a config, advice has the values in force, and tells the environment's limits from the agent's.
    """
    summary = EpisodeCounts()
    summary.add_step([episode.trajectory for episode in episodes], None)
    run = RunSummary(config=config, is_training=False, episodes=summary, incidents=incidents, definitions=definitions)
    return top(rank(finding for _, finding in apply_rules(run, of_newest_step=False)))


def _time_text(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M}"


def estimate_text(estimate: MeanInterval) -> str:
    """Format an estimate for humans.

    >>> estimate_text(MeanInterval(mean=0.8, low=0.49, high=0.943))
    '80.0 % (49.0 to 94.3)'
    """
    return f"{estimate.mean:.1%} ({100 * estimate.low:.1f} to {100 * estimate.high:.1f})".replace("%", " %")


def _type_result(episodes: Sequence[EvaluatedEpisode]) -> TypeResult:
    rewards = [e.trajectory.reward for e in episodes if e.trajectory.reward is not None]
    return TypeResult(
        n_tasks=len({episode.task_id for episode in episodes}),
        success=_success(episodes),
        reward=fmean(rewards) if rewards else None,
    )


def _success(episodes: Sequence[EvaluatedEpisode]) -> MeanInterval | None:
    tasks = _solved_by_task(episodes)
    return clustered_success(list(tasks.values())) if tasks else None


def _solved_by_task(episodes: Sequence[EvaluatedEpisode]) -> dict[str, list[bool]]:
    """Return the success of each sample by task; empty if no episode reports success."""
    if all(episode.trajectory.success is None for episode in episodes):
        return {}
    tasks: dict[str, list[bool]] = defaultdict(list)
    for episode in episodes:
        tasks[episode.task_id].append(bool(episode.trajectory.success))
    return tasks


def _reward(episodes: Sequence[EvaluatedEpisode], seed: int) -> MeanInterval | None:
    tasks: dict[str, list[float]] = defaultdict(list)
    for episode in episodes:
        if episode.trajectory.reward is not None:
            tasks[episode.task_id].append(episode.trajectory.reward)
    return bootstrap_mean([fmean(rewards) for rewards in tasks.values()], seed=seed) if tasks else None


def _over_tasks(
    episodes: Sequence[EvaluatedEpisode], samples: int, measure: Callable[[int, int, int], float]
) -> dict[int, float]:
    """Average `measure` for k = 1 to `samples` over the tasks that have at least k measured samples."""
    tasks = _solved_by_task(episodes)
    values = {
        k: [measure(len(solved), sum(solved), k) for solved in tasks.values() if len(solved) >= k]
        for k in range(1, samples + 1)
    }
    return {k: fmean(found) for k, found in values.items() if found}


def _own_turns(episode: EvaluatedEpisode, others: Container[str]) -> list[Turn]:
    return [turn for turn in episode.trajectory.turns if turn.role not in others]


def _tokens(turns: Sequence[Turn]) -> int:
    return sum(turn.end - turn.start or turn.counted_tokens or 0 for turn in turns)


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0
