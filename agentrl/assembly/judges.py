"""Who scores the episodes of a run."""

from __future__ import annotations

import asyncio

from agentrl.chat_service.client import ChatService, ServiceSettings
from agentrl.config.episodes import AgentConfig
from agentrl.config.judge import JudgeConfig
from agentrl.config.reward_model import RewardModelConfig
from agentrl.config.schema import ModelConfig
from agentrl.errors import ConfigError, UsageError
from agentrl.observe.model_folder import find_model
from agentrl.registry import Kind, lookup
from agentrl.reward import Score, Scorer
from agentrl.rollout.demonstrator import Demonstrator
from agentrl.rollout.engine_speaker import EngineSpeaker
from agentrl.rollout.environments import EnvironmentHost
from agentrl.rollout.judge import Judge, require_tokens
from agentrl.rollout.speaker import Speaker
from agentrl.rollout.transcript import Decode, transcript
from agentrl.task import Task
from agentrl.training.preferences.reward_model import RewardModel
from agentrl.trajectory import Trajectory


def build_scorer(config: AgentConfig, model: ModelConfig, host: EnvironmentHost, speaker: Speaker) -> Scorer:
    """The scorer of an ``agent`` section; what it opened is closed with the host.

    Args:
        config: Who scores.
        model: Device and number format of a reward model.
        host: Of the environment.
        speaker: Who plays.

    Raises:
        ConfigError: two are asked for, or the judge's prompt is no template.
        UsageError: there is no such reward model.
        UnknownNameError: no such scorer.
    """
    _check_one(config)
    if config.judge is not None:
        service = ChatService(_settings(config.judge))
        host.belongings.push_async_callback(service.close)
        return Judge(service, config.judge, _decoder(speaker))
    if config.reward_model is not None:
        return RewardModelScorer(config.reward_model, model, _decoder(speaker))
    return find_scorer(config.scorer)


def _check_one(config: AgentConfig) -> None:
    asked = {
        "scorer": config.scorer != AgentConfig.model_fields["scorer"].default,
        "judge": config.judge is not None,
        "reward_model": config.reward_model is not None,
    }
    if sum(asked.values()) > 1:
        raise ConfigError(
            "an episode has one scorer",
            got=" and ".join(f"agent.{name}" for name, is_asked in asked.items() if is_asked),
            expected="one of them",
            hint="environment_weight of a judge or a reward model adds the environment's own reward",
        )


class RewardModelScorer(Scorer):
    """Lets a reward model read episodes, one at a time and beside the event loop.

    Args:
        settings: Which.
        model: Its device and number format.
        decode: Text of the policy's tokens.

    Raises:
        UsageError: there is no such model, or it has no output for a reward.
    """

    def __init__(self, settings: RewardModelConfig, model: ModelConfig, decode: Decode) -> None:
        self._settings, self._decode = settings, decode
        self._model = RewardModel(
            find_model(settings.path), dtype=model.dtype, device=model.device, max_tokens=settings.max_tokens
        )
        self._one_at_a_time = asyncio.Lock()

    async def score(self, trajectory: Trajectory, task: Task) -> Score:
        """Its reward, plus the weighted reward of the environment.

        Raises:
            UsageError: the episode has no tokens to be read.
        """
        require_tokens(trajectory, "a reward model")
        earned = trajectory.environment_reward
        text = transcript(trajectory, self._decode)
        async with self._one_at_a_time:
            judged = await asyncio.to_thread(self._model.score, text)
        return Score(
            reward=judged + self._settings.environment_weight * earned,
            components={"reward_model": judged, "environment": earned},
        )


def find_scorer(name: str) -> Scorer:
    """A scorer by registry name or ``module:attr`` (of its class, or of an object)."""
    found = lookup(Kind.SCORER, name)
    scorer = found() if isinstance(found, type) else found
    if not isinstance(scorer, Scorer):
        raise UsageError(f"{name} is not a scorer", got=type(scorer).__name__, expected="a class derived from Scorer")
    return scorer


def longest_score_s(judge: JudgeConfig) -> float:
    """Seconds that a judge may take for an episode."""
    return judge.engine.timeout_s * judge.attempts


def _settings(judge: JudgeConfig) -> ServiceSettings:
    engine = judge.engine
    return ServiceSettings(
        url=engine.url,
        model=engine.model,
        api_key_variable=engine.api_key_variable,
        timeout_s=engine.timeout_s,
        retries=engine.retries,
        max_concurrent=engine.max_concurrent,
        section="agent.judge.engine",
    )


def _decoder(speaker: Speaker) -> Decode:
    """Text of the speaker's tokens; of one without tokens nobody asks."""
    renderer = speaker.renderer if isinstance(speaker, EngineSpeaker | Demonstrator) else None
    return (lambda ids: "") if renderer is None else renderer.encoder.decode_plain
