"""A collector of spans: receives OTLP over HTTP, and keeps what it got."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span

SOON: Final = {"OTEL_BSP_SCHEDULE_DELAY": "50"}
"""A node sends its spans at once, so that tests do not wait for 5 s."""


class Collector:
    """The spans that arrived.

    Attributes:
        url: the base URL, for ``OTEL_EXPORTER_OTLP_ENDPOINT``.
        answers: set while requests are answered; a collector that hangs clears it.
        asked: set once a request has arrived.
    """

    def __init__(self) -> None:
        self.resources: list[ResourceSpans] = []
        self.url = ""
        self.answers = threading.Event()
        self.answers.set()
        self.asked = threading.Event()

    def environment(self, **variables: str) -> dict[str, str]:
        """The variables of a node that exports here."""
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": self.url, **SOON, **variables}

    @property
    def spans(self) -> list[Span]:
        """All spans."""
        return [span for each in [*self.resources] for scope in each.scope_spans for span in scope.spans]

    @property
    def services(self) -> set[str]:
        """The names of the services that sent them."""
        return {
            pair.value.string_value
            for each in self.resources
            for pair in each.resource.attributes
            if pair.key == "service.name"
        }


def attributes(span: Span) -> dict[str, str | int]:
    """The attributes of a span, without the prefix of ours."""
    return {
        pair.key.removeprefix("quotagate."): pair.value.string_value or pair.value.int_value
        for pair in span.attributes
    }


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a port of its own."""
    collector = Collector()

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.asked.set()
            collector.answers.wait()
            is_ours = self.path == "/v1/traces"
            if is_ours:
                collector.resources += ExportTraceServiceRequest.FromString(body).resource_spans
            self.send_response(200 if is_ours else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        server.daemon_threads = True
        collector.url = f"http://127.0.0.1:{server.server_port}"
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        serving.start()
        try:
            yield collector
        finally:
            collector.answers.set()
            server.shutdown()
            serving.join()
