"""Ranks 1, 2, … of a trainer: they do what rank 0 says until it says that this was all, or is gone.

    python -m agentrl.builders.workers

is how a run with ``trainer.processes`` starts them; under torchrun every process runs the same command line, and those
that are not rank 0 come here.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping

from agentrl.builders.trainers import BUILD
from agentrl.training.distributed import Ranks, join
from agentrl.training.distributed.group import leave
from agentrl.training.distributed.launch import join_starter, launched_ranks


def followed_launcher() -> bool:
    """Serve as a rank to the end, if torchrun has started this process as another one than rank 0.

    Returns:
        True if it did: only rank 0 runs the command.
    """
    if launched_ranks() <= 1 or not (rank := int(os.environ["RANK"])):
        return False
    serve(join(None, rank=rank, count=launched_ranks()))
    leave()
    return True


def serve(ranks: Ranks) -> None:
    """Run rank 0's calls until there are no more; an exception ends this rank, and with it the run."""
    calls: Mapping[str, Callable[..., object]] = {}
    while (call := ranks.next_call()) is not None:
        if call.name == BUILD:
            calls = {}  # what was built before is gone before there is more
            build, *arguments = call.arguments
            calls = build(*arguments, ranks=ranks).calls()
        else:
            calls[call.name](*call.arguments)


def main() -> None:
    """Serve as a rank that `agentrl.training.distributed.launch` has started."""
    threading.Thread(target=_end_with_standard_input, name="end", daemon=True).start()
    serve(join_starter())
    leave()
    # not by return: threads of torch may still want the interpreter, which ends the process by abort where it is gone
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _end_with_standard_input() -> None:
    """End this process when the one that started it ends, which holds the other end of standard input."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
