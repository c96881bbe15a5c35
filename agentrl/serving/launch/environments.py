"""The virtual environments that hold inference engines: where they are, which there are, how to make one.

vLLM and SGLang pin libraries of their own, so each lives in an environment of its own. ``make engines`` of a source
checkout makes both, for machines without a GPU, in a folder outside the checkout; each is named after its engine,
version and Python, and is complete when it holds the file ``.installed``.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import UnknownNameError, UsageError

VARIABLE = "AGENTRL_ENGINES"
"""Environment variable that names the folder of the environments."""
DEFAULT_FOLDER = Path("~/.cache/agentrl/engines")
STAMP = ".installed"
ENGINES = ("vllm", "sglang")


@dataclass(frozen=True, slots=True)
class EngineEnvironment:
    """One virtual environment with an engine in it."""

    engine: str
    folder: Path

    @property
    def python(self) -> str:
        """Its interpreter."""
        return str(self.folder / "bin" / "python")


def engines_folder(environment: Mapping[str, str]) -> Path:
    """The folder of the environments."""
    return Path(environment.get(VARIABLE) or DEFAULT_FOLDER).expanduser()


def find_environments(engine: str, folder: Path) -> list[EngineEnvironment]:
    """The complete environments of an engine, the newest first."""
    stamps = [stamp for stamp in folder.glob(f"{engine}*/{STAMP}") if (stamp.parent / "bin" / "python").exists()]
    stamps.sort(key=lambda stamp: (stamp.stat().st_mtime, str(stamp)), reverse=True)
    return [EngineEnvironment(engine, stamp.parent) for stamp in stamps]


def engine_python(engine: str, chosen: str | None) -> str:
    """The interpreter that an engine's servers are launched with.

    Args:
        engine: ``vllm`` or ``sglang``.
        chosen: The user's own choice (``engine.python``).

    Raises:
        UnknownNameError: no such engine.
        UsageError: there is none with the engine, and how to make one; or the chosen one is no program.
    """
    if engine not in ENGINES:
        raise UnknownNameError("this engine is not launched", got=engine, expected=" or ".join(ENGINES))
    if chosen is not None:
        python = shutil.which(Path(chosen).expanduser())
        if python is None:
            raise UsageError("engine.python is no program", got=chosen, expected="the interpreter of an environment")
        return str(python)
    folder = engines_folder(os.environ)
    if made := find_environments(engine, folder):
        return made[0].python
    if importlib.util.find_spec(engine) is not None:
        return sys.executable
    raise UsageError(
        f"{engine} is not installed",
        got=f"none in {folder} and none beside {sys.executable}",
        hint=f"to install it: {how_to_make(engine, has_gpu=False)}; with a GPU: {how_to_make(engine, has_gpu=True)}",
    )


def how_to_make(engine: str, *, has_gpu: bool) -> str:
    """The commands that make an environment, in one line."""
    if not has_gpu:
        return "make engines, in a source checkout of agentrl"
    folder = DEFAULT_FOLDER / f"{engine}-gpu"
    return f"python3 -m venv {folder} && {folder}/bin/pip install {engine} && touch {folder / STAMP}"
