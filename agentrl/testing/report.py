"""Rules of a check, and the report of what they found."""

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
    """Something looks wrong, and may be meant."""
    FAILED = "failed"
    SKIPPED = "skipped"
    """There is nothing to which the rule applies, or something that it needs was not given."""


class RuleOutcome(Exception):
    """Raised by a rule that does not simply pass; the message says why."""

    status: ClassVar[CheckStatus]


class Broken(RuleOutcome):
    """A rule is broken."""

    status = CheckStatus.FAILED


class Suspect(RuleOutcome):
    """A rule looks broken, and there may be a reason."""

    status = CheckStatus.WARNED


class Missing(RuleOutcome):
    """There is nothing to which the rule applies."""

    status = CheckStatus.SKIPPED


def require(holds: bool, otherwise: str) -> None:
    """Raise `Broken` with the text `otherwise` unless the condition holds."""
    if not holds:
        raise Broken(otherwise)


@dataclass(frozen=True, slots=True)
class Finding:
    """Finding of a rule that measured something; other rules return a text alone."""

    detail: str
    figures: Mapping[str, float]
    """Measured numbers by name; the unit ends the name."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Rule of a check: what is demanded, how it is checked, and what to do where it is broken."""

    look: Callable[[Any], Any]
    """Takes the subject of the check. Returns a text or a `Finding` (some rules as coroutines), or raises a
    `RuleOutcome`. Its name is the rule's name; the first paragraph of its docstring is the demand."""
    mend: str = ""
    """Next step for the author of what broke it."""

    @property
    def name(self) -> str:
        """Name in reports."""
        return self.look.__name__.replace("_", " ")

    @property
    def demand(self) -> str:
        """Demand of the rule, in a sentence."""
        return " ".join((inspect.getdoc(self.look) or "").partition("\n\n")[0].split())

    def row(self, found: Finding | str | Exception, seconds: float) -> CheckRow:
        """Return the row of the report; an exception other than a `RuleOutcome` breaks the rule."""
        status, figures = CheckStatus.PASSED, dict[str, float]()
        match found:
            case Finding():
                detail, figures = found.detail, dict(found.figures)
            case RuleOutcome():
                status, detail = found.status, str(found)
            case Exception():
                status, detail = CheckStatus.FAILED, f"{type(found).__name__}: {found}"
            case _:
                detail = found
        mend = self.mend if status in (CheckStatus.FAILED, CheckStatus.WARNED) else ""
        return CheckRow(check=self.name, status=status, detail=detail, figures=figures, mend=mend, seconds=seconds)


def rule(mend: str) -> Callable[[Callable[[Any], Finding | str]], Rule]:
    """Make a `Rule` of the decorated function; `mend` says what to do where it is broken."""
    return lambda look: Rule(look, mend)


async def check_rule(rule: Rule, subject: object, *, escaping: tuple[type[Exception], ...] = ()) -> CheckRow:
    """Check a rule whose `look` is a coroutine function; exceptions in `escaping` are raised, all others break it."""
    start = time.perf_counter()
    try:
        found = await rule.look(subject)
    except escaping:
        raise
    except Exception as error:
        found = error
    return rule.row(found, time.perf_counter() - start)


def choose_rules(rules: Sequence[Rule], *, only: Collection[str] = (), skip: Collection[str] = ()) -> tuple[Rule, ...]:
    """Choose rules by name.

    Args:
        rules: To choose among.
        only: Names of the rules to check; all when empty. Blanks may be written as dashes or underscores.
        skip: Names of rules to leave out.

    Raises:
        UnknownNameError: there is no such rule.
    """
    names = [rule.name for rule in rules]
    wanted, unwanted = {_known(name, names) for name in only}, {_known(name, names) for name in skip}
    return tuple(rule for rule in rules if rule.name not in unwanted and (not wanted or rule.name in wanted))


def _known(name: str, names: Sequence[str]) -> str:
    plain = name.replace("-", " ").replace("_", " ").lower()
    if plain in names:
        return plain
    hint = did_you_mean(plain, names)
    raise UnknownNameError("there is no rule of this name", got=repr(name), expected=", ".join(names), hint=hint)


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
    """The next step; empty where nothing is to be done."""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether the rule is not broken."""
        return self.status is not CheckStatus.FAILED


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """Report of a check."""

    kind: str
    """What was checked: ``environment``, ``sandbox``, ``tool`` or ``engine``."""
    name: str
    """Its name."""
    split: str = ""
    """Split of an environment whose tasks were played."""
    rows: tuple[CheckRow, ...]

    @property
    def passed(self) -> bool:
        """Whether no rule is broken."""
        return all(row.passed for row in self.rows)

    @property
    def seconds(self) -> float:
        """Seconds that the rules took."""
        return sum(row.seconds for row in self.rows)

    def with_status(self, status: CheckStatus) -> tuple[CheckRow, ...]:
        """Return the rows of a status."""
        return tuple(row for row in self.rows if row.status is status)

    def to_plain(self) -> dict[str, Any]:
        """Return it as JSON types."""
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
