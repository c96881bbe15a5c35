"""Files of a Docker context that a ``.dockerignore`` excludes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from agentrl.errors import UsageError

NAME = ".dockerignore"
_PIECE = re.compile(r"\*\*/|\*\*|\*|\?|\[\^?[^\]]+\]|\\.|.", re.DOTALL)
_MEANING = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}


@dataclass(frozen=True, slots=True)
class IgnoreRule:
    """A line of the file: it excludes the paths that it matches, or with ``!`` includes them again."""

    pattern: re.Pattern[str]
    keeps: bool


def read_ignore_rules(context: Path, dockerfile: str = "Dockerfile") -> Sequence[IgnoreRule]:
    """Read the rules of a context from ``Dockerfile.dockerignore``, or else ``.dockerignore``; none without a file.

    Raises:
        UsageError: the file cannot be read.
    """
    places = (context / f"{dockerfile}{NAME}", context / NAME)
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        return ()
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read", got=error, expected="patterns in UTF-8, one per line") from error
    texts = (line.strip() for line in lines if not line.startswith("#"))
    return [rule for text in texts if (rule := _rule(text, file)) is not None]


def is_ignored(path: str, rules: Sequence[IgnoreRule]) -> bool:
    """Return True if a path below the context is excluded; the last rule that matches it or its folder decides."""
    return next((not rule.keeps for rule in reversed(rules) if rule.pattern.fullmatch(path)), False)


def _rule(text: str, file: Path) -> IgnoreRule | None:
    keeps = text.startswith("!")
    pattern = str(PurePosixPath("/", text.removeprefix("!").strip())).lstrip("/")
    if not pattern or pattern == ".":
        return None
    try:
        return IgnoreRule(re.compile(f"{_regular_expression(pattern)}(?:/.*)?", re.DOTALL), keeps)
    except re.error as error:
        raise UsageError(f"{file} has a pattern that cannot be read", got=text, hint=str(error)) from error


def _regular_expression(pattern: str) -> str:
    pieces = _PIECE.findall(pattern)
    return "".join(
        _MEANING.get(piece) or (f"[{piece[1:-1]}]" if piece[0] == "[" and len(piece) > 2 else re.escape(piece[-1]))
        for piece in pieces
    )
