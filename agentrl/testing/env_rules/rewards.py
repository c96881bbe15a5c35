"""Rules about rewards: the scores of scripted policies, and the rewards of play that solves nothing.

The reward should correlate only with the solution.
"""

from __future__ import annotations

import math
import random
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from agentrl.message import Content
from agentrl.rollout.env_returns import WrongReturn
from agentrl.task import Task
from agentrl.testing.env_session import (
    CallFailed,
    EnvSession,
    PlayedEpisode,
    Policy,
    call_action,
    expert_policy,
    plain_text,
    play,
    random_policy,
)
from agentrl.testing.env_subject import Subject, until
from agentrl.testing.report import CheckFinding, RuleFailed, RuleSkipped, RuleWarned, rule
from agentrl.tool import Tool
from agentrl.tool.random_call import random_arguments

ROUNDED = 0.05
"""Tolerance of a stated score, which is rounded and measured on finitely many episodes."""
IMPLAUSIBLE = 1e-5
"""Significance level: the stated score is wrong if the success count is less probable than this."""
LITTLE = 0.1
"""Maximum return of play without a solution, relative to the expert's return."""
SHUFFLES = 200
MIN_COMPARED_TASKS = 4
"""Minimum number of tasks for a comparison of lazy play with random play; fewer may differ by chance."""
DEVIATIONS = 2.5
"""Minimum difference of the mean returns of two policies, in standard errors."""
NONSENSE = "zx qv"
EVERYTHING = 100
"""Number of integers in an answer with all numbers, from 0 on."""
_GIVING_UP = re.compile(r"submit|finish|done|end|stop|quit|give|answer|transfer|escalate", re.IGNORECASE)
_MAX_ANSWER_CHARS = 8000
_WORD = re.compile(r"[a-z0-9_]+")
_SUCCESS = "All tests passed. reward 1"
_PROGRAM = f"```python\nimport sys\nprint({_SUCCESS!r})\nsys.exit(0)\n```"
_COMMAND = f"```bash\necho {_SUCCESS!r}; exit 0\n```"


@rule("fix the expert, or state its success in `scores`")
def is_solved_by_its_expert(subject: Subject) -> CheckFinding:
    """The expert reaches the stated score, with text actions and through the environment's tools."""
    played = [*subject.tool_episodes, *_more(subject, lambda _task: expert_policy(through_tools=True))]
    if subject.has_tool_messages:
        _require_equal_scores(subject)
    found = _score(subject, "expert", played)
    if "expert" not in subject.spec.scores:
        _doubt_expert(found, _measure(subject, subject.random_episodes))
    return found


def _require_equal_scores(subject: Subject) -> None:
    """Check that the expert solves the same tasks with text actions and through tools.

    Raises:
        RuleFailed: it does not.
    """
    for task, text, tools in zip(subject.tasks, subject.expert_episodes, subject.tool_episodes, strict=False):
        verdicts = text.is_solved(subject.spec), tools.is_solved(subject.spec)
        if verdicts[0] != verdicts[1]:
            words = ["does not solve" if verdict is False else "solves" for verdict in verdicts]
            raise RuleFailed(f"the expert {words[1]} {task.id} through tools, and {words[0]} it with text actions")


def _doubt_expert(expert: CheckFinding, chance: CheckFinding) -> None:
    """Check an expert without a stated score.

    Raises:
        RuleWarned: the expert solves nothing, or is not better than random play.
    """
    if expert.figures.get("success") == 0:
        raise RuleWarned(f"the expert solves nothing: {expert.detail}")
    kinds = ("success", "mean_return") if "success" in chance.figures else ("mean_return",)
    if all(expert.figures.get(kind, 0.0) <= chance.figures[kind] for kind in kinds):
        raise RuleWarned(f"the expert is not better than random play: {expert.detail}, random {chance.detail}")


@rule("reward what counts as success; state the true `reward_range`")
def rewards_success(subject: Subject) -> str:
    """Success is rewarded: some solved episode has a return above the lowest one, and not 0."""
    played = list(subject.random_episodes)
    with suppress(RuleSkipped):
        played += subject.expert_episodes
    solved = [episode.total for episode in played if episode.results and episode.results[-1].info.get("success")]
    if not solved:
        raise RuleSkipped("no episode with success")
    least = subject.spec.reward_range[0]
    if all(total == 0 or total <= least for total in solved):
        raise RuleWarned(f"{len(solved)} of {len(played)} episodes are successes, and all return {max(solved):g}")
    return f"{len(solved)} successes return {min(solved):g} to {max(solved):g}"


