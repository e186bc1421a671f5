"""HTTP/1.1 on one connection: uvicorn's protocol, and what callers may do that it does not foresee."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, Final, cast

import httptools
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from app.http.decisions import IS_GONE
from app.http.peer import PeerProtocol
from app.http.problems import PROBLEM_JSON, Problem

MAX_HEAD: Final = 65_536
"""Bytes of a target and header fields together."""

NOT_HTTP: Final = Problem(400, "This is no request of HTTP/1.1.")
TOO_SLOW: Final = Problem(408, "The request did not come to its end in time.")
TOO_LARGE: Final = Problem(431, f"The head is larger than {MAX_HEAD:,} bytes.")

_BODY_FIELDS: Final = (b"content-length", b"transfer-encoding")


class Protocol(PeerProtocol):
    """One connection.

    - An upgrade is declined by answering as if it had not been offered, body and all. Java's own client
      offers HTTP/2 with the first request of each connection.
    - Trailers are no headers.
    - What is no HTTP, and a head without bounds, is answered with a problem, after the answers to what was
      asked before it.
    - Who connects and says nothing, or begins a question and does not end it, is not waited for without end.
    - Who ends his side after a question still gets the answer; who leaves altogether is written to no more,
      whichever of his questions is being answered.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._newest: RequestResponseCycle | None = None
        self._answering: RequestResponseCycle | None = None
        self._last_word: bytes | None = None  # once it is known, nothing is read any more
        self._begun = 0
        self._is_amid_a_request = False
        self._fields: list[tuple[bytes, bytes]] = []
        self._in_head = True
        self._arriving = 0
        self._head_size = 0
        self._head_size_at_most = 0
        self._head_is_made_up = False

    # What the connection tells

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a question, as long as for the next one later."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Read on."""
        if self._is_ending():
            return
        awaited = self._begun if self._is_amid_a_request else 0
        if not awaited:
            self._unset_keepalive_if_required()
        try:
            self._read(data)
        except httptools.HttpParserError:
            self._end(TOO_LARGE if self._head_size > MAX_HEAD else NOT_HTTP)
        if self._is_ending():
            return
        if self._is_amid_a_request:
            if self._begun != awaited:
                self._wait()
        elif self._is_idle():  # what came was answered before it ended
            self._wait()
        else:
            self._unset_keepalive_if_required()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Stay open while there is something to answer; over TLS no connection is closed by halves."""
        self._forget_what_is_not_whole()
        if self._is_idle() or self.scheme == "https":
            return None
        self._last_word = self._last_word or b""
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """Answer nothing more."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self.pipeline.clear()
        if self._answering is not None:
            _give_up(self._answering)

    def timeout_keep_alive_handler(self) -> None:
        """Wait no longer."""
        answered = not self._in_head and self._newest is not None and self._newest.response_complete
        if self._is_amid_a_request and not answered:
            self._end(TOO_SLOW)
        else:
            super().timeout_keep_alive_handler()

    # What the parser tells

    def on_message_begin(self) -> None:
        """Begin a request."""
        if not self._head_is_made_up:
            super().on_message_begin()
            self._is_amid_a_request = True
            self._begun += 1
            self._in_head = True
            self._head_size = self._head_size_at_most = 0

    def on_headers_complete(self) -> None:
        """Begin to answer."""
        if not self._head_is_made_up:
            if self._head_size_at_most + self._arriving > MAX_HEAD:
                self._head_size = len(self.url) + sum(
                    len(name) + len(value) + 4 for name, value in self.headers
                )
                if self._head_size > MAX_HEAD:
                    raise ValueError("the head is too large")  # which ends the parsing
            self._in_head = False
            super().on_headers_complete()
            self._newest = self.cycle
            self._fields = self.headers
            self.headers = []  # for trailers, which are no headers

    def on_message_complete(self) -> None:
        """End a request; the parser believes that one with an upgrade has no body."""
        if not self.parser.should_upgrade():
            super().on_message_complete()
            self._is_amid_a_request = False

    # Answers

    def on_response_complete(self) -> None:
        """Go on to the next question, or say the last word."""
        super().on_response_complete()
        if self._is_amid_a_request:
            self._wait()
        if self._is_ending() and self._is_idle():
            self._close()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        cast("dict[str, Any]", cycle.scope)[IS_GONE] = lambda: cycle.disconnected
        super()._start_asgi_task(cycle, app)

    def _wait(self) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def _read(self, data: bytes | memoryview) -> None:
        while data:
            begun = self._begun
            self._arriving = len(data)
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = memoryview(data)[upgrade.args[0] :]
                self._decline_upgrade()
                continue
            if self._in_head:
                self._head_size_at_most += len(data)
                if self._begun == begun:  # all of it lies within one head
                    self._head_size += len(data)
                if self._head_size > MAX_HEAD:
                    self._end(TOO_LARGE)
            return

    def _decline_upgrade(self) -> None:
        """Parse what follows as the body that was announced, by a parser that knows of no upgrade."""
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        fields = [name + b": " + value for name, value in self._fields if name in _BODY_FIELDS]
        self._head_is_made_up = True
        try:
            self.parser.feed_data(b"\r\n".join([b"POST / HTTP/1.1", *fields, b"", b""]))
        finally:
            self._head_is_made_up = False

    def _end(self, problem: Problem) -> None:
        """Answer what was asked, then with a problem, and no more."""
        self._unset_keepalive_if_required()
        self._forget_what_is_not_whole()
        self._last_word = self._answer(problem)
        if self._is_idle():
            self._close()

    def _answer(self, problem: Problem) -> bytes:
        body = problem.body()
        fields = [
            *self.server_state.default_headers,
            (b"content-type", PROBLEM_JSON.encode()),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        status = f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}".encode()
        return b"\r\n".join([status, *(name + b": " + value for name, value in fields), b"", body])

    def _forget_what_is_not_whole(self) -> None:
        """The newest question, if it will never be whole."""
        newest = self._newest
        if newest is not None and newest.more_body and not newest.response_complete:
            _give_up(newest)
            if self.pipeline and self.pipeline[0][0] is newest:
                self.pipeline.popleft()

    def _is_ending(self) -> bool:
        """Whether the last word is known."""
        return self._last_word is not None

    def _is_idle(self) -> bool:
        """Whether nothing is left to answer."""
        now = self._answering
        return not self.pipeline and (now is None or now.response_complete or now.disconnected)

    def _close(self) -> None:
        if self._last_word and not self.transport.is_closing():
            self.transport.write(self._last_word)
        self.transport.close()


def _give_up(cycle: RequestResponseCycle) -> None:
    """Let whoever answers know that nobody listens."""
    cycle.disconnected = True
    cycle.message_event.set()
