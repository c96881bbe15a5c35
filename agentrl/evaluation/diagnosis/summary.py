"""Summary of a run or an evaluation, which the rules read: metrics of the steps, counts over episodes, failures."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, TypeAlias

from agentrl.config.config import Config
from agentrl.engine import StopReason
from agentrl.errors import Outcome, SourceLocation
from agentrl.evaluation.diagnosis.finding import ConfigChange, ExampleEpisode
from agentrl.observe.incidents import Incidents
from agentrl.observe.metrics import SuccessCounts, sampled_bytes
from agentrl.reward import rewards_differ
from agentrl.trajectory import Trajectory, Turn

Line: TypeAlias = Mapping[str, Any]
"""Metrics of a step."""
WHOLE = ""
"""Name of an episode's whole reward among its components."""
SOLVED = 0.95
"""Success rate from which a policy counts as finished: its episodes no longer need to differ."""
MIN_EVENTS = 8
"""Minimum number of episodes for statements about all of them."""
MAX_TEXT_CHARS = 200
"""Maximum number of characters of an error or an answer that are kept."""
ANSWERS_PER_STEP = 32
"""Maximum number of unusable answers of a step whose text is counted."""
MAX_ANSWERS = 400
"""Maximum number of distinct unusable answers that are counted."""


@dataclass(slots=True, kw_only=True)
class Moments:
    """Running count, mean and sum of squared deviations (Welford, 1962)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        """Add a number."""
        self.count += 1
        step = value - self.mean
        self.mean += step / self.count
        self.squares += step * (value - self.mean)

    @property
    def error(self) -> float:
        """Squared standard error of the mean; 0 for fewer than two numbers."""
        return self.squares / (self.count - 1) / self.count if self.count > 1 else 0.0


@dataclass(slots=True, kw_only=True)
class Range:
    """Smallest and largest number so far."""

    low: float = math.inf
    high: float = -math.inf

    def add(self, value: float) -> None:
        """Add a number."""
        self.low, self.high = min(self.low, value), max(self.high, value)

    @property
    def is_constant(self) -> bool:
        """True if there were numbers, and all were equal up to rounding."""
        return self.low <= self.high and not rewards_differ([self.low, self.high])


@dataclass(slots=True, kw_only=True)
class Covariance:
    """Sums of products of deviations from the means of groups, of two quantities."""

    both: float = 0.0
    first: float = 0.0
    second: float = 0.0

    def add_group(self, pairs: Sequence[tuple[float, float]]) -> None:
        """Add the pairs of a group."""
        mean_first, mean_second = fmean(a for a, _ in pairs), fmean(b for _, b in pairs)
        for a, b in pairs:
            self.both += (a - mean_first) * (b - mean_second)
            self.first += (a - mean_first) ** 2
            self.second += (b - mean_second) ** 2

    @property
    def correlation(self) -> float:
        """Correlation within groups; 0 if one of the quantities does not vary."""
        product = self.first * self.second
        return self.both / math.sqrt(product) if product > 0 else 0.0


@dataclass(slots=True, kw_only=True)
class ToolUse:
    """Calls of one tool."""

    calls: int = 0
    errors: int = 0
    """Calls that returned an error to the policy, for whatever reason."""
    seconds: float = 0.0


Answer: TypeAlias = str | tuple[int, ...]
"""Answer as its text, or as its tokens."""


@dataclass(slots=True, kw_only=True)
class EpisodeCounts(SuccessCounts):
    """Counts over episodes without infrastructure failures."""

    episodes: int = 0
    turns: int = 0
    longest: int = 0
    """Largest number of turns of an episode."""
    unusable: int = 0
    """Turns whose answer was not a usable action."""
    cut: int = 0
    """Turns whose answer was cut off, because its tokens ran out."""
    cut_unusable: int = 0
    """Turns of both kinds."""
    first_turn_cuts: int = 0
    """Episodes that ran out of tokens in their first turn."""
    outcomes: Counter[str] = field(default_factory=Counter)
    remarks: Counter[str] = field(default_factory=Counter)
    """Error messages about answers that could not be used."""
    rewards: dict[str, Range] = field(default_factory=dict)
    """Ranges of the whole reward (`WHOLE`) and of its components."""
    by_success: dict[bool, Moments] = field(default_factory=lambda: {True: Moments(), False: Moments()})
    """Rewards of solved and of other episodes."""
    different: set[int] = field(default_factory=set)
    """Hashes of the sampled tokens of a few episodes, which show whether episodes differ."""
    bad_answers: Counter[Answer] = field(default_factory=Counter)
    """Unusable answers, with their counts in a sample."""
    tools: dict[str, ToolUse] = field(default_factory=lambda: defaultdict(ToolUse))
    turn_seconds: float = 0.0
    """Seconds of all turns: engine, tools and environment."""
    engine_seconds: float = 0.0
    """Seconds of the engine in them; 0 for scripted policies."""
    length_and_reward: Covariance = field(default_factory=Covariance)
    """Sampled tokens and rewards of episodes, within groups."""
    examples: dict[str, ExampleEpisode] = field(default_factory=dict)
    """Newest example of each kind of problem, and of any episode (`WHOLE`)."""

    def add_step(self, trajectories: Sequence[Trajectory], step: int | None) -> None:
        """Add the episodes of a step that have ended."""
        groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
        left = ANSWERS_PER_STEP
        for trajectory in trajectories:
            if trajectory.outcome is None or not trajectory.outcome.is_trainable:
                continue
            left -= self._add(trajectory, step, most=left)
            if trajectory.reward is not None:
                groups[trajectory.group_id].append((float(_sampled_tokens(trajectory)), trajectory.reward))
        for pairs in groups.values():
            self.length_and_reward.add_group(pairs)

    def _add(self, trajectory: Trajectory, step: int | None, *, most: int) -> int:
        """Add an episode; return the number of unusable answers, of at most `most`, whose text was counted."""
        assert trajectory.outcome is not None
        self.episodes += 1
        outcome, metrics, turns = trajectory.outcome.value, trajectory.metrics, trajectory.turns
        self.outcomes[outcome] += 1
        self.longest = max(self.longest, len(turns))
        cut = sum(turn.stop_reason == StopReason.LENGTH for turn in turns)
        unusable = int(metrics.get("invalid_answers", 0.0) + metrics.get("invalid_actions", 0.0))
        self.turns, self.cut, self.unusable = self.turns + len(turns), self.cut + cut, self.unusable + unusable
        self.cut_unusable += sum(turn.stop_reason == StopReason.LENGTH and not turn.valid for turn in turns)
        self.first_turn_cuts += trajectory.outcome is Outcome.TRUNCATED_TOKENS and len(turns) <= 1
        if trajectory.outcome is Outcome.POLICY_ERROR and trajectory.error:
            self.remarks[trajectory.error[:MAX_TEXT_CHARS]] += 1
        self._add_rewards(trajectory)
        if len(self.different) < MIN_EVENTS:
            self.different.add(hash((sampled_bytes(trajectory), repr(trajectory.transcript))))
        failing = self._add_tools(trajectory)
        engine = sum(t.timings.queue + t.timings.prefill + t.timings.decode for t in turns)
        self.engine_seconds += engine
        self.turn_seconds += engine + sum(t.timings.tool + t.timings.env for t in turns)
        example = ExampleEpisode(id=trajectory.id, task_id=trajectory.task_id, step=step)
        kinds = {WHOLE: True, outcome: True, "unusable": unusable > 0, "cut": cut > 0, **failing}
        self.examples |= {kind: example for kind, shows in kinds.items() if shows}
        return self._add_answers(trajectory, most) if unusable and most else 0

    def _add_rewards(self, trajectory: Trajectory) -> None:
        self.count_success(trajectory)
        if trajectory.reward is not None:
            for name, value in {**trajectory.reward_components, WHOLE: trajectory.reward}.items():
                self.rewards.setdefault(name, Range()).add(value)
            if trajectory.success is not None:
                self.by_success[trajectory.success].add(trajectory.reward)

    def _add_tools(self, trajectory: Trajectory) -> dict[str, bool]:
        """Add the calls of tools; return the kinds of examples that the episode is of."""
        shown = {}
        for name, value in trajectory.metrics.items():
            prefix, _, rest = name.partition("/")
            tool, _, quantity = rest.rpartition("/")
            if prefix != "tool" or quantity not in ("calls", "errors", "seconds"):
                continue
            use = self.tools[tool]
            setattr(use, quantity, getattr(use, quantity) + (value if quantity == "seconds" else int(value)))
            shown[f"tool {quantity} {tool}"] = value > 0
        return shown

    def _add_answers(self, trajectory: Trajectory, most: int) -> int:
        added = 0
        for answer in _unusable_answers(trajectory):
            if added == most:
                break
            added += 1
            if answer in self.bad_answers or len(self.bad_answers) < MAX_ANSWERS:
                self.bad_answers[answer] += 1
        return added

    @property
    def unusable_share(self) -> float:
        """Share of turns without a usable action; at least the share of episodes that ended as ``policy_error``."""
        by_outcome = self.outcomes[Outcome.POLICY_ERROR.value] / max(1, self.episodes)
        return max(by_outcome, min(1.0, self.unusable / self.turns) if self.turns else 0.0)


def _sampled_tokens(trajectory: Trajectory) -> int:
    """Return the number of tokens of the answers; the turns know it without reading the tokens of stored episodes."""
    return sum(turn.end - turn.start or turn.counted_tokens or 0 for s in trajectory.sequences for turn in s.turns)


def _unusable_answers(trajectory: Trajectory) -> Iterator[Answer]:
    texts = {one.turn: one.text for messages in trajectory.transcript for one in messages if one.turn is not None}
    for sequence in trajectory.sequences:
        ids: Sequence[int] = () if all(turn.valid for turn in sequence.turns) else sequence.ids_list()
        for turn in sequence.turns:
            if not turn.valid:
                yield _answer_of(turn, ids, texts)


def _answer_of(turn: Turn, ids: Sequence[int], texts: Mapping[int, str]) -> Answer:
    if turn.end > turn.start:
        return tuple(ids[turn.start : min(turn.end, turn.start + MAX_TEXT_CHARS)])
    return texts.get(turn.index, "")[:MAX_TEXT_CHARS]


@dataclass(slots=True, kw_only=True)
class RunSummary:
    """Summary of a run or an evaluation, which the rules read.

    Example: after two steps of a run, `lines` are their two lines of ``metrics.jsonl``, `episodes` counts the episodes
    of both, and `newest` those of the second.
    """

    config: Config | None = None
    """Config of the run; ``None`` if it cannot be read."""
    is_training: bool = True
    """False for an evaluation, and for a run that only plays episodes."""
    learns_from_rewards: bool = True
    """False if a step learns also when the episodes of a group do not differ."""
    lines: list[Line] = field(default_factory=list)
    """Metrics of the steps, in order."""
    episodes: EpisodeCounts = field(default_factory=EpisodeCounts)
    newest: EpisodeCounts = field(default_factory=EpisodeCounts)
    """Episodes of the newest step."""
    incidents: Incidents = field(default_factory=Incidents)
    """Failures of rewards, environments and tools."""
    definitions: Mapping[str, SourceLocation | None] = field(default_factory=dict)
    """Reward functions by their names in messages; empty if the environment gives the rewards."""
    decode: Callable[[Sequence[int]], str] | None = None
    """Decodes the tokens of an answer."""

    def add_step(self, line: Line, trajectories: Sequence[Trajectory]) -> None:
        """Add the metrics and the episodes of a step."""
        self.lines.append(line)
        self.newest = EpisodeCounts()
        for episodes in (self.episodes, self.newest):
            episodes.add_step(trajectories, line["step"])

    @property
    def newest_metrics(self) -> dict[str, float]:
        """Metrics of the newest step; empty before the first one."""
        line = self.lines[-1] if self.lines else {}
        return {name: value for name, value in line.items() if name != "step" and value is not None}

    @property
    def is_solved(self) -> bool:
        """True if the newest episodes succeed in at least `SOLVED` of the cases."""
        episodes = self.newest if self.newest.judged else self.episodes
        return episodes.judged > 0 and episodes.solved >= SOLVED * episodes.judged

    def setting(self, key: str) -> Any:
        """Return the value of a config key; ``None`` if it is unknown or not set."""
        found: Any = self.config
        for part in key.split("."):
            found = getattr(found, part, None)
        return found

    def change(self, key: str, value: Any) -> ConfigChange:
        """Return a change of a config key."""
        return ConfigChange(key=key, value=value, now=self.setting(key))

    def double_limit(self, key: str) -> ConfigChange:
        """Return a change that doubles a limit."""
        now = self.setting(key)
        return self.change(key, None if now is None else 2 * now)

    def frequent_answers(self, count: int = 3) -> list[tuple[str, int]]:
        """Return the most frequent unusable answers as texts, with their counts in the sample."""
        found = []
        for answer, times in self.episodes.bad_answers.most_common(count):
            if isinstance(answer, str):
                found.append((answer, times))
            elif self.decode is not None:
                found.append((self.decode(answer)[:MAX_TEXT_CHARS], times))
        return found

    def example(self, kind: str = WHOLE) -> ExampleEpisode | None:
        """Return an episode that shows a kind of problem, or else any one."""
        return self.episodes.examples.get(kind) or self.episodes.examples.get(WHOLE)


def metric(line: Line, name: str) -> float | None:
    """Return a metric of a step; ``None`` if it is missing or not finite."""
    value = line.get(name)
    return None if value is None or not math.isfinite(value) else float(value)


def series(lines: Sequence[Line], name: str) -> list[float]:
    """Return the known values of a metric."""
    return [value for line in lines if (value := metric(line, name)) is not None]
