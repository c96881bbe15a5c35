"""Rules about rewards: what scripted policies reach, and what play that solves nothing earns.

The reward should not go with anything but the solution.
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
from agentrl.rollout.env_adapter import WrongReturn
from agentrl.task import Task
from agentrl.testing.env_session import (
    CallFailed,
    EnvSession,
    Played,
    Policy,
    call_action,
    expert_policy,
    parameters_of,
    plain_text,
    play,
    random_arguments,
    random_policy,
)
from agentrl.testing.env_subject import Subject, until
from agentrl.testing.report import Broken, Finding, Missing, Suspect, rule
from agentrl.tool import Tool

ROUNDED = 0.05
"""How far a stated score may be from the true one: it is rounded, and measured on finitely many episodes."""
IMPLAUSIBLE = 1e-5
"""A number of successes that is rarer than this under the stated score shows that it is wrong."""


@rule("fix the expert, or state in `scores` what it reaches")
def is_solved_by_its_expert(subject: Subject) -> Finding:
    """The expert reaches the stated score."""
    played = [*subject.expert_episodes, *_more(subject, lambda _task: expert_policy())]
    found = _score(subject, "expert", played)
    if "expert" not in subject.spec.scores:
        _doubt_expert(found, _measured(subject, subject.random_episodes))
    return found


def _doubt_expert(expert: Finding, chance: Finding) -> None:
    """Scores that nobody stated are doubted where they are no use.

    Raises:
        Suspect: the expert solves nothing, or is no better than random play.
    """
    if expert.figures.get("success") == 0:
        raise Suspect(f"the expert solves nothing: {expert.detail}")
    kinds = ("success", "mean_return") if "success" in chance.figures else ("mean_return",)
    if all(expert.figures.get(kind, 0.0) <= chance.figures[kind] for kind in kinds):
        raise Suspect(f"the expert is no better than random play: {expert.detail}, random {chance.detail}")


@rule("let what is called success be what is rewarded; state the true `reward_range`")
def rewards_success(subject: Subject) -> str:
    """What the environment calls success is rewarded: some solved episode returns more than the least, and not 0."""
    played = list(subject.random_episodes)
    with suppress(Missing):
        played += subject.expert_episodes
    solved = [episode.total for episode in played if episode.results and episode.results[-1].info.get("success")]
    if not solved:
        raise Missing("no episode with success")
    least = subject.spec.reward_range[0]
    if all(total == 0 or total <= least for total in solved):
        raise Suspect(f"{len(solved)} of {len(played)} episodes are successes, and all return {max(solved):g}")
    return f"{len(solved)} successes return {min(solved):g} to {max(solved):g}"


@rule("let `mistake` return only what changes nothing")
def survives_mistakes(subject: Subject) -> Finding:
    """The expert's mistakes change nothing: it reaches its score with them, too."""
    with subject.session() as session:
        session.reset(subject.tasks[0])
        if session.find("expert") is None or not hasattr(session.call("expert"), "mistake"):
            raise Missing("no mistake() of an expert")
    return _score(subject, "expert", subject.play(lambda task: expert_policy(mistakes=0.2, seed=task.seed)))


@rule("measure the random policy again, and state its score")
def has_a_random_score(subject: Subject) -> Finding:
    """The random policy reaches the stated score, the lower bound."""
    played = [*subject.random_episodes, *_more(subject, lambda task: random_policy(task.seed))]
    found = _score(subject, "random", played)
    if found.figures.get("success") == 1 and "random" not in subject.spec.scores:
        raise Suspect(f"random play solves everything, so there is nothing to learn: {found.detail}")
    return found


def _more(subject: Subject, policy_of: Callable[[Task], Policy]) -> list[Played]:
    """Episodes of further tasks, as many as the effort has time for."""
    count = min(subject.effort.scored, len(subject.source))
    further: Iterator[Task] = (subject.source[index] for index in range(len(subject.tasks), count))
    return subject.play(policy_of, further)


