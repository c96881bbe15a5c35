"""Pages and tables of the documentation that are made from the code; a hook of mkdocs.

A page asks for a table with a line ``<!-- generated: NAME -->``; the reference pages are made whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from typer.testing import CliRunner

from agentrl.cli.application import build
from agentrl.cli.commands import COMMANDS
from agentrl.config import shipped_configs
from agentrl.config.reference import config_reference
from agentrl.env_lookup import resolve_environment
from agentrl.registry import Kind, lookup, names

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

MARK = re.compile(r"<!-- generated: ([\w ]+) -->")
WIDTH = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}


def configuration_page() -> str:
    """The reference of all config keys."""
    return f"# Config keys\n\nAlso printed by `agentrl config reference`.\n\n{config_reference()}"


def cli_page() -> str:
    """Every command's help page."""
    parts = ["# Command line\n", _help([])]
    for name, entry in COMMANDS.items():
        parts += [f"## agentrl {name}\n", _help([name])]
        if entry.is_group:
            for child in _children(name):
                parts += [f"### agentrl {name} {child}\n", _help([name, child])]
    return "\n".join(parts)


def environments_table() -> str:
    """Every installed environment with its splits and the scores of scripted policies."""
    rows = ["| name | splits | random | expert | what it is |", "|---|---|---|---|---|"]
    for name in names(Kind.ENVIRONMENT):
        spec = resolve_environment(name)
        scores = [f"{spec.scores[policy]:.2f}" if policy in spec.scores else "none" for policy in ("random", "expert")]
        rows.append(f"| `{name}` | {', '.join(spec.splits)} | {' | '.join(scores)} | {spec.description} |")
    return "\n".join(rows)


def tools_table() -> str:
    """Every installed tool."""
    tools = {name: lookup(Kind.TOOL, name).schema["function"]["description"] for name in names(Kind.TOOL)}
    return "\n".join(
        ["| name | what it does |", "|---|---|", *(f"| `{name}` | {told} |" for name, told in tools.items())]
    )


def documented_table(kind: Kind) -> str:
    """The names of a kind, each with the first line of its docstring."""
    rows = ["| name | what it is |", "|---|---|"]
    for name in names(kind):
        summary = (lookup(kind, name).__doc__ or "").strip().partition("\n")[0]
        rows.append(f"| `{name}` | {summary} |")
    return "\n".join(rows)


def configs_table() -> str:
    """The configs that are installed."""
    return "\n".join(f"- `{name}`" for name in shipped_configs())


PAGES: Mapping[str, Callable[[], str]] = {"configuration.md": configuration_page, "cli.md": cli_page}
TABLES: Mapping[str, Callable[[], str]] = {
    "environments": environments_table,
    "tools": tools_table,
    "agent loops": lambda: documented_table(Kind.AGENT_LOOP),
    "advantages": lambda: documented_table(Kind.ADVANTAGE),
    "losses": lambda: documented_table(Kind.LOSS),
    "configs": configs_table,
}


def fill(markdown: str) -> str:
    """A page with its tables."""
    return MARK.sub(lambda mark: TABLES[mark[1]](), markdown)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made whole."""
    from mkdocs.structure.files import File  # only there when the site is built

    for path, make in PAGES.items():
        files.append(File.generated(config, path, content=make()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in the tables of a page."""
    return fill(markdown)


def _help(words: list[str]) -> str:
    result = CliRunner(env=WIDTH).invoke(build(next(iter(words), None)), [*words, "--help"], prog_name="agentrl")
    text = "\n".join(line.rstrip() for line in result.output.strip().splitlines())
    return f"```text\n{text}\n```\n"


def _children(group: str) -> list[str]:
    (added,) = [found for found in build(group).registered_groups if found.name == group]
    assert added.typer_instance is not None
    commands = added.typer_instance.registered_commands
    return [command.name or str(command.callback and command.callback.__name__) for command in commands]
