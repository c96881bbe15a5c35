"""Which split a generated instance belongs to: decided by its checksum, so that no two splits share one."""

from __future__ import annotations

import hashlib

from agentrl.task import SeedTasks

_SHARES = (SeedTasks.SPLITS[0], *SeedTasks.SPLITS)
"""Instances fall into four equal parts by their checksum: two for training, one each for validation and test."""


def split_of_checksum(checksum: int) -> str:
    """The split that owns what has this checksum."""
    return _SHARES[checksum % len(_SHARES)]


def split_of_text(text: str) -> str:
    """The split that owns a problem."""
    return split_of_checksum(hashlib.blake2b(text.encode(), digest_size=1).digest()[0])


def split_of_seed(seed: int) -> str:
    """The split whose range of seeds holds `seed` (`SeedTasks`); training where none does."""
    number = seed // SeedTasks.SPLIT_SIZE
    return SeedTasks.SPLITS[number] if 0 <= number < len(SeedTasks.SPLITS) else SeedTasks.SPLITS[0]
