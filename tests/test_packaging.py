"""What is installed is what is there: packages, data, the wheel, the public names, the doctests."""

from __future__ import annotations

import ast
import doctest
import importlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl.serving.vllm import server as vllm_server

ROOT = Path(__file__).parent.parent
FOLDERS = {"agentrl": "agentrl", "agent_loops": "agentrl.agent_loops", "configs": "agentrl.configs"}
FOLDERS |= {"envs": "agentrl.envs", "tools": "agentrl.tools"}
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]


def package_name(folder: Path) -> str:
    first, *rest = folder.relative_to(ROOT).parts
    return ".".join([FOLDERS[first], *rest])


def python_files() -> list[Path]:
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def test_the_list_of_packages_equals_the_folders() -> None:
    folders = {package_name(path.parent) for path in python_files()}
    assert set(SETUPTOOLS["packages"]) == folders
    assert {package_name(path.parent) for path in python_files() if path.name == "__init__.py"} == folders


def test_every_catalogue_folder_is_mapped_into_the_package() -> None:
    assert SETUPTOOLS["package-dir"] == {package: folder for folder, package in FOLDERS.items()}


def test_every_extra_that_the_design_names_exists() -> None:
    promised = {"vllm", "sglang", "ray", "docker", "alfworld", "trackers", "gpu", "docs", "dev"}
    assert promised <= set(PROJECT["project"]["optional-dependencies"])


def test_the_extra_installs_a_vllm_that_the_code_accepts() -> None:
    (requirement,) = PROJECT["project"]["optional-dependencies"]["vllm"]
    assert requirement.startswith(f"vllm>={vllm_server.OLDEST};")


def test_the_public_surface_is_what_it_says() -> None:
    source = ast.parse((ROOT / "agentrl" / "__init__.py").read_text())
    imported = {
        alias.asname or alias.name
        for node in ast.walk(source)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("agentrl")
        for alias in node.names
    }
    assert sorted(agentrl.__all__) == agentrl.__all__
    assert set(agentrl.__all__) == imported
    assert all(getattr(agentrl, name) is not None for name in agentrl.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = agentrl.nonsense


def test_the_version_is_that_of_the_package() -> None:
    assert agentrl.__version__ == PROJECT["project"]["version"]
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert f"## {agentrl.__version__}" in changelog


def modules_with_doctests() -> list[str]:
    with_examples = [path for path in python_files() if ">>> " in path.read_text()]
    return [f"{package_name(path.parent)}.{path.stem}".removesuffix(".__init__") for path in with_examples]


@pytest.mark.parametrize("name", modules_with_doctests())
def test_doctests(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0


@pytest.fixture(scope="module")
def unpacked_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources and unpacked where nothing of the checkout is."""
    sources = tmp_path_factory.mktemp("sources")
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, sources / folder, ignore=unwanted)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, sources / file)
    built = tmp_path_factory.mktemp("built")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(built), str(sources)]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    (wheel,) = built.glob("*.whl")
    site = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


@pytest.mark.slow
def test_the_wheel_holds_every_source_file_and_the_data(unpacked_wheel: Path) -> None:
    inside = {str(path.relative_to(unpacked_wheel)) for path in unpacked_wheel.rglob("*") if path.is_file()}
    expected = {f"{package_name(path.parent).replace('.', '/')}/{path.name}" for path in python_files()}
    data = list((ROOT / "configs").rglob("*.yaml"))
    expected |= {f"{package_name(path.parent).replace('.', '/')}/{path.name}" for path in data}
    expected |= {"agentrl/py.typed"} | {
        str(path.relative_to(ROOT))
        for folder in ("agentrl/cli/scaffold", "agentrl/cli/scaffold_tools", "agentrl/evaluation/templates")
        for path in (ROOT / folder).rglob("*")
        if path.is_file()
    }
    assert expected - inside == set()
    assert not [name for name in inside if name.startswith(("tests", "envs", "tools", "configs", "examples"))]


@pytest.mark.slow
def test_the_wheel_works_outside_the_checkout(unpacked_wheel: Path, tmp_path: Path) -> None:
    program = (
        "import sys, agentrl.cli\n"
        "assert agentrl.__file__.startswith(sys.argv[1]), agentrl.__file__\n"
        "agentrl.cli.main(sys.argv[2:])\n"
    )

    def run(*words: str) -> str:
        command = [sys.executable, "-c", program, str(unpacked_wheel), *words]
        environment = {**os.environ, "PYTHONPATH": str(unpacked_wheel)}
        ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    assert "quickstart" in run("config", "list")
    run("init", "away_game")
    words = ("--env", "household/valid_unseen", "--policy", "expert", "--tasks", "3", "--json", "expert.json")
    run("eval", *words, "environment.options={size: tiny}")
    assert json.loads((tmp_path / "expert.json").read_text())["success"]["mean"] == 1.0


USER_CODE = """\
import agentrl
from agentrl.errors import UsageError

@agentrl.tool
def double(number: int) -> int:
    \"\"\"Twice a number.

    Args:
        number: Any number.
    \"\"\"
    return 2 * number

run = agentrl.train(env="guess_number", model="scratch", stepz=2)
result: int = agentrl.evaluate(env="guess_number", model="scratch")
parsed: str = agentrl.parse_int("7")
raise UsageError(5)
"""


@pytest.mark.slow
def test_a_type_checker_finds_mistakes_in_code_that_uses_the_installed_wheel(
    unpacked_wheel: Path, tmp_path: Path
) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    (installed,) = (tmp_path / "venv").glob("lib/*/site-packages")
    shutil.copytree(unpacked_wheel, installed, dirs_exist_ok=True)
    (tmp_path / "mine.py").write_text(USER_CODE)
    command = [sys.executable, "-m", "mypy", "--python-executable", str(tmp_path / "venv" / "bin" / "python")]
    command += ["--ignore-missing-imports", "--config-file=", "--cache-dir", str(tmp_path / "cache"), "mine.py"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    lines = {int(line.split(":")[1]) for line in found.stdout.splitlines() if line.startswith("mine.py:")}
    assert lines == {13, 14, 15, 16}, found.stdout + found.stderr
