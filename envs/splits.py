"""Splits of generated instances, decided by checksums, so that no two splits share an instance."""

from __future__ import annotations

import hashlib

from agentrl.task import SeedTasks

_SHARES = (SeedTasks.SPLITS[0], *SeedTasks.SPLITS)
"""Split of each of four equal parts of the checksums: two for training, one each for validation and test."""


def split_of_checksum(checksum: int) -> str:
    """Return the split of instances with this checksum."""
    return _SHARES[checksum % len(_SHARES)]


def split_of_text(text: str) -> str:
    """Return the split of an instance with this text."""
    return split_of_checksum(hashlib.blake2b(text.encode(), digest_size=1).digest()[0])


def split_of_seed(seed: int) -> str:
    """Return the split whose range of seeds contains `seed` (`SeedTasks`); training if none does."""
    number = seed // SeedTasks.SPLIT_SIZE
    return SeedTasks.SPLITS[number] if 0 <= number < len(SeedTasks.SPLITS) else SeedTasks.SPLITS[0]