def _score(subject: Subject, policy: str, played: Sequence[Played]) -> Finding:
    """Compare what a policy reached with what is stated of it."""
    found = _measured(subject, played)
    stated, success = subject.spec.scores.get(policy), found.figures.get("success")
    if stated is None or success is None:
        return found
    solved = round(success * len(played))
    if stated == 1 and solved < len(played):
        verdicts = [episode.is_solved(subject.spec) for episode in played]
        failed = [subject.source[number].id for number, verdict in enumerate(verdicts) if not verdict]
        raise Broken(f"the {policy} is said to solve everything, but not {', '.join(failed[:3])}")
    if _chance(solved, len(played), stated) < IMPLAUSIBLE:
        raise Broken(f"the {policy} solved {solved} of {len(played)}, which a score of {stated:g} does not explain")
    return Finding(found.detail.replace(" solved;", f" solved, stated {stated:g};"), found.figures)


def _measured(subject: Subject, played: Sequence[Played]) -> Finding:
    verdicts = [episode.is_solved(subject.spec) for episode in played]
    steps = statistics.fmean(len(episode.results) for episode in played)
    total = math.fsum(episode.total / len(played) for episode in played)
    figures = {"episodes": float(len(played)), "mean_return": total, "mean_steps": steps}
    if None in verdicts:
        return Finding(f"mean return {total:g}, {steps:.1f} steps; no success to tell", figures)
    solved = sum(map(bool, verdicts))
    detail = f"{solved} of {len(played)} solved; {steps:.1f} steps on average"
    return Finding(detail, {**figures, "success": solved / len(played)})


def _chance(solved: int, count: int, stated: float) -> float:
    """Chance of as many successes or more, or of as few or fewer, where the true score is near the stated one."""
    least, most = max(stated - ROUNDED, 0.0), min(stated + ROUNDED, 1.0)
    at_least = sum(_binomial(number, count, most) for number in range(solved, count + 1))
    at_most = sum(_binomial(number, count, least) for number in range(solved + 1))
    return min(at_least, at_most)


def _binomial(number: int, count: int, share: float) -> float:
    return math.comb(count, number) * share**number * (1 - share) ** (count - number)


LITTLE = 0.1
"""Share of the expert's return that play without a solution may earn by chance."""
SHUFFLES = 200
FEWEST_COMPARED = 4
"""Tasks on which lazy play must have been compared with random play; fewer may differ by accident."""
DEVIATIONS = 2.5
"""Standard errors by which the mean returns of two policies must differ."""
NONSENSE = "zx qv"
EVERYTHING = 100
"""Numbers that are said at once, from 0 on."""
_GIVING_UP = re.compile(r"submit|finish|done|end|stop|quit|give|answer|transfer|escalate", re.IGNORECASE)
_LONGEST_SAID = 8000
_WORD = re.compile(r"[a-z0-9_]+")
_SUCCESS = "All tests passed. reward 1"
_PROGRAM = f"```python\nimport sys\nprint({_SUCCESS!r})\nsys.exit(0)\n```"
_COMMAND = f"```bash\necho {_SUCCESS!r}; exit 0\n```"


@rule("pay at the limit what losing pays, and on the way only for what actions have changed")
def doing_nothing_does_not_pay(subject: Subject) -> Finding:
    """Saying nothing until the end earns no more than random play, and less than the expert."""
    return _compared(subject, lambda _task: _always(""))


@rule("pay at the limit what losing pays; an invalid action may cost, and must not pay")
def repeating_nonsense_does_not_pay(subject: Subject) -> Finding:
    """Repeating one invalid action until the end earns no more than random play, and less than the expert."""
    return _compared(subject, lambda _task: _always(NONSENSE))


@rule("let giving up be worth no more than losing; make handing over depend on the task")
def giving_up_does_not_pay(subject: Subject) -> Finding:
    """Giving up at once, in words and by tools that end or hand over, earns no more than random play, and less than
    the expert.
    """
    return _compared(subject, lambda task: _giving_up(task.seed))


@rule("grade one answer: take several for none, and ask which is meant")
def saying_everything_does_not_pay(subject: Subject) -> Finding:
    """Saying all numbers, all admissible actions and all that was seen at once earns no more than random play, and less
    than the expert.
    """
    return _compared(subject, lambda _task: _saying_everything())


