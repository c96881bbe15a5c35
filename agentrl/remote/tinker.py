"""Training run at a Tinker-compatible service: its client, the trainer's calls, and the newest sampler.

The calls block, so they are made in threads; the client has its own thread for the connections.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from agentrl.errors import TrainingError, UsageError, described_error
from agentrl.errors.foreign import DaemonThreads
from agentrl.registry import Extra

T = TypeVar("T")
TINKER = Extra(name="training-service", module="tinker")
ADAM_EPS = 1e-8
"""As in torch's AdamW."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TinkerRun:
    """Settings of a training run at a service."""

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
        """Thread that makes the calls in order; the package warns about calls from a thread with an event loop."""
        self._waits = DaemonThreads("agentrl-tinker-wait")
        """Threads that wait for results, so that a slow one does not delay later calls."""

    def resume_from(self, path: str) -> None:
        """Start the run with the weights and optimizer that `save` stored there."""
        self._saved = path

    def open(self) -> None:
        """Start the run, with new adapters unless it resumes; idempotent.

        Raises:
            UsageError: the key is not set, or the service refuses the run.
        """
        self._in_time(self._threads.submit(self._open), "the start of the run")

    def _in_time(self, call: Future[Any], what: str) -> Any:
        """Return the result of a call; abandon it after the time limit, because the package may retry for hours."""
        try:
            return call.result(self._run.timeout_s)
        except TimeoutError as late:
            if call.done():  # just now, or with an error of this type
                return call.result()
            raise TrainingError(
                f"the Tinker service at {self._run.url} does not answer: {what}",
                got=f"no answer in {self._run.timeout_s:g} s",
                expected="a service that is up, or a longer engine.timeout_s",
            ) from late

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

    def _call(self, what: str, start: Callable[[Any], Any], read: Callable[[Any], T]) -> T:
        """Make a call of the trainer and wait for its result; see `_start_call`."""
        return self._start_call(what, start, read)()

    def _start_call(self, what: str, start: Callable[[Any], Any], read: Callable[[Any], T]) -> Callable[[], T]:
        """Queue a call of the trainer after the earlier ones; return a function that waits for its result.

        `read` extracts the result from the service's answer.

        That function raises:
            TrainingError: the call failed, took longer than the time limit, or has an answer that cannot be read.
        """
        running = self._threads.submit(lambda: start(self._open()))

        def wait() -> T:
            try:
                pending = self._in_time(running, what)
                return read(self._in_time(self._waits.submit(pending.result), what))
            except (UsageError, TrainingError):
                raise
            except Exception as error:
                raise TrainingError(f"the Tinker service failed: {what}", got=described_error(error)) from error

        return wait

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-probability of each token but the first, given the tokens before it."""
        data = [self._datum(ids, {"weights": [0.0] * (len(ids) - 1)}) for ids in sequences]

        def read(answer: Any) -> list[list[float]]:
            found = [list(map(float, output["logprobs"].data)) for output in answer.loss_fn_outputs]
            if [len(one) + 1 for one in found] != [len(ids) for ids in sequences]:
                raise TrainingError(
                    "the Tinker service returned log-probabilities for the wrong number of tokens",
                    got=f"{len(found)} sequences, {sum(map(len, found))} tokens",
                    expected=f"{len(sequences)} sequences, {sum(len(ids) - 1 for ids in sequences)} tokens",
                )
            return found

        return self._call("a forward pass", lambda trainer: trainer.forward(data, "cross_entropy"), read)

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
        return self._call(
            "a gradient",
            lambda trainer: trainer.forward_backward(data, "ppo", config),
            lambda passed: float(passed.metrics["loss:sum"]),
        )

    def update(
        self, *, learning_rate: float, betas: tuple[float, float], weight_decay: float, clip: float
    ) -> float | None:
        """Update the weights with the accumulated gradients; return the gradient norm, ``None`` if not reported."""
        adam = self.tinker.AdamParams(
            learning_rate=learning_rate,
            beta1=betas[0],
            beta2=betas[1],
            eps=ADAM_EPS,
            weight_decay=weight_decay,
            grad_clip_norm=clip,
        )

        def read(answer: Any) -> float | None:
            norm = (answer.metrics or {}).get("grad_norm")
            return None if norm is None else float(norm)

        return self._call("an update", lambda trainer: trainer.optim_step(adam), read)

    def save(self, name: str) -> Callable[[], str]:
        """Begin to save weights and optimizer at the service; return a function that waits for the path."""
        return self._start_call("a checkpoint", lambda trainer: trainer.save_state(name), lambda saved: str(saved.path))

    def sampler(self) -> Any:
        """Return a sampler of the current weights, which later updates do not change."""
        return self._call("a sampler", lambda trainer: trainer.save_weights_and_get_sampling_client(), _as_is)

    def close(self) -> None:
        """End the run at the service; its checkpoints remain."""
        service, self._service, self._trainer = self._service, None, None
        if service is not None:
            self._in_time(self._threads.submit(lambda: service.close("success").result()), "the end of the run")

    def _datum(self, ids: Sequence[int], inputs: Mapping[str, Sequence[float]]) -> Any:
        types = self.tinker.types
        targets = {"target_tokens": list(ids[1:]), **{name: list(values) for name, values in inputs.items()}}
        return types.Datum(model_input=types.ModelInput.from_ints(list(ids[:-1])), loss_fn_inputs=targets)


def _as_is(answer: Any) -> Any:
    return answer
