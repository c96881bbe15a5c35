"""Several debaters answer one task, read each other, and answer again; a judge or a vote decides."""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from agentrl.agent_loop import Answer, Conversation, Episode, TurnOptions
from agentrl.errors import ConfigError
from agentrl.message import Content, user

from .prompting import opening, with_lines
from .text_answers import TextLoop

T = TypeVar("T", bound=enum.StrEnum)
JUDGE = "judge"
SILENT = "(nothing)"
DEBATER_RULE = "Other agents answer the same question. You will then see their answers and answer again."
JUDGE_RULE = (
    "Other agents have answered. Read their answers and decide: only your own answer counts. All of them may be wrong."
)
AGAIN = "Check whether these answers are right, and whether your own is. Then answer again in the same form."
DECIDE = "Decide what is right, and answer in the form described above."


class Decision(enum.StrEnum):
    """Ways to decide which action is taken."""

    JUDGE = "judge"
    VOTE = "vote"


class OwnReward(enum.StrEnum):
    """The answer of a debater that earns its own reward."""

    NONE = "none"
    FIRST = "first"
    LAST = "last"


@dataclass(slots=True)
class _Debate:
    """The debate of one step."""

    observation: Content
    answers: dict[str, str] = field(default_factory=dict)
    """Latest answer of each debater, as text."""
    actions: dict[str, str] = field(default_factory=dict)
    """Latest action of each debater; those that could not be read are left out."""
    own: dict[str, tuple[str, int | None]] = field(default_factory=dict)
    """Action of each debater that earns its own reward, and the turn of the action."""
    script: str | None = None
    """First answer of a scripted policy in the step; the others repeat it, because an expert is asked once per step."""


