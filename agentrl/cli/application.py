"""The program `agentrl`: imports the command's module, runs it, and turns errors into messages and exit codes."""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.commands import COMMANDS, RUN_OR_CONFIG, CommandEntry
from agentrl.cli.exits import ExitCode, end_despite_foreign_code
from agentrl.cli.help_pages import PlainCommand, PlainGroup, examples, no_permission_error
from agentrl.errors import AgentRLError, UsageError
from agentrl.observe.console import VisibleFormatter, kept_streams, note, paths_shown_from, print_error
from agentrl.observe.run_folder import missing_run_error

DEBUG = "--debug"
HELP = "Train language-model agents with reinforcement learning in environments."
EXAMPLES = examples(
    "agentrl demo",
    "agentrl init my_game",
    "agentrl env check my_game:GuessNumber-v0",
    "agentrl sft quickstart",
    "agentrl train quickstart model.path=runs/latest",
    "agentrl eval runs/latest",
    "agentrl view runs/latest",
)


def run(arguments: Sequence[str] | None = None, *, imported: Callable[[], None] = lambda: None) -> None:
    """Run the command line; ends the process with an `ExitCode`.

    Args:
        arguments: Arguments after ``agentrl``; default `sys.argv`.
        imported: Called after the command's module and its libraries have been imported.
    """
    if arguments is None:
        with end_despite_foreign_code(), kept_streams():
            _run(sys.argv[1:], imported)
    else:
        with kept_streams():
            _run(arguments, imported)


_KEY_OPTION = re.compile(r"--(?P<key>[a-z_]\w*(?:\.\w+)+)(?:=(?P<value>.*))?", re.DOTALL)
"""Config key that is written like an option."""


def _run(arguments: Sequence[str], imported: Callable[[], None]) -> None:
    words = list(arguments)
    debug = DEBUG in words
    words = [word for word in words if word != DEBUG]
    if logging.lastResort is not None:  # for warnings that are not written to a run's log
        logging.lastResort.setFormatter(VisibleFormatter())
    try:
        here = str(_current_folder())
        if "" not in sys.path and here not in sys.path:
            sys.path.append(here)  # the user's module:attr names are imported from the current folder
        refuse_empty_words(words)
        chosen = next((word for word in words if not word.startswith("-")), None)
        if chosen is not None and (entry := COMMANDS.get(chosen)) is not None:
            check_first_argument(entry, words[words.index(chosen) + 1 :])
        refuse_key_options(words)
        program = build(chosen)
        imported()
        with paths_shown_from(Path(here)):  # environments may change the working folder
            program(args=words, prog_name="agentrl")
    except KeyboardInterrupt:
        note("interrupted")
        sys.exit(ExitCode.INTERRUPTED)
    except AgentRLError as error:
        if debug:
            raise
        print_error(error)
        sys.exit(ExitCode.USAGE if isinstance(error, UsageError) else ExitCode.FAILED)
    except Exception as error:
        if debug:
            raise
        if isinstance(error, PermissionError) and error.filename is not None:
            print_error(no_permission_error(error.filename))
            sys.exit(ExitCode.USAGE)
        print_error(AgentRLError(f"{type(error).__name__}: {error}"))
        note("unexpected error: run the command again with --debug for the traceback")
        sys.exit(ExitCode.FAILED)


def _current_folder() -> Path:
    """Return the current folder.

    Raises:
        UsageError: it was deleted.
    """
    try:
        return Path.cwd()
    except FileNotFoundError as error:
        raise UsageError(
            "the current folder was deleted",
            got=os.environ.get("PWD", error),
            expected="a folder that exists, where relative paths begin",
            hint='go to another folder, or to a new one of the same name: cd "$PWD"',
        ) from error


def refuse_empty_words(words: Sequence[str]) -> None:
    """Refuse an empty argument or value of an option, which as a path would mean the current folder.

    Raises:
        UsageError: such a word; the shell makes one of a variable that is not set.
    """
    for before, word in itertools.pairwise(["", *itertools.takewhile(lambda word: word != "--", words)]):
        if not word or (word.startswith("--") and word.endswith("=")):
            option = word.removesuffix("=") or (before if before.startswith("-") and "=" not in before else "")
            raise UsageError(
                f"{option or 'an argument'} is empty",
                got="''",
                expected="a value" if option else "a name or a value",
                hint="a variable of the shell that is not set gives an empty value",
            )


def refuse_key_options(words: Sequence[str]) -> None:
    """Refuse config keys with dashes, as other programs write them.

    Raises:
        UsageError: such a word, which the command line would call an unknown option.
    """
    own = itertools.takewhile(lambda word: word != "--", words)
    for word in own:
        if found := _KEY_OPTION.fullmatch(word):
            raise UsageError(
                f"{word} is not an option",
                hint=f"config keys have no dashes: {found['key']}={found['value'] or 'VALUE'}",
            )


def check_first_argument(entry: CommandEntry, words: Sequence[str]) -> None:
    """Check that the run named by a command's first argument exists, unless the argument follows an option.

    Raises:
        UsageError: no such folder.
    """
    word = next(iter(words), "-")
    if not entry.reads or word.startswith("-") or "=" in word or Path(word).exists():
        return
    hint = None
    if entry.reads == RUN_OR_CONFIG:
        try:
            importlib.import_module("agentrl.config").load_config(word)
            return
        except UsageError as error:
            hint = error.hint or "list the configs: agentrl config list"
    raise missing_run_error(word, entry.reads, hint=hint)


def build(chosen: str | None) -> typer.Typer:
    """Return the program with the chosen command loaded; other commands have only a name and a line of help."""
    root = typer.Typer(
        name="agentrl",
        cls=PlainGroup,
        help=HELP,
        epilog=EXAMPLES,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    root.callback(help=HELP)(_root_options)
    for name, entry in COMMANDS.items():
        _add(root, name, entry, load=name == chosen)
    return root


def _add(root: typer.Typer, name: str, entry: CommandEntry, *, load: bool) -> None:
    if not load:
        root.command(name, help=entry.help, rich_help_panel=entry.panel)(_not_loaded)
        return
    app: typer.Typer = importlib.import_module(entry.module).app
    for command in app.registered_commands:
        command.cls = PlainCommand
    if entry.is_group:
        root.add_typer(app, name=name, cls=PlainGroup, help=entry.help, rich_help_panel=entry.panel)
        return
    command = next(command for command in app.registered_commands if command.name in (None, name))
    command.name, command.rich_help_panel = name, entry.panel
    root.registered_commands.append(command)


def _not_loaded() -> None:
    raise RuntimeError("this command is not loaded")


def _print_version(is_set: bool) -> None:
    if is_set:
        typer.echo(importlib.metadata.version("agentrl"))
        raise typer.Exit


def _root_options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Accept the options before a command."""
