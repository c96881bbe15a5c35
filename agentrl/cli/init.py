"""`agentrl init`: a new project that runs without changes."""

from __future__ import annotations

import importlib.resources
import importlib.util
import keyword
import re
import shlex
import shutil
from collections.abc import Iterator
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from agentrl.cli.help_pages import examples
from agentrl.errors import UsageError
from agentrl.observe.console import out

app = typer.Typer()

SUFFIX = ".template"
NAME = re.compile(r"[a-z][a-z0-9_]*")
SCAFFOLD, WITH_TOOLS = "scaffold", "scaffold_tools"
"""Folders of templates."""
NEXT = {
    SCAFFOLD: ("  python -m pytest", "  agentrl sft train.yaml", "  agentrl train train.yaml model.path=runs/latest"),
    WITH_TOOLS: ("  python -m pytest", "  agentrl sft train.yaml", "  agentrl train train.yaml model.path=runs/latest"),
}


@app.command(
    epilog=examples("agentrl init my_game", "agentrl init my_game --folder projects", "agentrl init my_desk --tools")
)
def init(
    name: Annotated[str, typer.Argument(help="Name of the project and its package, for example my_game.")],
    folder: Annotated[Path, typer.Option(help="Parent of the project's folder.")] = Path(),
    tools: Annotated[
        bool, typer.Option("--tools", help="Create an environment with its own tools, which share its state.")
    ] = False,
) -> None:
    """Create a project with an environment, a tool, a config and a test."""
    scaffold = WITH_TOOLS if tools else SCAFFOLD
    project = create_project(name, folder, scaffold)
    out.print(f"created {project}/")
    for path in sorted(project.rglob("*")):
        if path.is_file():
            out.print(f"  {path.relative_to(project)}")
    for step in ("", "next:", f"  cd {shlex.quote(str(project))}", *NEXT[scaffold]):
        out.print(step)


def create_project(name: str, folder: Path, scaffold: str = SCAFFOLD) -> Path:
    """Write the project's files and return its folder.

    Raises:
        UsageError: the name is not valid or taken, or the folder exists or cannot be written.
    """
    if not NAME.fullmatch(name) or keyword.iskeyword(name):
        near = name.lower().replace("-", "_")
        raise UsageError(
            "this is not a valid package name",
            got="the Python keyword " + repr(name) if keyword.iskeyword(name) else repr(name),
            expected="a lowercase letter, then lowercase letters, digits and underscores",
            hint=f"for example: {near}" if near != name and NAME.fullmatch(near) else None,
        )
    project = folder / name
    if project.exists():
        raise UsageError(f"{project} already exists", hint="choose another name, or delete it first")
    if importlib.util.find_spec(name) is not None:
        raise UsageError("a Python package already has this name", got=repr(name), hint="choose another name")
    words = {"package": name, "class_name": "".join(part.capitalize() for part in name.split("_"))}
    try:
        for path, text in _templates(importlib.resources.files("agentrl.cli").joinpath(scaffold), Path()):
            target = project / str(path).replace("package", name).removesuffix(SUFFIX)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(Template(text).substitute(words), encoding="utf-8")
    except OSError as error:
        shutil.rmtree(project, ignore_errors=True)
        raise UsageError(
            f"the project cannot be written to {project.absolute()}",
            got=error.strerror or error,
            hint="choose a writable folder: agentrl init NAME --folder FOLDER",
        ) from error
    return project


def _templates(folder: Traversable, path: Path) -> Iterator[tuple[Path, str]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _templates(entry, path / entry.name)
        elif entry.name.endswith(SUFFIX):
            yield path / entry.name, entry.read_text(encoding="utf-8")
