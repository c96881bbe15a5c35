"""Ranks for tests: forked from this process, so that nobody waits for libraries to be imported once more."""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from support import forks
from support.forks import exit_code
from torch import distributed
from torch.distributed.tensor import debug

from agentrl.builders.trainers import build_on_ranks, build_trainer
from agentrl.builders.workers import serve
from agentrl.training.distributed import Ranks, join
from agentrl.training.distributed.group import leave

PATIENCE = timedelta(seconds=240)


class Group:
    """Ranks of which this process is the first; the others build again what they are told to."""

    def __init__(self, ranks):
        self.ranks = ranks

    def build(self, config, path=None, reference=None):
        return build_on_ranks(self.ranks, build_trainer, config, str(path or config.model.path), reference)


@contextmanager
def group_of(count, work: Callable[[Ranks], Any] = serve):
    """This process as rank 0 of a group; the others, forked here, do `work`."""
    if count == 1:
        yield Group(Ranks())
        return
    _forget_own_rank()
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)

    def other(rank):
        place = distributed.TCPStore("127.0.0.1", store.port, is_master=False, timeout=PATIENCE)
        work(join(place, rank=rank, count=count))
        leave()

    children = [forked(lambda rank=rank: other(rank)) for rank in range(1, count)]
    try:
        ranks = join(store, rank=0, count=count)
        yield Group(ranks)
        if work is serve:
            ranks.shutdown()
        while children:
            assert exit_code(children.pop()) == 0
    finally:
        leave()
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def in_ranks(count, work: Callable[[Ranks], Any]):
    """What `work` gives in rank 0; all ranks do it at the same time."""
    with group_of(count, work) as group:
        return work(group.ranks)


def forked(work: Callable[[], None]):
    """A copy of this process, which does some work as a rank of its own and ends."""

    def other():
        _forget_own_rank()
        work()

    return forks.forked(other)


def _forget_own_rank():
    """Torch caches which part of a tensor a rank has, for as long as the process lives."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("torch.distributed.tensor")]
    owners = [*modules, *(value for module in modules for value in vars(module).values() if isinstance(value, type))]
    for owner in owners:
        for value in list(vars(owner).values()):
            if hasattr(value, "cache_clear") and not isinstance(value, type):
                value.cache_clear()
    debug._clear_sharding_prop_cache()
