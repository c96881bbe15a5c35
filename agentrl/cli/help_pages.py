"""Help pages: footer and format of options and arguments; and errors about wrong values of these."""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from agentrl.errors import UsageError, did_you_mean

FOOTER = (
    "Add --debug to any command for full tracebacks. "
    "Exit codes: 0 done, 1 failed, 2 wrong usage or config, 130 interrupted."
)

_RECIPES = "recipes/"
"""Folder of configs that are too many for help pages."""

OTHER_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "--tasks": ("-n", "--num-examples", "--num-tasks", "--num-episodes", "--limit", "--max-samples"),
    "--samples": ("-r", "--rollouts-per-example", "--num-samples", "--n-samples", "--epochs", "--repeats", "--n"),
    "--model": ("-m", "--model-name", "--model-path", "--model-name-or-path", "--pretrained", "--checkpoint"),
    "--url": ("-b", "--base-url", "--api-base-url", "--api-base", "--model-base-url"),
    "--env": ("-e", "--environment", "--env-id", "--env-name", "--task"),
    "--concurrency": ("-c", "--max-concurrent", "--max-connections", "--num-workers"),
    "--json": ("-o", "--output", "--output-path", "--output-file", "--out", "--save-results"),
    "--resume": ("--resume-from-checkpoint", "--resume-from", "--continue"),
    "--data": ("--dataset", "--dataset-name", "--data-path", "--train-file", "--train-files"),
    "--from": ("--data", "--dataset", "--dataset-name", "--data-path", "--train-file", "--pairs", "--run"),
    "--reward": ("--reward-func", "--reward-funcs", "--reward-fn"),
}
"""Options of agentrl's commands, and their names in other programs, such as verifiers, inspect, lm-eval and TRL."""

_SECTIONS: Mapping[str | None, str] = {"dpo": "preferences", "reward-model": "preferences"}
"""Config sections of commands, if they have other names than the commands."""


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

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments.

        Raises:
            UsageError: an option is a config key, or its value is not one of its choices or has the wrong type.
        """
        try:
            with _plain_errors():
                return super().parse_args(ctx, args)
        except Exception as error:
            self._refuse_key(error)
            raise

    def _refuse_key(self, error: Exception) -> None:
        """Raise a `UsageError` for another program's option, and for the end of a config key: ``--learning-rate``."""
        option = str(getattr(error, "option_name", ""))
        options = [name for one in self.params for name in one.opts]
        usual = option.replace("_", "-")
        if meant := next((name for name in options if usual in OTHER_OPTIONS.get(name, ())), None):
            raise UsageError(f"{option} is not an option", hint=f"did you mean {meant}?") from error
        is_option = difflib.get_close_matches(option, getattr(error, "possibilities", None) or (), cutoff=0.8)
        if not option.startswith("--") or is_option or not any("CONFIG" in str(one.metavar) for one in self.params):
            return
        if option.startswith(("--config", "--cfg")):
            hint = f"the config is an argument: agentrl {self.name} FILE.yaml"
            raise UsageError(f"{option} is not an option", hint=hint) from error
        keys = importlib.import_module("agentrl.config.keys")  # slow; the command has imported it
        name = option[2:].replace("-", "_")
        section = _SECTIONS.get(self.name) or str(self.name)
        key = f"{section}.{name}" if (section, name) in keys.all_keys() else keys.nearest_key((section, name), ())
        own = (section, str(key).rpartition(".")[2])
        key = ".".join(own) if own in keys.all_keys() else key
        if key is not None:
            hint = f"config keys have no dashes: {key}=VALUE"
            raise UsageError(f"{option} is not an option", hint=hint) from error

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts of the usage line, without brackets around a metavar that has its own."""
        return [re.sub(r"^\[(\[.*\].*)\](\.\.\.)?$", r"\1", piece) for piece in super().collect_usage_pieces(ctx)]


class PlainGroup(TyperGroup):
    """A group of commands whose help shows flags without a type."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return all options and arguments."""
        return _flags_without_type(super().get_params(ctx))


_CHOICE = re.compile(r"(?:Value error, )?('.*') is not one of (.*?)\.?", re.DOTALL)
"""Typer's message about a value that is not one of the choices; its beginning depends on Typer's version."""


def no_permission_error(path: object) -> UsageError:
    """Return the error for a file or folder that this user may not open."""
    expected = "a file or folder that this user may open"
    hint = "run agentrl as its owner, or change its permissions"
    return UsageError(f"cannot open {path}", got="Permission denied", expected=expected, hint=hint)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Convert Typer's error about the value of a parameter; its class depends on Typer's version."""
    try:
        yield
    except Exception as error:
        if type(error).__name__ != "BadParameter":
            raise
        message, parameter = str(getattr(error, "message", error)), getattr(error, "param", None)
        name = "argument" if parameter is None else max(parameter.opts, key=len)
        if found := _CHOICE.fullmatch(message):
            value, choices = ast.literal_eval(found[1]), re.findall(r"'([^']*)'", found[2])
            known = " or ".join(filter(None, (", ".join(choices[:-1]), choices[-1])))
            hint = did_you_mean(value, choices)
            raise UsageError(f"unknown value of {name}", got=repr(value), expected=known, hint=hint) from error
        if found := re.fullmatch(r"[Pp]ath '(.*)' is not readable\.", message):
            raise no_permission_error(found[1]) from error
        told: list[Any] = getattr(error.__cause__ or error.__context__, "errors", list)()
        got = repr(told[0]["input"]) if told else None
        expected = message.partition(", unable to")[0].removeprefix("Input should be ")
        if expected == message:
            raise UsageError(f"{name} is wrong: {message.removeprefix('Value error, ')}") from error
        is_file = (name, expected) == ("--tasks", "a valid integer")
        hint = "for a file of tasks, set environment.tasks=FILE" if is_file else None
        raise UsageError(f"{name} is wrong", got=got, expected=expected, hint=hint) from error


def _join_lines(text: str) -> str:
    """Return a docstring with one line per paragraph: the terminal wraps it at its own width."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(" ".join(paragraph.split("\n")) for paragraph in paragraphs)


def _flags_without_type(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters
