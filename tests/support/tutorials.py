"""Projects that the tutorials describe, made from the code on their pages."""

from __future__ import annotations

import re
from pathlib import Path

from agentrl.cli.init import SCAFFOLD, WITH_TOOLS, create_project

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)

SMALL = (
    "model.scratch.hidden_size=32",
    "model.scratch.layers=1",
    "trainer.tasks_per_step=2",
    "algorithm.group_size=4",
    "sft.episodes=24",
    "sft.warmup_steps=2",
    "evaluation.tasks=4",
)
"""Overrides with which the commands of a tutorial take seconds."""


def code_of(page: str) -> list[str]:
    """Return the Python blocks of a tutorial."""
    return PYTHON.findall((TUTORIALS / page).read_text())


def make_coins(folder: Path) -> Path:
    """Make the project of the first environment, with the rewards of the run that does not learn."""
    project = create_project("coins", folder, SCAFFOLD)
    (project / "coins" / "environment.py").write_text(code_of("first-environment.md")[0])
    (project / "coins" / "rewards.py").write_text(code_of("why-a-run-does-not-learn.md")[0])
    return project


def make_machine(folder: Path) -> Path:
    """Make the project of the first tool."""
    project = create_project("machine", folder, WITH_TOOLS)
    (project / "machine" / "environment.py").write_text(code_of("first-tool.md")[1])
    (project / "shop.py").write_text(code_of("first-tool.md")[0])
    return project
