"""Finished episodes of a killed run, on which the resumed run trains instead of playing them again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from agentrl.observe.trajectory_store import read_trajectories
from agentrl.trajectory import Trajectory


class RecoveredEpisodes:
    """Stored episodes by group and member; each one is taken at most once.

    Args:
        episodes: Finished episodes; of several attempts of a member, the last one is kept.
        are_stored: True if the store keeps them; otherwise they are written to it again when they are used.
    """

    def __init__(self, episodes: Iterable[Trajectory] = (), *, are_stored: bool = False) -> None:
        self.are_stored = are_stored
        self._by_player = {episode.id.rpartition(".")[0]: episode for episode in episodes}

    def __len__(self) -> int:
        return len(self._by_player)

    def keep_groups_from(self, position: int, others: Iterable[str]) -> None:
        """Drop the episodes of groups before `position`, except those of the groups `others`."""
        kept = set(others)
        self._by_player = {
            player: episode
            for player, episode in self._by_player.items()
            if episode.group_id in kept or group_position(episode.group_id) >= position
        }

    def keep_versions_until(self, version: int, adapters: Mapping[str, int]) -> None:
        """Drop the episodes with tokens from newer weights than the checkpoint's."""
        self._by_player = {
            player: episode for player, episode in self._by_player.items() if not _is_newer(episode, version, adapters)
        }

    def holds_group(self, group_id: str, size: int) -> bool:
        """Return True if all members of a group have ended."""
        return all(f"{group_id}/{member}" in self._by_player for member in range(size))

    def take_all(self) -> list[Trajectory]:
        """Remove and return all episodes."""
        episodes, self._by_player = list(self._by_player.values()), {}
        return episodes

    def take(self, group_id: str, member: int) -> Trajectory | None:
        """Return a member's episode; ``None`` if it must be played."""
        return self._by_player.pop(f"{group_id}/{member}", None)


def read_recoverable(folder: Path, *, first_step: int, are_stored: bool = False) -> RecoveredEpisodes:
    """Read the trainable episodes of a run's ``trajectories``; those that began before `first_step` are not found.

    With `are_stored`, the store keeps their records.
    """
    if not folder.is_dir():  # a new run
        return RecoveredEpisodes()
    found = read_trajectories(folder, messages=True, first_step=first_step)
    trainable = (stored.trajectory for stored in found if stored.trajectory.is_trainable)
    return RecoveredEpisodes(trainable, are_stored=are_stored)


def group_position(group_id: str) -> int:
    """Return the position of a group in the run's order of tasks; -1 if the id has none."""
    first = group_id.partition("-")[0]
    return int(first) if first.isdecimal() else -1


def _is_newer(episode: Trajectory, version: int, adapters: Mapping[str, int]) -> bool:
    """Return True if a token was sampled by newer weights; a token's version counts by its own adapter."""
    for sequence in episode.sequences:
        sampled = sequence.versions[sequence.loss_mask]
        adapter = sequence.turns[0].adapter if sequence.turns else None
        if sampled.size and int(sampled.max()) > (version if adapter is None else adapters.get(adapter, -1)):
            return True
    return False