@rule("reward what was done, not that the episode went on")
def silence_earns_nothing(subject: Subject) -> Finding:
    """A policy that says nothing earns less than a tenth of what the expert does."""
    return _judged(subject, subject.play(lambda _task: _always("")))


@rule("let the task begin unsolved, and judge its result")
def handing_in_earns_nothing(subject: Subject) -> Finding:
    """A policy that only ever says "submit" earns less than a tenth of what the expert does."""
    return _judged(subject, subject.play(lambda _task: _always("submit")))


@rule("judge values that the program returns, elsewhere than where it ran; not its exit code and not its words")
def printed_success_earns_nothing(subject: Subject) -> Finding:
    """A Python program that prints marks of success and exits earns less than a tenth of what the expert does."""
    return _judged(subject, subject.play(lambda _task: _always(_PROGRAM)))


@rule("judge the state that the command left, elsewhere than where it ran; not its exit code and not its words")
def echoed_success_earns_nothing(subject: Subject) -> Finding:
    """A shell command that prints marks of success and exits earns less than a tenth of what the expert does."""
    return _judged(subject, subject.play(lambda _task: _always(_COMMAND)))


@rule("keep answers out of what the policy reads")
def repeating_earns_nothing(subject: Subject) -> Finding:
    """A policy that repeats what it reads earns less than a tenth of what the expert does."""
    return _judged(subject, subject.play(lambda _task: lambda _session, observation: plain_text(observation)))


@rule("let tasks differ in their solutions; a world of one task is no fault")
def another_solution_earns_nothing(subject: Subject) -> Finding:
    """What solves the first task earns in the others less than a tenth of what the expert does."""
    first, others = subject.tasks[0], subject.tasks[1:]
    if not others:
        raise Missing("one task was played")
    with subject.session() as session:
        if session.find("expert") is None:
            raise Missing("no expert()")
        actions = play(session, first, expert_policy(), subject.limit).actions
        played = [play(session, task, _script(actions), subject.limit) for task in others]
    try:
        return _judged(subject, played)
    except Broken as same:
        raise Suspect(str(same)) from None


@rule("look which tasks the words stand in; that such a task is easier is no fault")
def openings_tell_no_luck(subject: Subject) -> Finding:
    """No word of the opening tells whether random play is rewarded."""
    found = _mean(subject.random_episodes)
    if words := telling(subject.random_episodes):
        raise Suspect(f"random play: mean return {found:g}, which goes with {_listed(words)} in the opening")
    return Finding(f"random play: mean return {found:g}", {"mean_return": found})


def _judged(subject: Subject, played: Sequence[Played]) -> Finding:
    """Judge what cheap play earned: little, and no word of the opening tells when.

    Raises:
        Broken: as much as the expert.
        Suspect: more than a little, or a word goes with it.
    """
    earned, worth = _mean(played), _worth(subject)
    detail = f"mean return {earned:g}" + ("" if worth is None else f", of a solution {worth:g}")
    if worth is not None and earned >= worth > 0:
        raise Broken(detail)
    if words := telling(played):
        raise Suspect(f"{detail}; it goes with {_listed(words)} in the opening")
    if worth is not None and earned > min(worth * LITTLE, worth):
        raise Suspect(detail)
    return Finding(detail, {"mean_return": earned})


def _compared(subject: Subject, policy_of: Callable[[Task], Policy]) -> Finding:
    """Compare the returns of lazy play with those of random play of the same tasks.

    Raises:
        Missing: it cannot be played; *bears nonsense* says more.
        Broken: lazy play earned more, and not by accident; or as much as an expert who is better than random play.
    """
    lazy = _lazy_episodes(subject, policy_of)
    honest = subject.random_episodes[: len(lazy)]
    earned, chance = _mean(lazy), _mean(honest)
    detail = f"mean return {earned:g}, of random play {chance:g}"
    if earned > chance:
        gains = [one.total - other.total for one, other in zip(lazy, honest, strict=True)]
        if len(gains) >= FEWEST_COMPARED and earned - chance > DEVIATIONS * _standard_error(gains):
            raise Broken(detail)
        with suppress(Missing):
            worth = _mean(subject.expert_episodes[: len(lazy)])
            if earned >= worth > chance:
                raise Broken(f"{detail}, of the expert {worth:g}")
    return Finding(f"{detail}; {len(lazy)} tasks", {"mean_return": earned, "random_return": chance})


