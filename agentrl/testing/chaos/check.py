"""Comparison of the ledger with the run's folder and with the updates that the trainer made.

====================  ==================================================================================================
lost                  a started task that was neither trained nor recorded with a reason; a record of an update that the
                      trainer never made
duplicated            an episode, a member of a group or a group that trained twice
mislabelled           a stored reward, outcome, success, action or observation that differs from the ledger; metrics of
                      other episodes than the update's; an infrastructure failure that trained
====================  ==================================================================================================

An episode of the ledger is identified by its seed and its return, which `agentrl.testing.chaos.world.LedgerEnv` makes
unique. The trained episodes are those that `agentrl.testing.chaos.witness` received. An update that a resumed run
repeated counts once: the update of step N is the last one with the episodes that the run's records of step N name.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.errors import Outcome
from agentrl.observe.files import decode_record
from agentrl.observe.metrics import read_metrics
from agentrl.observe.run_folder import RunDirectory
from agentrl.observe.trajectory_store import VOID, GroupEnd, read_trajectories, step_files
from agentrl.testing.chaos.damage import Damage
from agentrl.testing.chaos.world import read_ledger
from agentrl.trajectory import Trajectory

COMPARED_CHARACTERS = 200
"""Number of leading characters of an observation that must be in the stored messages, which may be truncated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEpisode:
    """Episode as the environment recorded it in the ledger."""

    seed: int
    actions: tuple[str, ...] = ()
    observations: tuple[str, ...] = ()
    """Observations of the reset and of each step, in order."""
    total: float = 0.0
    ended: bool = False
    """True if the environment terminated the episode."""
    success: bool | None = None


def ledger_episodes(events: Iterable[Mapping[str, Any]]) -> dict[str, LedgerEpisode]:
    """Assemble the episodes of a ledger, by their ids in it."""
    found: dict[str, dict[str, Any]] = {}
    for event in events:
        match event["event"]:
            case "reset":
                found[event["episode"]] = {
                    "seed": event["seed"],
                    "actions": (),
                    "observations": (event["observation"],),
                }
            case "restore":
                before = found[event["before"]]
                turns = event["turns"]
                found[event["episode"]] = {
                    "seed": before["seed"],
                    "actions": before["actions"][:turns],
                    "observations": before["observations"][: turns + 1],
                }
            case "step":
                row = found[event["episode"]]
                row["actions"] += (event["action"],)
                row["observations"] += (event["observation"],)
                row["total"], row["ended"], row["success"] = event["total"], event["terminated"], event["success"]
    return {name: LedgerEpisode(**row) for name, row in found.items()}


@dataclass(slots=True)
class Account:
    """Findings about the episodes of one run or of several."""

    lost: list[str] = field(default_factory=list)
    duplicated: list[str] = field(default_factory=list)
    mislabelled: list[str] = field(default_factory=list)
    trained: int = 0
    """Number of episodes that trained."""
    named: Counter[str] = field(default_factory=Counter)
    """Number of groups by result."""

    def add(self, other: Account) -> None:
        """Add the findings about another run."""
        self.lost += other.lost
        self.duplicated += other.duplicated
        self.mislabelled += other.mislabelled
        self.trained += other.trained
        self.named += other.named


def check_run(
    folder: Path, ledger: Path, *, group_size: int, max_left_over: int, damage: Damage | None = None
) -> Account:
    """Compare a finished run with its ledger; at most `max_left_over` groups may be unused after its last step."""
    return _Check(folder, ledger, group_size, max_left_over, damage or Damage()).run()


