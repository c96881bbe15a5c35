"""Entry point `agentrl` with faults in its process: garbled answers of the local engine, clock jumps, a slow disk.

    python -m agentrl.testing.chaos.program INBOX LEDGER train …

A fault is a file in the folder INBOX, which this process removes when it accepts the fault. Otherwise the program is
``agentrl train …``.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from agentrl.cli import main
from agentrl.engine import GenerateRequest, Generation
from agentrl.errors import EngineError
from agentrl.serving.local import LocalEngine
from agentrl.testing.chaos.plan import Target
from agentrl.testing.chaos.world import Ledger

COMMAND_POLL_S = 0.02
LATE_ANSWER_S = 3.0
"""Delay in seconds of a late answer."""
SLOW_DISK_S = 2.0
"""Delay in seconds of a sync to a slow disk."""
SLOW_SYNCS = 3
CLOCK_S = 86_400.0
"""Size in seconds of a clock jump."""


def garbled_fields(
    way: str, answer: Generation, *, vocab_size: int, version: int, max_tokens: int, draw: int
) -> dict[str, Any]:
    """Return the fields of an answer that a fault changes, with their invalid values.

    `way` is one of `agentrl.testing.chaos.plan.GARBLED`, and `draw` the seed of the changed position.
    """
    at = random.Random(draw).randrange(len(answer.token_ids))
    ids, logprobs, versions = list(answer.token_ids), list(answer.logprobs), list(answer.versions)
    match way:
        case "id out of range" | "negative id" | "fractional id":
            wrong: dict[str, Any] = {"id out of range": vocab_size, "negative id": -1, "fractional id": 1.5}
            return {"token_ids": [*ids[:at], wrong[way], *ids[at + 1 :]]}
        case "NaN log-probability" | "positive log-probability" | "infinite log-probability":
            logprobs[at] = {"NaN": float("nan"), "positive": 0.5, "infinite": float("-inf")}[way.partition(" ")[0]]
            return {"logprobs": logprobs}
        case "version of the future" | "negative version":
            versions[at] = version + 1 if way.endswith("future") else -1
            return {"versions": versions}
        case "too many tokens" | "no tokens":
            times = 0 if way == "no tokens" else max_tokens + 1
            return {"token_ids": ids * times, "logprobs": logprobs * times, "versions": versions * times}
        case "missing ids" | "missing log-probabilities":
            return {"token_ids" if way.endswith("ids") else "logprobs": None}
        case "fewer log-probabilities":
            return {"logprobs": logprobs[:-1]}
        case "fewer versions":
            return {"versions": versions[:-1]}
        case "unknown stop reason":
            return {"stop_reason": "exploded"}
        case "negative duration":
            return {"decode_s": -1.0}
        case _:
            raise ValueError(f"unknown change of an answer: {way}")


class Inbox:
    """Faults that the campaign sends to this process."""

    def __init__(self, folder: Path, ledger: Ledger) -> None:
        self._folder, self._ledger = folder, ledger
        self._answers: deque[dict[str, Any]] = deque()
        self._garbled: dict[str, dict[str, Any]] = {}
        """Pending faults by the id of the request whose answer they change."""
        self._clock_s = 0.0
        self._slow_syncs = 0
        self._sync, self._time = os.fsync, time.time

    def install(self) -> None:
        """Patch the engine's methods, ``time.time`` and ``os.fsync``, and start to watch the folder."""
        generate, answer = LocalEngine.generate, LocalEngine._answer

        async def disturbed_generate(engine: LocalEngine, request: GenerateRequest) -> Generation:
            await self._disturb(request)
            return await generate(engine, request)

        def garbled_answer(engine: LocalEngine, job: Any, reason: Any) -> None:
            answer(engine, job, reason)
            self._garble(engine, job)

        for owner, name, replacement in (
            (LocalEngine, "generate", disturbed_generate),
            (LocalEngine, "_answer", garbled_answer),
            (os, "fsync", self._slow_sync),
        ):
            setattr(owner, name, replacement)
        time.time = lambda: self._time() + self._clock_s
        threading.Thread(target=self._watch, name="chaos", daemon=True).start()

    def _watch(self) -> None:
        while True:
            for file in sorted(self._folder.glob("*.json")):
                fault = json.loads(file.read_bytes())
                file.unlink()
                self._take(fault)
            time.sleep(COMMAND_POLL_S)

    def _take(self, fault: dict[str, Any]) -> None:
        match fault["target"]:
            case Target.ANSWER:
                self._answers.append(fault)
                return  # it takes effect with the next request
            case Target.CLOCK:
                self._clock_s += CLOCK_S if fault["way"] == "forward" else -CLOCK_S
            case Target.DISK:
                self._slow_syncs = SLOW_SYNCS
        self._note(fault)

    def _note(self, fault: dict[str, Any]) -> None:
        self._ledger.append("fault", target=fault["target"], way=fault["way"])

    def _slow_sync(self, descriptor: Any) -> None:
        if self._slow_syncs > 0:
            self._slow_syncs -= 1
            time.sleep(SLOW_DISK_S)
        self._sync(descriptor)

    async def _disturb(self, request: GenerateRequest) -> None:
        """Drop, delay or fail a request, or mark its answer to be garbled."""
        if not self._answers:
            return
        fault = self._answers.popleft()
        self._note(fault)
        match fault["way"]:
            case "lost":
                await asyncio.Event().wait()
            case "failed":
                raise EngineError(f"request {request.request_id} failed", got="a fault of agentrl chaos")
            case "late":
                await asyncio.sleep(LATE_ANSWER_S)
            case _:
                self._garbled[request.request_id] = fault

    def _garble(self, engine: LocalEngine, job: Any) -> None:
        """Change the answer of a request in place, before it is read."""
        fault = self._garbled.pop(job.request.request_id, None)
        if fault is None or job.future.cancelled() or not (answer := job.future.result()).token_ids:
            return
        changed = garbled_fields(
            fault["way"],
            answer,
            vocab_size=engine.capabilities.vocab_size,
            version=engine.version,
            max_tokens=job.request.params.max_tokens,
            draw=fault["draw"],
        )
        for name, value in changed.items():
            object.__setattr__(answer, name, value)


if __name__ == "__main__":
    Inbox(Path(sys.argv[1]), Ledger(sys.argv[2])).install()
    sys.argv = ["agentrl", *sys.argv[3:]]
    main()
