"""Options of the environment and of its tasks, and the kinds of puzzles."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.errors import UsageError
from agentrl.sandbox import SandboxSpec, read_spec

from ..code.options import Size

ATTEMPTS = 8
REFERENCES = 6
INPUTS = 10
BUFFER = 16_384
SEEDS = 256
SECONDS = 5.0
MAX_SECONDS = 20.0
MIN_INPUTS, MAX_INPUTS = 2, 10


class Kind(enum.StrEnum):
    """Kind of a puzzle: the part of (program, input, output) that the solver has to find."""

    DEDUCTION = "deduction"
    """The output, from the program and an input."""
    ABDUCTION = "abduction"
    """An input, from the program and the output."""
    INDUCTION = "induction"
    """The program, from inputs and outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposedOptions:
    """Checked options of the environment and its task source."""

    kinds: tuple[Kind, ...]
    size: Size
    attempts: int
    references: int
    inputs: int
    buffer: int
    seeds: int
    seconds: float
    sandbox: SandboxSpec = field(hash=False)


def parse_options(
    *,
    kinds: Sequence[str] = tuple(Kind),
    size: str = Size.SMALL,
    attempts: int = ATTEMPTS,
    references: int = REFERENCES,
    inputs: int = INPUTS,
    buffer: int = BUFFER,
    seeds: int = SEEDS,
    seconds: float = SECONDS,
    sandbox: Mapping[str, Any] | SandboxSpec | str = "local",
) -> ProposedOptions:
    """Check the options of a config; `ProposedPrograms` describes them.

    Raises:
        UsageError: a value is not allowed.
    """
    if isinstance(kinds, str) or not kinds or not set(kinds) <= set(Kind) or len(set(kinds)) < len(kinds):
        raise UsageError("kinds of proposed_programs is not valid", got=repr(kinds), expected=f"some of {[*Kind]}")
    if size not in list(Size):
        raise UsageError("unknown size of proposed_programs", got=repr(size), expected=" or ".join(Size))
    numbers = {
        "attempts": (attempts, 2),
        "references": (references, 0),
        "inputs": (inputs, MIN_INPUTS),
        "buffer": (buffer, 1),
        "seeds": (seeds, 1),
    }
    for name, (number, least) in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise UsageError(
                f"{name} of proposed_programs is not valid", got=repr(number), expected=f"a whole number from {least}"
            )
    if inputs > MAX_INPUTS:
        raise UsageError("inputs of proposed_programs is too large", got=inputs, expected=f"at most {MAX_INPUTS}")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= MAX_SECONDS:
        raise UsageError(
            "seconds of proposed_programs is out of range",
            got=repr(seconds),
            expected=f"more than 0, up to {MAX_SECONDS:g}",
        )
    return ProposedOptions(
        kinds=tuple(map(Kind, kinds)),
        size=Size(size),
        attempts=attempts,
        references=references,
        inputs=inputs,
        buffer=buffer,
        seeds=seeds,
        seconds=float(seconds),
        sandbox=read_spec(sandbox),
    )
