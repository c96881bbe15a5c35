"""Help pages: their footer, and the format of options and arguments."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

FOOTER = (
    "Add --debug to any command for full tracebacks. "
    "Exit codes: 0 done, 1 failed, 2 wrong usage or config, 130 interrupted."
)

_RECIPES = "recipes/"
"""Folder of configs that are too many for help pages."""


def examples(*commands: str, configs: Sequence[str] = ()) -> str:
    """Return the end of a help page: example commands, shipped configs, and the footer."""
    lines = "\n".join(f"  [cyan]{escape(command)}[/cyan]" for command in commands)
    listed = [name for name in configs if not name.startswith(_RECIPES)]
    listed += [] if len(listed) == len(configs) else [f"{_RECIPES}NAME (agentrl config list)"]
    shipped = "\n".join(f"  {name}" for name in listed)
    return "\n\n".join(
        [
            f"Examples:\n{lines}",
            *([f"Shipped configs (CONFIG is one of them, or a YAML file):\n{shipped}"] if configs else []),
            FOOTER,
        ]
    )


class PlainCommand(TyperCommand):
    """A command whose help shows flags without a type, and variadic arguments by their metavar."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.help:
            self.help = _join_lines(self.help)

    def get_params(self, ctx: Any) -> list[Any]:
        """Return all options and arguments."""
        return _flags_without_type(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts of the usage line, without brackets around a metavar that has its own."""
        return [re.sub(r"^\[(\[.*\].*)\](\.\.\.)?$", r"\1", piece) for piece in super().collect_usage_pieces(ctx)]


class PlainGroup(TyperGroup):
    """A group of commands whose help shows flags without a type."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return all options and arguments."""
        return _flags_without_type(super().get_params(ctx))


def _join_lines(text: str) -> str:
    """Return a docstring with one line per paragraph: the terminal wraps it at its own width."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(" ".join(paragraph.split("\n")) for paragraph in paragraphs)


def _flags_without_type(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters
