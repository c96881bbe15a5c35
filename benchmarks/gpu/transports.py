"""Speed of weight transports: a broadcast in a group of two (NCCL between GPUs), and CUDA IPC to another process.

agentrl bench transports --folder benchmarks/gpu megabytes=1024
"""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import threading
from datetime import timedelta
from typing import Any

import torch
from _gpu_setup import conditions, seconds_of
from torch.distributed import TCPStore
from torch.multiprocessing.reductions import reduce_tensor

from agentrl.weights.collective import TrainerGroup, make_group

TIMEOUT_S = 60.0
READER = """
import pickle, sys, time, torch
start = time.perf_counter()
function, arguments = pickle.load(sys.stdin.buffer)
tensor = function(*arguments)
total = int(tensor.long().sum())
print(total, time.perf_counter() - start)
"""


async def _broadcast(sent: torch.Tensor, received: torch.Tensor, rounds: int) -> list[float]:
    group = TrainerGroup("http://127.0.0.1:1", workers=1, device=sent.device, timeout_s=TIMEOUT_S)
    ready = threading.Event()

    def receive() -> None:
        store = TCPStore(group.info.address, group.info.port, None, False, timeout=timedelta(seconds=TIMEOUT_S))
        if received.is_cuda:
            torch.cuda.set_device(received.device)
        member = make_group(group.info, store, rank=1)
        ready.set()
        for _ in range(rounds):
            member.broadcast(received, 0).wait()

    other = threading.Thread(target=receive)
    other.start()
    await group.join()
    ready.wait(TIMEOUT_S)
    taken = [seconds_of(lambda: group._send(sent)) for _ in range(rounds)]
    other.join(TIMEOUT_S)
    group.close()
    return taken


def _ipc(sent: torch.Tensor) -> dict[str, Any]:
    """Let another process read the tensor in place."""
    handed = pickle.dumps(reduce_tensor(sent))
    found = subprocess.run([sys.executable, "-c", READER], input=handed, capture_output=True, check=True)
    total, seconds = found.stdout.split()
    return {"equal": int(total) == int(sent.long().sum()), "seconds_with_the_start_of_cuda": float(seconds)}


def run(*, megabytes: int | None = None, rounds: int = 5) -> dict[str, Any]:
    """Send data and compare the received data; on the CPU over gloo, within this process.

    Args:
        megabytes: Size of each message.
        rounds: Number of messages.
    """
    gpus = torch.cuda.device_count()
    size = (megabytes or (1024 if gpus else 4)) << 20
    devices = ("cuda:0", "cuda:1") if gpus > 1 else ("cpu", "cpu")
    sent = (torch.arange(size) % 251).to(torch.uint8).to(devices[0])
    received = torch.zeros(size, dtype=torch.uint8, device=devices[1])
    taken = asyncio.run(_broadcast(sent, received, rounds))
    return {
        **conditions(),
        "megabytes": size >> 20,
        "broadcast": {
            "backend": "nccl" if gpus > 1 else "gloo, for NCCL needs two GPUs",
            "equal": bool(torch.equal(sent.cpu(), received.cpu())),
            "gigabytes_per_s": size / min(taken) / 1e9,
        },
        "cuda_ipc": _ipc(sent.to("cuda:0")) if gpus else "needs a GPU",
    }
