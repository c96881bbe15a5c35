"""Scorers that ask a language model about single episodes or about the episodes of a group.

An unreadable verdict is an infrastructure failure, never a reward of 0.

A group is ranked by comparing pairs in both orders or lists in several orders; rewards are between 0 and 1. Position
bias cancels, because each pair is shown in both orders and each list in shuffled orders. Episodes with equal
transcripts get equal rewards and are not compared with each other.

- Pairwise, every pair: the win rate, r_i = mean over j != i of s_ij, where s_ij is the mean of both orders' results, 1
  for a win, 0.5 for a tie, 0 for a loss.
- Pairwise, some pairs: strengths p_i of the Bradley-Terry model, P(i beats j) = p_i / (p_i + p_j), fitted to the pairs
  by Hunter's minorization (2004, equation 3) with a weak prior; r_i = mean over j != i of p_i / (p_i + p_j).
- Listwise: r_i = mean over rounds of (n - place_i) / (n - 1), with place 1 for the best of n different episodes.
"""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import TypeAdapter, ValidationError

from agentrl.config.config import Config
from agentrl.config.judge import JudgeConfig, RubricItem, check_items
from agentrl.errors import BudgetSpent, ConfigError, EngineError, UsageError
from agentrl.message import broken_up
from agentrl.reward import GroupScorer, Score, Scorer, weighted
from agentrl.rollout.judges.client import JudgeClient
from agentrl.rollout.judges.transcripts import Decode, TranscriptPiece, marked_transcript, pieces_of, require_tokens
from agentrl.rollout.judges.verdicts import (
    FieldsFormat,
    FieldWeights,
    RankingFormat,
    ScoreFormat,
    VerdictField,
    VerdictFormat,
    configured_format,
    reason_field,
    verdict_weights,
)
from agentrl.rollout.tools import gather_in_order
from agentrl.task import Task
from agentrl.trajectory import Trajectory

MAX_GROUPS = 10_000
"""Maximum number of groups that `BudgetFallback` remembers, far more than are in flight at a time."""

_log = logging.getLogger(__name__)
_ITEMS = TypeAdapter(list[RubricItem])
Attempt: TypeAlias = tuple[TranscriptPiece, ...]
Pair: TypeAlias = tuple[int, int]
TIE = 0.5
RESULT = {"1": 1.0, "2": 0.0, "tie": TIE}
PRIOR = 0.1
"""Prior wins and losses of each episode against an imaginary one of strength 1, which keep all strengths finite."""
ITERATIONS = 500
ROUNDS = 3
"""Default number of listwise comparisons."""


def make_judge(
    client: JudgeClient, settings: JudgeConfig, decode: Decode, *, break_up: Callable[[str], str] = broken_up
) -> Scorer:
    """Make the scorer of an ``agent.judge`` section; `break_up` breaks up the control tokens of the judge's model.

    Raises:
        ConfigError: the prompt is not a template, or the verdict does not describe a format.
    """
    if settings.compare is not None:
        return RankingJudge(client, settings, decode, break_up)
    return Judge(client, settings, decode, break_up)


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeRequest:
    """Request to a judge about one episode: one question per answer format, and the fields' weights."""

    formats: Sequence[VerdictFormat]
    weights: FieldWeights


class Judge(Scorer):
    """Scorer of single episodes: by a score in free text, a typed verdict, or a rubric."""

    def __init__(
        self, client: JudgeClient, settings: JudgeConfig, decode: Decode, break_up: Callable[[str], str] = broken_up
    ) -> None:
        self._client, self._settings, self._decode = client, settings, decode
        self._question = Question(settings, break_up)
        self._without = BudgetFallback(client, settings)
        self._fixed = None if settings.kind == "rubric" else _fixed_request(settings)

    async def score(self, trajectory: Trajectory, task: Task) -> Score:
        """Return the judge's reward, at most 1, plus the weighted reward of the environment."""
        require_tokens(trajectory, "a judge")
        if self._without.begins_without(trajectory.group_id):
            return self._without.score(trajectory)
        request = self._fixed or _rubric_request(self._settings, task)
        try:
            parts = await self._parts(trajectory, task, request)
        except BudgetSpent as spent:
            return self._without.after_spending(trajectory, spent)
        if not self._without.note_judged(trajectory.group_id):
            return self._without.score(trajectory)  # another episode of the group could not be judged
        named = {f"judge/{name}": value for name, value in parts.items()} if self._settings.is_typed else {}
        return _total(request.weights.reward(parts), trajectory, self._settings, named)

    async def _parts(self, trajectory: Trajectory, task: Task, request: JudgeRequest) -> dict[str, float]:
        """Ask the judge, and return the values of the scored fields, between 0 and 1."""
        question = self._question.about(trajectory, task, list(pieces_of(trajectory, self._decode)))
        answers = await gather_in_order(
            [self._client.ask(question, answer_format, trajectory.id) for answer_format in request.formats]
        )
        return request.weights.parts({name: value for answer in answers for name, value in answer.items()})


