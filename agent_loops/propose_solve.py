"""One role proposes a task and another one attempts it several times; or a task that was proposed earlier is solved."""

from __future__ import annotations

import math
from collections.abc import Sequence

from agentrl.agent_loop import AgentLoop, Episode, EpisodeEnd, TurnOptions
from agentrl.env import StepResult
from agentrl.errors import ConfigError, Outcome, UsageError
from agentrl.message import Content, Message
from agentrl.trajectory import ATTEMPT

from .prompting import opening

PROPOSER, SOLVER = "proposer", "solver"
MIN_ATTEMPTS = 2
"""With a single attempt, the success rate is 0 or 1, so no proposal could be learnable."""
UNTRAINED = TurnOptions(trained=False)


class ProposeSolve(AgentLoop):
    """A proposer writes a task, and a solver's attempts at it decide its reward; every turn is a separate conversation.

    The environment says who acts next (``player``): ``proposer``, then ``solver#1``, ``solver#2``, …; or ``solver`` for
    a task that was proposed earlier. It ends the episode if it rejects the proposal, and after the last attempt. Each
    turn gets its own reward, which counts only for its role:

    - a proposal: `learnability` of the attempts; ``wrong`` if that is 0; ``malformed`` if it was rejected;
    - a solver's answer: 1 if it is correct, ``wrong`` if it is not, ``malformed`` if it is not in the required format.

    Args:
        attempts: Number of attempts at a proposed task; the environment must have the same number.
        train_attempts: Also train the solver on its attempts at proposed tasks, which are compared with each other.
        wrong: Reward of a wrong answer, and of a proposal that all attempts solve or none does.
        malformed: Reward of an answer that is not in the required format, and of a proposal that is rejected.
    """

    follow_ups = ()
    sequence_per_turn = True

    def __init__(
        self, *, attempts: int = 8, train_attempts: bool = True, wrong: float = 0.0, malformed: float = 0.0
    ) -> None:
        if isinstance(attempts, bool) or not isinstance(attempts, int) or attempts < MIN_ATTEMPTS:
            raise ConfigError(
                "attempts of propose_solve is too small", got=repr(attempts), expected=f"{MIN_ATTEMPTS} or more"
            )
        if not isinstance(train_attempts, bool):
            raise ConfigError("train_attempts is not a boolean", got=repr(train_attempts), expected="true or false")
        for name, value in (("wrong", wrong), ("malformed", malformed)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value > 0:
                raise ConfigError(
                    f"{name} of propose_solve is not a penalty",
                    got=repr(value),
                    expected="0 or a negative number, such as -0.5",
                )
        self.attempts = [f"{SOLVER}{ATTEMPT}{number + 1}" for number in range(attempts)]
        self.train_attempts = train_attempts
        self.wrong, self.malformed = float(wrong), float(malformed)
        self.roles = (PROPOSER, SOLVER, *self.attempts)

    async def run(self, episode: Episode) -> None:
        """Play one episode.

        Raises:
            UsageError: the environment does not have these players.
        """
        observation = await episode.reset()
        self._check_players(episode)
        if episode.player == SOLVER:
            result = await self._take_turn(episode, observation)
            self._pay_solver(episode, result, SOLVER, is_paid=bool(result.reward))
            return
        result = await self._take_turn(episode, observation)
        if result.done:
            episode.give_reward(self.malformed, role=PROPOSER, success=False)
            return
        solved = []
        while not result.done:
            role = str(episode.player)
            result = await self._take_turn(episode, result.observation)
            solved.append(bool(result.info["success"]))
            self._pay_solver(episode, result, role, is_paid=False)
        self._pay_proposer(episode, solved)

    async def _take_turn(self, episode: Episode, observation: Content) -> StepResult:
        """Let the player act in a conversation of its own."""
        role = str(episode.player)
        conversation = episode.open(opening([episode.spec.instructions], observation), role=role)
        untrained = role in self.attempts and not self.train_attempts
        try:
            answer = await conversation.generate(options=UNTRAINED if untrained else TurnOptions())
        except EpisodeEnd as end:
            if end.outcome is Outcome.TRUNCATED_TOKENS:
                episode.give_reward(self.malformed, role=role)
            raise
        return await episode.step(answer.text)

    def _pay_solver(self, episode: Episode, result: StepResult, role: str, *, is_paid: bool) -> None:
        """Reward an answer; `is_paid` if the environment has already rewarded it, as for a task proposed earlier."""
        if result.info["success"]:
            reward = 0.0 if is_paid else 1.0
        else:
            reward = self.wrong if result.info.get("valid", True) else self.malformed
        if reward:
            episode.give_reward(reward, role=role)

    def _pay_proposer(self, episode: Episode, solved: Sequence[bool]) -> None:
        worth = learnability(solved)
        episode.give_reward(worth or self.wrong, role=PROPOSER, success=worth > 0)

    def _check_players(self, episode: Episode) -> None:
        proposing = (PROPOSER, *self.attempts)
        if tuple(episode.player_names) in (proposing, (SOLVER,)) and episode.player in (PROPOSER, SOLVER):
            return
        raise UsageError(
            f"the players of environment {episode.spec.name} are not those of propose_solve",
            got=", ".join(episode.player_names) or "a single player",
            expected=f"{', '.join(proposing)}; or {SOLVER} for a task that was proposed earlier",
            hint="set agent.options.attempts and environment.options.attempts to the same number",
        )

    def demonstrate(self, action: str) -> Message:
        """Return the answer of an ideal policy: the action."""
        return Message(role="assistant", content=action)


def learnability(solved: Sequence[float]) -> float:
    """Compute 1 - mean of the solver's successes, or 0 if no attempt succeeded (Absolute Zero, arXiv 2505.03335).

    It is highest for a task that a single attempt solves, and 0 for one that all attempts solve or none does.

    >>> learnability([1, 0, 0, 0]), learnability([1, 1, 1, 1]), learnability([0, 0, 0, 0])
    (0.75, 0.0, 0.0)
    """
    mean = sum(solved) / len(solved) if solved else 0.0
    return 1.0 - mean if mean > 0 else 0.0
