"""Which tensors of a server are not those that it should have, by checksum."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from agentrl.errors import AgentRLError, EngineError, TrainingError, async_boundary
from agentrl.server import InferenceServer

STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Tensors that servers keep as one, by the name that they give it."""
ROWS = 64
"""Servers fill the vocabulary up with zeros to a multiple of so many rows."""
MOST_NAMED = 8
NAMING_S = 30.0
"""Deadline of the search: without names the failure is still told."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspects:
    """What checksums tell. Names are the trainer's."""

    differing: Sequence[str]
    unknown: Sequence[str]
    """For which the server gives no checksum."""

    def __str__(self) -> str:
        if self.differing:
            return f"tensors that differ by checksum: {_listed(self.differing)}"
        if self.unknown:
            return f"all checksums agree; the server gives none for {_listed(self.unknown)}"
        return "all checksums agree: the two sides compute the model differently"


async def name_tensors(
    error: TrainingError, server: InferenceServer, weights: Callable[[], Mapping[str, Tensor]]
) -> TrainingError:
    """A failure of the probe that also names the tensors which differ, where the server's checksums tell.

    Args:
        error: What the probe says.
        server: Answered the probe.
        weights: What it should have; read in a thread.
    """
    try:
        async with async_boundary(EngineError, "the search for tensors that differ", deadline_s=NAMING_S):
            told = await server.checksums()
            found = await asyncio.to_thread(lambda: compare_checksums(told, weights()))
    except AgentRLError as failure:
        _log.info("the tensors of %s that differ are not known: %s", server.url, failure)
        return error
    if found is None:
        return error
    return TrainingError(error.what, got=error.got, expected=error.expected, hint=str(found))


def compare_checksums(told: Mapping[str, str], weights: Mapping[str, Tensor]) -> Suspects | None:
    """Compare a server's checksums with those of tensors; ``None`` when its checksums are of another kind.

    Args:
        told: As `agentrl.server.InferenceServer.checksums` gives them.
        weights: What the server should have.
    """
    parts = {name: sent for name in told if (sent := _parts(name, weights))}
    agree = {name: told[name] in _checksums([weights[part] for part in sent]) for name, sent in parts.items()}
    if not any(agree.values()):
        return None
    known = {part for sent in parts.values() for part in sent}
    return Suspects(
        differing=[part for name, sent in parts.items() if not agree[name] for part in sent],
        unknown=[name for name in weights if name not in known],
    )


def _parts(name: str, weights: Mapping[str, Tensor]) -> list[str]:
    """The trainer's names of what a server keeps under a name; none when it is not known."""
    if name in weights:
        return [name]
    for stacked, parts in STACKED.items():
        names = [name.replace(stacked, part) for part in parts]
        if stacked in name and all(part in weights for part in names):
            return names
    return []


def _checksums(tensors: Sequence[Tensor]) -> set[str]:
    """Of tensors one after the other, as they are and filled up."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    filled = digest.copy()
    missing = -sum(tensor.shape[0] for tensor in tensors if tensor.dim()) % ROWS
    filled.update(bytes(missing * tensors[0][:1].nbytes if tensors[0].dim() else 0))
    return {digest.hexdigest()[:16], filled.hexdigest()[:16]}


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(islice(names, MOST_NAMED))
    return shown if len(names) <= MOST_NAMED else f"{shown} and {len(names) - MOST_NAMED} more"