class RankingJudge(GroupScorer):
    """Scorer that ranks the episodes of a group; the reward is the rank, between 0 and 1."""

    def __init__(
        self, client: JudgeClient, settings: JudgeConfig, decode: Decode, break_up: Callable[[str], str] = broken_up
    ) -> None:
        if settings.compare is None:
            raise ConfigError("agent.judge.compare is not set", expected="pairwise or listwise")
        self._client, self._settings, self._decode = client, settings, decode
        self._compare = settings.compare
        self._question = Question(settings, break_up)
        self._without = BudgetFallback(client, settings)

    async def score_group(self, trajectories: Sequence[Trajectory], task: Task) -> list[Score]:
        """Return the ranks plus the weighted rewards of the environment.

        Raises:
            EngineError: fewer than two episodes can be ranked, or a comparison cannot be read.
        """
        group_id = trajectories[0].group_id
        if len(trajectories) < 2:
            raise EngineError(
                f"group {group_id} cannot be ranked",
                got="1 episode without an infrastructure failure",
                expected="at least 2",
                hint="see the errors of its other episodes",
            )
        for trajectory in trajectories:
            require_tokens(trajectory, "a judge")
        if self._without.begins_without(group_id):
            return [self._without.score(trajectory) for trajectory in trajectories]
        try:
            ranks = await self._ranks(trajectories, task, group_id)
        except BudgetSpent as spent:
            return [self._without.after_spending(trajectory, spent) for trajectory in trajectories]
        found = zip(ranks, trajectories, strict=True)
        return [_total(rank, trajectory, self._settings, {}) for rank, trajectory in found]

    async def _ranks(self, trajectories: Sequence[Trajectory], task: Task, group_id: str) -> list[float]:
        shown = [tuple(pieces_of(trajectory, self._decode)) for trajectory in trajectories]
        comparison = GroupQuestion(
            client=self._client,
            question=lambda attempts: self._question.comparing(attempts, task),
            reason=reason_field(self._settings),
            name=group_id,
        )
        if self._compare.how == "listwise":
            return await listwise(comparison, shown, rounds=self._compare.rounds or ROUNDS)
        return await pairwise(comparison, shown, opponents=self._compare.opponents)


def _total(judged: float, trajectory: Trajectory, settings: JudgeConfig, parts: Mapping[str, float]) -> Score:
    earned = trajectory.environment_reward
    return Score(
        reward=judged + settings.environment_weight * earned,
        components={"judge": judged, "environment": earned, **parts},
        sources={**weighted(trajectory.environment_sources, settings.environment_weight), "judge": judged},
    )


