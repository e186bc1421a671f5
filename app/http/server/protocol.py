"""HTTP/1.1 on one connection: uvicorn's protocol, plus the limits and cases that it does not handle.

A connection gets here from the hot protocol (``hot_protocol.py``), with its first request that is not an
ordinary one to a hot route, and stays.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from time import perf_counter
from typing import Any, ClassVar, Final, cast

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from app.http import host
from app.http.peer import PeerProtocol
from app.http.problems import PROBLEM_JSON, ProblemError
from app.http.server.connections import ClientConnection
from app.http.server.deadlines import RequestDeadline, UnreadDeadline
from app.http.server.drain import DrainState
from app.http.server.hot import IS_GONE
from app.http.server.parsing import ParsingTurns

MAX_HEAD: Final = 65_536
"""The most bytes of a request target and its header fields together."""
MAX_TARGET: Final = 8_192
"""The most bytes of a request target; the longest entity, escaped twice in a query, has 5 KiB."""
MAX_PARAMETERS: Final = 1_024
"""The most parameters of a query; each takes about 2 us."""
PIECE: Final = 1_024
"""Bytes that are parsed in one step, but for bodies of announced size; all requests in them are accepted."""
AT_ONCE: Final = 2 * PIECE
"""Up to so many bytes are parsed when they arrive; more wait for the connection's turn, and nothing is read
meanwhile. Each header field and each chunk of a body takes 2 to 5 us, and can have few bytes."""
PARSING_S: Final = 0.000_25
"""How long connections parse waiting bytes before the event loop continues. A piece of a body
is read and handed on in the same iteration, which takes ten times as long as parsing it."""
WAITING: Final = 8
"""Parsing stops while this many requests are queued."""
FRAMING: Final = 8
"""The most framing bytes per byte of a chunked body; chunks of one byte need six."""
THROWN_AWAY: Final = 16 * 2**20
"""How much of an unneeded body is read, in bytes, so that the connection can be reused."""
A_LITTLE: Final = 17 * 2**16
"""How much is read, in bytes, when the connection will be closed: a caller that is still sending would
otherwise miss the answer. It is more than the largest head of servers in Go (1 MiB): some gateways copy the
whole head of a visitor, and let visitors in when the check has no answer."""

NOT_HTTP: Final = ProblemError(400, "This is not an HTTP/1.1 request.")
WRONG_HOST: Final = ProblemError(400, "An HTTP/1.1 request names its host exactly once (RFC 9112, 3.2).")
TOO_SLOW: Final = ProblemError(408, "The request did not arrive in time.")
TOO_LARGE: Final = ProblemError(431, f"The head is larger than {MAX_HEAD:,} bytes.")

LONG_TARGET: Final = ProblemError(
    414,
    f"The target is larger than {MAX_TARGET:,} bytes, or has more than {MAX_PARAMETERS:,} parameters.",
)

_BODY_FIELDS: Final = (b"content-length", b"transfer-encoding")


class Flow(FlowControl):
    """Uvicorn's flow control, plus a way to block reading until it is unblocked.

    Nothing is read while uvicorn pauses reading (for a body that nobody takes, or behind pipelined requests),
    or while it is blocked. The deadline does not count that time.
    """

    def __init__(self, transport: asyncio.Transport, deadline: RequestDeadline) -> None:
        super().__init__(transport)
        self._deadline = deadline
        self._is_paused = False
        self.is_blocked = False

    def pause_reading(self) -> None:
        """Pause reading."""
        self._is_paused = True
        self._stop()

    def resume_reading(self) -> None:
        """Resume reading, unless it is blocked."""
        self._is_paused = False
        self._read_on()

    def block(self) -> None:
        """Stop reading, even if uvicorn resumes it."""
        self.is_blocked = True
        self._stop()

    def unblock(self) -> None:
        """Stop blocking reading: uvicorn's flow control decides again."""
        self.is_blocked = False
        self._read_on()

    def _stop(self) -> None:
        self._deadline.pause()
        super().pause_reading()

    def _read_on(self) -> None:
        if self.read_paused and not self._is_paused and not self.is_blocked:
            self._deadline.resume()
            super().resume_reading()