@rule("let `mistake` return only actions that do not change the state")
def survives_mistakes(subject: Subject) -> CheckFinding:
    """The expert reaches its score even with mistakes, because they do not change the state."""
    with subject.session() as session:
        session.reset(subject.tasks[0])
        if session.find("expert") is None or not hasattr(session.call("expert"), "mistake"):
            raise RuleSkipped("no expert with mistake()")
    return _score(subject, "expert", subject.play(lambda task: expert_policy(mistakes=0.2, seed=task.seed)))


@rule("measure the random policy again, and state its score")
def has_a_random_score(subject: Subject) -> CheckFinding:
    """The random policy reaches its stated score, which is the baseline."""
    played = [*subject.random_episodes, *_more(subject, lambda task: random_policy(task.seed))]
    found = _score(subject, "random", played)
    if found.figures.get("success") == 1 and "random" not in subject.spec.scores:
        raise RuleWarned(f"random play solves everything, so there is nothing to learn: {found.detail}")
    return found


def _more(subject: Subject, policy_of: Callable[[Task], Policy]) -> list[PlayedEpisode]:
    """Play further tasks, as many as the effort allows."""
    count = min(subject.effort.scored, len(subject.source))
    further: Iterator[Task] = (subject.source[index] for index in range(len(subject.tasks), count))
    return subject.play(policy_of, further)


def _score(subject: Subject, policy: str, played: Sequence[PlayedEpisode]) -> CheckFinding:
    """Compare a policy's success with its stated score."""
    found = _measure(subject, played)
    stated, success = subject.spec.scores.get(policy), found.figures.get("success")
    if stated is None or success is None:
        return found
    solved = round(success * len(played))
    if stated == 1 and solved < len(played):
        verdicts = [episode.is_solved(subject.spec) for episode in played]
        failed = [subject.source[number].id for number, verdict in enumerate(verdicts) if not verdict]
        raise RuleFailed(f"the {policy} has a stated score of 1 but does not solve {', '.join(failed[:3])}")
    if _chance(solved, len(played), stated) < IMPLAUSIBLE:
        raise RuleFailed(
            f"the {policy} solved {solved} of {len(played)}, which contradicts its stated score of {stated:g}"
        )
    return CheckFinding(found.detail.replace(" solved;", f" solved, stated {stated:g};"), found.figures)


def _measure(subject: Subject, played: Sequence[PlayedEpisode]) -> CheckFinding:
    verdicts = [episode.is_solved(subject.spec) for episode in played]
    steps = statistics.fmean(len(episode.results) for episode in played)
    total = math.fsum(episode.total / len(played) for episode in played)
    figures = {"episodes": float(len(played)), "mean_return": total, "mean_steps": steps}
    if all(verdict is None for verdict in verdicts):
        return CheckFinding(f"mean return {total:g}, {steps:.1f} steps; success unknown", figures)
    solved = sum(map(bool, verdicts))
    detail = f"{solved} of {len(played)} solved; {steps:.1f} steps on average"
    return CheckFinding(detail, {**figures, "success": solved / len(played)})


def _chance(solved: int, count: int, stated: float) -> float:
    """Return the probability of at least, or at most, `solved` successes if the true score is near the stated one."""
    least, most = max(stated - ROUNDED, 0.0), min(stated + ROUNDED, 1.0)
    at_least = sum(_binomial(number, count, most) for number in range(solved, count + 1))
    at_most = sum(_binomial(number, count, least) for number in range(solved + 1))
    return min(at_least, at_most)


def _binomial(number: int, count: int, share: float) -> float:
    return math.comb(count, number) * share**number * (1 - share) ** (count - number)


@rule("give the reward of a loss at the step limit, and intermediate rewards only for changes made by actions")
def doing_nothing_does_not_pay(subject: Subject) -> CheckFinding:
    """Empty answers until the end earn no more than random play, and less than the expert; `final_reward` does not call
    a task solved at its start.
    """
    with subject.session() as session:
        session.reset(subject.tasks[0])
        final = session.call("final_reward")
    threshold = subject.spec.success_threshold
    if final is not None and final.info.get("success", threshold is not None and final.reward >= threshold):
        raise RuleFailed(f"final_reward returns {final.reward:g} and a success before the first action")
    return _compare(subject, lambda _task: _always(""))


@rule("give the reward of a loss at the step limit; an invalid action may have a penalty but no reward")
def repeating_nonsense_does_not_pay(subject: Subject) -> CheckFinding:
    """Repeating one invalid action until the end earns no more than random play, and less than the expert."""
    return _compare(subject, lambda _task: _always(NONSENSE))


