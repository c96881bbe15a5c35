"""Extra rollouts of groups (greedy and expert), and log-probabilities of a served teacher."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from agentrl.builders.adapter_checks import trained_roles
from agentrl.builders.episodes import RunEnvironment, build_loop
from agentrl.config.config import AlgorithmConfig, Config
from agentrl.config.derived import adapter_config, environment_algorithms, per_environment_configs
from agentrl.config.step_settings import STAGE_MARK, Settings
from agentrl.engine import SamplingParams
from agentrl.env.lookup import resolve_environment
from agentrl.errors import TrainingError, UsageError
from agentrl.errors.foreign import run_in_own_thread
from agentrl.observe.trajectory_record import environment_label
from agentrl.render.renderer import Renderer
from agentrl.render.translation import Translation, Translator
from agentrl.rollout.environment_probe import has_expert
from agentrl.rollout.events import RolloutCounters
from agentrl.rollout.groups import EXPERT, GREEDY, Group
from agentrl.rollout.policies import EngineEpisodePolicy, EpisodePolicy
from agentrl.rollout.runner import EpisodeRunner
from agentrl.rollout.scripted_policies import ScriptedEpisodePolicy, ScriptedPolicy, StoredExpert
from agentrl.serving.teacher import TeacherScore, TeacherServers
from agentrl.task import Task
from agentrl.training.batch import StepExtras, trained_mask
from agentrl.training.dynamic_sampling import DynamicSampling, GroupLearner, is_in_band
from agentrl.training.signals.without_model import needs_greedy_rollouts
from agentrl.training.stored_episodes import load_trajectories
from agentrl.trajectory import Trajectory

ExtraRunners: TypeAlias = Mapping[str, Mapping[str, EpisodeRunner | StoredExpert]]
"""Runners of extra rollouts, by environment label and rollout name."""


def policy_group_size(config: AlgorithmConfig) -> int:
    """Return the number of episodes in a group that the policy plays."""
    return config.group_size - (0 if config.expert is None else config.expert.members)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupExtras:
    """Runners of extra rollouts, and the servers of a teacher."""

    runners: ExtraRunners
    counters: RolloutCounters
    """Counts of these runners."""
    teacher: TeacherServers | None
    """Servers of the teacher; ``None`` without a teacher, or if the trainer loads it."""
    hint: Callable[[Task], Sequence[int]] | None = None
    """Function that renders what only the teacher reads, if the teacher has a hint."""
    translator: Translator | None = None
    """Translator to the tokens of a teacher with another tokenizer; ``None`` for other teachers, or without one."""

    async def for_step(self, groups: Sequence[Group]) -> StepExtras:
        """Collect the groups' extra rollouts and a served teacher's log-probabilities, for the trainer.

        Raises:
            UsageError: the episodes contain images, which a served teacher does not accept, or a key is missing.
            EngineError: the teacher cannot be reached.
            TrainingError: most tokens cannot be compared with those of a teacher with another tokenizer.
        """
        extras = extras_of(groups)
        trained = [trajectory for group in groups for trajectory in group.trainable]
        hints = {} if self.hint is None else _hints(groups, self.hint)
        if self.translator is not None:
            experts, every = extras.expert_ids, [*trained, *extras.experts]
            translations = await run_in_own_thread(_translate, self.translator, every, experts)
            for trajectory in (*every, *(one for group in groups for one in group.trajectories)):
                trajectory.contexts.clear()  # nothing else needs the messages
            scores = {} if self.teacher is None else await _score_translations(self.teacher, translations)
            return replace(extras, hints=hints, translations=translations, teacher_logp=scores)
        scored = {} if self.teacher is None else await _score_by_teacher(self.teacher, [*trained, *extras.experts])
        return replace(
            extras,
            hints=hints,
            teacher_logp={name: [score.logp for score in scores] for name, scores in scored.items()},
            teacher_top={
                name: [score.top for score in scores if score.top is not None]
                for name, scores in scored.items()
                if all(score.top is not None for score in scores)
            },
        )

    async def close(self) -> None:
        """Close the connections to the teacher."""
        if self.teacher is not None:
            await self.teacher.close()


def extras_of(groups: Sequence[Group]) -> StepExtras:
    """Collect the extra rollouts of some groups."""
    return StepExtras(
        greedy={group.id: group.extra_rollouts[GREEDY] for group in groups if GREEDY in group.extra_rollouts},
        experts=[trajectory for group in groups for trajectory in group.experts],
        environments={group.id: group.draw.environment for group in groups},
    )


def build_group_extras(
    config: Config,
    environments: Sequence[RunEnvironment],
    policy: EngineEpisodePolicy,
    model_path: str,
    translator: Translator | None,
) -> GroupExtras:
    """Build the extra rollouts and the served teacher that the config's algorithm needs.

    Raises:
        ConfigError: the expert's stored episodes were sampled with another tokenizer.
        UsageError: there are no stored episodes, or none from the run's environments.
    """
    teacher, counters = config.algorithm.teacher, RolloutCounters()
    return GroupExtras(
        runners=_build_runners(config, environments, policy, model_path, counters),
        counters=counters,
        teacher=TeacherServers(teacher) if teacher is not None and teacher.servers else None,
        hint=None
        if teacher is None or teacher.hint is None
        else functools.partial(
            _render_hint, teacher.hint, policy.renderer if translator is None else translator.reader
        ),
        translator=translator,
    )


def _hints(groups: Sequence[Group], render: Callable[[Task], Sequence[int]]) -> dict[str, Sequence[int]]:
    found: dict[str, Sequence[int]] = {}
    for group in groups:
        own = render(group.task)
        found |= dict.fromkeys([trajectory.id for trajectory in (*group.trajectories, *group.experts)], own)
    return found


def _render_hint(template: str, renderer: Renderer, task: Task) -> list[int]:
    fields = {**task.columns, "ground_truth": task.ground_truth, "prompt": task.prompt}
    known = {name: value for name, value in fields.items() if value is not None}
    try:
        return renderer.hint(template.format_map(known))
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise UsageError(
            f"the teacher's hint does not fit task {task.id}",
            got=f"{template!r} ({type(error).__name__}: {error})",
            expected=f"a text with fields of the task: {', '.join(sorted(known)) or 'it has none'}",
            hint="set algorithm.teacher.hint",
        ) from error


def _build_runners(
    config: Config,
    environments: Sequence[RunEnvironment],
    policy: EngineEpisodePolicy,
    model_path: str,
    counters: RolloutCounters,
) -> ExtraRunners:
    """Build the runners of extra rollouts, which do not count in the policy's statistics and are not stored."""
    policies = _policies(config, policy)
    found: dict[str, dict[str, EpisodeRunner | StoredExpert]] = {
        env.label: {name: env.runner.with_policy(own, counters) for name, own in policies.items()}
        for env in environments
    }
    expert = config.algorithm.expert
    if expert is not None and expert.trajectories is not None:
        stored = load_trajectories(expert.trajectories, model_path, {env.spec.name for env in environments})
        labels = {env.label.partition(STAGE_MARK)[0] for env in environments}
        for env in environments:
            own = [one for one in stored if one.environment == env.spec.name and _may_be_of(env.label, one, labels)]
            found[env.label] |= {f"{EXPERT}-{rank}": StoredExpert(own, place=rank) for rank in range(expert.members)}
    return found