class BudgetFallback:
    """Rule for which episodes get the environment's reward only, once the budget is spent.

    Rewards of a group are compared, so a group has verdicts for all of its episodes or for none. An episode without a
    verdict in a group that already has verdicts gets no reward and does not train.
    """

    def __init__(self, client: JudgeClient, settings: JudgeConfig) -> None:
        self._client, self._settings = client, settings
        self._judged: dict[str, bool] = {}

    def begins_without(self, group_id: str) -> bool:
        """Return True if the group does without verdicts."""
        if group_id not in self._judged and self._client.continues_without:
            self._note(group_id, is_judged=False)
        return self._judged.get(group_id) is False

    def note_judged(self, group_id: str) -> bool:
        """Record that an episode has a verdict; return False if its group does without verdicts."""
        return self._judged[group_id] if group_id in self._judged else self._note(group_id, is_judged=True)

    def after_spending(self, trajectory: Trajectory, spent: BudgetSpent) -> Score:
        """Return the score of an episode whose verdict exceeds the budget.

        Raises:
            BudgetSpent: the config stops the run in this case.
        """
        if self._settings.budget.when_spent == "stop":
            raise spent
        group_id = trajectory.group_id
        is_judged = self._judged[group_id] if group_id in self._judged else self._note(group_id, is_judged=False)
        return Score(reward=None) if is_judged else self.score(trajectory)

    def score(self, trajectory: Trajectory) -> Score:
        """Return only the weighted reward of the environment."""
        earned = trajectory.environment_reward
        self._client.counters.judge_without += 1
        weight = self._settings.environment_weight
        return Score(
            reward=weight * earned,
            components={"environment": earned},
            sources=weighted(trajectory.environment_sources, weight),
        )

    def _note(self, group_id: str, *, is_judged: bool) -> bool:
        if not is_judged and False not in self._judged.values():
            _log.warning(
                "the budget of the judge is spent (%s): from group %s on, only the environment rewards episodes",
                self._client.spent,
                group_id,
            )
        self._judged[group_id] = is_judged
        if len(self._judged) > MAX_GROUPS:
            del self._judged[next(iter(self._judged))]
        return is_judged


class Question:
    """Template of a judge's question.

    Raises:
        ConfigError: the prompt is not a valid Jinja2 template.
    """

    def __init__(self, settings: JudgeConfig, break_up: Callable[[str], str] = broken_up) -> None:
        self._settings = settings
        self._break_up = break_up
        try:
            environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined)
            self._template = environment.from_string(settings.question)
        except TemplateError as error:
            raise ConfigError("agent.judge.prompt is not a valid Jinja2 template", got=str(error)) from error

    def about(self, trajectory: Trajectory, task: Task, pieces: Sequence[TranscriptPiece]) -> str:
        """Return the question about one episode."""
        return self._render(
            task=self._break_up_value(asdict(task)),
            transcript=self._transcript([pieces]),
            reward=trajectory.environment_reward,
            outcome="" if trajectory.outcome is None else trajectory.outcome.value,
            low=f"{self._settings.low:g}",
            high=f"{self._settings.high:g}",
        )

    def comparing(self, attempts: Sequence[Sequence[TranscriptPiece]], task: Task) -> str:
        """Return the question about several attempts at one task."""
        task_values = self._break_up_value(asdict(task))
        return self._render(task=task_values, transcript=self._transcript(attempts), count=len(attempts))

    def _transcript(self, episodes: Sequence[Sequence[TranscriptPiece]]) -> str:
        limit = self._settings.max_transcript_chars
        return marked_transcript(episodes, max_chars=limit, break_up=self._break_up)

    def _break_up_value(self, value: Any) -> Any:
        """Break up control tokens in a task, which may come from an untrusted data set."""
        if isinstance(value, str):
            return self._break_up(value)
        if isinstance(value, Mapping):
            return {key: self._break_up_value(item) for key, item in value.items()}
        return [*map(self._break_up_value, value)] if isinstance(value, list | tuple) else value

    def _render(self, **values: Any) -> str:
        try:
            return self._template.render(**values).strip()
        except TemplateError as error:
            raise UsageError(
                "agent.judge.prompt cannot be filled in",
                got=str(error),
                expected=f"only the variables {', '.join(values)}",
            ) from error


def _fixed_request(settings: JudgeConfig) -> JudgeRequest:
    """Return the requests that are equal for all episodes."""
    if settings.verdict is None:
        answer_format = ScoreFormat(settings.pattern, settings.low, settings.high)
        score = VerdictField(name="score", kind="number", low=settings.low, high=settings.high)
        return JudgeRequest(
            formats=[answer_format], weights=FieldWeights(fields={"score": score}, weights={"score": 1.0})
        )
    typed = configured_format(settings)
    return JudgeRequest(formats=[typed], weights=verdict_weights(settings, typed))


