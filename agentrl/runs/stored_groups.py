"""Groups of stored episodes, in the order in which a run started them, for a run that trains without playing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from agentrl.algorithms.traits import Input, needed_inputs
from agentrl.builders.adapter_checks import refuse_role_adapters
from agentrl.builders.group_extras import policy_group_size
from agentrl.config.config import Config
from agentrl.config.derived import per_environment_configs
from agentrl.errors import ConfigError, Outcome, UsageError
from agentrl.models.load import embedding_rows
from agentrl.observe.trajectory_index import EpisodeFilter, EpisodeRow, TrajectoryIndex
from agentrl.registry import Kind, lookup
from agentrl.rollout.groups import Group
from agentrl.rollout.task_order import SampledTask
from agentrl.task import Task
from agentrl.training.gradients import Objective
from agentrl.training.stored_episodes import check_store_tokens, find_store


def check_stored_training(config: Config) -> None:
    """Check that the algorithm can train on stored episodes of the policy alone.

    Raises:
        ConfigError: it needs other rollouts, a served teacher, several adapters, or a cluster.
    """
    refuse_role_adapters(config, "training on stored episodes")
    teacher = config.algorithm.teacher
    needs = {
        "greedy rollouts": Input.GREEDY_RETURN in needed_inputs(lookup(Kind.ADVANTAGE, config.algorithm.advantage)),
        "algorithm.expert": config.algorithm.expert is not None,
        "algorithm.teacher.servers": teacher is not None and bool(teacher.servers),
        "cluster": config.cluster is not None,
        "curriculum": config.curriculum.horizon is not None or config.curriculum.pools is not None,
    }
    if found := [name for name, is_needed in needs.items() if is_needed]:
        raise ConfigError(
            "this config cannot train on stored episodes",
            got=", ".join(found),
            expected="an algorithm that needs only the policy's episodes, on this machine",
            hint="remove trainer.episodes to play new episodes",
        )


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """Rows of a complete group, one for each member, in their order."""

    position: int
    id: str
    rows: Sequence[EpisodeRow]


class StoredGroups:
    """Complete groups of a trajectory store; their episodes are read when they are needed.

    Args:
        config: Config of the run, with ``trainer.episodes``.

    Raises:
        UsageError: the store does not exist, or its episodes have no tokens or no log-probabilities.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self.store = find_store(Path(config.trainer.episodes or ""))
        self.size = policy_group_size(config.algorithm)
        self.incomplete = self.failed = 0
        """Groups that are left out: members are missing, or too few of them can train."""
        self._index = TrajectoryIndex(self.store)
        try:
            self._check_logprobs()
            self.groups = self._find()
        except UsageError:
            self.close()
            raise

    def close(self) -> None:
        """Close the index."""
        self._index.close()

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def summary(self) -> str:
        """Counts of the groups, in words."""
        left_out = [
            f"{count} {words}"
            for count, words in (
                (self.incomplete, "incomplete groups are left out"),
                (self.failed, "groups with too few episodes to train on are left out"),
            )
            if count
        ]
        return "; ".join([f"{len(self)} stored groups of {self.size} episodes from {self.store}", *left_out])

    def check_enough(self, used: int = 0) -> None:
        """Check that the groups are enough for ``trainer.steps``, without those that dynamic sampling drops.

        Args:
            used: Number of groups that the earlier steps of the run have used.

        Raises:
            UsageError: there are too few.
        """
        trainer = self._config.trainer
        if used or len(self) >= trainer.steps * trainer.tasks_per_step:
            return
        enough = len(self) // trainer.tasks_per_step
        raise UsageError(
            "the stored episodes are too few for the run",
            got=self.summary,
            expected=f"{trainer.steps * trainer.tasks_per_step} groups for {trainer.steps} steps of "
            f"trainer.tasks_per_step={trainer.tasks_per_step}",
            hint=f"set trainer.steps={enough}" if enough else "play more: agentrl rollout --resume RUN",
        )

    def check_model(self, model_path: str) -> None:
        """Check that the episodes consist of a model's tokens.

        Raises:
            ConfigError: the model has another tokenizer, or fewer token ids.
        """
        check_store_tokens(self.store, model_path)
        size = embedding_rows(model_path)
        unknown = [row for group in self.groups for row in group.rows if row.largest_id >= size]
        if unknown:
            raise ConfigError(
                f"the stored episodes are not those of a model such as {model_path}",
                got=f"token ids up to {max(row.largest_id for row in unknown)} in {len(unknown)} episodes",
                expected=f"ids below {size}",
                hint="train the model that sampled them, or one with the same vocabulary",
            )

    def read(self, group: StoredGroup) -> Group:
        """Read the episodes of a group.

        Raises:
            UsageError: the store has changed.
        """
        members = {number: self._index.read(row).trajectory for number, row in enumerate(group.rows)}
        task = Task(id=group.rows[0].task_id, environment=group.rows[0].environment)
        draw = SampledTask(environment=self._label(group), place=group.position, task=task)
        return Group(position=group.position, draw=draw, size=self.size, members=members)

    def batches(self, used: int, *, keep: Callable[[Group], bool]) -> Iterator[tuple[list[Group], int]]:
        """Yield batches of ``trainer.tasks_per_step`` groups, each with the number of groups used until its end.

        Args:
            used: Number of groups that earlier steps have used.
            keep: Returns True if a group is worth training on; others are passed over.
        """
        batch: list[Group] = []
        for number, stored in enumerate(self.groups[used:], used + 1):
            group = self.read(stored)
            if keep(group):
                batch.append(group)
            if len(batch) == self._config.trainer.tasks_per_step:
                yield batch, number
                batch = []

    def _check_logprobs(self) -> None:
        rows = self._index.select(EpisodeFilter(is_trainable=True))
        without = sum(row.missing_logprobs > 0 or row.sampled_tokens == 0 for row in rows)
        if without:
            raise UsageError(
                f"episodes in {self.store} have no log-probabilities of the policy that played them",
                got=f"{without} of {len(rows)} episodes",
                expected="episodes that a local, vLLM or SGLang engine sampled, as in runs of agentrl train or rollout",
                hint="to train on demonstrations or texts, use agentrl sft",
            )

    def _find(self) -> list[StoredGroup]:
        """Return the complete groups with enough trainable episodes, in the order of their positions."""
        latest: dict[str, dict[int, EpisodeRow]] = {}
        for row in self._index.select():
            members = latest.setdefault(row.group_id, {})
            earlier = members.get(row.member or 0)
            if row.outcome is not Outcome.CANCELLED and (earlier is None or row.attempt >= earlier.attempt):
                members[row.member or 0] = row
        largest = max((member for members in latest.values() for member in members), default=0)
        if largest >= self.size:
            raise ConfigError(
                "algorithm.group_size differs from that of the stored groups",
                got=self.size,
                expected=largest + 1,
                hint=f"set algorithm.group_size={largest + 1}",
            )
        found, least = [], 2 if Objective(self._config.algorithm).compares_groups else 1
        for place, (name, members) in enumerate(latest.items()):
            rows = [members[member] for member in sorted(members)]
            if len(rows) < self.size:
                self.incomplete += 1
            elif sum(row.is_trainable for row in rows) < least:
                self.failed += 1
            else:
                found.append(StoredGroup(_position(name, len(latest) + place), name, rows))
        return sorted(found, key=lambda group: group.position)

    def _label(self, group: StoredGroup) -> str:
        """Return the label of a group's environment, in a config with several environments."""
        rest = group.id.partition("-")[2]
        return next((label for label in self._labels if label and rest.startswith(f"{label}-")), "")

    @cached_property
    def _labels(self) -> Mapping[str, str]:
        """Environments by label; longer labels first."""
        parts = {part.label: part.config.sole_environment.name for part in per_environment_configs(self._config)}
        return dict(sorted(parts.items(), key=lambda item: -len(item[0])))


def _position(group_id: str, default: int) -> int:
    """Return the position of a group in its run's order of tasks.

    >>> _position("12-train-7", 0)
    12
    """
    first = group_id.partition("-")[0]
    return int(first) if first.isdecimal() else default