class _Check:
    def __init__(self, folder: Path, ledger: Path, group_size: int, max_left_over: int, damage: Damage) -> None:
        run = RunDirectory(folder)
        events = read_ledger(ledger)
        self._group_size, self._max_left_over, self._damage = group_size, max_left_over, damage
        self._played = ledger_episodes(events)
        self._updates = [tuple(event["returns"]) for event in events if event["event"] == "trained"]
        self._stored = {
            found.trajectory.id: found.trajectory for found in read_trajectories(run.trajectories, messages=True)
        }
        records = list(_readable_records(run.trajectories))
        self._groups = _group_records(records, damage)
        self._seeds = set(_seeds(records)) | damage.seeds
        void = (line for file in sorted((run.trajectories / VOID).glob("*.jsonl")) for line in _decoded_lines(file))
        self._seeds |= set(_seeds(line for line in void if _group_of(line) in self._groups))
        self._metrics = {int(line["step"]): line for line in read_metrics(run.metrics_file)}
        self._by_return: dict[tuple[int, float], list[LedgerEpisode]] = defaultdict(list)
        for episode in self._played.values():
            self._by_return[episode.seed, episode.total].append(episode)
        self.account = Account()

    def run(self) -> Account:
        for trajectory in self._stored.values():
            self._check_label(trajectory)
        self._check_updates()
        self._check_groups()
        self._check_started()
        return self.account

    def _record_mismatch(self, trajectory: Trajectory, what: str, got: object, expected: object) -> None:
        self.account.mislabelled.append(f"{trajectory.id}: {what} is {got!r}, the environment recorded {expected!r}")

    def _check_label(self, trajectory: Trajectory) -> None:
        """Compare a stored episode with the ledger."""
        outcome = trajectory.outcome
        if outcome is None or not outcome.is_trainable:
            if trajectory.reward is not None:
                self.account.mislabelled.append(
                    f"{trajectory.id}: reward {trajectory.reward!r} after the infrastructure failure {outcome}"
                )
            return
        if not trajectory.turns:
            return
        played = self._by_return.get((trajectory.seed, trajectory.reward or 0.0), [])
        if not played:
            self.account.mislabelled.append(
                f"{trajectory.id}: no episode of seed {trajectory.seed} has the return {trajectory.reward!r}"
            )
            return
        texts = "\n".join(message.text for messages in trajectory.conversations for message in messages)
        episode = next((each for each in played if _was_shown(each, texts)), None)
        if episode is None:
            self._record_mismatch(trajectory, "text", texts[-COMPARED_CHARACTERS:], played[0].observations)
            return
        if (outcome is Outcome.FINISHED) != episode.ended:
            self._record_mismatch(
                trajectory, "outcome", outcome.value, "terminated" if episode.ended else "not terminated"
            )
        if episode.success is not None and trajectory.success != episode.success:
            self._record_mismatch(trajectory, "success", trajectory.success, episode.success)
        answers = "\n".join(trajectory.completions)
        if not all(action.strip() in answers for action in episode.actions):
            self._record_mismatch(trajectory, "answers", answers, episode.actions)

    def _check_updates(self) -> None:
        """Find the update of each step, and check that no episode trained in two of them."""
        trained: Counter[float] = Counter()
        for step, groups in sorted(self._trained_groups().items()):
            ids = [episode for group in groups for episode in group["episodes"]]
            rewards = [self._stored[name].reward for name in ids if name in self._stored]
            self._check_trainable(step, ids)
            update = self._find_update([reward for reward in rewards if reward is not None], len(ids))
            if update is None:
                self.account.lost.append(f"step {step}: no update had the {len(ids)} episodes of the run's records")
                continue
            trained.update(update)
            self.account.trained += len(update)
            self._check_metrics(step, update)
        played = Counter(episode.total for episode in self._played.values())
        for total, count in trained.items():
            if count > played[total]:
                self.account.duplicated.append(f"the episode with return {total!r} trained {count} times")
            if not played[total]:
                self.account.mislabelled.append(f"an episode trained with return {total!r}, which no episode has")
        steps = set(self._trained_groups())
        for step in range(1, max([*steps, *self._metrics], default=0) + 1):
            if step not in steps or (step not in self._metrics and step not in self._damage.steps):
                self.account.lost.append(f"step {step}: it has no {'metrics' if step in steps else 'trained groups'}")

    def _trained_groups(self) -> dict[int, list[Mapping[str, Any]]]:
        found: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
        for records in self._groups.values():
            if records[-1]["end"] == GroupEnd.TRAINED:
                found[records[-1]["step"]].append(records[-1])
        return found

    def _check_trainable(self, step: int, ids: Sequence[str]) -> None:
        for name in ids:
            stored = self._stored.get(name)
            if stored is None and name not in self._damage.ids:
                self.account.lost.append(f"{name}: it trained in step {step}, but is not stored")
            if stored is not None and not stored.is_trainable:
                self.account.mislabelled.append(f"{name}: it trained in step {step} after {stored.outcome}")

    def _find_update(self, rewards: Sequence[float], count: int) -> tuple[float, ...] | None:
        """Return the last update of `count` episodes with these returns, except those of destroyed records."""
        wanted = Counter(rewards)
        return next((u for u in reversed(self._updates) if len(u) == count and not wanted - Counter(u)), None)

    def _check_metrics(self, step: int, update: Sequence[float]) -> None:
        line = self._metrics.get(step)
        mean = math.fsum(update) / len(update)
        if line is not None and not math.isclose(line["reward/mean"], mean, rel_tol=1e-12):
            self.account.mislabelled.append(
                f"step {step}: the metrics have the mean reward {line['reward/mean']!r}, its update {mean!r}"
            )

    def _check_groups(self) -> None:
        """Check that records cover each position of the task order, and that members of trained groups trained once."""
        names = {*self._groups, *(trajectory.group_id for trajectory in self._stored.values())}
        positions = {int(name.partition("-")[0]): name for name in names}
        for position in range(max(positions, default=-1) + 1):
            if position not in positions:
                self.account.lost.append(f"group {position}: no record of it, although later groups were started")
            elif positions[position] not in self._groups:
                self.account.lost.append(f"group {positions[position]}: no record states its result")
        for name, records in self._groups.items():
            self.account.named[records[-1]["end"]] += 1
            trainings = [record["step"] for record in records if record["end"] == GroupEnd.TRAINED]
            if len(set(trainings)) > 1:
                self.account.duplicated.append(f"group {name}: it trained in the steps {trainings}")
            self._check_members(name, records[-1])
        if self.account.named[GroupEnd.LEFT_OVER] > self._max_left_over:
            left = self.account.named[GroupEnd.LEFT_OVER]
            self.account.lost.append(f"{left} groups are left over, expected at most {self._max_left_over}")

    def _check_members(self, name: str, record: Mapping[str, Any]) -> None:
        members = Counter(episode.rpartition("/")[2].partition(".")[0] for episode in record["episodes"])
        if record["end"] == GroupEnd.TRAINED:
            for member, count in members.items():
                if count > 1:
                    self.account.duplicated.append(f"{name}/{member}: {count} attempts trained")
            for member in set(map(str, range(self._group_size))) - set(members):
                if not self._is_named(f"{name}/{member}"):
                    self.account.lost.append(f"{name}/{member}: it neither trained nor failed")
        elif record["end"] == GroupEnd.FAILED and not any(map(self._has_error, record["episodes"])):
            self.account.lost.append(f"group {name}: it failed, but none of its episodes states an error")

    def _is_named(self, player: str) -> bool:
        return any(
            self._has_error(name) for name in {*self._stored, *self._damage.ids} if name.startswith(f"{player}.")
        )

    def _has_error(self, name: str) -> bool:
        stored = self._stored.get(name)
        if stored is None:
            return name in self._damage.ids
        return stored.outcome is not None and stored.outcome.is_infrastructure and bool(stored.error)

    def _check_started(self) -> None:
        """Check that every played episode is stored or belongs to a recorded group."""
        for name, episode in self._played.items():
            if episode.actions and episode.seed not in self._seeds:
                self.account.lost.append(f"episode {name} of seed {episode.seed} was played, but is not stored")


