"""All rules, in the order of the report.

- A rule of the sandbox check.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

from agentrl.errors import UnknownNameError
from agentrl.testing.env_subject import Finding
from agentrl.testing.sandbox_rules import behaviour, limits, security
from agentrl.testing.sandbox_subject import SandboxSubject


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxRule:
    """What is demanded, and how it is looked for."""

    look: Callable[[SandboxSubject], Awaitable[Finding]]
    """Says what it found, or raises `Broken`, `Suspect` or `Missing`. Its name is the rule's; its docstring says what
    is demanded."""

    @property
    def name(self) -> str:
        """As reports show it."""
        return self.look.__name__.replace("_", " ")

    @property
    def demand(self) -> str:
        """What is demanded, in a sentence."""
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