def _rubric_request(settings: JudgeConfig, task: Task) -> JudgeRequest:
    """Return the requests about an episode of a task: the rubric's items and the task's own items."""
    items = [*(settings.rubric.items if settings.rubric else ()), *_task_items(settings, task)]
    fields = {item.name: _item_field(item) for item in items}
    reason = reason_field(settings)
    first = [] if reason is None else [reason]
    groups = [list(fields.values())] if settings.rubric_requests == "together" else [[f] for f in fields.values()]
    weights = {item.name: item.weight for item in items}
    return JudgeRequest(
        formats=[FieldsFormat([*first, *group]) for group in groups],
        weights=FieldWeights(
            fields=fields, weights=weights, gates=frozenset(item.name for item in items if item.required)
        ),
    )


def _item_field(item: RubricItem) -> VerdictField:
    if item.scale is None:
        return VerdictField(name=item.name, kind="boolean", meaning=item.criterion)
    return VerdictField(name=item.name, kind="number", low=item.scale[0], high=item.scale[1], meaning=item.criterion)


def _task_items(settings: JudgeConfig, task: Task) -> list[RubricItem]:
    """Return the items in the column ``agent.judge.task_rubric`` of a task: a list, or its JSON.

    Raises:
        UsageError: the task has no items although the config has no rubric, or the items are not valid.
    """
    if settings.task_rubric is None:
        return []
    given = task.columns.get(settings.task_rubric)
    what = f"column {settings.task_rubric} of task {task.id} does not contain a rubric"
    if given is None:
        if settings.rubric is not None:
            return []
        raise UsageError(what, got="no such column", hint="add agent.judge.rubric for tasks without their own items")
    try:
        items = _ITEMS.validate_python(json.loads(given) if isinstance(given, str) else list(given))
        check_items([*(settings.rubric.items if settings.rubric else ()), *items])
    except (ValidationError, ValueError, TypeError) as error:
        words = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise UsageError(
            what, got=words, expected="[{name: …, criterion: …, weight: …}, …]", hint="see docs/judges.md"
        ) from error
    return items


def judge_rows(config: Config) -> list[tuple[str, str, str]]:
    """Return a dry run's rows about the judge: name, value, source."""
    judge, algorithm = config.agent.judge, config.algorithm
    if judge is None:
        return []
    each = requests_per_group(judge, algorithm.group_size)
    tasks, steps = config.trainer.tasks_per_step, config.trainer.steps
    kind = judge.kind if judge.compare is None else judge.compare.how
    rows = [
        ("judge", kind, f"{judge.engine.model} at {judge.engine.url}"),
        (
            "judge's requests per group",
            f"{each:,}",
            f"algorithm.group_size {algorithm.group_size}, if all are readable",
        ),
        ("judge's requests", f"{each * tasks * steps:,}", f"{steps:,} steps of {tasks:,} groups, no evaluations"),
    ]
    budget = judge.budget
    limits = {"requests": budget.max_requests, "tokens": budget.max_tokens_total, "cost": budget.max_cost}
    words = ", ".join(f"{limit:,} {name}" for name, limit in limits.items() if limit is not None)
    return [*rows, ("judge's budget", words, f"then {budget.when_spent}")] if words else rows


def requests_per_group(judge: JudgeConfig, size: int) -> int:
    """Return the number of judge requests per group if all answers are readable and none is cached.

    Rubric items from tasks are not counted.
    """
    if judge.compare is None:
        items = len(judge.rubric.items) if judge.rubric is not None else 1
        return size * (items if judge.rubric_requests == "each" else 1)
    if judge.compare.how == "listwise":
        return judge.compare.rounds or ROUNDS
    return 2 * len(pairs_of(size, judge.compare.opponents, seed=""))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupQuestion:
    """Question to a judge that shows several attempts at one task."""

    client: JudgeClient
    question: Callable[[Sequence[Attempt]], str]
    """Function that returns the question about attempts in the given order."""
    reason: VerdictField | None
    """Field of the judge's reasons, which precede its decision; ``None`` without reasons."""
    name: str
    """Id of the group, for messages; it also seeds the orders."""


async def pairwise(comparison: GroupQuestion, attempts: Sequence[Attempt], *, opponents: int | None) -> list[float]:
    """Compare attempts two at a time, each pair in both orders; by default each attempt with all others."""
    count = len(attempts)
    pairs = pairs_of(count, opponents, seed=comparison.name)
    results = await gather_in_order([_result(comparison, attempts[i], attempts[j]) for i, j in pairs])
    found = dict(zip(pairs, results, strict=True))
    if len(pairs) == count * (count - 1) // 2:
        return win_rates(found, count)
    return bradley_terry(found, count)