@rule("reward giving up no more than losing; make the reward of a hand-over depend on the task")
def giving_up_does_not_pay(subject: Subject) -> CheckFinding:
    """Giving up at once, in text and by tools that end the episode or hand over, earns no more than random play, and
    less than the expert.
    """
    return _compare(subject, lambda task: _giving_up(task.seed))


@rule("grade a single answer: reject several answers, and ask for one")
def saying_everything_does_not_pay(subject: Subject) -> CheckFinding:
    """An answer with all numbers, all admissible actions and all observations earns no more than random play, and less
    than the expert.
    """
    return _compare(subject, lambda _task: _saying_everything())


@rule("reward results of actions, not the length of the episode")
def silence_earns_nothing(subject: Subject) -> CheckFinding:
    """A policy with empty answers earns less than a tenth of the expert's return."""
    return _judge(subject, subject.play(lambda _task: _always("")))


@rule("let the task begin unsolved, and grade its result")
def handing_in_earns_nothing(subject: Subject) -> CheckFinding:
    """A policy that always answers "submit" earns less than a tenth of the expert's return."""
    return _judge(subject, subject.play(lambda _task: _always("submit")))


@rule("grade the program's return values, not its exit code or output, and do so outside the place where it ran")
def printed_success_earns_nothing(subject: Subject) -> CheckFinding:
    """A Python program that prints messages of success and exits earns less than a tenth of the expert's return."""
    return _judge(subject, subject.play(lambda _task: _always(_PROGRAM)))


@rule("grade the state after the command, not its exit code or output, and do so outside the place where it ran")
def echoed_success_earns_nothing(subject: Subject) -> CheckFinding:
    """A shell command that prints messages of success and exits earns less than a tenth of the expert's return."""
    return _judge(subject, subject.play(lambda _task: _always(_COMMAND)))


@rule("keep answers out of the observations")
def repeating_earns_nothing(subject: Subject) -> CheckFinding:
    """A policy that repeats its observations earns less than a tenth of the expert's return."""
    return _judge(subject, subject.play(lambda _task: lambda _session, observation: plain_text(observation)))


@rule("let tasks differ in their solutions; an environment with a single task is fine")
def another_solution_earns_nothing(subject: Subject) -> CheckFinding:
    """The solution of the first task earns less than a tenth of the expert's return in other tasks."""
    first, others = subject.tasks[0], subject.tasks[1:]
    if not others:
        raise RuleSkipped("only one task was played")
    with subject.session() as session:
        if session.find("expert") is None:
            raise RuleSkipped("no expert()")
        actions = play(session, first, expert_policy(), subject.limit).actions
        played = [play(session, task, _script(actions), subject.limit) for task in others]
    try:
        return _judge(subject, played)
    except RuleFailed as same:
        raise RuleWarned(str(same)) from None


@rule("look at the tasks with these words; easier tasks are fine")
def openings_do_not_predict_rewards(subject: Subject) -> CheckFinding:
    """No word of the opening predicts whether random play is rewarded."""
    found = _mean(subject.random_episodes)
    if words := telling(subject.random_episodes):
        raise RuleWarned(f"random play: mean return {found:g}, which correlates with {_quote(words)} in the opening")
    return CheckFinding(f"random play: mean return {found:g}", {"mean_return": found})


def _judge(subject: Subject, played: Sequence[PlayedEpisode]) -> CheckFinding:
    """Check that trivial play earned little, and that no word of the opening predicts its return.

    Raises:
        RuleFailed: trivial play earned as much as a solution.
        RuleWarned: it earned more than `LITTLE` of a solution, or its return correlates with a word.
    """
    earned, worth = _mean(played), _worth(subject)
    detail = f"mean return {earned:g}" + ("" if worth is None else f", of a solution {worth:g}")
    if worth is not None and earned >= worth > 0:
        raise RuleFailed(detail)
    if words := telling(played):
        raise RuleWarned(f"{detail}; it correlates with {_quote(words)} in the opening")
    if worth is not None and earned > min(worth * LITTLE, worth):
        raise RuleWarned(detail)
    return CheckFinding(detail, {"mean_return": earned})


