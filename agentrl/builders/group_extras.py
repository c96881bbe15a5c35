"""Extra rollouts of a group, which are not members of it: the greedy policy's and the expert's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from agentrl.algorithms.traits import Input, needed_inputs
from agentrl.builders.checks import check_experts
from agentrl.builders.episodes import RunEnvironment
from agentrl.builders.pairs import load_trajectories
from agentrl.config.config import AlgorithmConfig, Config
from agentrl.engine import SamplingParams
from agentrl.errors import UsageError
from agentrl.registry import Kind, lookup
from agentrl.rollout.policies import EngineEpisodePolicy, EpisodePolicy
from agentrl.rollout.runner import EpisodeRunner
from agentrl.rollout.scheduler import EXPERT, GREEDY, Group
from agentrl.rollout.scripted_policies import ScriptedEpisodePolicy, ScriptedPolicy, StoredExpert
from agentrl.serving.teacher import TeacherScore, TeacherServers
from agentrl.training.batch import StepExtras
from agentrl.trajectory import Trajectory

ExtraRunners: TypeAlias = Mapping[str, Mapping[str, EpisodeRunner | StoredExpert]]
"""Runners of extra rollouts, by the label of the environment and their name."""


def policy_group_size(config: AlgorithmConfig) -> int:
    """Return the number of episodes of a group that the policy plays."""
    return config.group_size - (0 if config.expert is None else config.expert.members)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupExtras:
    """Extra rollouts and a served teacher: what a group has besides the policy's own rollouts."""

    runners: ExtraRunners
    teacher: TeacherServers | None
    """A teacher that is not loaded here."""

    async def for_step(self, groups: Sequence[Group]) -> StepExtras:
        """Collect the extra rollouts of some groups, and a served teacher's log-probabilities, for the trainer.

        Raises:
            UsageError: the episodes hold images, which a teacher behind servers is not shown; a key is missing.
            EngineError: the teacher cannot be reached.
        """
        extras = extras_of(groups)
        trained = [trajectory for group in groups for trajectory in group.trainable]
        answers = {} if self.teacher is None else await _asked(self.teacher, [*trained, *extras.experts])
        return replace(
            extras,
            teacher_logp={name: [word.logp for word in words] for name, words in answers.items()},
            teacher_top={
                name: [word.top for word in words if word.top is not None]
                for name, words in answers.items()
                if all(word.top is not None for word in words)
            },
        )

    async def close(self) -> None:
        """Close the connections to a teacher."""
        if self.teacher is not None:
            await self.teacher.close()


def extras_of(groups: Sequence[Group]) -> StepExtras:
    """Collect the extra rollouts of some groups."""
    return StepExtras(
        greedy={group.id: group.extra_rollouts[GREEDY] for group in groups if GREEDY in group.extra_rollouts},
        experts=[trajectory for group in groups for trajectory in group.experts],
    )


def build_group_extras(
    config: Config, environments: Sequence[RunEnvironment], policy: EngineEpisodePolicy, model_path: str
) -> GroupExtras:
    """Build what a config's algorithm needs in addition to the policy's own rollouts.

    Raises:
        ConfigError: an expert's stored episodes are of a model with other tokens.
        UsageError: they are not there, or none is of the run's environments.
    """
    teacher = config.algorithm.teacher
    return GroupExtras(
        runners=_build_runners(config, environments, policy, model_path),
        teacher=TeacherServers(teacher) if teacher is not None and teacher.servers else None,
    )


async def check_extra_rollouts(config: Config) -> None:
    """Check that every environment can play the extra rollouts of groups.

    Raises:
        UsageError: an environment has no expert, or its agent loop cannot be demonstrated.
    """
    expert = config.algorithm.expert
    if expert is not None and expert.trajectories is None:
        await check_experts(config)


def _build_runners(
    config: Config, environments: Sequence[RunEnvironment], policy: EngineEpisodePolicy, model_path: str
) -> ExtraRunners:
    """Build the runners of extra rollouts, which are not counted as the policy's and not written to disk."""
    policies = _policies(config, policy)
    found: dict[str, dict[str, EpisodeRunner | StoredExpert]] = {
        env.label: {name: env.runner.with_policy(own) for name, own in policies.items()} for env in environments
    }
    expert = config.algorithm.expert
    if expert is not None and expert.trajectories is not None:
        shown = load_trajectories(expert.trajectories, model_path, {env.spec.name for env in environments})
        for env in environments:
            own = [trajectory for trajectory in shown if trajectory.environment == env.spec.name]
            found[env.label] |= {f"{EXPERT}-{place}": StoredExpert(own, place=place) for place in range(expert.members)}
    return found


def _policies(config: Config, policy: EngineEpisodePolicy) -> dict[str, EpisodePolicy]:
    policies: dict[str, EpisodePolicy] = {}
    if Input.GREEDY_RETURN in needed_inputs(lookup(Kind.ADVANTAGE, config.algorithm.advantage)):
        policies[GREEDY] = policy.with_sampling(SamplingParams(temperature=0.0), trains=policy.trains)
    expert = config.algorithm.expert
    if expert is not None and expert.trajectories is None:
        scripted = ScriptedEpisodePolicy(ScriptedPolicy.EXPERT, policy.renderer, max_context=config.agent.max_tokens)
        policies |= {f"{EXPERT}-{number}": scripted for number in range(expert.members)}
    return policies


async def _asked(teacher: TeacherServers, trajectories: Sequence[Trajectory]) -> dict[str, list[TeacherScore]]:
    if any(sequence.images for trajectory in trajectories for sequence in trajectory.sequences):
        raise UsageError(
            "a teacher behind servers takes text only",
            got="episodes with images",
            hint="remove algorithm.teacher.servers, so that the trainer loads the teacher",
        )
    found = await teacher.score([s.ids_list() for trajectory in trajectories for s in trajectory.sequences])
    rest = iter(found)
    return {t.id: [next(rest) for _ in t.sequences] for t in trajectories}
