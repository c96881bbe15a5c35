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
from agentrl.testing.sandbox_rules import behaviour as commands
from agentrl.testing.sandbox_rules import behaviour as files
from agentrl.testing.sandbox_rules import behaviour as lifetimes
from agentrl.testing.sandbox_rules import limits as endings
from agentrl.testing.sandbox_rules import limits as resources
from agentrl.testing.sandbox_rules import security as escapes
from agentrl.testing.sandbox_rules import security as network
from agentrl.testing.sandbox_rules import security as secrets_kept
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
        commands.runs_commands,
        commands.tells_how_commands_end,
        commands.runs_commands_at_the_same_time,
        commands.keeps_programs_running,
        commands.keeps_output_within_limits,
        files.reads_what_was_written,
        files.says_why_a_file_cannot_be_read,
        files.keeps_snapshots,
        files.lets_no_path_lead_out,
        endings.kills_at_the_deadline,
        endings.counts_processor_time,
        endings.kills_what_commands_leave,
        endings.survives_signals_from_inside,
        endings.stops_with_its_caller,
        resources.stops_a_fork_bomb,
        resources.stops_a_memory_bomb,
        resources.counts_memory_of_all_processes,
        resources.keeps_no_memory_after_a_command,
        resources.stops_a_disk_fill,
        resources.stops_a_zip_bomb,
        secrets_kept.hides_the_environment,
        secrets_kept.hides_files_of_the_host,
        secrets_kept.hides_the_code_of_agentrl,
        secrets_kept.hides_other_sandboxes,
        escapes.gives_no_rights,
        escapes.writes_only_where_it_may,
        escapes.signals_nobody_outside,
        escapes.has_no_terminal,
        network.reaches_no_network,
        lifetimes.runs_many_at_once,
        lifetimes.leaves_nothing_behind,
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
