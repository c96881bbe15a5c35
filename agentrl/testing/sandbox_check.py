"""Conformance check of sandbox back ends: `check_sandbox` uses sandboxes and attacks them.

report = await check_sandbox("local")
assert report.passed, report

This file lists the rules in the order of the report.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from agentrl.errors import UsageError
from agentrl.sandbox import SandboxSpec, read_spec
from agentrl.testing.report import CheckReport, CheckRule, check_rule, choose_rules
from agentrl.testing.sandbox_rules import behaviour, limits, network, security
from agentrl.testing.sandbox_subject import SandboxSubject

RULES = tuple(
    CheckRule(check)
    for check in (
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
        network.reaches_listed_hosts_only,
        network.forwards_ports,
        behaviour.runs_many_at_once,
        behaviour.leaves_nothing_behind,
    )
)


async def check_sandbox(
    spec: SandboxSpec | Mapping[str, Any] | str = "local",
    *,
    only: Collection[str] = (),
    watch: Callable[[str], object] | None = None,
) -> CheckReport:
    """Check that a back end meets its contract and withstands attacks.

    Args:
        spec: Name of the back end, or a spec; the spec's limits and files are not used.
        only: Names of the rules to check; all if empty.
        watch: Called with the name of each rule before it is checked.

    Raises:
        UsageError: the back end or rule does not exist, or this machine cannot run the back end.
        SandboxError: the sandbox does not start.
    """
    rules = choose_rules(RULES, only=only)
    subject = SandboxSubject(read_spec(spec))
    if subject.spec.options.get("unconfined"):
        raise UsageError("an unconfined sandbox cannot be checked", hint="the attacks would hit this machine")
    async with subject.open() as sandbox:  # raises at once if no sandbox can start
        await sandbox.exec("true")
    rows = []
    for rule in rules:
        if watch is not None:
            watch(rule.name)
        rows.append(await check_rule(rule, subject, escaping=(UsageError,)))
    return CheckReport(kind="sandbox", name=subject.spec.type, rows=tuple(rows))
