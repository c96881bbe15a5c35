"""A training run at a Tinker-compatible service: its client, the calls of the trainer, and the newest sampler.

The calls block, and are made in threads; the client has a thread of its own for the connections.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.errors import TrainingError, UsageError, described_error
from agentrl.errors.foreign import DaemonThreads
from agentrl.registry import Extra

TINKER = Extra(name="training-service", module="tinker")
ADAM_EPS = 1e-8
"""As in torch's AdamW."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TinkerRun:
    """Settings with which a training run at a service is started."""

    url: str
    base_model: str
    rank: int
    seed: int
    api_key_variable: str = "TINKER_API_KEY"
    timeout_s: float = 600.0


class TinkerClient:
    """Client of one training run; the first call starts it.

    Raises:
        UsageError: the package tinker is missing.
    """

    def __init__(self, run: TinkerRun) -> None:
        self.tinker = TINKER.load()
        self._run = run
        self._service: Any = None
        self._trainer: Any = None
        self._saved: str | None = None
        self._threads = DaemonThreads("agentrl-tinker", limit=1)
        """Makes the calls, because the package warns about calls from a thread with an event loop."""

    def resume_from(self, path: str) -> None:
        """Start the run with the weights and optimizer that `save` stored there."""
        self._saved = path

    def open(self) -> None:
        """Start the run, with new adapters unless it resumes; idempotent.

        Raises:
            UsageError: the key is not set, or the service refuses the run.
        """
        self._threads.submit(self._open).result()

    def _open(self) -> Any:
        """Return the trainer, after its start."""
        if self._trainer is not None:
            return self._trainer
        key = os.environ.get(self._run.api_key_variable)
        if not key:
            raise UsageError(
                f"the environment variable {self._run.api_key_variable} is not set",
                expected="the API key of the Tinker service (engine.api_key_variable)",
            )
        try:
            self._service = self.tinker.ServiceClient(base_url=self._run.url, api_key=key)
            if self._saved is not None:
                made = self._service.create_training_client_from_state_with_optimizer(self._saved)
            else:
                made = self._service.create_lora_training_client(
                    base_model=self._run.base_model, rank=self._run.rank, seed=self._run.seed, train_unembed=False
                )
            self._trainer = made.result(self._run.timeout_s)
        except Exception as error:
            raise UsageError(
                f"the Tinker service at {self._run.url} did not start a run of {self._saved or self._run.base_model}",
                got=described_error(error),
                expected="a service that trains this model (engine.url, engine.base_model)",
            ) from error
        return self._trainer

    def _call(self, what: str, start: Callable[[Any], Any]) -> Any:
        """Make a call of the trainer and wait for its result; see `_started`."""
        return self._started(what, start)()

    def _started(self, what: str, start: Callable[[Any], Any]) -> Callable[[], Any]:
        """Make a call of the trainer, after the earlier ones; return a function that waits for its result.

        That function raises:
            TrainingError: the call failed, or took longer than the time limit.
        """
        running = self._threads.submit(lambda: start(self._open()))

        def wait() -> Any:
            try:
                return self._threads.submit(lambda: running.result().result(self._run.timeout_s)).result()
            except UsageError:
                raise
            except Exception as error:
                raise TrainingError(f"the Tinker service failed: {what}", got=described_error(error)) from error

        return wait

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-probability of each token but the first, given the tokens before it."""
        data = [self._datum(ids, {"weights": [0.0] * (len(ids) - 1)}) for ids in sequences]
        found = self._call("a forward pass", lambda trainer: trainer.forward(data, "cross_entropy"))
        return [list(map(float, output["logprobs"].data)) for output in found.loss_fn_outputs]

    def add_gradients(
        self,
        sequences: Sequence[Sequence[int]],
        old_logprobs: Sequence[Sequence[float]],
        advantages: Sequence[Sequence[float]],
        clip: tuple[float, float],
    ) -> float:
        """Add the gradient of the sum of ``-min(r A, clip(r) A)``, r = pi / old, and return the sum.

        `old_logprobs` and `advantages` have an entry for each token but the first; an advantage of 0 does not train.
        """
        data = [
            self._datum(ids, {"logprobs": old, "advantages": own})
            for ids, old, own in zip(sequences, old_logprobs, advantages, strict=True)
        ]
        config = {"clip_low_threshold": clip[0], "clip_high_threshold": clip[1]}
        passed = self._call("a gradient", lambda trainer: trainer.forward_backward(data, "ppo", config))
        return float(passed.metrics["loss:sum"])

    def update(self, *, learning_rate: float, betas: tuple[float, float], weight_decay: float, clip: float) -> float:
        """Update the weights from the added gradients; return the gradient's norm, NaN if the service hides it."""
        adam = self.tinker.AdamParams(
            learning_rate=learning_rate,
            beta1=betas[0],
            beta2=betas[1],
            eps=ADAM_EPS,
            weight_decay=weight_decay,
            grad_clip_norm=clip,
        )
        updated = self._call("an update", lambda trainer: trainer.optim_step(adam))
        return float((updated.metrics or {}).get("grad_norm", float("nan")))

    def save(self, name: str) -> Callable[[], str]:
        """Begin to save weights and optimizer at the service; return a function that waits for the path."""
        wait = self._started("a checkpoint", lambda trainer: trainer.save_state(name))
        return lambda: str(wait().path)

    def sampler(self) -> Any:
        """Return a sampler of the current weights, which later updates do not change."""
        return self._call("a sampler", lambda trainer: trainer.save_weights_and_get_sampling_client())

    def close(self) -> None:
        """End the run at the service; its checkpoints remain."""
        service, self._service, self._trainer = self._service, None, None
        if service is not None:
            self._threads.submit(lambda: service.close("success").result(self._run.timeout_s)).result()

    def _datum(self, ids: Sequence[int], inputs: Mapping[str, Sequence[float]]) -> Any:
        types = self.tinker.types
        targets = {"target_tokens": list(ids[1:]), **{name: list(values) for name, values in inputs.items()}}
        return types.Datum(model_input=types.ModelInput.from_ints(list(ids[:-1])), loss_fn_inputs=targets)
