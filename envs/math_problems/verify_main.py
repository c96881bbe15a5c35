"""The process that compares formulas with math-verify: a line of JSON in, a line out, until its input ends.

What an answer asks to be computed has no bounds, so that memory is limited, and processor time by a timer whose signal
ends the process wherever it is.
"""

from __future__ import annotations

import json
import logging
import resource
import signal
import sys

CPU_S = 1.0
"""Processor time of one comparison; answers of people take a few hundredths of a second."""
MOST_BYTES = 2 << 30


def is_same(right: str, said: str) -> bool:
    """Return True if two formulas are the same."""
    from math_verify import parse, verify

    try:
        gold = parse(f"\\boxed{{{right}}}", parsing_timeout=None)
        answer = parse(f"\\boxed{{{said}}}", parsing_timeout=None)
        return bool(verify(gold, answer, timeout_seconds=None))
    except (MemoryError, RecursionError, OverflowError):
        return False  # what was said is no number that can be written down


def main() -> None:
    """Say "ready", and answer each pair of texts."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    logging.disable(logging.WARNING)  # it warns that nobody limits its time
    is_same("x", "x + 1")  # imports what parsing needs
    print("ready", flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        answer = is_same(*json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