def _compare(subject: Subject, policy_of: Callable[[Task], Policy]) -> CheckFinding:
    """Compare the returns of lazy play with those of random play on the same tasks.

    Raises:
        RuleSkipped: lazy play raises an exception, which the rule *answers invalid actions* reports.
        RuleFailed: lazy play earned significantly more, or as much as an expert that is better than random play.
    """
    lazy = _lazy_episodes(subject, policy_of)
    honest = subject.random_episodes[: len(lazy)]
    earned, chance = _mean(lazy), _mean(honest)
    detail = f"mean return {earned:g}, of random play {chance:g}"
    if earned > chance:
        gains = [one.total - other.total for one, other in zip(lazy, honest, strict=True)]
        if len(gains) >= MIN_COMPARED_TASKS and earned - chance > DEVIATIONS * _standard_error(gains):
            raise RuleFailed(detail)
        with suppress(RuleSkipped):
            worth = _mean(subject.expert_episodes[: len(lazy)])
            if earned >= worth > chance:
                raise RuleFailed(f"{detail}, of the expert {worth:g}")
    return CheckFinding(f"{detail}; {len(lazy)} tasks", {"mean_return": earned, "random_return": chance})


def _lazy_episodes(subject: Subject, policy_of: Callable[[Task], Policy]) -> list[PlayedEpisode]:
    with subject.session() as session:
        timed = until(subject.effort.lazy_s, subject.tasks)
        try:
            return [play(session, task, policy_of(task), subject.limit) for task in timed]
        except (CallFailed, WrongReturn):
            raise
        except Exception as error:
            raise RuleSkipped(f"the environment rejects an action with {type(error).__name__}: {error}") from error


def _standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


def _giving_up(seed: int) -> Policy:
    """Return a policy that calls each tool that may end the episode once, and then answers that it gives up."""
    generator = random.Random(seed)
    tools: list[Tool] | None = None

    def choose(session: EnvSession, observation: Content) -> str:
        nonlocal tools
        if tools is None:
            tools = [tool for tool in session.own_tools() if _GIVING_UP.search(tool.name)]
        if tools:
            tool = tools.pop()
            return call_action(tool, random_arguments(tool.schema, generator, plain_text(observation)))
        return "I give up. I do not know the answer."

    return choose


def _saying_everything() -> Policy:
    """Return a policy that calls each tool without arguments once, and then repeats all text that it has read."""
    seen = list[str]()
    tools: list[Tool] | None = None

    def choose(session: EnvSession, observation: Content) -> str:
        nonlocal tools
        seen.append(plain_text(observation))
        if tools is None:
            tools = [one for one in session.own_tools() if not one.schema["function"]["parameters"].get("properties")]
        if tools:
            return call_action(tools.pop(), {})
        texts = [*map(str, range(EVERYTHING)), *(session.call("admissible_actions") or ()), *seen]
        return "\n".join(texts)[:_MAX_ANSWER_CHARS]

    return choose


def _worth(subject: Subject) -> float | None:
    """Return the return of a solution: the expert's mean, or else the spec's; ``None`` if neither is known."""
    with suppress(RuleSkipped):
        return _mean(subject.expert_episodes)
    stated = (subject.spec.success_threshold, subject.spec.reward_range[1])
    return next((value for value in stated if value is not None and math.isfinite(value)), None)


def _mean(played: Sequence[PlayedEpisode]) -> float:
    return math.fsum(episode.total / len(played) for episode in played)  # dividing first avoids an overflow


def _quote(words: Sequence[str]) -> str:
    return ", ".join(map(repr, words[:3]))


def telling(played: Sequence[PlayedEpisode]) -> list[str]:
    """Return the words whose presence in an opening correlates with the return more strongly than chance explains.

    The threshold is the strongest correlation of any word after permuting the returns among the episodes `SHUFFLES`
    times (Westfall and Young, Resampling-Based Multiple Testing, 1993).
    """
    returns = np.array([episode.total for episode in played])
    bags = [set(_WORD.findall(episode.moments[0].observation.lower())) for episode in played]
    words = sorted({word for bag in bags for word in bag if any(word not in other for other in bags)})
    if not words or np.ptp(returns) == 0:
        return []
    presence = _standardize(np.array([[word in bag for word in words] for bag in bags], dtype=np.float64))
    generator = np.random.default_rng(0)
    shuffled = np.stack([returns, *(generator.permutation(returns) for _ in range(SHUFFLES))])
    strength = np.abs(_standardize(shuffled.T).T @ presence)
    accident = strength[1:].max() + 1e-9
    return [word for word, found in zip(words, strength[0], strict=True) if found > accident]


def _standardize(columns: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Scale columns to mean 0 and length 1, so that their products are correlations."""
    centred = columns - columns.mean(axis=0)
    return np.asarray(centred / np.linalg.norm(centred, axis=0))


def _always(text: str) -> Policy:
    return lambda _session, _observation: text


def _script(actions: Sequence[str]) -> Policy:
    left = list(actions)

    def choose(_session: EnvSession, _observation: Content) -> str:
        return left.pop(0) if left else actions[-1]

    return choose
