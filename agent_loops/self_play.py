"""Several roles play a game against each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from agentrl.agent_loop import Conversation, Episode, EpisodeEnd
from agentrl.env import StepResult
from agentrl.errors import ConfigError, Outcome, UsageError
from agentrl.message import Content, user

from .prompting import after, opening, with_lines
from .text_answers import TextLoop


@dataclass(kw_only=True, eq=False)
class SelfPlay(TextLoop):
    """Roles play the players of one game, each in its own conversation, as text; by default one policy plays all.

    The environment must have several players. An answer that cannot be read counts as an illegal move, so the game's
    rules decide what it costs. A game that a budget ends is lost.

    Args:
        roles: Names of the roles, one for each player, in the order of the environment's players.
        rotate: Let the task decide who plays first (`Task.pick`), for roles that differ, such as an untrained opponent.
            All episodes of a task have the same order.
        unfinished: Reward of a role that has used up its tokens; of every role if the turns or the seconds are spent.
    """

    roles: Sequence[str] = ("player_1", "player_2")
    rotate: bool = False
    unfinished: float = -1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        roles, unfinished = self.roles, self.unfinished
        if isinstance(roles, str) or len(roles) < 2 or len(set(roles)) != len(roles) or not all(roles):
            raise ConfigError("roles of self_play are not valid", got=repr(roles), expected="two or more unique names")
        if isinstance(unfinished, bool) or not isinstance(unfinished, int | float) or not math.isfinite(unfinished):
            raise ConfigError("unfinished is not a reward", got=repr(unfinished), expected="a number, such as -1")
        self.roles = tuple(roles)

    async def run(self, episode: Episode) -> None:
        """Play one game.

        Raises:
            UsageError: the environment has a different number of players.
        """
        observation = await episode.reset()
        episode.players = self._seats(episode)
        conversations: dict[str, Conversation] = {}
        while True:
            role = episode.players[episode.player or ""]
            shown = await self._show(episode, observation)
            if role in conversations:
                conversations[role].add(user(shown))
            else:
                conversations[role] = episode.open(opening(self.instructions(episode), shown), role=role)
            try:
                result = await self._move(episode, conversations[role])
            except EpisodeEnd as end:
                self._count_as_lost(episode, role, end.outcome)
                raise
            if result.done:
                return self._judge(episode, result)
            observation = result.observation

    def _seats(self, episode: Episode) -> dict[str, str]:
        names = list(episode.player_names)
        if len(names) != len(self.roles):
            raise UsageError(
                f"self_play has {len(self.roles)} roles, but environment {episode.spec.name} has other players",
                got=", ".join(names) or "a single player",
                expected=f"{len(self.roles)} players",
                hint="set environment.options={opponent: self}, if it has this option, or agent.options.roles",
            )
        first = episode.task.pick(len(names)) if self.rotate else 0
        return dict(zip(names, [*self.roles[first:], *self.roles[:first]], strict=True))

    async def _show(self, episode: Episode, observation: Content) -> Content:
        return with_lines(observation, [await self.actions(episode)])

    async def _move(self, episode: Episode, conversation: Conversation) -> StepResult:
        """Let the current player move; if it has to move again, it reads what was wrong with its answer."""
        mover = episode.player
        reading = self.read(await self.act(conversation), episode.action_hint)
        result = await episode.step("" if reading.problem else reading.action)
        if reading.problem and episode.player == mover:
            return replace(result, observation=after(f"{reading.problem}\n", result.observation))
        return result

    def _count_as_lost(self, episode: Episode, role: str, outcome: Outcome) -> None:
        all_lose = outcome in (Outcome.TRUNCATED_TURNS, Outcome.TRUNCATED_TIME)
        for loser in self.roles if all_lose else (role,):
            episode.give_reward(self.unfinished, role=loser)

    def _judge(self, episode: Episode, result: StepResult) -> None:
        """Count the game as a success if the only trained role has won it; skip this if several are trained."""
        trained = [role for role in self.roles if episode.roles[role].trained]
        if len(trained) == 1:
            rewards = result.info.get("rewards", {})
            own = [reward for player, reward in rewards.items() if episode.players[player] == trained[0]]
            episode.give_reward(0.0, success=any(reward > 0 for reward in own))