def _may_be_of(label: str, stored: Trajectory, labels: Set[str]) -> bool:
    """Return False if a stored episode is of another environment, whose task file may have rows with the same ids."""
    found = environment_label(stored.group_id, stored.task_id).partition(STAGE_MARK)[0]
    return found not in labels or found == label.partition(STAGE_MARK)[0]


def _policies(config: Config, policy: EngineEpisodePolicy) -> dict[str, EpisodePolicy]:
    policies: dict[str, EpisodePolicy] = {}
    if needs_greedy_rollouts(config.algorithm):
        policies[GREEDY] = policy.with_sampling(SamplingParams(temperature=0.0), trains=policy.trains)
    expert = config.algorithm.expert
    if expert is not None and expert.trajectories is None:
        scripted = ScriptedEpisodePolicy(ScriptedPolicy.EXPERT, policy.renderer, max_context=config.agent.max_tokens)
        policies |= {f"{EXPERT}-{number}": scripted for number in range(expert.members)}
    return policies


async def _score_by_teacher(
    teacher: TeacherServers, trajectories: Sequence[Trajectory]
) -> dict[str, list[TeacherScore]]:
    if any(sequence.images for trajectory in trajectories for sequence in trajectory.sequences):
        raise UsageError(
            "a served teacher accepts text only",
            got="episodes with images",
            hint="remove algorithm.teacher.servers, so that the trainer loads the teacher",
        )
    found = await teacher.score([s.ids_list() for trajectory in trajectories for s in trajectory.sequences])
    rest = iter(found)
    return {t.id: [next(rest) for _ in t.sequences] for t in trajectories}


MAX_UNALIGNED = 0.5
"""Maximum share of a step's tokens that may have no counterpart in the tokens of a teacher with another tokenizer."""


