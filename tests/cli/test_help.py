"""Help pages with examples, and the options of the program itself."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer

from agentrl.cli.commands import COMMANDS
from agentrl.config import shipped_configs

Cli = Callable[..., Any]


def pages() -> list[tuple[str, ...]]:
    """The words of every command and every command of a group."""
    found: list[tuple[str, ...]] = []
    for name, entry in COMMANDS.items():
        found.append((name,))
        app: typer.Typer = importlib.import_module(entry.module).app
        if entry.is_group:
            names = [c.name or (c.callback.__name__ if c.callback else "") for c in app.registered_commands]
            found += [(name, child) for child in names]
    return found


@pytest.mark.parametrize("words", pages(), ids=" ".join)
def test_every_help_page_explains_and_gives_examples(agentrl: Cli, words: tuple[str, ...]) -> None:
    page = agentrl(*words, "--help")
    assert page.code == 0, page.err
    assert f"Usage: agentrl {' '.join(words)}" in page.out
    if not COMMANDS[words[0]].is_group or len(words) == 2:
        assert f"agentrl {' '.join(words)}" in page.out.partition("Examples:")[2]
        assert "--debug" in page.out
    assert "<bool>" not in page.out
    assert "[[" not in page.out
    assert not {"{", "["} & set(re.sub(r"'[^']*'", "", page.out.partition("Examples:")[2])), "a shell splits this"


def test_the_overview_names_every_command(agentrl: Cli) -> None:
    page = agentrl("--help")
    assert page.code == 0
    for name, entry in COMMANDS.items():
        assert f" {name} " in page.out
        assert entry.help in page.out


def test_the_overview_follows_the_order_of_work(agentrl: Cli) -> None:
    page = agentrl("--help").out
    work = ("init", "doctor", "demo", "env", "tool", "config", "plan", "sft", "train", "eval", "view", "serve")
    places = [page.index(f" {name}  ") for name in work]
    assert places == sorted(places)


@pytest.mark.parametrize("command", ["train", "sft", "plan", "eval"])
def test_commands_that_take_a_config_list_those_that_are_shipped(agentrl: Cli, command: str) -> None:
    shown = agentrl(command, "--help").out.partition("Shipped configs")[2].split()
    recipes = {name for name in shipped_configs() if name.startswith("recipes/")}
    assert set(shipped_configs()) - recipes <= set(shown)
    assert recipes.isdisjoint(shown)
    assert "recipes/NAME" in shown


@pytest.mark.parametrize("library", ["typer", "torch"])
@pytest.mark.slow
def test_an_interruption_during_imports_is_one_line(library: str, tmp_path: Path) -> None:
    program = (
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {library!r}: signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from agentrl.cli import main\n"
        "main(['doctor'])\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (ended.returncode, ended.stderr, ended.stdout) == (130, "interrupted\n", "")


def test_a_command_group_without_a_command_shows_its_help(agentrl: Cli) -> None:
    page = agentrl("env")
    assert page.code == 2
    assert "check" in page.out + page.err


def test_the_version(agentrl: Cli) -> None:
    assert agentrl("--version").out.strip() == "0.1.0"


def test_an_unknown_command_gets_the_nearest(agentrl: Cli) -> None:
    ended = agentrl("trian")
    assert ended.code == 2
    assert "Did you mean 'train'" in ended.err


def test_a_paragraph_of_help_wraps_only_at_the_width_of_the_terminal(agentrl: Cli) -> None:
    lines = [line.strip() for line in agentrl("demo", "--help").out.splitlines()]
    start = next(number for number, line in enumerate(lines) if line.startswith("Creates a small model"))
    paragraph = lines[start : lines.index("", start)]
    assert all(len(line) + len(following.split()[0]) >= 70 for line, following in pairwise(paragraph))
