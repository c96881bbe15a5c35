"""`agentrl config`: resolved configs, and the reference of all keys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.arguments import read_config
from agentrl.cli.help_pages import examples
from agentrl.config import dump_config, shipped_configs
from agentrl.config.reference import config_reference
from agentrl.config.step_settings import plan_rows
from agentrl.observe.console import note, out

app = typer.Typer(no_args_is_help=True)


@app.command("list", epilog=examples("agentrl config list"))
def list_configs() -> None:
    """List the configs that come with agentrl."""
    for name in shipped_configs():
        out.print(name)


@app.command(epilog=examples("agentrl config show quickstart trainer.steps=5", "agentrl config show my_config.yaml"))
def show(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONFIG]... [KEY=VALUE]...", help="Files or shipped configs, then overrides."),
    ] = None,
) -> None:
    """Print a config with all its keys, defaults included, as YAML; comments list the values that change by step."""
    config = read_config(words)
    out.print(dump_config(config), end="")
    for key, values, _ in plan_rows(config):
        out.print(f"# {key} by step: {values}")


@app.command(epilog=examples("agentrl config reference", "agentrl config reference --output docs/configuration.md"))
def reference(
    output: Annotated[Path | None, typer.Option(help="Write the reference to this file instead.")] = None,
) -> None:
    """Print every key with its type, default and meaning, as Markdown."""
    if output is None:
        out.print(config_reference())
        return
    output.write_text(config_reference(), encoding="utf-8")
    note(f"wrote {output}")
