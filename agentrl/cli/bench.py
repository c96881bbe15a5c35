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

from agentrl.cli.arguments import json_pairs
from agentrl.cli.help import examples
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
        "agentrl bench learning environment=sokoban loop=tool_calling",
        "agentrl bench rollout --engine sglang --model runs/latest --url http://127.0.0.1:20000",
    )
)
def bench(
    name: Annotated[str | None, typer.Argument(help="Which benchmark; none lists them.")] = None,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Its own options; values are JSON.")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="vllm or sglang, for those that measure a server.")] = None,
    model: Annotated[str | None, typer.Option(help="What it serves: a model folder or name, a run.")] = None,
    url: Annotated[str | None, typer.Option(help="Its address, when it runs already.")] = None,
    versus: Annotated[str | None, typer.Option(help="What it is compared with, for those that ask: trl.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    folder: Annotated[Path, typer.Option(help="Where the benchmarks are.")] = Path(FOLDER),
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
    """The options that were given, by name or as words; refuse those that the benchmark does not take."""
    given = {option: value for option, value in named.items() if value is not None} | json_pairs(words)
    known = inspect.signature(run).parameters.keys()
    if refused := given.keys() - known:
        raise UsageError(
            f"benchmark {name} has no such option", got=min(refused), expected=", ".join(known) or "no options at all"
        )
    return given


def _first_line(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]


def find_benchmarks(folder: Path) -> dict[str, Path]:
    """The benchmarks of a checkout by name.

    Raises:
        UsageError: there is no such folder.
    """
    if not folder.is_dir():
        raise UsageError(
            f"no folder {folder} here",
            expected="the top folder of a source checkout",
            hint="benchmarks are not installed with the package",
        )
    return {path.stem: path for path in sorted(folder.glob("*.py")) if not path.stem.startswith("_")}


def load_run(path: Path) -> Callable[..., dict[str, Any]]:
    """The function `run` of a benchmark file, which may import its siblings and the small models in ``tests/support``.

    Raises:
        UsageError: the file has none.
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
    """Nested figures as rows.

    >>> flatten({"engine": {"tokens_per_s": 5}})
    [('engine.tokens_per_s', 5)]
    """
    rows: list[tuple[str, Any]] = []
    for key, value in figures.items():
        rows += flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return rows
