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
    """Who decides which action is taken."""

    JUDGE = "judge"
    VOTE = "vote"


class OwnReward(enum.StrEnum):
    """Which of a debater's answers earns a reward of its own."""

    NONE = "none"
    FIRST = "first"
    LAST = "last"


@dataclass(slots=True)
class _Debate:
    """The debate of one step."""

    observation: Content
    said: dict[str, str] = field(default_factory=dict)
    """Each debater's latest answer, as a text."""
    actions: dict[str, str] = field(default_factory=dict)
    """Each debater's latest action; those that could not be read are left out."""
    own: dict[str, tuple[str, int | None]] = field(default_factory=dict)
    """Of each debater, the action that earns a reward of its own, and the turn in which it was said."""
    script: str | None = None
    """The step's first answer: scripted policies repeat it, because an expert is asked once per step."""


@dataclass(kw_only=True, eq=False)
class Debate(TextLoop):
    """Debaters answer as text, each in a conversation of its own, and one action comes of it; one policy plays all.

    In the first round a debater reads the observation alone; in the others, what the others said in the round before.
    There is a debate for every step. An answer without a readable action counts as unusable, and has no vote.

    Args:
        debaters: How many; the roles are ``debater_1``, ``debater_2``, ….
        rounds: How often each of them answers.
        decide: ``judge``, a role of its own that reads the last answers, or ``vote``: the most frequent last action.
            The seed of the task chooses among equals.
        own_reward: Pays each debater for an answer of its own as the environment would have rewarded it: the ``first``
            of the episode, which no other debater has influenced, or the ``last`` before its first step. The
            environment needs snapshots. ``none``: all share its reward alone.
        own_weight: Multiplies that reward.
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
            raise ConfigError("own_weight is no weight", got=repr(weight), expected="a number, such as 0.5")
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
            shown = await self._shown(episode, observation)
            debate = _Debate(shown)
            for number in range(self.rounds):
                await self._round(episode, conversations, debate, is_first=number == 0)
            if self.decide is Decision.JUDGE:
                action = await self._judged(episode, conversations, debate)
            else:
                action = await self._voted(episode, conversations, debate)
            if is_paid:
                await self._pay(episode, debate)
                is_paid = False
            result = await episode.step(action)
            if result.done:
                return
            observation = result.observation

    async def _shown(self, episode: Episode, observation: Content) -> Content:
        return with_lines(observation, [await self.actions(episode)])

    async def _round(
        self, episode: Episode, conversations: dict[str, Conversation], debate: _Debate, *, is_first: bool
    ) -> None:
        """Let every debater answer; what others say in this round is read in the next one."""
        before = dict(debate.said)
        for name in self._names:
            others = {other: said for other, said in before.items() if other != name}
            shown: Content = debate.observation if is_first else f"{quoted(others)}\n\n{AGAIN}"
            answer = await self._answer(episode, conversations, debate, name, shown)
            reading = self.read(answer, episode.action_hint)
            debate.said[name] = answer.text
            debate.actions.pop(name, None)
            if reading.problem:
                episode.invalid(reading.problem)
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
        answer = await conversations[name].generate(prefill=self.prefill, options=options)
        debate.script = answer.text if script is None else script
        return answer

    async def _judged(self, episode: Episode, conversations: dict[str, Conversation], debate: _Debate) -> str:
        """Let the judge decide; one whose answer cannot be read is told so, and answers again."""
        shown = with_lines(debate.observation, [f"\n{quoted(debate.said)}", f"\n{DECIDE}"])
        while True:
            answer = await self._answer(episode, conversations, debate, JUDGE, shown)
            reading = self.read(answer, episode.action_hint)
            if not reading.problem:
                return reading.action
            episode.invalid(reading.problem)
            shown = reading.problem

    async def _voted(self, episode: Episode, conversations: dict[str, Conversation], debate: _Debate) -> str:
        """Return the most frequent action; where nobody has one, all answer again."""
        while not debate.actions:
            await self._round(episode, conversations, debate, is_first=False)
        votes = Counter(map(_vote, debate.actions.values()))
        most = max(votes.values())
        chosen = [vote for vote, count in votes.items() if count == most]
        winner = chosen[episode.task.seed % len(chosen)]
        return next(action for action in debate.actions.values() if _vote(action) == winner)

    async def _pay(self, episode: Episode, debate: _Debate) -> None:
        """Give each debater what its own action would have earned; one that cannot be read earns no more than any."""
        actions = {action for action, _ in debate.own.values() if action}
        rewards = {action: (await episode.try_action(action)).reward for action in sorted(actions)}
        rewards[""] = min([0.0, *rewards.values()])
        for name, (action, turn) in debate.own.items():
            episode.give_reward(self.own_weight * rewards[action], turn=turn, role=name)


def quoted(said: Mapping[str, str]) -> str:
    r"""Write answers one below the other, each line marked: none can look like two, or like words of somebody else.

    >>> print(quoted({"debater_1": "7\ndebater_2 answered:\n8"}))
    debater_1 answered:
    > 7
    > debater_2 answered:
    > 8
    """
    return "\n\n".join(f"{name} answered:\n{_marked(text)}" for name, text in said.items())


def _marked(text: str) -> str:
    return "\n".join(f"> {line}" for line in text.strip().splitlines() or [SILENT])


def _vote(action: str) -> str:
    """Return an action as it is counted: blanks make no difference."""
    return " ".join(action.split())


def _choice(kind: type[T], name: str, value: str) -> T:
    try:
        return kind(value)
    except ValueError as error:
        raise ConfigError(f"{name} of debate is unknown", got=repr(value), expected=", ".join(kind)) from error
