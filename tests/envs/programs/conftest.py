"""Sandboxes of these tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.registry import Kind, register, unregister

sys.path.append(str(Path(__file__).parent))

from plain_sandbox import OPEN, PlainSandbox


@pytest.fixture(autouse=True)
def plain() -> Iterator[str]:
    """The name of a sandbox that confines nothing; all of them are closed at the end."""
    register(Kind.SANDBOX, "plain", PlainSandbox)
    yield "plain"
    unregister(Kind.SANDBOX, "plain")
    left = len(OPEN)
    OPEN.clear()
    assert left == 0