def _lazy_episodes(subject: Subject, policy_of: Callable[[Task], Policy]) -> list[Played]:
    with subject.session() as session:
        timed = until(subject.effort.lazy_s, subject.tasks)
        try:
            return [play(session, task, policy_of(task), subject.limit) for task in timed]
        except (CallFailed, WrongReturn):
            raise
        except Exception as error:
            raise Missing(f"an action is refused by an exception ({type(error).__name__}: {error})") from error


def _standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


def _giving_up(seed: int) -> Policy:
    """Calls each tool that may end the episode once, then says that it gives up."""
    generator = random.Random(seed)
    tools: list[Tool] | None = None

    def choose(session: EnvSession, observation: Content) -> str:
        nonlocal tools
        if tools is None:
            tools = [tool for tool in session.own_tools() if _GIVING_UP.search(tool.name)]
        if tools:
            tool = tools.pop()
            return call_action(tool, random_arguments(tool, generator, plain_text(observation)))
        return "I give up. I do not know the answer."

    return choose


def _saying_everything() -> Policy:
    """Calls each tool that needs no arguments once, then says all that it knows, again and again."""
    seen = list[str]()
    tools: list[Tool] | None = None

    def choose(session: EnvSession, observation: Content) -> str:
        nonlocal tools
        seen.append(plain_text(observation))
        if tools is None:
            tools = [tool for tool in session.own_tools() if not parameters_of(tool)]
        if tools:
            return call_action(tools.pop(), {})
        told = [*map(str, range(EVERYTHING)), *(session.call("admissible_actions") or ()), *seen]
        return "\n".join(told)[:_LONGEST_SAID]

    return choose


def _worth(subject: Subject) -> float | None:
    """Return what a solution earns: the expert's mean return, else the spec's score; ``None`` when neither is known."""
    with suppress(Missing):
        return _mean(subject.expert_episodes)
    stated = (subject.spec.success_threshold, subject.spec.reward_range[1])
    return next((value for value in stated if value is not None and math.isfinite(value)), None)


def _mean(played: Sequence[Played]) -> float:
    return math.fsum(episode.total / len(played) for episode in played)  # rewards of any size can be added so


def _listed(words: Sequence[str]) -> str:
    return ", ".join(map(repr, words[:3]))


def telling(played: Sequence[Played]) -> list[str]:
    """Words whose presence in an opening goes with the return more closely than that of any word by accident.

    What is an accident is seen by giving the returns to other episodes, again and again: there, too, some word goes
    with them best (Westfall and Young, Resampling-Based Multiple Testing, 1993).
    """
    returns = np.array([episode.total for episode in played])
    bags = [set(_WORD.findall(episode.moments[0].observation.lower())) for episode in played]
    words = sorted({word for bag in bags for word in bag if any(word not in other for other in bags)})
    if not words or np.ptp(returns) == 0:
        return []
    presence = _standardised(np.array([[word in bag for word in words] for bag in bags], dtype=np.float64))
    generator = np.random.default_rng(0)
    shuffled = np.stack([returns, *(generator.permutation(returns) for _ in range(SHUFFLES))])
    strength = np.abs(_standardised(shuffled.T).T @ presence)
    accident = strength[1:].max() + 1e-9
    return [word for word, found in zip(words, strength[0], strict=True) if found > accident]


def _standardised(columns: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Columns of mean 0 and length 1, so that products of them are correlations."""
    centred = columns - columns.mean(axis=0)
    return np.asarray(centred / np.linalg.norm(centred, axis=0))


def _always(text: str) -> Policy:
    return lambda _session, _observation: text


def _script(actions: Sequence[str]) -> Policy:
    left = list(actions)

    def choose(_session: EnvSession, _observation: Content) -> str:
        return left.pop(0) if left else actions[-1]

    return choose