class Protocol(PeerProtocol):
    """One connection.

    - An upgrade is declined: the request is answered as if it had not offered one, with its body. Java's
      client offers HTTP/2 with the first request of each connection.
    - Trailers are not treated as headers.
    - Invalid HTTP, or a head that is too large, is answered with a problem, after the responses to all
      earlier requests.
    - A request without a host, or with several, is invalid (RFC 9112, 3.2).
    - Timeouts apply to a caller that does not finish a request, or that does not read responses. The time
      for the first head begins when the connection is accepted (``app.http.server.connections``).
    - While responses are sent, further requests are accepted. Queued requests, unparsed bytes and unread
      responses are all bounded.
    - An unneeded body, and bytes after the final response, are read up to a bound.
    - While the process is stopping, each response ends its connection.
    - A half-closed client still gets its response; a disconnected one gets nothing.

    Args:
        connection: its entry among the counted connections.
        drain: whether the process is stopping.
        turns: shares the time for parsing among the connections of the port.
    """

    LINGER_S: ClassVar[float] = 1.0
    """How long the connection stays open after the final response, so that the caller can read it."""

    flow: Flow

    def __init__(
        self,
        *arguments: Any,
        connection: ClientConnection,
        drain: DrainState,
        turns: ParsingTurns,
        **keywords: Any,
    ) -> None:
        super().__init__(*arguments, **keywords)
        self._connection = connection
        self.source = connection.source
        self._drain = drain
        self._turns = turns
        self._parses_until = 0.0
        self._is_queued = False
        self._newest: RequestResponseCycle | None = None
        self._answering: RequestResponseCycle | None = None
        self._final_response: bytes | None = None  # once it is set, parsing stops
        self._peer_has_ended = False
        self._unparsed = b""
        self._deadline = RequestDeadline(connection, self.loop, self.timeout_keep_alive_handler)
        self._unread: UnreadDeadline
        self._linger: asyncio.TimerHandle | None = None
        self._refusal: ProblemError | None = None
        self._announced_size = 0
        self._body_size = 0
        self._framed_size = 0
        self._thrown_away = 0
        self._begun = 0
        self._in_request = False
        self._hosts: list[bytes] = [b""]
        self._fields: list[tuple[bytes, bytes]] = []
        self._in_head = True
        self._arriving = 0
        self._head_size = 0
        self._head_size_at_most = 0
        self._synthetic_head = False

    # Events of the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request, with the keep-alive timeout."""
        super().connection_made(transport)
        self.flow = Flow(transport, self._deadline)
        self._unread = UnreadDeadline(transport, self.loop)
        self._connection.time_out = self._time_out  # during a handshake there is no transport to end
        self._deadline.set(self.loop.time() + self.timeout_keep_alive)

    def take_over(
        self,
        transport: asyncio.Transport,
        data: bytes,
        *,
        until: float,
        has_ended: bool,
        is_write_paused: bool,
    ) -> None:
        """Take over a connection whose earlier requests were answered by another protocol.

        Args:
            data: the bytes that have arrived, from the beginning of a request.
            until: the deadline of a head that began before, by the loop's clock.
            has_ended: whether the caller sends no more.
            is_write_paused: whether earlier answers wait for the caller to read.
        """
        transport.set_protocol(self)
        self.connection_made(transport)
        if is_write_paused:
            self.pause_writing()
        self.data_received(data)
        if self._in_request and self._in_head:
            self._deadline.set(min(self._deadline.at, until))
        if has_ended and not self.eof_received():
            transport.close()

    def refuse(self, transport: asyncio.Transport, problem: ProblemError) -> None:
        """End a connection with a problem, after its earlier requests were answered by another protocol."""
        transport.set_protocol(self)
        self.connection_made(transport)
        self._end(problem)

    def data_received(self, data: bytes) -> None:
        """Parse what arrived."""
        if self._is_ending():
            self._throw_away(len(data))
            return
        begun, was_in_request = self._begun, self._in_request
        self._unparsed = self._unparsed + data if self._unparsed else data
        if not self._parse() or self._is_ending():
            return
        if self._in_request:
            if not was_in_request or self._begun != begun:
                self._deadline.set(self._deadline.at)
        elif not self._is_idle():
            self._unset_keepalive_if_required()
        elif was_in_request:  # the request was answered before it ended
            self._deadline.set(self.loop.time() + self.timeout_keep_alive)
        else:  # blank lines, which begin nothing
            self._deadline.set(min(self._deadline.at, self.loop.time() + self._deadline.HEAD_S))

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Stay open while there is something to answer; with TLS, a connection cannot be half-closed."""
        self._peer_has_ended = True
        self._drop_incomplete_request()
        if self._is_idle() or self.scheme == "https":
            return None
        self._final_response = self._final_response or b""
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """Answer nothing more."""
        super().connection_lost(exc)
        self._deadline.end()
        self._unread.cancel()
        if self._linger is not None:
            self._linger.cancel()
        self._connection.closed()
        self.pipeline.clear()
        self._unparsed = b""
        if self._answering is not None:
            _give_up(self._answering)

    def pause_writing(self) -> None:
        """Stop reading from a caller that does not read."""
        super().pause_writing()
        self.flow.block()
        self._unread.watch()

    def resume_writing(self) -> None:
        """Parse on."""
        super().resume_writing()
        if not self._is_ending():
            self._parse()

    def drain(self) -> None:
        """End the connection with its next response."""
        for cycle in (self.cycle, *(cycle for cycle, _ in self.pipeline)):
            if cycle is not None:
                cycle.keep_alive = False

    def shutdown(self) -> None:
        """Close when all answers are sent, even to unparsed requests: these end the connection in a drain."""
        if not self._is_queued:
            super().shutdown()

    def timeout_keep_alive_handler(self) -> None:
        """Handle a deadline that has passed."""
        answered = not self._in_head and self._newest is not None and self._newest.response_complete
        if self._in_request and not answered:
            self._connection.late()
            self._end(TOO_SLOW)
        else:
            super().timeout_keep_alive_handler()

    # Events of the parser

    def on_message_begin(self) -> None:
        """Begin a request."""
        if not self._synthetic_head:
            super().on_message_begin()
            self._in_request = True
            self._begun += 1
            self._in_head = True
            self._head_size = self._head_size_at_most = 0
            self._deadline.at = self.loop.time() + self._deadline.HEAD_S

    def on_headers_complete(self) -> None:
        """Check the head, and begin to answer."""
        if not self._synthetic_head:
            if self._head_size_at_most + self._arriving > MAX_HEAD:
                self._head_size = len(self.url) + sum(
                    len(name) + len(value) + 4 for name, value in self.headers
                )
                if self._head_size > MAX_HEAD:
                    self._refuse(TOO_LARGE)
            if len(self.url) > MAX_PARAMETERS and (
                len(self.url) > MAX_TARGET or self.url.count(b"&") >= MAX_PARAMETERS
            ):
                self._refuse(LONG_TARGET)
            hosts, announced = [], 0
            for name, value in self.headers:
                if name == b"host":
                    hosts.append(value)
                elif name == b"content-length":
                    announced = int(value)
            if not hosts or hosts != self._hosts:  # the hosts of the last request were valid
                if host.is_wrong(hosts, version=self.parser.get_http_version()):
                    self._refuse(WRONG_HOST)
                self._hosts = hosts
            self._in_head = False
            self._connection.request_received()
            super().on_headers_complete()
            if self._drain.has_begun:
                self.cycle.keep_alive = False
            self._newest = self.cycle
            self._fields = self.headers
            self.headers = []  # for trailers, which are not headers
            self._announced_size = announced
            self._body_size = self._framed_size = self._thrown_away = 0
            self._deadline.at = self.loop.time() + self._deadline.body_s(
                announced if announced <= THROWN_AWAY else 0
            )

    def on_body(self, body: bytes) -> None:
        """Receive a part of a body; discard it if the request was answered already."""
        self._body_size += len(body)
        if not self._announced_size:
            self._deadline.at += len(body) / self._deadline.BODY_RATE
        if self.cycle.response_complete:
            self._thrown_away += len(body)
            if self._thrown_away > (THROWN_AWAY if self._announced_size <= THROWN_AWAY else A_LITTLE):
                self._refuse(None)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request, unless the parser assumes that it has no body because it offers an upgrade."""
        if not self.parser.should_upgrade():
            super().on_message_complete()
            self._in_request = False

    def _refuse(self, problem: ProblemError | None) -> None:
        """End parsing and the connection, with a problem if there is one left to send."""
        self._refusal = problem
        raise ValueError("refused")

    # Answers

    def on_response_complete(self) -> None:
        """Continue with the next request, or send the final response.

        Uvicorn's own method does the first part of this, and makes a timer for each response.
        """
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        if self._is_ending():
            if self._is_idle():
                self._close()
            return
        if self._unparsed:
            self._parse()
        if self._in_request:
            self._deadline.set(self._deadline.at)
        elif self._is_idle():
            self._deadline.set(self.loop.time() + self.timeout_keep_alive)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        cast("dict[str, Any]", cycle.scope)[IS_GONE] = lambda: cycle.disconnected
        super()._start_asgi_task(cycle, app)

    def _unset_keepalive_if_required(self) -> None:
        """Drop the deadline, as no caller is waited for."""
        self._deadline.drop()

    def _parse(self) -> bool:
        """Parse while the queue has room; read nothing until all is parsed. Return False if it must wait."""
        if self._is_queued:
            self.flow.block()
            return False
        data, at = self._unparsed, 0
        if len(data) > AT_ONCE and not self._parses_until:
            self._is_queued = True
            self._turns.add(self)
            self.flow.block()
            self._deadline.note_arrival()
            return False
        self._refusal = NOT_HTTP
        try:
            while at < len(data) and len(self.pipeline) < WAITING and not self.flow.write_paused:
                if self._parses_until and perf_counter() >= self._parses_until:
                    self._is_queued = True
                    break
                size = self._piece_size()
                if at or size < len(data):
                    piece = memoryview(data)[at : at + size]
                    at += len(piece)
                    self._read(piece)
                else:  # the usual case
                    at = len(data)
                    self._read(data)
                if self._final_response is not None:
                    return True
        except httptools.HttpParserError:
            self._end(TOO_LARGE if self._head_size > MAX_HEAD else self._refusal)
            return True
        self._unparsed = data[at:]
        if self._unparsed:
            self.flow.block()
        elif self.flow.is_blocked and not self.flow.write_paused:
            self.flow.unblock()
        return True

    def parse(self, until: float) -> bool:
        """Parse more of the bytes received; return whether more can be parsed now."""
        self._is_queued = False
        if self._unparsed and not self._is_ending() and not self.transport.is_closing():
            self._parses_until = until
            try:
                self.data_received(b"")
            finally:
                self._parses_until = 0.0
        return self._is_queued

    def abort(self) -> None:
        """Close the connection at once."""
        self.transport.abort()

    def _piece_size(self) -> int:
        """Return the size of the next piece; the rest of a body is one piece."""
        left = self._announced_size - self._body_size
        return PIECE if self._in_head or left < PIECE else left

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
                if self._begun == begun:  # the data is part of one head
                    self._head_size += len(data)
                if self._head_size > MAX_HEAD:
                    self._end(TOO_LARGE)
            elif self._in_request:
                self._framed_size += len(data)
                if self._framed_size > MAX_HEAD + FRAMING * self._body_size:
                    self._end(NOT_HTTP)
            return

    def _decline_upgrade(self) -> None:
        """Parse the following bytes as the announced body, with a new parser that has seen no upgrade."""
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        fields = [name + b": " + value for name, value in self._fields if name in _BODY_FIELDS]
        self._synthetic_head = True
        try:
            self.parser.feed_data(b"\r\n".join([b"POST / HTTP/1.1", *fields, b"", b""]))
        finally:
            self._synthetic_head = False

    def _end(self, problem: ProblemError | None) -> None:
        """Answer all whole requests, then send a problem, and end."""
        self._unset_keepalive_if_required()
        self._drop_incomplete_request()
        self._unparsed = b""
        self._thrown_away = 0
        self._final_response = self._answer(problem) if problem else b""
        if self._is_idle():
            self._close()
        else:
            self.flow.block()

    def _throw_away(self, size: int) -> None:
        self._thrown_away += size
        if self._thrown_away > A_LITTLE:
            self.transport.close()

    def _answer(self, problem: ProblemError) -> bytes:
        body = problem.body()
        fields = [
            *self.server_state.default_headers,
            (b"content-type", PROBLEM_JSON.encode()),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        status = f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}".encode()
        return b"\r\n".join([status, *(name + b": " + value for name, value in fields), b"", body])

    def _drop_incomplete_request(self) -> None:
        """Drop the newest request if it is incomplete."""
        newest = self._newest
        if newest is not None and newest.more_body and not newest.response_complete:
            _give_up(newest)
            if self.pipeline and self.pipeline[0][0] is newest:
                self.pipeline.popleft()

    def _time_out(self) -> None:
        """End: the head of the first request is late."""
        if self._is_queued:  # it is not late, but we are; its own timer goes on
            return
        if self._in_request and not self._is_ending():
            self._end(TOO_SLOW)
        else:
            self.transport.abort()

    def _is_ending(self) -> bool:
        """Whether the final response is decided."""
        return self._final_response is not None

    def _is_idle(self) -> bool:
        """Whether no request is left to answer."""
        now = self._answering
        return not self.pipeline and (now is None or now.response_complete or now.disconnected)

    def _close(self) -> None:
        """Send the final response, then linger: closing with unread input would reset the connection."""
        if self.transport.is_closing():
            return
        self.transport.write(self._final_response or b"")
        if not self._final_response or self._peer_has_ended or not self.transport.can_write_eof():
            self.transport.close()
            return
        self.transport.write_eof()
        self.flow.unblock()
        self.flow.resume_reading()
        self._deadline.cancel()
        self._linger = self.loop.call_later(self.LINGER_S, self.transport.close)


def _give_up(cycle: RequestResponseCycle) -> None:
    """Tell the application that the caller has gone."""
    cycle.disconnected = True
    cycle.message_event.set()
