"""Weight sync with an engine in this process."""

from __future__ import annotations

import time

from agentrl.policy import PolicyEngine
from agentrl.weights.probe import Probe
from agentrl.weights.sync import SyncReport, WeightSource, WeightSync


class InProcessSync(WeightSync):
    """Pause, hand the tensors over (or let the engine know that they changed), resume, verify.

    Args:
        trainer: Owns the weights.
        engine: Serves them.
        shared: The engine computes with the trainer's own tensors, so that nothing is copied; only right while
            nothing is sampled during optimizer steps.
        probe: What is compared.
    """

    def __init__(self, trainer: WeightSource, engine: PolicyEngine, *, shared: bool, probe: Probe) -> None:
        self._trainer = trainer
        self._engine = engine
        self._shared = shared
        self._probe = probe

    async def sync(self, version: int) -> SyncReport:
        """Serve the trainer's weights as `version`."""
        began = time.perf_counter()
        await self._engine.pause()
        await self._engine.update_weights(None if self._shared else self._trainer.weights(), version)
        await self._engine.resume()
        transported = time.perf_counter()
        difference = await self.verify()
        return SyncReport(
            version=version,
            transport_s=transported - began,
            verify_s=time.perf_counter() - transported,
            probe_difference=difference,
        )

    async def verify(self) -> float:
        """Compare engine and trainer as they are."""
        return (await self._probe.compare(self._engine, self._trainer)).difference
