"""The conformance check of a sandbox back end: `check_sandbox` works in some, and attacks others.

report = await check_sandbox("local")
assert report.passed, report
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from agentrl.errors import UsageError
from agentrl.sandbox import SandboxSpec, read_spec
from agentrl.testing.env_subject import Broken, Finding, Missing, Suspect
from agentrl.testing.report import CheckRow, CheckStatus
from agentrl.testing.sandbox_rules.catalogue import SandboxRule, choose_rules
from agentrl.testing.sandbox_subject import SandboxSubject


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxReport:
    """What `check_sandbox` found out."""

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
        """As JSON types."""
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
    """What a rule says; any other error breaks it."""
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