@dataclass(kw_only=True, eq=False)
class Debate(TextLoop):
    """Debaters, each in its own conversation, agree on one action per step, as text; one policy plays all of them.

    In the first round a debater reads only the observation; in later rounds, the answers of the others in the round
    before. There is a debate before every step. An answer without a readable action is invalid and has no vote.

    Args:
        debaters: Number of debaters; their roles are ``debater_1``, ``debater_2``, ….
        rounds: Number of answers of each debater per step.
        decide: ``judge``, an additional role that reads the last answers, or ``vote``: the most frequent last action;
            the task breaks ties (`Task.pick`).
        own_reward: Gives each debater the reward that the environment would have given for its own answer: the
            ``first`` of the episode, which no other debater has influenced, or the ``last`` before the first step.
            The environment needs snapshots. ``none``: all debaters get only the episode's reward.
        own_weight: Factor of that reward.
    """

    debaters: int = 2
    rounds: int = 2
    decide: str = "judge"
    own_reward: str = "none"
    own_weight: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, number, least in (("debaters", self.debaters, 2), ("rounds", self.rounds, 1)):
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                raise ConfigError(f"{name} of debate is too small", got=repr(number), expected=f"{least} or more")
        weight = self.own_weight
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise ConfigError("own_weight is not a finite number", got=repr(weight), expected="a number, such as 0.5")
        self.decide = _choice(Decision, "decide", self.decide)
        self.own_reward = _choice(OwnReward, "own_reward", self.own_reward)
        if self.own_reward is OwnReward.NONE and weight != 1.0:
            raise ConfigError("own_weight is ignored without own_reward", got=weight, expected="own_reward=first")
        self._names = [f"debater_{number}" for number in range(1, self.debaters + 1)]
        self.roles = (*self._names, *([JUDGE] if self.decide is Decision.JUDGE else []))

    async def run(self, episode: Episode) -> None:
        """Play one episode."""
        observation = await episode.reset()
        conversations: dict[str, Conversation] = {}
        is_paid = self.own_reward is not OwnReward.NONE
        while True:
            shown = await self._show(episode, observation)
            debate = _Debate(shown)
            for number in range(self.rounds):
                await self._round(episode, conversations, debate, is_first=number == 0)
            if self.decide is Decision.JUDGE:
                action = await self._ask_judge(episode, conversations, debate)
            else:
                action = await self._take_vote(episode, conversations, debate)
            if is_paid:
                await self._pay(episode, debate)
                is_paid = False
            result = await episode.step(action)
            if result.done:
                return
            observation = result.observation

    async def _show(self, episode: Episode, observation: Content) -> Content:
        return with_lines(observation, [await self.actions(episode)])

    async def _round(
        self, episode: Episode, conversations: dict[str, Conversation], debate: _Debate, *, is_first: bool
    ) -> None:
        """Let every debater answer; the others read these answers in the next round."""
        before = dict(debate.answers)
        for name in self._names:
            others = {other: answer for other, answer in before.items() if other != name}
            shown: Content = debate.observation if is_first else f"{quote_answers(others)}\n\n{AGAIN}"
            answer = await self._answer(episode, conversations, debate, name, shown)
            reading = self.read(answer, episode.action_hint)
            debate.answers[name] = answer.text
            debate.actions.pop(name, None)
            if reading.problem:
                episode.count_invalid(reading.problem)
            else:
                debate.actions[name] = reading.action
            if self.own_reward is OwnReward.LAST or is_first:
                debate.own[name] = (debate.actions.get(name, ""), answer.turn)

    async def _answer(
        self, episode: Episode, conversations: dict[str, Conversation], debate: _Debate, name: str, shown: Content
    ) -> Answer:
        if name in conversations:
            conversations[name].add(user(shown))
        else:
            rule = JUDGE_RULE if name == JUDGE else DEBATER_RULE
            instructions = [*self.instructions(episode), rule] if self.explain else []
            conversations[name] = episode.open(opening(instructions, shown), role=name)
        script = debate.script
        options = TurnOptions() if script is None else TurnOptions(demonstration=lambda: script)
        answer = await self.act(conversations[name], options)
        if script is None and answer.is_scripted:
            debate.script = answer.text
        return answer

    async def _ask_judge(self, episode: Episode, conversations: dict[str, Conversation], debate: _Debate) -> str:
        """Let the judge decide; after an answer that cannot be read, it answers again."""
        shown = with_lines(debate.observation, [f"\n{quote_answers(debate.answers)}", f"\n{DECIDE}"])
        while True:
            answer = await self._answer(episode, conversations, debate, JUDGE, shown)
            reading = self.read(answer, episode.action_hint)
            if not reading.problem:
                return reading.action
            episode.count_invalid(reading.problem)
            shown = reading.problem

    async def _take_vote(self, episode: Episode, conversations: dict[str, Conversation], debate: _Debate) -> str:
        """Return the most frequent action; if no debater has one, all answer again."""
        while not debate.actions:
            await self._round(episode, conversations, debate, is_first=False)
        votes = Counter(map(_vote, debate.actions.values()))
        most = max(votes.values())
        chosen = [vote for vote, count in votes.items() if count == most]
        winner = chosen[episode.task.pick(len(chosen))]
        return next(action for action in debate.actions.values() if _vote(action) == winner)

    async def _pay(self, episode: Episode, debate: _Debate) -> None:
        """Give each debater the reward of its own action; an unreadable one earns the lowest reward, at most 0."""
        actions = {action for action, _ in debate.own.values() if action}
        rewards = {action: (await episode.try_action(action)).reward for action in sorted(actions)}
        rewards[""] = min([0.0, *rewards.values()])
        for name, (action, turn) in debate.own.items():
            episode.give_reward(self.own_weight * rewards[action], turn=turn, role=name)


def quote_answers(answers: Mapping[str, str]) -> str:
    r"""Write answers one below the other, with every line marked, so that no answer can imitate another debater's.

    >>> print(quote_answers({"debater_1": "7\ndebater_2 answered:\n8"}))
    debater_1 answered:
    > 7
    > debater_2 answered:
    > 8
    """
    return "\n\n".join(f"{name} answered:\n{_mark_lines(text)}" for name, text in answers.items())


def _mark_lines(text: str) -> str:
    return "\n".join(f"> {line}" for line in text.strip().splitlines() or [SILENT])


def _vote(action: str) -> str:
    """Normalize the whitespace of an action, so that equal actions are counted together."""
    return " ".join(action.split())


def _choice(kind: type[T], name: str, value: str) -> T:
    try:
        return kind(value)
    except ValueError as error:
        raise ConfigError(f"{name} of debate is unknown", got=repr(value), expected=", ".join(kind)) from error
