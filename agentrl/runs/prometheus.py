"""Prometheus endpoint of a run: its current activity, and the metrics of its last training step.

It runs in threads of its own, so that it also answers while the event loop or the trainer hangs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from agentrl.errors import UsageError
from agentrl.observe.progress import RunStatus
from agentrl.observe.run_status import RunSnapshot
from agentrl.remote.listening import LOCAL_NAMES, is_own_host, is_own_origin

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

    from prometheus_client import Metric

PREFIX = "agentrl_"
STEP_PREFIX = "agentrl_step_"
"""Prefix of the metrics of the last training step: ``agentrl_step_success_mean`` is ``success/mean``."""
LOOPBACK = "127.0.0.1"
ENDPOINT_END_S = 2.0
"""Seconds for the end of the endpoint's thread."""


def metric_name(name: str) -> str:
    """Return the Prometheus name of a metric of a step.

    >>> metric_name("tool/my tool/seconds")
    'agentrl_step_tool_my_tool_seconds'
    """
    return STEP_PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", name)


class RunCollector:
    """Collector of a run's metrics, for a registry of prometheus_client.

    Args:
        run: Name of the run, which becomes the label ``run``.
        status: Status that the run updates in place.
        snapshot: Returns the run's current activity; it takes no lock.
    """

    def __init__(self, run: str, status: RunStatus, snapshot: Callable[[], RunSnapshot]) -> None:
        self._run, self._status, self._snapshot = run, status, snapshot

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        now = self._snapshot()
        yield self._gauge("finished_steps", "Finished training steps.", {(): now.step})
        yield self._gauge("planned_steps", "Training steps of the whole run.", {(): now.steps})
        yield self._gauge("phase", "1 for the phase of the run.", {(now.phase,): 1}, "phase")
        states = {(state,): count for state, count in now.episodes.items()}
        yield self._gauge("episodes", "Running episodes by what they wait for.", states, "state")
        yield self._gauge("episodes_done", "Episodes that ended since the last training step.", {(): now.episodes_done})
        yield self._gauge("attempts_failed", "Failed attempts since the last training step.", {(): now.attempts_failed})
        yield self._counter("sampled_tokens", "Tokens sampled since the start.", self._status.sampled_tokens)
        for name, text, values in (
            ("engine_running", "Requests that an engine is processing.", {(e.name,): e.running for e in now.engines}),
            ("engine_queue", "Requests that wait in an engine.", {(e.name,): e.queue for e in now.engines}),
            (
                "engine_tokens_per_second",
                "Tokens that an engine samples per second.",
                {(e.name,): e.tokens_per_s for e in now.engines if e.tokens_per_s is not None},
            ),
        ):
            yield self._gauge(name, text, values, "engine")
        longest: dict[tuple[str, ...], float] = {}
        for wait in now.waits:
            longest[wait.kind,] = max(longest.get((wait.kind,), 0.0), now.time - wait.since)
        yield self._gauge("longest_wait_seconds", "Longest current wait, by what is waited for.", longest, "kind")
        blocked = 0.0 if now.blocked is None else now.time - now.blocked.since
        yield self._gauge("event_loop_blocked_seconds", "Time for which the event loop is blocked.", {(): blocked})
        for name, text, value in (
            ("memory_bytes", "Memory of the trainer's process.", now.memory_bytes),
            ("seconds_left", "Estimated time until the last step.", now.seconds_left),
        ):
            if value is not None:
                yield self._gauge(name, text, {(): value})
        by_name = {metric_name(original): (original, value) for original, value in self._status.metrics.items()}
        for name, (original, value) in by_name.items():  # of two with the same name, the last one
            yield self._gauge(name.removeprefix(PREFIX), f"{original} of the last training step.", {(): value})

    def _gauge(self, name: str, text: str, values: Mapping[Any, float | int], *labels: str) -> Metric:
        from prometheus_client.core import GaugeMetricFamily

        family = GaugeMetricFamily(PREFIX + name, text, labels=["run", *labels])
        for found, value in values.items():
            family.add_metric([self._run, *found], float(value))
        return family

    def _counter(self, name: str, text: str, value: int) -> Metric:
        from prometheus_client.core import CounterMetricFamily

        family = CounterMetricFamily(PREFIX + name, text, labels=["run"])
        family.add_metric([self._run], float(value))
        return family


def check_prometheus(port: int | None) -> None:
    """Check that the endpoint can be served.

    Raises:
        UsageError: the package prometheus-client is missing.
    """
    if port is None:
        return
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        raise UsageError(
            "observe.prometheus_port needs the package prometheus-client",
            got="it is not installed",
            hint="to install it: pip install prometheus-client",
        ) from None


@contextmanager
def prometheus_endpoint(
    port: int | None, run: str, status: RunStatus, snapshot: Callable[[], RunSnapshot]
) -> Iterator[None]:
    """Serve ``http://127.0.0.1:PORT/metrics`` while the block runs; do nothing without a port.

    Requests whose ``Host`` or ``Origin`` is another site are refused, as by all servers without a token.

    Args:
        port: Port on the loopback address.
        run: Name of the run.
        status: Status that the run updates in place.
        snapshot: Returns the run's current activity.

    Raises:
        UsageError: the port is in use, or the package prometheus-client is missing.
    """
    if port is None:
        yield
        return
    check_prometheus(port)
    from prometheus_client import CollectorRegistry, make_wsgi_app, start_http_server

    registry = CollectorRegistry(auto_describe=False)
    try:
        server, thread = start_http_server(port, addr=LOOPBACK, registry=registry)
    except OSError as error:
        raise UsageError(
            f"port {port} cannot be served (observe.prometheus_port)", got=error, hint="choose another port"
        ) from error
    try:
        server.set_app(_guard(make_wsgi_app(registry)))
        registry.register(RunCollector(run, status, snapshot))
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join(ENDPOINT_END_S)


def _guard(application: WSGIApplication) -> WSGIApplication:
    """Wrap an application so that it rejects requests with a foreign ``Host`` or ``Origin``."""

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        origin = environ.get("HTTP_ORIGIN")
        if is_own_host(environ.get("HTTP_HOST", ""), LOCAL_NAMES) and (
            origin is None or is_own_origin(origin, LOCAL_NAMES)
        ):
            return application(environ, start_response)
        start_response("403 Forbidden", [("Content-Type", "text/plain; charset=utf-8")])
        return [b"this server answers only requests to this machine\n"]

    return answer
