"""Equal steps give equal bits: torch's deterministic algorithms, and cuBLAS with a workspace of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


def prepare_repeatable(*, enabled: bool) -> None:
    """Say to cuBLAS, before its first product, that its sums must not depend on timing; what is set already stays."""
    if enabled:
        os.environ.setdefault(CUBLAS, ":4096:8")


@contextmanager
def repeatable(*, enabled: bool) -> Iterator[None]:
    """Compute so that the same work gives the same bits, if `enabled`; torch's settings are put back afterwards.

    SDPA's kernels and FlashAttention have backward passes without atomic sums, which these settings choose; an
    operation that has none raises. What lanes and ranks compute is added up in a fixed order in any case.
    """
    if not enabled:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    searches = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = searches
