"""The conformance kit of policy engines: run it on an engine of your own.

report = await check_engine(lambda: MyEngine(...), reference=logprobs_of_my_model)
print(report)
report.raise_on_failure()
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from agentrl.errors import AgentRLError, EngineError
from agentrl.policy import PolicyEngine
from agentrl.testing.engine_checks import CHECKS
from agentrl.testing.engine_probe import CheckSkipped, EngineProbe, NewWeights, Reference, Sampling


class Verdict(enum.StrEnum):
    """How a check ended."""

    PASSED = "passed"
    FAILED = "FAILED"
    SKIPPED = "skipped"
    """It does not apply to this engine, or needs what was not given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRow:
    """One check of a report."""

    check: str
    """Its name: a function in `agentrl.testing.engine_checks`, whose docstring says what is promised."""
    verdict: Verdict
    detail: str
    """What was found."""

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return self.verdict is not Verdict.FAILED


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What `check_engine` found."""

    rows: list[CheckRow]

    @property
    def passed(self) -> bool:
        """Whether every check passed or was skipped."""
        return all(row.passed for row in self.rows)

    def raise_on_failure(self) -> None:
        """Do nothing when all is well.

        Raises:
            EngineError: names the checks that failed.
        """
        if not self.passed:
            failed = "; ".join(f"{row.check}: {row.detail}" for row in self.rows if not row.passed)
            raise EngineError("the engine does not keep its promises", got=failed)

    def __str__(self) -> str:
        return "\n".join(f"{row.verdict:8} {row.check:18} {row.detail}".rstrip() for row in self.rows)


async def check_engine(
    factory: Callable[[], PolicyEngine],
    *,
    reference: Reference | None = None,
    new_weights: NewWeights = lambda: None,
    tolerance: float = 1e-5,
    sampling: Sampling | None = None,
    kill: Callable[[], object] | None = None,
    deadline_s: float = 120.0,
) -> EngineReport:
    """Check what `agentrl.policy` promises, on one engine, from its start to its close.

    Requests that are to be met in flight are watched, not timed: the kit acts when it sees that one has begun.

    Args:
        factory: Makes the engine; it has no session and no request yet. Called once more where there is a `kill`.
        reference: Log-probabilities of the model that the engine serves, on its current weights: called with ids and
            a temperature, gives one value for each id but the first. Without it, nothing is compared.
        new_weights: Makes new weights and gives what `update_weights` takes; ``None`` where the engine shares them.
        tolerance: Largest difference from the reference that is accepted.
        sampling: Asks an engine of another process how many requests have their first token and not their last, as
            `ServerEngine.sampling` does. Left out, `metrics` is watched: its `sampled_tokens` must count the tokens of
            requests that still run.
        kill: Ends the process that samples, as SIGKILL does; the engine is not used any more. Left out, that is not
            checked.
        deadline_s: Most seconds of one check.
    """
    probe = EngineProbe(
        factory=factory,
        reference=reference,
        new_weights=new_weights,
        tolerance=tolerance,
        sampling=sampling,
        kill=kill,
    )
    await probe.start()
    try:
        return EngineReport([await _run(check, probe, deadline_s) for check in CHECKS])
    finally:
        await probe.engine.close()


async def _run(check: Callable[[EngineProbe], Awaitable[str]], probe: EngineProbe, deadline_s: float) -> CheckRow:
    try:
        async with asyncio.timeout(deadline_s) as limit:
            verdict, detail = Verdict.PASSED, await check(probe)
    except CheckSkipped as skipped:
        verdict, detail = Verdict.SKIPPED, str(skipped)
    except Exception as error:  # the boundary of a check: whatever goes wrong in it is its result
        with suppress(AgentRLError):
            await probe.engine.resume()
        verdict, detail = Verdict.FAILED, f"{type(error).__name__}: {error}"
        if limit.expired():
            detail = f"it did not end within {deadline_s:g} s"
    return CheckRow(check=getattr(check, "__name__", "check"), verdict=verdict, detail=detail)
