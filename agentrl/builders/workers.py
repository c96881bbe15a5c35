"""Ranks 1, 2, … of a trainer, which run rank 0's calls until shutdown or until rank 0 exits.

    python -m agentrl.builders.workers

A run with ``trainer.processes`` starts them with this command. Under torchrun, every process runs the same command
line, and the ranks other than 0 use `serve_launched_rank`.
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


def serve_launched_rank() -> bool:
    """Serve as a rank until shutdown, if torchrun has started this process and it is not rank 0.

    Returns:
        True if it served: only rank 0 runs the command.
    """
    if launched_ranks() <= 1 or not (rank := int(os.environ["RANK"])):
        return False
    serve(join(None, rank=rank, count=launched_ranks()))
    leave()
    return True


def serve(ranks: Ranks) -> None:
    """Run rank 0's calls until shutdown; an exception ends this rank and the run."""
    calls: Mapping[str, Callable[..., object]] = {}
    while (call := ranks.next_call()) is not None:
        if call.name == BUILD:
            calls = {}  # frees the previous parts before new ones are built
            build, *arguments = call.arguments
            calls = build(*arguments, ranks=ranks).calls()
        else:
            calls[call.name](*call.arguments)


def main() -> None:
    """Serve as a rank that `agentrl.training.distributed.launch` has started."""
    threading.Thread(target=_end_with_standard_input, name="end", daemon=True).start()
    serve(join_starter())
    leave()
    # exit without interpreter shutdown: threads of torch that still use the interpreter would abort the process
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _end_with_standard_input() -> None:
    """Exit when standard input closes, because the parent process has exited."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
