"""Trackers that write the traces of episodes: files, and OpenTelemetry spans."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.observe.files import JsonLinesWriter
from agentrl.observe.run_folder import step_name
from agentrl.observe.traces import DISK, ENGINE, SUFFIX, TOOL, EpisodeTrace, SpanNode, span_tree
from agentrl.observe.trackers import Tracker

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import SpanContext

BATCH = 1000
"""Number of spans that are exported together."""


class TraceFileTracker(Tracker):
    """Files of traces, one per training step, which `agentrl trace` reads."""

    traces = True

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any]) -> None:
        self._folder = folder
        self._file: JsonLinesWriter | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Do nothing: ``metrics.jsonl`` has the metrics."""

    def trace(self, trace: EpisodeTrace) -> None:
        """Write a trace to the file of its step."""
        path = self._folder / step_name(trace.step, SUFFIX)
        if self._file is None or self._file.path != path:
            self.close()
            self._file = JsonLinesWriter(path)
        self._file.append(trace.to_record())

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class OpenTelemetryTracker(Tracker):
    """Spans of episodes by the conventions for generative AI; needs opentelemetry-exporter-otlp-proto-http.

    The standard variables configure it: ``OTEL_EXPORTER_OTLP_ENDPOINT`` (http://localhost:4318),
    ``OTEL_EXPORTER_OTLP_HEADERS``, ``OTEL_SERVICE_NAME`` (agentrl).
    """

    package = "opentelemetry.exporter.otlp.proto.http"
    distribution = "opentelemetry-exporter-otlp-proto-http"
    traces = True

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any]) -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._model = str(config.get("model", {}).get("path") or "scratch")
        self._engine = str(config.get("engine", {}).get("type", "local"))
        service = os.environ.get("OTEL_SERVICE_NAME", "agentrl")
        self._resource = Resource.create({SERVICE_NAME: service, "agentrl.run": name})
        self._scope = InstrumentationScope("agentrl")
        self._ids = RandomIdGenerator()
        self._exporter = self.make_exporter()
        self._spans: list[ReadableSpan] = []

    def make_exporter(self) -> SpanExporter:
        """Return the exporter of spans; subclasses may choose another one."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Export the spans of the step's episodes."""
        self._flush()

    def trace(self, trace: EpisodeTrace) -> None:
        """Make the spans of an episode."""
        if trace.group:
            self._add(span_tree(trace), trace, self._ids.generate_trace_id(), None)
            if len(self._spans) >= BATCH:
                self._flush()

    def _add(self, node: SpanNode, trace: EpisodeTrace, tree: int, above: SpanContext | None) -> None:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
        from opentelemetry.trace.status import Status, StatusCode

        if node.kind == DISK:
            return
        name, attributes = self._describe(node, trace)
        own = SpanContext(tree, self._ids.generate_span_id(), is_remote=False, trace_flags=TraceFlags(1))
        failed = node.kind == "episode" and trace.is_failure
        self._spans.append(
            ReadableSpan(
                name,
                context=own,
                parent=above,
                resource=self._resource,
                attributes={key: value for key, value in attributes.items() if value is not None},
                kind=SpanKind.CLIENT if node.kind == ENGINE else SpanKind.INTERNAL,
                status=Status(StatusCode.ERROR, trace.error) if failed else Status(StatusCode.UNSET),
                start_time=round(node.began * 1e9),
                end_time=round(node.ended * 1e9),
                instrumentation_scope=self._scope,
            )
        )
        for child in node.children:
            self._add(child, trace, tree, own)

    def _flush(self) -> None:
        spans, self._spans = self._spans, []
        if spans:
            self._exporter.export(spans)

    def _describe(self, node: SpanNode, trace: EpisodeTrace) -> tuple[str, dict[str, Any]]:
        """Return the name and the attributes of a span."""
        if node.kind == "episode":
            return f"invoke_agent {trace.environment}", {
                "gen_ai.operation.name": "invoke_agent",
                "gen_ai.provider.name": self._engine,
                "gen_ai.agent.name": trace.environment,
                "gen_ai.conversation.id": trace.name,
                "error.type": trace.outcome if trace.is_failure else None,
                "agentrl.step": trace.step,
                "agentrl.task": trace.task,
                "agentrl.group": trace.group,
                "agentrl.attempt": trace.attempt,
                "agentrl.outcome": trace.outcome,
                "agentrl.reward": trace.reward,
                "agentrl.success": trace.success,
            }
        if node.kind == ENGINE:
            turn = node.turn
            answer = (
                {}
                if turn is None
                else {
                    "gen_ai.usage.input_tokens": turn.prompt_tokens,
                    "gen_ai.usage.output_tokens": turn.answer_tokens,
                    "gen_ai.response.finish_reasons": [turn.stop_reason],
                    "agentrl.role": turn.role,
                }
            )
            return f"chat {self._model}", {
                "gen_ai.operation.name": "chat",
                "gen_ai.provider.name": self._engine,
                "gen_ai.request.model": self._model,
                "gen_ai.conversation.id": trace.name,
                **answer,
            }
        if node.kind == TOOL:
            return f"execute_tool {node.name}", {
                "gen_ai.operation.name": "execute_tool",
                "gen_ai.tool.name": node.name,
                "gen_ai.tool.type": "function",
            }
        if node.kind == "turn":
            return node.name, {"agentrl.valid": None if node.turn is None else node.turn.valid}
        return f"{node.kind} {node.name}", {"agentrl.wait": node.kind}

    def close(self) -> None:
        """Export the spans that are left."""
        self._flush()
        self._exporter.shutdown()
