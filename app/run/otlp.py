"""Sends spans by OTLP, with OpenTelemetry's SDK: the extra ``otel``. Imported only when spans are wanted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import Thread
from time import monotonic
from typing import Final

import structlog
from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags

from app import __version__
from app.admission.spans import DecisionSpan, Sampling, Spans
from app.node.own_name import own_name

SPAN_NAME: Final = "quotagate.decision"
CLOSE_WITHIN_S: Final = 2.0
LOG_EVERY_S: Final = 60.0
"""How often the SDK's exporter may log: while its collector is away it logs each batch."""

log: Final = structlog.get_logger("quotagate.traces")


class CountingExporter(SpanExporter):
    """Counts the spans that go through an exporter, and those that it could not send."""

    def __init__(self, exporter: SpanExporter) -> None:
        self.done = self.failed = 0
        self._exporter = exporter

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            self.done += len(spans)
            if result is not SpanExportResult.SUCCESS:
                self.failed += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class Traces:
    """The spans of one process, on their way to a collector.

    The SDK's batch processor sends them from a thread of its own: a collector that hangs delays no decision.

    Args:
        sampling: which requests get spans.
        most_waiting: how many spans may wait for the exporter.

    Attributes:
        spans: gives decisions their spans.

    Raises:
        ValueError, OSError, RuntimeError: a variable of OpenTelemetry is wrong, or there is no thread.
    """

    def __init__(self, sampling: Sampling, most_waiting: int) -> None:
        logging.getLogger(trace_exporter.__name__).addFilter(_NowAndThen().allows)
        self.spans = Spans(sampling, self._give)
        self._exporter = CountingExporter(trace_exporter.OTLPSpanExporter())
        self._processor = BatchSpanProcessor(self._exporter, most_waiting)
        self._most_waiting = most_waiting
        self._scope = InstrumentationScope("quotagate", __version__)
        self._resource = _resource()
        self._given = self._unqueued = 0

    def dropped(self) -> Mapping[tuple[str, ...], float]:
        """How many sampled decisions have no span at the collector, by reason."""
        return {
            ("rate",): self.spans.over_rate,
            ("queue",): self._unqueued,
            ("export",): self._exporter.failed,
        }

    def _give(self, span: DecisionSpan) -> None:
        if self._given - self._exporter.done >= self._most_waiting:  # the SDK would drop it uncounted
            self._unqueued += 1
            return
        self._given += 1
        # Made without the SDK's tracer, which would sample once more.
        context = SpanContext(
            span.trace_id, span.span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED)
        )
        parent = span.parent and SpanContext(span.parent.trace_id, span.parent.span_id, is_remote=True)
        self._processor.on_end(
            ReadableSpan(
                SPAN_NAME,
                context,
                parent,
                self._resource,
                span.attributes,
                kind=SpanKind.SERVER,
                start_time=span.start_ns,
                end_time=span.end_ns,
                instrumentation_scope=self._scope,
            )
        )

    async def close(self) -> None:
        """Send the waiting spans, within a time limit, and stop."""
        loop, sent = asyncio.get_running_loop(), asyncio.Event()

        def send() -> None:
            self._processor.shutdown()  # type: ignore[no-untyped-call]
            with suppress(RuntimeError):  # the loop is closed already
                loop.call_soon_threadsafe(sent.set)

        # Neither the loop nor the interpreter waits for this thread, as they would for an executor's.
        Thread(target=send, name="send the last spans", daemon=True).start()
        try:
            await asyncio.wait_for(sent.wait(), CLOSE_WITHIN_S)
        except TimeoutError:
            log.warning("the last spans could not be sent", spans=self._given - self._exporter.done)


def _resource() -> Resource:
    """Return the description of this process; the variables of OpenTelemetry override it."""
    own = Resource({"service.version": __version__, "service.instance.id": own_name()})
    described = own.merge(Resource.create())
    if str(described.attributes[SERVICE_NAME]).startswith("unknown_service"):  # the SDK's default
        described = described.merge(Resource({SERVICE_NAME: "quotagate"}))
    return described


class _NowAndThen:
    """Lets one record through each minute."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._next = 0.0

    def allows(self, _record: logging.LogRecord) -> bool:
        now = self._clock()
        if now < self._next:
            return False
        self._next = now + LOG_EVERY_S
        return True
