"""Another application of the same host, which notes every request that reaches it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.threaded import threaded


class Decoy(ThreadingHTTPServer):
    """It answers everything with 200 and a JSON object."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.heads: list[str] = []
        """The first lines and the fields of all requests."""

    @property
    def port(self) -> int:
        return self.server_port


class _Answers(BaseHTTPRequestHandler):
    server: Decoy

    def do_GET(self) -> None:
        self.server.heads.append(f"{self.requestline}\n{self.headers}")
        body = b"{}"
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def running() -> Iterator[Decoy]:
    """The application, listening on loopback."""
    with threaded(Decoy()) as decoy:
        yield decoy
