"""Which split a generated problem belongs to: decided by its text, so that no two splits share one."""

from __future__ import annotations

import hashlib

from agentrl.task import SeedTasks

_SHARES = (SeedTasks.SPLITS[0], *SeedTasks.SPLITS)
"""Problems fall into four equal parts by their checksum: two for training, one each for validation and test."""


def split_of_text(text: str) -> str:
    """The split that owns a problem."""
    return _SHARES[hashlib.blake2b(text.encode(), digest_size=1).digest()[0] % len(_SHARES)]


def split_of_seed(seed: int) -> str:
    """The split whose range of seeds holds `seed` (`SeedTasks`); training where none does."""
    number = seed // SeedTasks.SPLIT_SIZE
    return SeedTasks.SPLITS[number] if 0 <= number < len(SeedTasks.SPLITS) else SeedTasks.SPLITS[0]
