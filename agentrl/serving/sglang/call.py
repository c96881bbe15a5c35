"""One request that runs, from its first token to its last."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, field, replace

from agentrl.policy import GenerateRequest, Generation, StopReason


def _wire_id() -> str:
    return uuid.uuid4().hex


@dataclass(slots=True, eq=False)
class Call:
    """A request, and what has been sampled for it."""

    request: GenerateRequest
    wire_id: str = field(default_factory=_wire_id)
    """Its name at the server. SGLang aborts all requests whose names begin with the aborted one, so that all names
    have the same length."""
    answer: Generation | None = None
    """What the calls of ``/generate`` that have ended sampled."""
    task: asyncio.Task[Generation] | None = None
    sent: bool = False
    """The server has the request; otherwise it waits here for the end of a pause."""
    aborted: bool = False

    @property
    def sampled(self) -> list[int]:
        """The tokens so far."""
        return [] if self.answer is None else self.answer.token_ids

    @property
    def routes_from(self) -> int | None:
        """The first token whose experts are not known yet, where they are asked for."""
        first = self.request.routes_from
        if first is None or self.answer is None or self.answer.routes is None:
            return first
        return first + len(self.answer.routes)

    def ended(self, stop_reason: StopReason) -> Generation:
        """The answer so far as the whole answer."""
        if self.answer is None:
            return Generation(token_ids=[], logprobs=[], versions=[], stop_reason=stop_reason)
        return replace(self.answer, stop_reason=stop_reason)
