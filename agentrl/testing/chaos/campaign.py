"""Fault-injection campaign over runs of several kinds.

for each scenario in turn, until all faults have happened:
a `DisturbedRun` of the scenario gets its share of the faults, finishes, and is checked
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from agentrl.errors import TrainingError
from agentrl.testing.chaos.disturbed_run import CampaignSettings, DisturbedRun
from agentrl.testing.chaos.result import CampaignResult
from agentrl.testing.chaos.scenarios import COMMON, LIMITS, LOCAL_ENGINE, SCRATCH, Scenario
from agentrl.testing.chaos.servers import AGENTRL
from agentrl.testing.chaos.world import Words


def run_campaign(
    settings: CampaignSettings, scenarios: Sequence[Scenario], faults: int, say: Callable[[str], None]
) -> CampaignResult:
    """Inject `faults` faults into runs of all scenarios in turn.

    `say` gets one line per fault and per run.
    """
    result = CampaignResult(settings.seed)
    model = settings.model or make_model(settings)
    began = time.monotonic()
    number = 0
    while len(result.faults) < faults:
        scenario = scenarios[number % len(scenarios)]
        with ExitStack() as stack:
            run = DisturbedRun(settings, scenario, number, model, result, began, say)
            stack.callback(run.close)
            if not run.play(min(settings.per_run, faults - len(result.faults))):
                break  # it cannot start, as the result reports
        number += 1
    return result


def make_model(settings: CampaignSettings) -> str:
    """Train a small model for one step, without faults, and return its folder.

    Raises:
        TrainingError: the run failed.
    """
    folder = settings.folder / "model"
    words = [f"run.directory={folder}", "run.name=run", "trainer.steps=1", "checkpoint.every=1"]
    env = settings.environment or f"{Words.__module__}:{Words.__qualname__}"
    overrides = [f"environment={env}", *LOCAL_ENGINE, *COMMON, *SCRATCH, *LIMITS, *words]
    done = subprocess.run([*AGENTRL, "train", *overrides], capture_output=True, text=True)
    if done.returncode:
        raise TrainingError("the training run that creates the model failed", got=done.stderr[-2000:])
    return str(folder / "run" / "model")
