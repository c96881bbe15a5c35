"""The import table: levels, third-party packages by folder, and the weight of `import agentrl`."""

from __future__ import annotations

import ast
import functools
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from agentrl.cli.commands import COMMANDS

ROOT = Path(__file__).parent.parent
CATALOGUE = ("envs", "tools", "agent_loops")

LEVELS: tuple[frozenset[str], ...] = tuple(
    map(
        frozenset,
        (
            {"errors", "tool.json_schema"},
            {"models.routed_experts"},
            {"message", "registry"},
            {"task"},
            {"env", "remote.retrieval", "tool", "trajectory"},
            {"engine", "reward"},
            {"agent_loop", "remote.chat"},
            {"observe", "remote"},
            {"env.lookup", "gateway", "sandbox"},
            {"config"},
            {"evaluation.diagnosis"},
            {"models", "render"},
            {"algorithms", "rollout", "serving", "training", "weights"},
            {"builders.ray", "remote.server"},
            {"builders"},
            {"evaluation", "training_service"},
            {"runs", "viewer"},
            {"cli"},
        ),
    )
)
"""From the bottom up: a part imports parts of lower levels only. A part is a file or a folder of `agentrl`, or one of a
folder that is split: the server of environments stands above what plays them, and its client below."""

CONTRACTS = {name for level in LEVELS[:7] for name in level} | {"", "sandbox", "gateway"}
"""What environments, tools and agent loops may import."""

EXCEPTIONS = {
    ("training", "algorithms"),
    ("cli", "testing"),  # `agentrl env check` is the conformance kit
}
OUTSIDE_THE_LEVELS = {"testing", ""}
"""`testing` may import anything, and only the command line imports it; "" is the package itself."""

ROOMS: dict[str, tuple[str, ...]] = {
    "torch": (
        "agentrl/algorithms/",
        "agentrl/models/",
        "agentrl/training/",
        "agentrl/training_service/",
        "agentrl/weights/",
        "agentrl/serving/local",
        "agentrl/serving/vllm/worker/",
        "agentrl/testing/",
        "tests/",
        "benchmarks/",
    ),
    "ray": ("agentrl/builders/ray/",),
    "docker": ("agentrl/sandbox/docker/",),
    "typer": ("agentrl/cli/", "tests/cli/"),
    "rich": ("agentrl/cli/", "agentrl/observe/", "tests/cli/"),
    "pyarrow": ("agentrl/observe/", "agentrl/viewer/", "tests/", "agentrl/message/data_file.py"),
    "matplotlib": ("agentrl/evaluation/", "tests/evaluation/"),
}
"""A third-party package has one room: paths in which it may be imported."""


DOORS = (
    "agentrl.builders.ray",
    "agentrl.gateway",
    "agentrl.remote.server",
    "agentrl.rollout.judges",
    "agentrl.sandbox.docker",
    "agentrl.serving.local",
    "agentrl.serving.pool",
    "agentrl.serving.sglang",
    "agentrl.serving.vllm",
    "agentrl.training_service",
    "agentrl.weights",
)
"""Packages of which everything else imports only the ``__init__``, or an entry of the registry."""


@dataclass(frozen=True, slots=True)
class Import:
    """One import statement's target."""

    path: Path
    module: str
    line: int
    inside_function: bool

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} imports {self.module}"


BLOCKS = ("body", "orelse", "handlers", "finalbody", "cases")
"""Fields of statements that have statements inside."""


def sources() -> list[Path]:
    folders = ("agentrl", *CATALOGUE)
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def package_of(path: Path) -> list[str]:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] in CATALOGUE:
        parts.insert(0, "agentrl")
    return parts[:-1]


def imports_of(path: Path) -> Iterator[Import]:
    """Look only into statements: expressions, which are most of a file, import nothing."""
    waiting: list[tuple[ast.AST, bool]] = [(ast.parse(path.read_text()), False)]
    while waiting:
        node, inside_function = waiting.pop()
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield Import(path, alias.name, node.lineno, inside_function)
            case ast.ImportFrom(module=module, level=level, names=names):
                base = package_of(path)[: len(package_of(path)) - level + 1] if level else []
                prefix = ".".join([*base, *([module] if module else [])])
                if prefix == "agentrl":
                    yield from (Import(path, f"agentrl.{a.name}", node.lineno, inside_function) for a in names)
                else:
                    yield Import(path, prefix, node.lineno, inside_function)
            case _:
                inside = inside_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                inner = (child for name in BLOCKS for child in getattr(node, name, ()))
                waiting += [(child, inside) for child in inner if isinstance(child, ast.AST)]


@functools.cache
def all_imports() -> list[Import]:
    return [found for path in sources() for found in imports_of(path)]


PARTS = {name for level in LEVELS for name in level} | OUTSIDE_THE_LEVELS | set(CATALOGUE)


