"""Who scores the episodes of a run."""

from __future__ import annotations

from agentrl.chat_service.client import ChatService, ServiceSettings
from agentrl.config.judge import JudgeConfig
from agentrl.config.schema import AgentConfig
from agentrl.errors import ConfigError, UsageError
from agentrl.registry import Kind, lookup
from agentrl.reward import Scorer
from agentrl.rollout.demonstrator import Demonstrator
from agentrl.rollout.engine_speaker import EngineSpeaker
from agentrl.rollout.environments import EnvironmentHost
from agentrl.rollout.judge import Judge
from agentrl.rollout.speaker import Speaker
from agentrl.rollout.transcript import Decode


def build_scorer(config: AgentConfig, host: EnvironmentHost, speaker: Speaker) -> Scorer:
    """The scorer of an ``agent`` section; what it opened is closed with the host.

    Raises:
        ConfigError: a scorer and a judge are both asked for, or the judge's prompt is no template.
        UnknownNameError: no such scorer.
    """
    if config.judge is None:
        return find_scorer(config.scorer)
    if config.scorer != AgentConfig.model_fields["scorer"].default:
        raise ConfigError(
            "agent.scorer is ignored with agent.judge",
            got=config.scorer,
            expected="one of them",
            hint="agent.judge.environment_weight adds the environment's own reward",
        )
    service = ChatService(_settings(config.judge))
    host.belongings.push_async_callback(service.close)
    return Judge(service, config.judge, _decoder(speaker))


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
