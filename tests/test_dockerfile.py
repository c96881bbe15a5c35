"""The image for GPU machines: it parses, copies what is there, and has the versions that the project is tested with."""

import re
import tomllib
from pathlib import Path

import pytest
from agentrl.envs.terminal.dockerfile import read_dockerfile
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from agentrl.runs.job_files import RAY_VERSION

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
PINS = {name: Requirement(pin) for name, pin in re.findall(r"^ARG (\w+)=(\S+)$", TEXT, re.MULTILINE)}
MAKE = dict(re.findall(r"^(\w+_VERSION) := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE))


def version_of(requirement: Requirement) -> str:
    (specifier,) = requirement.specifier
    assert specifier.operator == "=="
    return specifier.version


def test_the_dockerfile_copies_the_package_and_only_what_is_there() -> None:
    recipe = read_dockerfile(ROOT / "Dockerfile")
    targets = {copied.target for copied in recipe.copies}
    folders = {"agentrl", "agent_loops", "configs", "envs", "tools"}
    assert {f"/opt/agentrl/{name}/__init__.py" for name in folders} <= targets
    assert {"/opt/agentrl/pyproject.toml", "/opt/agentrl/README.md", "/opt/agentrl/LICENSE"} <= targets
    assert not any("__pycache__" in target for target in targets)
    assert recipe.variables["AGENTRL_ENGINES"] == "/opt/engines"
    assert recipe.folder == "/work"


def test_every_folder_of_the_package_is_copied() -> None:
    copied = set(re.findall(r"^COPY (\w+) \w+$", TEXT, re.MULTILINE))
    assert copied == {folder.partition("/")[0] for folder in PROJECT["tool"]["setuptools"]["package-dir"].values()}


@pytest.mark.parametrize(
    ("pin", "tested", "accepted"),
    [
        ("TORCH", (ROOT / "constraints.txt").read_text().strip(), PROJECT["project"]["dependencies"]),
        ("RAY", f"ray=={MAKE['RAY_VERSION']}", EXTRAS["ray"]),
        ("ENGINE", f"vllm=={MAKE['VLLM_VERSION']}", EXTRAS["vllm"]),
    ],
)
def test_pins_are_the_tested_versions_and_fit_the_project(pin: str, tested: str, accepted: list[str]) -> None:
    requirement = PINS[pin]
    assert (requirement.name, version_of(requirement)) == (Requirement(tested).name, version_of(Requirement(tested)))
    (allowed,) = [one for one in map(Requirement, accepted) if one.name == requirement.name]
    assert allowed.specifier.contains(version_of(requirement))


def test_the_other_engine_in_the_comment_fits_too() -> None:
    (other,) = re.findall(r"--build-arg ENGINE=(\S+)", TEXT)
    assert version_of(Requirement(other)) == MAKE["SGLANG_VERSION"]
    assert Requirement(EXTRAS["sglang"][0]).specifier.contains(MAKE["SGLANG_VERSION"])


def test_python_and_extras_are_those_of_the_project() -> None:
    (python,) = re.findall(r"^FROM python:([\d.]+)-", TEXT, re.MULTILINE)
    assert SpecifierSet(PROJECT["project"]["requires-python"]).contains(f"{python}.0")
    (extras,) = re.findall(r"pip install \"\.\[([\w,-]+)\]\"", TEXT)
    assert set(extras.split(",")) <= EXTRAS.keys()


def test_kuberay_expects_the_version_of_the_image() -> None:
    assert version_of(PINS["RAY"]) == RAY_VERSION