def _translate(
    translator: Translator, trajectories: Sequence[Trajectory], experts: Set[str]
) -> dict[str, list[Translation]]:
    """Translate episodes to the teacher's tokens.

    Raises:
        TrainingError: more than `MAX_UNALIGNED` of the trained tokens cannot be compared.
    """
    found: dict[str, list[Translation]] = {}
    for trajectory in trajectories:
        masks = [trained_mask(sequence, by_expert=trajectory.id in experts) for sequence in trajectory.sequences]
        found[trajectory.id] = translator.translate(trajectory, masks)
    counts = {name: [one.counts for one in own] for name, own in found.items()}
    trained = sum(one[0] for own in counts.values() for one in own)
    unaligned = {name: sum(one[2] for one in own) for name, own in counts.items()}
    if sum(unaligned.values()) > MAX_UNALIGNED * trained:
        worst = max(unaligned, key=unaligned.__getitem__)
        raise TrainingError(
            "the teacher's tokenizer cannot express most of what the policy writes",
            got=f"{sum(unaligned.values())} of {trained} tokens without a counterpart, {unaligned[worst]} of them in "
            f"episode {worst}",
            expected=f"at most {MAX_UNALIGNED:.0%}: control tokens and broken characters in answers",
            hint="look at this episode's answers with agentrl view, or use a teacher of the policy's family",
        )
    return found


async def _score_translations(
    teacher: TeacherServers, translations: Mapping[str, Sequence[Translation]]
) -> dict[str, list[npt.NDArray[np.float32]]]:
    """Request the log-probabilities of all translated tokens that have a group: [scored] for each translation."""
    every = [one for own in translations.values() for one in own]
    found = iter(await teacher.score([ids.tolist() for one in every for ids in one.ids]))
    scores = iter(
        [
            np.concatenate([np.empty(0, np.float32), *(next(found).logp[groups >= 0] for groups in one.other_groups)])
            for one in every
        ]
    )
    return {name: [next(scores) for _ in own] for name, own in translations.items()}


def worth_training(settings: Settings, has_signal: Callable[[Group], bool]) -> Callable[[Group], bool] | None:
    """Return the predicate of groups worth training on; ``None`` if no group is replaced.

    Args:
        settings: Current settings.
        has_signal: Predicate of `learning_signal`.
    """
    run = settings.config
    own = [run.algorithm, *environment_algorithms(run).values()]
    if not any(one.dynamic_sampling or (one.selection is not None and one.selection.has_band) for one in own):
        return None
    algorithms = functools.lru_cache(maxsize=1)(lambda step: environment_algorithms(settings.config))

    def is_worth_training(group: Group) -> bool:
        algorithm = algorithms(settings.step).get(group.draw.environment, settings.config.algorithm)
        if algorithm.selection is not None and not is_in_band(algorithm.selection, group.trainable):
            return False
        return not algorithm.dynamic_sampling or has_signal(group)

    return is_worth_training


def learning_signal(settings: Settings) -> Callable[[Group], bool]:
    """Return the predicate of groups with a learning signal under the current settings."""
    at_step = functools.lru_cache(maxsize=1)(lambda step: _learning_signal(settings.config))
    return lambda group: at_step(settings.step if settings.changes else 0)(group)


def _learning_signal(config: Config) -> Callable[[Group], bool]:
    """Return the predicate of groups with a learning signal for the policy or one of several adapters."""
    if algorithms := environment_algorithms(config):
        samplings = {label: DynamicSampling([GroupLearner(algorithm=own)]) for label, own in algorithms.items()}
        return lambda group: samplings[group.draw.environment].has_signal(group.trainable, extras_of([group]))
    adapters = trained_roles(config)
    learners = [
        GroupLearner(algorithm=adapter_config(config, name).algorithm, roles=adapters[name]) for name in adapters
    ]
    sampling = DynamicSampling(learners or [GroupLearner(algorithm=config.algorithm)])
    return lambda group: sampling.has_signal(group.trainable, extras_of([group]))


def check_extra_rollouts(config: Config) -> None:
    """Check that every environment supports the extra rollouts.

    Raises:
        UsageError: an environment has no expert, or its agent loop does not support demonstrations.
    """
    expert = config.algorithm.expert
    if expert is not None and expert.trajectories is None:
        check_experts(config)


def check_experts(config: Config) -> None:
    """Check that every environment has an expert that can demonstrate.

    Raises:
        UsageError: an environment has no expert, or its agent loop cannot be demonstrated.
    """
    for part in per_environment_configs(config):
        spec = resolve_environment(part.config.sole_environment.name)
        if not has_expert(spec, part.config):
            raise UsageError(
                f"environment {spec.name} has no expert to demonstrate",
                expected="an environment with an expert() method",
                hint="train from rewards only: agentrl train, without algorithm.expert",
            )
        loop = build_loop(part.config.agent)
        if loop.demonstration_problem():
            loop.demonstrate("")
