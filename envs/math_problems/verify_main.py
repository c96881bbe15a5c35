"""Process that compares formulas with math-verify: one line of JSON in, one line out, until its input ends.

The cost of evaluating an answer is unbounded, so memory is limited, and a timer's signal ends the process when a
comparison uses too much processor time.
"""

from __future__ import annotations

import json
import logging
import resource
import signal
import sys

CPU_S = 1.0
"""Processor time limit of one comparison in seconds; ordinary answers take a few hundredths."""
MAX_BYTES = 2 << 30


def is_same(right: str, said: str) -> bool:
    """Return True if two formulas are the same."""
    from math_verify import parse, verify

    try:
        gold = parse(f"\\boxed{{{right}}}", parsing_timeout=None)
        answer = parse(f"\\boxed{{{said}}}", parsing_timeout=None)
        return bool(verify(gold, answer, timeout_seconds=None))
    except (MemoryError, RecursionError, OverflowError):
        return False  # the answer is too large to evaluate


def main() -> None:
    """Print "ready", then answer each pair of texts."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    logging.disable(logging.WARNING)  # math-verify warns that its own time limit is off
    is_same("x", "x + 1")  # loads the parser's imports
    print("ready", flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        answer = is_same(*json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