def part_of(module: str) -> str:
    """``agentrl.render.chat_template`` → ``render``; names exported by `agentrl` itself → ""."""
    names = module.split(".")[1:3]
    return next((part for part in (".".join(names), *names[:1]) if part in PARTS), "")


def part_of_path(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] in CATALOGUE:
        return parts[0]
    names = [name for name in parts[1:] if name != "__init__"]
    return part_of(".".join(["agentrl", *names])) if ".".join(names[:2]) in PARTS else "".join(names[:1])


def level_of(part: str) -> int:
    return next(i for i, level in enumerate(LEVELS) if part in level)


def is_ours(found: Import) -> bool:
    return found.module.split(".")[0] == "agentrl"


def test_every_part_has_a_level() -> None:
    assert {part_of_path(path) for path in sources()} <= PARTS


def test_core_imports_go_downward() -> None:
    wrong = []
    for found in filter(is_ours, all_imports()):
        importer, imported = part_of_path(found.path), part_of(found.module)
        if importer in CATALOGUE or importer in OUTSIDE_THE_LEVELS or imported in (importer, ""):
            continue
        if (importer, imported) in EXCEPTIONS:
            continue
        if imported in OUTSIDE_THE_LEVELS or imported in CATALOGUE or level_of(imported) >= level_of(importer):
            wrong.append(str(found))
    assert wrong == []


def module_of(path: Path) -> str:
    names = [name for name in path.relative_to(ROOT).with_suffix("").parts if name != "__init__"]
    return ".".join(names if names[0] == "agentrl" else ("agentrl", *names))


def test_no_files_import_one_another_in_a_circle() -> None:
    """A file can be imported first: what it imports does not import it, nor do the packages that hold it."""
    imports: dict[str, set[str]] = {module_of(path): set() for path in sources()}
    for found in filter(is_ours, all_imports()):  # imports for annotations only count, too
        importer, names = module_of(found.path), found.module.split(".")
        for module in (".".join(names[:end]) for end in range(2, len(names) + 1)):
            if module in imports and not f"{importer}.".startswith(f"{module}."):
                imports[importer].add(module)
    assert sum(map(len, imports.values())) > 1000
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError


def test_the_catalogue_folders_never_import_one_another_or_the_insides() -> None:
    wrong = []
    for found in filter(is_ours, all_imports()):
        importer, imported = part_of_path(found.path), part_of(found.module)
        if importer not in CATALOGUE or imported == importer:
            continue
        if imported not in CONTRACTS:
            wrong.append(str(found))
    assert wrong == []


def test_packages_with_a_door_are_imported_through_it() -> None:
    wrong = []
    for found in filter(is_ours, all_imports()):
        door = next((door for door in DOORS if found.module.startswith(f"{door}.")), None)
        if door is not None and not f"{module_of(found.path)}.".startswith(f"{door}."):
            wrong.append(str(found))
    assert wrong == []
    assert all((ROOT / door.replace(".", "/") / "__init__.py").is_file() for door in DOORS)


def test_the_modules_of_commands_do_not_import_one_another() -> None:
    commands = {entry.module for entry in COMMANDS.values()}
    wrong = [str(found) for found in all_imports() if ".".join(found.module.split(".")[:3]) in commands]
    assert wrong == []


def test_our_own_modules_are_imported_at_the_top_of_a_file() -> None:
    assert [str(found) for found in all_imports() if found.inside_function and is_ours(found)] == []


@pytest.mark.parametrize("package", sorted(ROOMS))
def test_a_third_party_package_stays_in_its_room(package: str) -> None:
    users = [found for found in all_imports() if found.module.split(".")[0] == package]
    outside = [str(found) for found in users if not str(found.path.relative_to(ROOT)).startswith(ROOMS[package])]
    assert outside == []


def modules_after(statement: str) -> set[str]:
    command = f"import sys\n{statement}\nprint(*sys.modules)"
    return set(
        subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True).stdout.split()
    )


HEAVY = {"torch", "transformers", "gymnasium", "pydantic", "ray", "matplotlib", "typer", "numpy"}


def test_import_agentrl_is_light() -> None:
    assert modules_after("import agentrl; agentrl.tool; agentrl.parse_int") & HEAVY == set()


HELP_PAGE = """
import agentrl.cli
import contextlib, io
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    agentrl.cli.main(["--help"])
"""


def test_reading_a_config_and_showing_help_import_no_torch() -> None:
    assert "torch" not in modules_after("import agentrl.config; agentrl.config.load_config('quickstart')")
    assert modules_after(HELP_PAGE) & {"torch", "transformers", "gymnasium", "pydantic"} == set()


def test_importing_a_catalogue_folder_from_the_checkout_says_what_is_wrong() -> None:
    for folder in CATALOGUE:
        result = subprocess.run([sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 1
        assert f"agentrl.{folder}" in result.stderr
