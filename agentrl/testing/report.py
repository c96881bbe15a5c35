"""Rules of a check, and the report of their results."""

from __future__ import annotations

import enum
import inspect
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from agentrl.errors import UnknownNameError, did_you_mean


class CheckStatus(enum.StrEnum):
    """Result of a rule."""

    PASSED = "passed"
    WARNED = "warned"
    """A possible fault that may be intended."""
    FAILED = "failed"
    SKIPPED = "skipped"
    """The rule does not apply, or one of its inputs is missing."""


class RuleOutcome(Exception):
    """Result of a rule other than a plain pass; the message explains it."""

    status: ClassVar[CheckStatus]


class RuleFailed(RuleOutcome):
    """Result of a broken rule."""

    status = CheckStatus.FAILED


class RuleWarned(RuleOutcome):
    """Result of a rule that may be broken intentionally."""

    status = CheckStatus.WARNED


class RuleSkipped(RuleOutcome):
    """Result of a rule that does not apply."""

    status = CheckStatus.SKIPPED


def require(holds: bool, otherwise: str) -> None:
    """Raise `RuleFailed` with the text `otherwise` unless the condition holds."""
    if not holds:
        raise RuleFailed(otherwise)


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """Result of a rule that measures something; other rules return only a text."""

    detail: str
    figures: Mapping[str, float]
    """Measured numbers by name; the unit ends the name."""


@dataclass(frozen=True, slots=True)
class CheckRule:
    """Rule of a check: its requirement, its check, and what to do if it is broken."""

    check: Callable[[Any], Any]
    """Function that takes the subject of the check, and returns a text or a `CheckFinding` (some rules as coroutines),
    or raises a `RuleOutcome`. Its name is the rule's name; the first paragraph of its docstring is the requirement."""
    mend: str = ""
    """Next step for the author of the checked code if the rule is broken."""

    @property
    def name(self) -> str:
        """Name in reports."""
        return self.check.__name__.replace("_", " ")

    @property
    def demand(self) -> str:
        """Requirement of the rule in one sentence."""
        return " ".join((inspect.getdoc(self.check) or "").partition("\n\n")[0].split())

    def row(self, found: CheckFinding | str | Exception, seconds: float) -> CheckRow:
        """Return the row of the report; an exception other than a `RuleOutcome` breaks the rule."""
        status, figures = CheckStatus.PASSED, dict[str, float]()
        match found:
            case CheckFinding():
                detail, figures = found.detail, dict(found.figures)
            case RuleOutcome():
                status, detail = found.status, str(found)
            case Exception():
                status, detail = CheckStatus.FAILED, f"{type(found).__name__}: {found}"
            case _:
                detail = found
        mend = self.mend if status in (CheckStatus.FAILED, CheckStatus.WARNED) else ""
        return CheckRow(check=self.name, status=status, detail=detail, figures=figures, mend=mend, seconds=seconds)


def rule(mend: str) -> Callable[[Callable[[Any], CheckFinding | str]], CheckRule]:
    """Make a `CheckRule` of the decorated function; `mend` says what to do if it is broken."""
    return lambda check: CheckRule(check, mend)


async def check_rule(rule: CheckRule, subject: object, *, escaping: tuple[type[Exception], ...] = ()) -> CheckRow:
    """Check a rule with an async `check`; exceptions in `escaping` propagate, all others break the rule."""
    start = time.perf_counter()
    try:
        found = await rule.check(subject)
    except escaping:
        raise
    except Exception as error:
        found = error
    return rule.row(found, time.perf_counter() - start)


def choose_rules(
    rules: Sequence[CheckRule], *, only: Collection[str] = (), skip: Collection[str] = ()
) -> tuple[CheckRule, ...]:
    """Choose rules by name.

    Args:
        rules: Rules to choose from.
        only: Names of the rules to check; all if empty. Spaces may be written as dashes or underscores.
        skip: Names of rules to skip.

    Raises:
        UnknownNameError: a rule does not exist.
    """
    names = [rule.name for rule in rules]
    wanted, unwanted = {_rule_name(name, names) for name in only}, {_rule_name(name, names) for name in skip}
    return tuple(rule for rule in rules if rule.name not in unwanted and (not wanted or rule.name in wanted))


def _rule_name(name: str, names: Sequence[str]) -> str:
    plain = name.replace("-", " ").replace("_", " ").lower()
    if plain in names:
        return plain
    hint = did_you_mean(plain, names)
    raise UnknownNameError("unknown rule", got=repr(name), expected=", ".join(names), hint=hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRow:
    """Result of one rule."""

    check: str
    """Name of the rule."""
    status: CheckStatus
    detail: str
    figures: Mapping[str, float] = field(default_factory=dict)
    """Measured numbers by name."""
    mend: str = ""
    """Next step; empty if there is nothing to do."""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """True if the rule is not broken."""
        return self.status is not CheckStatus.FAILED


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """Report of a check."""

    kind: str
    """Kind of the checked object: ``environment``, ``sandbox``, ``tool`` or ``engine``."""
    name: str
    """Name of the checked object."""
    split: str = ""
    """Split of the played tasks of an environment."""
    rows: tuple[CheckRow, ...]

    @property
    def passed(self) -> bool:
        """True if no rule is broken."""
        return all(row.passed for row in self.rows)

    @property
    def seconds(self) -> float:
        """Seconds that the rules took."""
        return sum(row.seconds for row in self.rows)

    def with_status(self, status: CheckStatus) -> tuple[CheckRow, ...]:
        """Return the rows with a status."""
        return tuple(row for row in self.rows if row.status is status)

    def to_plain(self) -> dict[str, Any]:
        """Return the report in plain JSON types."""
        return {
            self.kind: self.name,
            **({"split": self.split} if self.split else {}),
            "passed": self.passed,
            "seconds": round(self.seconds, 3),
            "rows": [asdict(row) for row in self.rows],
        }

    def __str__(self) -> str:
        width = max((len(row.check) for row in self.rows), default=0)
        lines = [f"{row.status:<8} {row.check:<{width}}  {row.detail}".rstrip() for row in self.rows]
        return "\n".join([f"{self.kind} {self.name}", *lines])