def _was_shown(episode: LedgerEpisode, texts: str) -> bool:
    """Return True if the stored messages contain the episode's observations, except the last one."""
    shown = episode.observations[: len(episode.actions)]
    return all(observation[:COMPARED_CHARACTERS].strip() in texts for observation in shown)


def _seeds(records: Iterable[Mapping[str, Any]]) -> Iterator[int]:
    return (record["trajectory"]["seed"] for record in records if "trajectory" in record)


def _group_of(record: Mapping[str, Any]) -> str | None:
    found: str | None = record.get("trajectory", {}).get("group_id")
    return found


def _readable_records(trajectories: Path) -> Iterator[dict[str, Any]]:
    """Yield the undamaged records of the trajectory store, each with its ``step``."""
    for file in step_files(trajectories):
        step = int(file.stem.partition("-")[2])
        yield from ({**record, "step": step} for record in _decoded_lines(file))


def _decoded_lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the undamaged records of a file."""
    for line in file.read_bytes().splitlines():
        with suppress(ValueError):
            yield decode_record(line)


def _group_records(records: Iterable[Mapping[str, Any]], damage: Damage) -> dict[str, list[Mapping[str, Any]]]:
    """Return the records of each group in order; a destroyed record counts if the group has no other."""
    found: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        if record["kind"] == "group":
            found[record["id"]].append(record)
    for record in damage.groups:
        if record["id"] not in found:
            found[record["id"]].append(record)
    return dict(found)
