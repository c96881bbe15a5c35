"""A rank that meets others again and again, so that many tests share the seconds in which it imports its libraries."""

import sys
from datetime import timedelta

from torch import distributed

from agentrl.assembly.rank import serve
from agentrl.training import logprobs
from agentrl.training.ranks import join
from agentrl.training.ranks.group import leave

chunk = int(sys.argv[1])
logprobs.chunk_tokens = lambda vocabulary, megabytes: chunk

for line in sys.stdin:
    port, rank, count = map(int, line.split())
    store = distributed.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=120))
    serve(join(store, rank=rank, count=count))
    leave()