async def _result(comparison: GroupQuestion, first: Attempt, second: Attempt) -> float:
    """Return the mean over both orders of the first attempt's result: 1 for a win, 0.5 for a tie, 0 for a loss."""
    if first == second:
        return TIE
    reason = [] if comparison.reason is None else [comparison.reason]
    better = VerdictField(
        name="better", kind="string", choices=tuple(RESULT), meaning="the number of the better attempt"
    )
    answer_format = FieldsFormat([*reason, better])
    orders = ((first, second), (second, first))
    answers = await gather_in_order(
        [comparison.client.ask(comparison.question(order), answer_format, comparison.name) for order in orders]
    )
    forward, backward = (RESULT[answer["better"]] for answer in answers)
    counters = comparison.client.counters
    counters.judge_pairs += 1
    counters.judge_agreeing += forward == 1 - backward
    return (forward + 1 - backward) / 2


def pairs_of(count: int, opponents: int | None, *, seed: str) -> list[Pair]:
    """Return the pairs to compare: all, or those of neighbours on a shuffled circle with `opponents` for each attempt.

    >>> pairs_of(3, None, seed="")
    [(0, 1), (0, 2), (1, 2)]
    >>> from collections import Counter
    >>> sorted(Counter(i for pair in pairs_of(5, 2, seed="g") for i in pair).values())
    [2, 2, 2, 2, 2]
    """
    if opponents is None or opponents >= count - 1:
        return [(i, j) for i in range(count) for j in range(i + 1, count)]
    circle = list(range(count))
    random.Random(f"opponents/{seed}").shuffle(circle)
    return [
        (circle[i], circle[(i + distance) % count]) for i in range(count) for distance in range(1, opponents // 2 + 1)
    ]


def win_rates(results: Mapping[Pair, float], count: int) -> list[float]:
    """Return the mean result of each attempt against all others.

    >>> win_rates({(0, 1): 1.0, (0, 2): 0.5, (1, 2): 0.0}, 3)
    [0.75, 0.0, 0.75]
    """
    won = [0.0] * count
    for (i, j), result in results.items():
        won[i] += result
        won[j] += 1 - result
    return [value / (count - 1) for value in won]


def bradley_terry(results: Mapping[Pair, float], count: int) -> list[float]:
    """Return the expected win rate of each attempt against all others, from strengths fitted to the compared pairs."""
    met: list[list[int]] = [[] for _ in range(count)]
    won = [PRIOR] * count
    for (i, j), result in results.items():
        met[i].append(j)
        met[j].append(i)
        won[i] += result
        won[j] += 1 - result
    strength = [1.0] * count
    for _ in range(ITERATIONS):
        strength = [
            won[i] / math.fsum([2 * PRIOR / (strength[i] + 1), *(1 / (strength[i] + strength[j]) for j in met[i])])
            for i in range(count)
        ]
    return [
        math.fsum(strength[i] / (strength[i] + strength[j]) for j in range(count) if j != i) / (count - 1)
        for i in range(count)
    ]


async def listwise(comparison: GroupQuestion, attempts: Sequence[Attempt], *, rounds: int) -> list[float]:
    """Rank all attempts at once, in a new order each round, and average the rankings."""
    different = list(dict.fromkeys(attempts))
    if len(different) == 1:
        return [TIE] * len(attempts)
    found = await gather_in_order([_ranking(comparison, different, number) for number in range(rounds)])
    means = {attempt: math.fsum(ranks[attempt] for ranks in found) / rounds for attempt in different}
    return [means[attempt] for attempt in attempts]


async def _ranking(comparison: GroupQuestion, attempts: Sequence[Attempt], number: int) -> dict[Attempt, float]:
    shuffled = list(attempts)
    random.Random(f"round/{number}/{comparison.name}").shuffle(shuffled)
    count = len(shuffled)
    answer_format = RankingFormat(count, comparison.reason)
    answer = await comparison.client.ask(comparison.question(shuffled), answer_format, comparison.name)
    return {shuffled[label - 1]: (count - place) / (count - 1) for place, label in enumerate(answer["ranking"], 1)}
