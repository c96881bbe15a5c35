"""Settings of what a run stores and serves for those who watch it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agentrl.config.section import Section


class ObserveConfig(Section):
    """Settings of what a run stores and serves for observers."""

    tokens: Annotated[int, Field(ge=1)] | Literal["all", "none"] = 64
    """Episodes per training step whose sampled tokens are stored with the advantage, log-probabilities, ratio and
    entropy that the trainer computed for them, in ``tokens/``: a number, ``all``, or ``none`` for no tables at all.
    Whole groups are chosen, in turn the one whose rewards differ most, the best and the worst. See docs/status.md."""
    prometheus_port: int | None = Field(None, ge=1, le=65535)
    """Port on the loopback address at which Prometheus can read the run (``/metrics``); no port by default. See
    docs/monitoring.md."""
