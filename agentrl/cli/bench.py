"""`agentrl bench`: runs the benchmarks in the folder `benchmarks` of a source checkout."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from agentrl.cli.arguments import option_pairs
from agentrl.cli.help_pages import examples
from agentrl.errors import UnknownNameError, UsageError
from agentrl.observe.console import note, out

app = typer.Typer()

FOLDER = "benchmarks"


@app.command(
    epilog=examples(
        "agentrl bench",
        "agentrl bench engine --json engine.json",
        "agentrl bench rollout --engine vllm",
        "agentrl bench train --versus trl",
        "agentrl bench rollout --versus all --json rollout.json",
        "agentrl bench learning environment=sokoban loop=tool_calling",
        "agentrl bench rollout --engine sglang --model runs/latest --url http://127.0.0.1:20000",
    )
)
def bench(
    name: Annotated[str | None, typer.Argument(help="Name of the benchmark; without it, all are listed.")] = None,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Options of the benchmark; values are YAML.")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="vllm or sglang, for benchmarks of a server.")] = None,
    model: Annotated[str | None, typer.Option(help="Model to serve: a folder, a name or a run.")] = None,
    url: Annotated[str | None, typer.Option(help="Address of a running server.")] = None,
    versus: Annotated[
        str | None, typer.Option(help="Frameworks to compare with: names separated by commas, or all.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    folder: Annotated[Path, typer.Option(help="Folder of the benchmarks.")] = Path(FOLDER),
) -> None:
    """Run a benchmark and print its figures."""
    found = find_benchmarks(folder)
    if name is None:
        table = Table("benchmark", "what it measures", box=None, pad_edge=False)
        for known, path in found.items():
            table.add_row(known, _first_line(path))
        out.print(table)
        return
    if name not in found:
        raise UnknownNameError("unknown benchmark", got=repr(name), expected=f"one of {', '.join(found)}")
    run = load_run(found[name])
    figures = run(**_chosen(name, run, {"engine": engine, "model": model, "url": url, "versus": versus}, words))
    table = Table("figure", "value", box=None, pad_edge=False)
    for key, value in flatten(figures):
        table.add_row(key, f"{value:,.4g}" if isinstance(value, float) else str(value))
    out.print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=2, default=str) + "\n", encoding="utf-8")
        note(f"wrote {json_file}")


def _chosen(
    name: str, run: Callable[..., dict[str, Any]], named: dict[str, str | None], words: list[str] | None
) -> dict[str, Any]:
    """Return the options of a benchmark, from the command line's own options and ``key=value`` arguments.

    Raises:
        UsageError: the benchmark does not accept an option, or an option is given twice.
    """
    flags = {option: value for option, value in named.items() if value is not None}
    pairs = option_pairs(words)
    if twice := flags.keys() & pairs.keys():
        option = min(twice)
        got = f"--{option} {flags[option]} and {option}={pairs[option]}"
        raise UsageError(f"{option} is given twice", got=got, expected="one value")
    given = flags | pairs
    known = inspect.signature(run).parameters.keys()
    if refused := given.keys() - known:
        raise UsageError(
            f"benchmark {name} has no such option", got=min(refused), expected=", ".join(known) or "no options"
        )
    return given


def _first_line(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]


def find_benchmarks(folder: Path) -> dict[str, Path]:
    """Return the files of a checkout's benchmarks by name.

    Raises:
        UsageError: the folder does not exist.
    """
    if not folder.is_dir():
        raise UsageError(
            f"no folder {folder} in the current folder",
            expected="the root of a source checkout as current folder",
            hint="benchmarks are not installed with the package",
        )
    return {path.stem: path for path in sorted(folder.glob("*.py")) if not path.stem.startswith("_")}


def load_run(path: Path) -> Callable[..., dict[str, Any]]:
    """Load the function `run` of a benchmark file, which may import its siblings and ``tests/support``.

    Raises:
        UsageError: the file cannot be imported, or has no such function.
    """
    name = f"agentrl_benchmark_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    for folder in (path.parent, path.parent.parent / "tests"):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    sys.modules[name] = module
    spec.loader.exec_module(module)
    if not callable(getattr(module, "run", None)):
        raise UsageError(f"{path} has no function run()", expected="run() -> figures by name")
    run: Callable[..., dict[str, Any]] = module.run
    return run


def flatten(figures: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return nested figures as rows with dotted names.

    >>> flatten({"engine": {"tokens_per_s": 5}})
    [('engine.tokens_per_s', 5)]
    """
    rows: list[tuple[str, Any]] = []
    for key, value in figures.items():
        rows += flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return rows
