"""The examples in the docstrings of the shipped environments are true."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import agentrl.envs
import pytest

import agentrl.env.lookup

MODULES = [
    agentrl.env.lookup.__name__,
    *(module.name for module in pkgutil.walk_packages(agentrl.envs.__path__, prefix="agentrl.envs.")),
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0
