"""The conformance check of a sandbox back end: `check_sandbox` works in some, and attacks others.

report = await check_sandbox("local")
assert report.passed, report

Its rules are listed here, in the order of the report.
"""

from __future__ import annotations

import difflib
import inspect
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from agentrl.errors import UnknownNameError, UsageError
from agentrl.sandbox import SandboxSpec, read_spec
from agentrl.testing.env_subject import Broken, Finding, Missing, Suspect
from agentrl.testing.report import CheckRow, CheckStatus
from agentrl.testing.sandbox_rules import behaviour, limits, security
from agentrl.testing.sandbox_subject import SandboxSubject


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxRule:
    """Rule of the check: what is demanded, and how it is looked for."""

    look: Callable[[SandboxSubject], Awaitable[Finding]]
    """Says what it found, or raises `Broken`, `Suspect` or `Missing`. Its name is the rule's; its docstring says what
    is demanded."""

    @property
    def name(self) -> str:
        """Name in reports."""
        return self.look.__name__.replace("_", " ")

    @property
    def demand(self) -> str:
        """Demand of the rule, in a sentence."""
        return " ".join((inspect.getdoc(self.look) or "").partition("\n\n")[0].split())


RULES = tuple(
    SandboxRule(look=look)
    for look in (
        behaviour.runs_commands,
        behaviour.tells_how_commands_end,
        behaviour.runs_commands_at_the_same_time,
        behaviour.keeps_programs_running,
        behaviour.keeps_output_within_limits,
        behaviour.reads_what_was_written,
        behaviour.says_why_a_file_cannot_be_read,
        behaviour.keeps_snapshots,
        behaviour.lets_no_path_lead_out,
        limits.kills_at_the_deadline,
        limits.counts_processor_time,
        limits.kills_what_commands_leave,
        limits.survives_signals_from_inside,
        limits.stops_with_its_caller,
        limits.stops_a_fork_bomb,
        limits.stops_a_memory_bomb,
        limits.counts_memory_of_all_processes,
        limits.keeps_no_memory_after_a_command,
        limits.stops_a_disk_fill,
        limits.stops_a_zip_bomb,
        security.hides_the_environment,
        security.hides_files_of_the_host,
        security.hides_the_code_of_agentrl,
        security.hides_other_sandboxes,
        security.gives_no_rights,
        security.writes_only_where_it_may,
        security.signals_nobody_outside,
        security.has_no_terminal,
        security.reaches_no_network,
        behaviour.runs_many_at_once,
        behaviour.leaves_nothing_behind,
    )
)


def choose_rules(only: Collection[str] = ()) -> tuple[SandboxRule, ...]:
    """The rules of these names; all when there are none. Blanks may be written as dashes or underscores.

    Raises:
        UnknownNameError: there is no such rule.
    """
    wanted = {name.replace("-", " ").replace("_", " ").lower() for name in only}
    known = [rule.name for rule in RULES]
    for name in sorted(wanted.difference(known)):
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else None
        raise UnknownNameError("there is no rule of this name", got=repr(name), expected=", ".join(known), hint=hint)
    return tuple(rule for rule in RULES if not wanted or rule.name in wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxReport:
    """Report of `check_sandbox`."""

    type: str
    rows: tuple[CheckRow, ...]

    @property
    def passed(self) -> bool:
        """No rule is broken."""
        return all(row.passed for row in self.rows)

    def with_status(self, status: CheckStatus) -> tuple[CheckRow, ...]:
        """The rows of a status."""
        return tuple(row for row in self.rows if row.status is status)

    def to_plain(self) -> dict[str, Any]:
        """Return it as JSON types."""
        return {"type": self.type, "passed": self.passed, "rows": [asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        width = max((len(row.check) for row in self.rows), default=0)
        lines = [f"{row.status:<8} {row.check:<{width}}  {row.detail}" for row in self.rows]
        return "\n".join([f"sandbox {self.type}", *lines])


async def check_sandbox(
    spec: SandboxSpec | Mapping[str, Any] | str = "local",
    *,
    only: Collection[str] = (),
    watch: Callable[[str], object] | None = None,
) -> SandboxReport:
    """Check that a back end does what its contract says and stops what must be stopped.

    Args:
        spec: The back end's name, or a spec of it; its limits and files are not used.
        only: Names of the rules to check; all when empty.
        watch: Called with the name of each rule before it is checked.

    Raises:
        UsageError: no such back end or rule, or this machine cannot run it.
        SandboxError: no sandbox starts.
    """
    rules = choose_rules(only)
    subject = SandboxSubject(read_spec(spec))
    if subject.spec.options.get("unconfined"):
        raise UsageError("a sandbox without walls is not attacked", hint="the attacks would hit this machine")
    async with subject.open() as sandbox:  # what it cannot be made without is missing for all rules
        await sandbox.exec("true")
    rows = []
    for rule in rules:
        if watch is not None:
            watch(rule.name)
        start = time.perf_counter()
        status, finding = await _look(rule, subject)
        took = time.perf_counter() - start
        row = CheckRow(check=rule.name, status=status, detail=finding.detail, figures=finding.figures, seconds=took)
        rows.append(row)
    return SandboxReport(type=subject.spec.type, rows=tuple(rows))


async def _look(rule: SandboxRule, subject: SandboxSubject) -> tuple[CheckStatus, Finding]:
    """Look by a rule; any other error breaks it."""
    try:
        return CheckStatus.PASSED, await rule.look(subject)
    except Missing as missing:
        return CheckStatus.SKIPPED, Finding(detail=str(missing))
    except Suspect as suspect:
        return CheckStatus.WARNED, Finding(detail=str(suspect))
    except UsageError:
        raise
    except Broken as broken:
        return CheckStatus.FAILED, Finding(detail=str(broken))
    except Exception as error:
        return CheckStatus.FAILED, Finding(detail=f"{type(error).__name__}: {error}")
