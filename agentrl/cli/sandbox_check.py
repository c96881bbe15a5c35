"""`agentrl sandbox check`: the conformance check of one back end, or of all that this machine has."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from agentrl.cli.env_check import STANDARD_OUTPUT, STYLES, watching, write_report
from agentrl.errors import AgentRLError, UsageError
from agentrl.observe.console import note, out
from agentrl.registry import Kind, names
from agentrl.sandbox import SandboxSpec
from agentrl.testing.env_report import CheckStatus
from agentrl.testing.sandbox_check import SandboxReport, check_sandbox


def check_back_ends(specs: Sequence[SandboxSpec] | None, *, only: Sequence[str], json_file: str | None) -> None:
    """Check back ends and print their rules.

    Args:
        specs: Of the back ends; ``None``: all that are registered, without those that this machine cannot run.
        only: Names of rules; all when empty.
        json_file: Where the report goes as JSON.

    Raises:
        UsageError: a back end that was asked for cannot run here.
        AgentRLError: one breaks rules.
    """
    reports, skipped = [], {}
    for spec in [SandboxSpec(type=name) for name in names(Kind.SANDBOX)] if specs is None else specs:
        try:
            reports.append(_check(spec, only))
        except UsageError as error:
            if specs is not None:
                raise
            skipped[spec.type] = str(error)
            note(f"{spec.type} is left out: {error}")
            continue
        if json_file != STANDARD_OUTPUT:
            _print_report(reports[-1])
    write_report({"back_ends": [report.to_plain() for report in reports], "skipped": skipped}, json_file)
    if not reports:
        raise UsageError("this machine can run no sandbox", hint="install bubblewrap: apt-get install bubblewrap")
    broken = [f"{report.type}: {row.check}" for report in reports for row in report.with_status(CheckStatus.FAILED)]
    if broken:
        raise AgentRLError("sandboxes break rules", got=", ".join(broken))


def _check(spec: SandboxSpec, only: Sequence[str]) -> SandboxReport:
    with watching(spec.type) as watch:
        return asyncio.run(check_sandbox(spec, only=only, watch=watch))


def _print_report(report: SandboxReport) -> None:
    out.print(Text(f"sandbox {report.type}", style="bold"))
    table = Table("", "rule", "found", box=None, pad_edge=False)
    for row in report.rows:
        table.add_row(Text(row.status, style=STYLES[row.status]), row.check, Text(row.detail))
    out.print(table)
    counts = ", ".join(f"{len(report.with_status(status))} {status.lower()}" for status in CheckStatus)
    out.print(Text(f"{counts}; {sum(row.seconds for row in report.rows):.1f} s", style="dim"))
