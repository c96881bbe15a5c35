"""`agentrl chaos`: random faults in real runs, and an account of every episode."""

from __future__ import annotations

import enum
import json
import logging
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from agentrl.cli.arguments import EnvName, ModelName, Words, config_words
from agentrl.cli.exits import ExitCode
from agentrl.cli.help_pages import examples
from agentrl.errors import UnknownNameError, UsageError
from agentrl.observe.console import note, out
from agentrl.observe.files import check_writable
from agentrl.observe.run_folder import OBSERVED
from agentrl.testing.chaos.campaign import run_campaign
from agentrl.testing.chaos.disturbed_run import PER_RUN, CampaignSettings, Patience
from agentrl.testing.chaos.result import CampaignResult
from agentrl.testing.chaos.scenarios import LOCAL_SCENARIOS, Scenario, engine_scenarios

app = typer.Typer()

_DEFAULTS = Patience()


class ChaosEngine(enum.StrEnum):
    """Engine of the runs."""

    LOCAL = "local"
    VLLM = "vllm"
    SGLANG = "sglang"


@app.command(
    epilog=examples(
        "agentrl chaos --faults 6",
        "agentrl chaos --faults 200 --seed 1 --json faults.json --keep faults",
        "agentrl chaos --faults 20 --scenario asynchronous --patience 6",
        "agentrl chaos --env my_game:GuessNumber-v0 --faults 20",
        "agentrl chaos --engine vllm --faults 20",
    )
)
def chaos(
    words: Words = None,
    faults: Annotated[int, typer.Option(min=1, help="Number of faults.")] = 20,
    seed: Annotated[int, typer.Option(help="Seed of the faults and of the runs.")] = 0,
    engine: Annotated[ChaosEngine, typer.Option(help="Engine; vllm and sglang start a server.")] = ChaosEngine.LOCAL,
    env: EnvName = None,
    model: ModelName = None,
    scenario: Annotated[
        list[str] | None, typer.Option(help="Kind of run; may be repeated. Default: all of the engine.")
    ] = None,
    per_run: Annotated[int, typer.Option(min=1, help="Number of faults in each run.")] = PER_RUN,
    stall_s: Annotated[
        float, typer.Option("--stall", min=1, help="Seconds without progress after which a run counts as hung.")
    ] = _DEFAULTS.stall_s,
    patience: Annotated[
        float, typer.Option(min=1, help="Factor for the time limit of a run; set it above 1 on a busy machine.")
    ] = _DEFAULTS.factor,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result to this file.")] = None,
    keep: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Keep runs, ledgers and outputs in this new folder.")
    ] = None,
) -> None:
    """Inject random faults into training runs, and check that no episode is lost, trained twice or mislabelled.

    Kills and stops real runs, gives them wrong answers, full disks and damaged files, and resumes them. Exits with 1 if
    an episode was lost, duplicated or mislabelled, or if a run hung or ended without a clear message.
    """
    if json_file is not None:
        check_writable(json_file)
    given = config_words(words or [])
    chosen = _choose(engine, scenario)
    if keep is not None and keep.exists():
        raise UsageError(f"{keep} already exists", expected="a new folder for --keep")
    folder = Path(tempfile.mkdtemp(prefix="agentrl-chaos-")) if keep is None else keep.resolve()
    logging.getLogger(OBSERVED).addHandler(logging.NullHandler())  # the check reads records that faults damaged
    settings = CampaignSettings(
        folder=folder,
        seed=seed,
        config=given.source,
        words=given.overrides,
        environment=env,
        model=model,
        patience=Patience(stall_s=stall_s, factor=patience),
        per_run=per_run,
    )
    try:
        result = run_campaign(settings, chosen, faults, note)
        _report(result, json_file)
        if keep is None and any(result.counts.values()):
            keep = folder
            note(f"runs, ledgers and outputs are in {folder}")
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    if any(result.counts.values()):
        raise typer.Exit(ExitCode.FAILED)


def _choose(engine: ChaosEngine, names: Sequence[str] | None) -> Sequence[Scenario]:
    known = LOCAL_SCENARIOS if engine is ChaosEngine.LOCAL else engine_scenarios(engine)
    if unknown := sorted(set(names or ()) - {scenario.name for scenario in known}):
        raise UnknownNameError(
            f"--engine {engine} has no such scenario",
            got=unknown[0],
            expected=f"one of {', '.join(scenario.name for scenario in known)}",
        )
    return [scenario for scenario in known if not names or scenario.name in names]


def _report(result: CampaignResult, json_file: Path | None) -> None:
    table = Table(*result.counts, box=None, pad_edge=False)
    table.add_row(*map(str, result.counts.values()))
    out.print(table)
    for kind, findings in result.findings.items():
        for finding in findings:
            out.print(f"{kind}: {finding}", highlight=False, markup=False)
    note(f"{len(result.faults)} faults in {len(result.runs)} runs, {result.account.trained} episodes trained")
    if json_file is not None:
        json_file.write_text(json.dumps(result.to_json(), indent=2) + "\n", encoding="utf-8")
        note(f"wrote {json_file}")
