"""Conformance checks for `agentrl env check`, `agentrl env integrity` and `agentrl sandbox check`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from rich.table import Table
from rich.text import Text

from agentrl.cli.exits import discard_standard_output, message_when_interrupted
from agentrl.env import EnvironmentSpec
from agentrl.errors import AgentRLError, UsageError
from agentrl.observe.console import err, note, out
from agentrl.observe.files import write_output
from agentrl.registry import Kind, names
from agentrl.runs.stop import run_until_stopped
from agentrl.sandbox import SandboxSpec
from agentrl.testing.report import CheckReport, CheckStatus
from agentrl.testing.sandbox_check import check_sandbox

STYLES = {
    CheckStatus.PASSED: "green",
    CheckStatus.WARNED: "yellow",
    CheckStatus.FAILED: "bold red",
    CheckStatus.SKIPPED: "dim",
}
EnvironmentCheck: TypeAlias = Callable[..., CheckReport]
"""`check_env` or `reward_integrity`."""
STANDARD_OUTPUT = "-"
"""File name that means standard output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedEnvironment:
    """Result for an environment of the registry."""

    name: str
    report: CheckReport | None
    reason: str = ""
    """Reason for a missing report: a package or data is not installed."""

    @property
    def status(self) -> CheckStatus:
        """Worst status among the report's rows."""
        if self.report is None:
            return CheckStatus.SKIPPED
        if not self.report.passed:
            return CheckStatus.FAILED
        return CheckStatus.WARNED if self.report.with_status(CheckStatus.WARNED) else CheckStatus.PASSED

    @property
    def remarks(self) -> str:
        """Failures and warnings, or the reason for skipping the environment."""
        if self.report is None:
            return self.reason
        wrong = (*self.report.with_status(CheckStatus.FAILED), *self.report.with_status(CheckStatus.WARNED))
        return "; ".join(f"{row.check}: {row.detail}" for row in wrong)


@message_when_interrupted(lambda: "interrupted")
def check_one(
    check: EnvironmentCheck, name: str, json_file: str | None, spec: EnvironmentSpec | None = None, **settings: Any
) -> None:
    """Check an environment, or instead of it `spec`, and print the report.

    Raises:
        AgentRLError: the environment breaks rules.
    """
    with show_progress(name) as watch, discard_standard_output():
        report = check(spec or name, watch=watch, **settings)
    if json_file != STANDARD_OUTPUT:
        _print_report(report)
    write_report(report.to_plain(), json_file)
    if not report.passed:
        broken = ", ".join(row.check for row in report.with_status(CheckStatus.FAILED))
        raise AgentRLError(f"environment {report.name} breaks rules", got=broken)


@message_when_interrupted(lambda: "interrupted")
def check_all(check: EnvironmentCheck, json_file: str | None, **settings: Any) -> None:
    """Check every installed environment and print a summary; environments without a package or data are skipped.

    Raises:
        AgentRLError: an environment breaks rules.
    """
    checked = []
    for name in names(Kind.ENVIRONMENT):
        checked.append(_check_named(check, name, settings))
        note(f"{name}: {checked[-1].status}")
    if json_file != STANDARD_OUTPUT:
        out.print(_summary(checked))
    reports = [one.report.to_plain() for one in checked if one.report is not None]
    skipped = {one.name: one.reason for one in checked if one.report is None}
    write_report({"environments": reports, "skipped": skipped}, json_file)
    failed = [one.name for one in checked if one.status is CheckStatus.FAILED]
    if failed:
        raise AgentRLError("environments break rules", got=", ".join(failed))


def _check_named(check: EnvironmentCheck, name: str, settings: Mapping[str, Any]) -> CheckedEnvironment:
    with show_progress(name) as watch, discard_standard_output():
        try:
            return CheckedEnvironment(name=name, report=check(name, watch=watch, **settings))
        except UsageError as error:  # no arguments could be wrong: something is not installed
            more = error.hint or error.got
            reason = error.what if more is None else f"{error.what}: {more}"
            return CheckedEnvironment(name=name, report=None, reason=reason)


@contextmanager
def show_progress(name: str) -> Iterator[Callable[[str], object]]:
    """Show the current rule, if standard error is a terminal."""
    if not err.is_terminal:
        yield lambda _rule: None
        return
    with err.status(name) as status:
        yield lambda rule: status.update(f"{name}: {rule}")


def _print_report(report: CheckReport) -> None:
    split = f", split {report.split}" if report.split else ""
    out.print(Text(f"{report.kind} {report.name}{split}", style="bold"))
    table = Table("", "rule", "found", box=None, pad_edge=False)
    for row in report.rows:
        table.add_row(Text(row.status, style=STYLES[row.status]), row.check, row.detail)
    out.print(table)
    for row in report.rows:
        if row.mend:
            out.print(Text(f"→ {row.check}: {row.mend}", style=STYLES[row.status]))
    counts = ", ".join(f"{len(report.with_status(status))} {status.lower()}" for status in CheckStatus)
    out.print(Text(f"{counts}; {report.seconds:.1f} s", style="dim"))


def _summary(checked: Sequence[CheckedEnvironment]) -> Table:
    table = Table("environment", "", "rules passed", "seconds", "remarks", box=None, pad_edge=False)
    for one in checked:
        kept = seconds = ""
        if one.report is not None:
            looked = len(one.report.rows) - len(one.report.with_status(CheckStatus.SKIPPED))
            kept = f"{len(one.report.with_status(CheckStatus.PASSED))} of {looked}"
            seconds = f"{one.report.seconds:.1f}"
        table.add_row(one.name, Text(one.status, style=STYLES[one.status]), kept, seconds, one.remarks)
    return table


def write_report(report: Mapping[str, Any], file: str | None) -> None:
    """Write a report as JSON, to a file or for ``-`` to standard output; do nothing without a file.

    Raises:
        UsageError: the file cannot be written.
    """
    if file is None:
        return
    text = json.dumps(report, indent=2)
    if file == STANDARD_OUTPUT:
        out.print(text)
        return
    write_output(Path(file), f"{text}\n".encode())
    note(f"wrote {file}")


def check_back_ends(specs: Sequence[SandboxSpec] | None, *, only: Sequence[str], json_file: str | None) -> None:
    """Check back ends and print their reports.

    Args:
        specs: Specs of the back ends; ``None`` for all registered ones that this machine can run.
        only: Names of rules; all if empty.
        json_file: File for the report as JSON.

    Raises:
        UsageError: a back end in `specs`, or every registered one, cannot run on this machine.
        AgentRLError: a back end breaks rules.
    """
    reports, skipped = [], {}
    for spec in [SandboxSpec(type=name) for name in names(Kind.SANDBOX)] if specs is None else specs:
        try:
            with show_progress(spec.type) as watch:
                reports.append(run_until_stopped(check_sandbox(spec, only=only, watch=watch)))
        except UsageError as error:
            if specs is not None:
                raise
            skipped[spec.type] = str(error)
            note(f"{spec.type} is skipped: {error}")
            continue
        if json_file != STANDARD_OUTPUT:
            _print_report(reports[-1])
    write_report(
        {"back_ends": [{"type": report.name, **report.to_plain()} for report in reports], "skipped": skipped}, json_file
    )
    if not reports:
        raise UsageError("this machine cannot run sandboxes", hint="install bubblewrap: apt-get install bubblewrap")
    broken = [f"{report.name}: {row.check}" for report in reports for row in report.with_status(CheckStatus.FAILED)]
    if broken:
        raise AgentRLError("sandboxes break rules", got=", ".join(broken))
