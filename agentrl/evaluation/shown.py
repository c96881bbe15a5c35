"""Shows what a policy reads: the first turns of a task, and the remark on an answer in the wrong form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agentrl.agent_loop import PLAIN_TURN, Answer, Conversation, TurnOptions
from agentrl.builders.environments import task_source
from agentrl.builders.episodes import build_env_pool, build_runner
from agentrl.config.config import Config
from agentrl.engine import StopReason
from agentrl.env_lookup import resolve_environment
from agentrl.errors import UsageError
from agentrl.message import Message, plainly_written
from agentrl.reward import EnvironmentReward
from agentrl.rollout.policies import EpisodePolicy, EpisodeView, append_textual_turn
from agentrl.rollout.scripted_policies import ScriptedConversation, ScriptedEpisodePolicy, ScriptedPolicy
from agentrl.rollout.shots import with_shots
from agentrl.rollout.waits import RolloutObserver
from agentrl.tool import Tool
from agentrl.trajectory import Trajectory

WRONG_ANSWER = "I am not sure what to do."


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownTask:
    """Messages that a policy reads in the first turns of a task."""

    conversations: list[list[Message]]
    """Messages of the expert's turns, or of random ones where there is no expert; most loops have one conversation."""
    remark: list[Message]
    """What follows `WRONG_ANSWER` as the first answer."""

    def titled(self) -> Iterator[tuple[str, str]]:
        """Yield who speaks, or when, and the text of each message."""
        for number, messages in enumerate(self.conversations):
            for message in messages:
                again = f", in conversation {number + 1}" if number else ""
                yield f"{message.role}{again}", plainly_written(message)
        for message in self.remark:
            yield f"{message.role}, if the first answer were: {WRONG_ANSWER}", plainly_written(message)


async def shown(config: Config) -> ShownTask:
    """Play the first turns of the first task.

    Args:
        config: Environment, agent; ``agent.max_turns`` bounds the turns.

    Raises:
        UsageError: no such environment or loop, or the environment cannot be played.
    """
    try:
        conversations = await _played(config, ScriptedEpisodePolicy(ScriptedPolicy.EXPERT))
    except UsageError:  # no expert, or one that the loop cannot demonstrate
        conversations = await _played(config, ScriptedEpisodePolicy(ScriptedPolicy.RANDOM))
    once = config.model_copy(update={"agent": config.agent.model_copy(update={"max_turns": 1, "shots": 0})})
    *_, last = await _played(once, _WrongPolicy(ScriptedPolicy.RANDOM))
    return ShownTask(conversations=conversations, remark=last[-1:] if last[-1].role in ("user", "tool") else [])


async def _played(config: Config, policy: EpisodePolicy) -> list[list[Message]]:
    spec = resolve_environment(config.sole_environment.name)
    heard = _Heard()
    pool = build_env_pool(config, spec=spec)
    try:
        runner = build_runner(config, pool, policy, observer=heard, retries=0)
        runner.scorer = EnvironmentReward()  # nobody reads the return, and a judge would be paid for it
        task = task_source(spec, config.sole_environment)[0]
        shots = () if runner.shots is None else await runner.shots.messages(runner, task)
        await runner.run(task, group_id="shown", member=0, seed=0)
    finally:
        await pool.close()
    if not heard.conversations:
        raise UsageError(f"the first task of {spec.name} cannot be shown", got=heard.error)
    return [list(with_shots(messages, shots)) for messages in heard.conversations]


class _Heard(RolloutObserver):
    def __init__(self) -> None:
        self.conversations: list[list[Message]] = []
        self.error: str | None = None

    def on_end(self, trajectory: Trajectory) -> None:
        self.conversations = [list(messages) for messages in trajectory.conversations]
        self.error = trajectory.error


class _WrongPolicy(ScriptedEpisodePolicy):
    """Answers in the wrong form."""

    def open(self, episode: EpisodeView, messages: Sequence[Message], tools: Sequence[Tool]) -> Conversation:
        return _WrongConversation(self, None, episode)


class _WrongConversation(ScriptedConversation):
    async def generate(self, *, prefill: str = "", options: TurnOptions = PLAIN_TURN) -> Answer:
        turns = self._episode.turns
        turns.begin()
        turns.take(append_textual_turn(turns, StopReason.STOP), prompt_tokens=0, answer_tokens=0)
        return Answer(message=Message(role="assistant", content=WRONG_ANSWER), raw_text=WRONG_ANSWER)

    def fork(self, messages: Sequence[Message]) -> Conversation:
        return self
