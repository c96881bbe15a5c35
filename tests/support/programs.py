"""The program `agentrl` in processes of its own, which a server forks after the imports, so that each costs little."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from agentrl.cli import main
from agentrl.serving.local import LocalEngine

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["support.programs", "agentrl.cli.train", "agentrl.cli.evaluate"])


def start_program(words: list[str], folder: Path, worlds: Path, environment: Mapping[str, str]) -> BaseProcess:
    """Start a command in a folder; its output goes to the file ``output``."""
    process = _context.Process(target=_run, args=(words, folder, worlds, dict(environment)))
    process.start()
    return process


def _run(words: list[str], folder: Path, worlds: Path, environment: dict[str, str]) -> None:
    os.chdir(folder)
    output = os.open("output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.path.insert(0, str(worlds))
    os.environ.update(environment)
    torch.set_num_threads(1)
    if "end_session" in environment.get("HANG", ""):
        __import__("hanging").patch_engine(LocalEngine)
    sys.argv = ["agentrl", *words]
    main()
