"""`agentrl diagnose`: what is wrong with a run, and which key to change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from agentrl.cli.help_pages import examples
from agentrl.evaluation.diagnosis.finding import Finding, Severity
from agentrl.evaluation.diagnosis.read import Diagnosis
from agentrl.observe.console import out
from agentrl.runs.diagnosis import diagnose_folder

app = typer.Typer()

STYLES = {Severity.CRITICAL: "bold red", Severity.SERIOUS: "bold yellow", Severity.MINOR: "bold"}


@app.command(
    epilog=examples(
        "agentrl diagnose runs/latest",
        "agentrl diagnose runs/my-run --json",
        "agentrl diagnose runs/evaluations/engine-4f0c2a9d1b3e",
    )
)
def diagnose(
    run: Annotated[Path, typer.Argument(help="Folder of a run, finished or not, or of an evaluation.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the diagnosis as JSON.")] = False,
) -> None:
    """Find out what is wrong with a run, with evidence, and which config key to change.

    Reads metrics, log and episodes of a finished, running or crashed run. The root cause comes first; findings that
    it explains come last.
    """
    found = diagnose_folder(run)
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
    else:
        out.print(diagnosis_text(found), soft_wrap=True)


def diagnosis_text(found: Diagnosis) -> Text:
    """Format a diagnosis for the terminal."""
    text = Text.assemble((str(found.folder), "bold"), f": {found.ending}\n")
    for error in found.errors:
        text.append(f"  {error}\n", "red")
    for note in found.notes:
        text.append(f"  {note}\n", "dim")
    roots = [finding for finding in found.findings if finding.because_of is None]
    for number, finding in enumerate(roots, 1):
        text.append_text(_finding_text(number, finding, found.folder))
    followers = [finding for finding in found.findings if finding.because_of is not None]
    if followers:
        text.append("\nExplained by the above:\n", "bold")
    for finding in followers:
        text.append(f"  {finding.kind} (because of {finding.because_of}): {finding.sentence}\n")
    if not found.findings:
        text.append("  nothing wrong was found\n", "green")
    return text


def _finding_text(number: int, finding: Finding, folder: Path) -> Text:
    style = STYLES[finding.severity]
    text = Text.assemble(f"\n{number}. ", (f"{finding.kind}, {finding.severity}", style), f": {finding.sentence}\n")
    for line in finding.evidence:
        text.append(f"   evidence: {line}\n")
    for change in finding.changes:
        text.append("   change:   ").append(f"{change}\n", "cyan")
    if finding.advice:
        text.append(f"   advice:   {finding.advice}\n")
    if finding.example is not None:
        text.append("   look:     ").append(f"{finding.example.view_command(folder)}\n", "cyan")
    return text
