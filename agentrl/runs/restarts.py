"""Restarts of a run from its newest checkpoint after the loss of a rank."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Protocol, TypeVar

from agentrl.errors import RankLost
from agentrl.runs.start import Run, RunResult
from agentrl.runs.stop import StopRequest


class TrainingLoop(Protocol):
    """Loop of a run, which can be run once."""

    @property
    def step(self) -> int:
        """Number of finished steps or updates."""


Loop = TypeVar("Loop", bound=TrainingLoop)


def run_with_restarts(
    run: Run, make: Callable[[Run, str | None], Loop], execute: Callable[[Loop], RunResult], request: StopRequest
) -> RunResult:
    """Run a loop to its end; start again after the loss of a rank, up to ``trainer.restarts`` times without a new step.

    Args:
        run: Folder and config.
        make: Makes a loop, with the reason for a restart.
        execute: Runs a loop.
        request: The run does not restart once its stop was requested.

    Raises:
        RankLost: no restart is left.
    """
    restarts, reached, reason = 0, 0, None
    while True:
        loop = make(run, reason)
        try:
            return execute(loop)
        except RankLost as error:
            if loop.step > reached:
                restarts, reached = 0, loop.step
            most = run.config.trainer.restarts
            if request.count or restarts >= most:
                raise
            restarts += 1
            next_step = f"the run restarts from its newest checkpoint ({restarts} of {most}: trainer.restarts)"
            reason = str(RankLost(error.what, got=error.got, hint=next_step))
        run = Run(run.folder, run.config)
        del loop  # frees the model
        gc.collect()
