"""HTTP/1.1 on one connection whose requests are ordinary ones to hot routes.

An ordinary request is a whole HTTP/1.1 request to the unescaped path of a hot route, with a body of announced
size within the limit. The protocol reads it with httptools' parser, asks the route by a call, and sends the
answer: there is no scope, no task and no timer for a request. Requests of one connection are answered one
after the other, and the next one is not parsed before.

The first request that is anything else hands the connection over to uvicorn's protocol for good
(``protocol.py``), with the bytes from the beginning of that request. Requests that are not answered but
refused (invalid, too large, too late) are handed over too, so that each refusal is written in one place.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Mapping
from contextvars import Context, copy_context
from functools import partial
from http import HTTPStatus
from time import perf_counter
from typing import Any, Final

import structlog
import uvicorn
from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.server import ServerState

from app.admission.errors import OverloadedError
from app.http import host
from app.http.access.access import Sender
from app.http.head import EXPECT, HOST, RequestHead
from app.http.peer import name_of
from app.http.server.connections import ClientConnection
from app.http.server.deadlines import RequestDeadline, UnreadDeadline
from app.http.server.drain import DrainState
from app.http.server.hot import JSON, BodyRoute, Fields, HotRoute, HttpAnswer, Result
from app.http.server.intake import BodyBytes
from app.http.server.parsing import ParsingTurns
from app.http.server.protocol import AT_ONCE, MAX_PARAMETERS, PIECE, TOO_SLOW, Protocol

MAX_HEAD: Final = 16_384
"""The longest ordinary head in bytes; gateways that copy a visitor's cookies send several thousand."""
MAX_LINE: Final = MAX_PARAMETERS
"""The longest ordinary request line in bytes."""

IDLE, QUEUED, ANSWERING, OVER = range(4)
"""A connection reads; waits for its turn to read; answers a request; reads and answers nothing more."""

_STATUS_LINES: Final = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}
_JSON_LINES: Final = b"content-type: application/json\r\n"
_HEAD_END: Final = b"\r\n\r\n"
_HEAD_END_SIZE: Final = 4
_CONTENT_LENGTH: Final = b"content-length"
_NO_BODY: Final = (b"0",)
_MAX_DIGITS: Final = 20
"""The most digits of an ordinary ``Content-Length``: enough for 64 bits, leading zeros included."""
_NO_HEAD: Final = RequestHead()
_EXTRAORDINARY: Final = frozenset({EXPECT, b"transfer-encoding", b"upgrade"})

log = structlog.get_logger("quotagate.http")
Making = Coroutine["asyncio.Future[Any] | None", None, HttpAnswer | None]


class Outbox:
    """The answers of one iteration of the event loop, over all connections of a process.

    Each write wakes its receiver. A receiver on this host, or a proxy with many connections, is woken once if
    the answers follow each other closely. If the answers come with pauses, the receiver sleeps between them,
    and each wake-up costs this process about a fifth of a decision.

    Args:
        failed: called for each answer that could not be written.
    """

    def __init__(self, failed: Callable[[], None]) -> None:
        self._failed = failed
        self._waiting: list[tuple[asyncio.Transport, bytes]] = []

    def add(self, transport: asyncio.Transport, answer: bytes, loop: asyncio.AbstractEventLoop) -> None:
        """Send an answer at the end of this iteration."""
        if not self._waiting:
            loop.call_soon(self.flush)
        self._waiting.append((transport, answer))

    def flush(self) -> None:
        """Send the waiting answers now; required before anything else is sent on their connections."""
        waiting, self._waiting = self._waiting, []
        for transport, answer in waiting:
            if not transport.is_closing():
                try:
                    transport.write(answer)
                except Exception:
                    log.exception("an answer could not be sent")  # and the other connections get theirs
                    self._failed()
                    transport.abort()


class HttpPort:
    """Makes the protocols of the connections to the HTTP port, which share the parts of this object.

    Args:
        hot: the hot routes by path.
        outbox: for answers, one for all connections of a process.
        drain: whether the process is stopping.
        turns: shares the time for parsing among the connections of the port.
        count_handed_over: called for each connection that goes to uvicorn's protocol.
    """

    def __init__(
        self,
        hot: Mapping[str, HotRoute],
        outbox: Outbox,
        drain: DrainState,
        turns: ParsingTurns,
        count_handed_over: Callable[[], None],
    ) -> None:
        self.routes = {
            b"%b %b HTTP/1.1" % (method, path.encode()): (route, path, largest)
            for path, route in hot.items()
            for method, largest in route.ordinary.items()
        }
        self.outbox = outbox
        self.drain = drain
        self.turns = turns
        self.count_handed_over = count_handed_over
        self._fields: Fields = ()
        self._lines = b""
        self._accepted = b""

    def __call__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        connection: ClientConnection,
    ) -> asyncio.Protocol:
        """Return the protocol of a new connection; uvicorn's server calls this."""
        loop = _loop or asyncio.get_running_loop()
        general = partial(self.general, config, server_state, app_state, loop, connection=connection)
        return HotProtocol(self, connection, loop, server_state, config.timeout_keep_alive, general)

    def find(self, line: bytes) -> tuple[HotRoute, str, int, bytes] | None:
        """Return the route of a request line, its path, the largest ordinary body, and the query.

        None if no request with this line is ordinary.
        """
        found = self.routes.get(line)
        if found is not None:
            return *found, b""
        before, mark, rest = line.partition(b"?")
        query, _, version = rest.rpartition(b" ")
        found = self.routes.get(b"%b %b" % (before, version)) if mark else None
        # The parser allows several blanks before the version.
        if found is None or len(line) > MAX_LINE or b"#" in query or b" " in query:
            return None
        return *found, query

    def encode(self, answer: HttpAnswer, fields: Fields, *, keep_alive: bool) -> bytes:
        """Return an answer as uvicorn would send it, with the fields of the server first.

        Args:
            fields: the fields of the server, one object until their date changes.
            keep_alive: whether the connection stays open.
        """
        if fields is not self._fields:  # they change each second
            self._fields, self._lines = fields, _lines_of(fields)
            self._accepted = _STATUS_LINES[200] + self._lines + _JSON_LINES
        body = answer.body
        if answer.headers is JSON and answer.status == 200 and keep_alive:
            return b"%bcontent-length: %d\r\n\r\n%b" % (self._accepted, len(body), body)
        lines = _JSON_LINES if answer.headers is JSON else _lines_of(answer.headers)
        length = b"content-length: %d\r\n" % len(body)
        end = b"\r\n" if keep_alive else b"connection: close\r\n\r\n"
        return b"".join((_STATUS_LINES[answer.status], self._lines, lines, length, end, body))

    def general(self, *arguments: Any, connection: ClientConnection, **keywords: Any) -> Protocol:
        """Return the protocol of a connection for requests of any kind; takes the arguments of a call."""
        return Protocol(*arguments, connection=connection, drain=self.drain, turns=self.turns, **keywords)


class HotProtocol(asyncio.Protocol):
    """One connection.

    Nothing is parsed while a request is being answered, while the connection waits for its turn, or while the
    caller does not read. Bytes that arrive meanwhile are kept; beyond ``AT_ONCE`` nothing more is read.

    Args:
        port: the parts that all connections share.
        connection: its entry among the counted connections.
        state: uvicorn's state, with the fields of each answer and the open connections.
        keep_alive_s: how long a connection may be idle.
        general: makes the protocol that the connection is handed over to.

    Attributes:
        loop: the event loop.
        source: the network that its turns for parsing are charged to.
    """

    __slots__ = (
        "_body",
        "_body_bytes",
        "_body_left",
        "_connection",
        "_data",
        "_deadline",
        "_fields",
        "_head",
        "_is_first",
        "_is_in_head",
        "_is_last",
        "_is_read_paused",
        "_is_write_paused",
        "_keep_alive_s",
        "_keeps_alive",
        "_make_general",
        "_parsed",
        "_parser",
        "_peer",
        "_peer_has_ended",
        "_phase",
        "_port",
        "_route",
        "_sender",
        "_state",
        "_transport",
        "_unread",
        "_unsent",
        "loop",
        "on_header",
        "source",
    )

    _transport: asyncio.Transport
    _parser: HttpRequestParser
    _unread: UnreadDeadline

    def __init__(
        self,
        port: HttpPort,
        connection: ClientConnection,
        loop: asyncio.AbstractEventLoop,
        state: ServerState,
        keep_alive_s: float,
        general: Callable[[], Protocol],
    ) -> None:
        self._port = port
        self._connection = connection
        self._state = state
        self._keep_alive_s = keep_alive_s
        self._make_general = general
        self.loop = loop
        self.source = connection.source
        self._deadline = RequestDeadline(connection, loop, self._on_deadline)
        self._peer: str | None = None
        # The bytes received, from the beginning of the head being read, or after the bytes already read.
        self._data = b""
        self._parsed = 0  # how many of these bytes the parser has seen
        self._is_in_head = False  # whether a head has begun, and had to wait for its rest
        self._phase = IDLE
        self._is_first = True  # whether the first request has not arrived
        self._is_last = False  # whether the next answer ends the connection
        self._is_read_paused = False  # whether nothing is read
        self._is_write_paused = False
        self._peer_has_ended = False
        self._unsent: HttpAnswer | None = None  # waits until earlier answers are read
        # The head that is being read
        self._fields: dict[bytes, bytes] = {}  # as they are spelled
        # The parser calls this for each field, most of which nobody reads.
        self.on_header = self._fields.__setitem__
        self._keeps_alive: bool | None = None  # whether the head keeps the connection; known once complete
        # The request that is being read or answered
        self._head = _NO_HEAD
        self._route: HotRoute
        self._body = bytearray()  # as far as it has arrived, if it comes later than its head
        self._body_left = 0  # how much of its body has not arrived
        self._sender: Sender | None = None  # of a request whose body comes later than its head
        self._body_bytes: BodyBytes | None = None  # counts such a body; None if nobody needs it

    # Events of the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request, with the keep-alive timeout."""
        self._transport = transport
        self._parser = HttpRequestParser(self)
        self._unread = UnreadDeadline(transport, self.loop)
        if certificate := transport.get_extra_info("peercert"):
            self._peer = name_of(certificate)
        self._state.connections.add(self)  # type: ignore[arg-type]  # as far as the server uses them
        self._connection.time_out = self._time_out
        self._deadline.set(self.loop.time() + self._keep_alive_s)
        self._is_last = self._port.drain.has_begun

    def data_received(self, data: bytes) -> None:
        """Read a request, unless another one is being answered."""
        if self._phase == OVER:
            return
        self._data = self._data + data if self._data else data
        if self._phase == IDLE:
            self._read()
        elif len(self._data) > AT_ONCE:
            self._regulate()

    def eof_received(self) -> bool | None:
        """Stay open while there is something to answer; with TLS, a connection cannot be half-closed."""
        self._peer_has_ended = True
        is_left = self._phase in (QUEUED, ANSWERING) or (self._is_write_paused and self._data)
        if is_left and not self._transport.get_extra_info("sslcontext"):
            return True
        self._port.outbox.flush()
        return None

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Answer nothing more."""
        self._phase = OVER
        self._unsent = None
        self._forget()
        self._connection.closed()

    def pause_writing(self) -> None:
        """Stop reading from a caller that does not read."""
        self._is_write_paused = True
        self._regulate()
        self._unread.watch()

    def resume_writing(self) -> None:
        """Go on."""
        self._is_write_paused = False
        if self._unsent is not None:
            answer, self._unsent = self._unsent, None
            self.reply(answer)
        elif self._data and self._phase == IDLE:
            self._queue()
        self._regulate()

    def drain(self) -> None:
        """End the connection with its next answer."""
        self._is_last = True

    def shutdown(self) -> None:
        """Close when all requests that arrived are answered, including one whose body is not complete."""
        self._is_last = True
        if self._phase == IDLE and self._body_bytes is None:
            self._close()

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    def is_gone(self) -> bool:
        """Whether the caller has disconnected."""
        return self._phase == OVER

    # Events of the parser

    def on_headers_complete(self) -> None:
        """Ask the parser, once the head is complete, whether the connection is kept open."""
        self._keeps_alive = self._parser.should_keep_alive()

    # Reading

    def parse(self, until: float) -> bool:
        """Read more of the bytes received, at this connection's turn; return whether time ran out."""
        if self._phase != QUEUED or self._transport.is_closing():
            return False
        self._phase = IDLE
        return self._read(until)

    def _resume(self) -> None:
        self.parse(0.0)

    def _read(self, until: float = 0.0) -> bool:
        """Read up to the end of one request; return whether time ran out before.

        Args:
            until: when time runs out, by ``perf_counter``; 0 outside of the connection's turn: much data then
                has to wait.
        """
        try:
            while (data := self._data) and self._phase == IDLE and not self._is_write_paused:
                if until:
                    if perf_counter() >= until:
                        self._phase = QUEUED
                        return True
                elif len(data) - self._parsed > AT_ONCE:
                    self._queue()
                    break
                if self._body_left:
                    self._read_body()
                elif not self._read_head(data):
                    break
        except (HttpParserError, HttpParserUpgrade):
            self._hand_over()
        if self._phase == IDLE:
            self._wait()
        if self._is_read_paused or self._phase == QUEUED:
            self._regulate()
        return False

    def _read_head(self, data: bytes) -> bool:
        """Read a piece of a head, at most to its end; return whether there may be more to read.

        Once an ordinary head is whole, its request begins. An ordinary head repeats no field: only the last
        value would be known.
        """
        fed, parser = self._parsed, self._parser
        at = data.find(_HEAD_END, fed - 3 if fed > 3 else 0)
        stop = end = at + _HEAD_END_SIZE if at >= 0 else 0
        if not end or end > fed + PIECE:
            stop = min(len(data), fed + PIECE)
        parser.feed_data(data[fed:stop])
        self._parsed = stop
        if self._keeps_alive is None:
            if stop > MAX_HEAD:
                self._hand_over()
                return False
            if stop != end:
                return stop < len(data)
            if not data[:end].strip(b"\r\n"):  # blank lines, which begin nothing
                self._data, self._parsed = data[end:], 0
                self._deadline.set(min(self._deadline.at, self.loop.time() + self._deadline.HEAD_S))
                return True
        if stop != end or stop > MAX_HEAD or self._keeps_alive is None:
            self._hand_over()
            return False
        sent = self._fields
        fields = dict(zip(map(bytes.lower, sent), zip(sent.values(), strict=True), strict=True))
        found = self._port.find(data[: data.find(b"\r\n")])
        hosts, sizes = fields.get(HOST), fields.get(_CONTENT_LENGTH, _NO_BODY)
        if (
            found is None
            or len(sizes[0]) > _MAX_DIGITS
            or (size := int(sizes[0])) > found[2]
            or len(fields) + 2 != data.count(b"\r\n", 0, end)
            or not _EXTRAORDINARY.isdisjoint(fields)
            or hosts is None
            or len(hosts[0]) > host.LONGEST
            or host.parts(hosts[0]) is None
        ):
            self._hand_over()
            return False
        if self._is_first:
            self._is_first = False
            self._connection.request_received()
        if not self._keeps_alive:
            self._is_last = True
        self._keeps_alive, self._is_in_head, self._parsed = None, False, 0
        sent.clear()
        self._route, path, _, query = found
        self._head = RequestHead(path, query, fields, self._connection.address, self._peer)
        body_end = end + size
        if body_end > len(data):
            self._data, self._body_left = data[end:], size
            self._await_body()
            return True
        self._data = data[body_end:]
        body = data[end:body_end]
        if size:
            parser.feed_data(body)
        self._answer(body)
        return True

    # A body that comes later than its head

    def _await_body(self) -> None:
        """Identify the sender before the body is taken."""
        self._deadline.set(self.loop.time() + self._deadline.body_s(self._body_left))
        route = self._route
        assert isinstance(route, BodyRoute), "no other has a body"
        try:
            self._sender = sender = route.identify(self._head)
        except Exception as error:  # noqa: BLE001  it is logged, or is an answer
            self._fail(error)
        else:
            self._body_bytes = BodyBytes(route.intake, sender.turn)

    def _read_body(self) -> None:
        """Receive a part of the body; discard it if the request was refused."""
        data, left = self._data, self._body_left
        part = data[:left]
        self._data = data[left:]
        self._body_left = left - len(part)
        self._parser.feed_data(part)
        if self._body_bytes is None:
            if not self._body_left:
                self._deadline.set(self.loop.time() + self._keep_alive_s)
            return
        self._body += part
        try:
            self._body_bytes.add(len(part))
        except OverloadedError as error:
            self._release()
            self._fail(error)
            return
        if not self._body_left:
            body, sender = bytes(self._body), self._sender
            self._release()
            self._answer(body, sender)

    def _release(self) -> None:
        """Stop counting the body; the route counts it again if need be."""
        self._sender = None
        self._body = bytearray()
        if self._body_bytes is not None:
            self._body_bytes.release()
            self._body_bytes = None

    # Answers

    def _answer(self, body: bytes, sender: Sender | None = None) -> None:
        """Let the route answer the newest request, after identifying its sender if that is not known yet."""
        self._phase = ANSWERING
        self._connection.idle_since = math.inf
        route, head = self._route, self._head
        if sender is None:
            try:
                sender = route.identify(head)
            except Exception as error:  # noqa: BLE001  it is logged, or is an answer
                self._fail(error)
                return
        else:
            route.access.resume(head)
        if not route.begin(head, body, sender, self.is_gone, self._finish):
            AnswerDriver(route.reply_whole(head, body, sender, self.is_gone), self).go_on()

    def _fail(self, error: Exception) -> None:
        """Answer the newest request with an error; the rest of its body is thrown away."""
        self._phase = ANSWERING
        self._deadline.drop()
        AnswerDriver(self._route.failed(error, self._head), self).go_on()

    def _finish(self, result: Result) -> None:
        """Answer the newest request, for which its route has called back."""
        if self._phase != ANSWERING:
            return
        try:
            answer = self._route.finish(result, self._head)
        except Exception as error:  # noqa: BLE001  nobody else would answer
            self._fail(error)
            return
        if answer is not None:
            self.reply(answer)

    def reply(self, answer: HttpAnswer) -> None:
        """Send the answer to the newest request, once the earlier ones were read, and go on."""
        if self._phase == OVER:
            return
        if self._is_write_paused:
            self._unsent = answer
            return
        port = self._port
        sent = port.encode(answer, self._state.default_headers, keep_alive=not self._is_last)
        port.outbox.add(self._transport, sent, self.loop)
        self._phase = IDLE
        self._head = _NO_HEAD  # it may be large, and the next one may come late
        if self._is_last:
            self._close()
            return
        now, deadline = self.loop.time(), self._deadline
        self._connection.idle_since = now
        if not self._body_left:  # the deadline for the rest of a discarded body stays
            deadline.at = now + self._keep_alive_s
        if deadline.rings_at > deadline.at:
            deadline.set(deadline.at)
        if self._data:
            self._queue()
        elif self._peer_has_ended:
            self._close()
        if self._is_read_paused:
            self._regulate()

    # Deadlines and flow control

    def _queue(self) -> None:
        """Go on in a later iteration of the loop, and with much data at the connection's turn."""
        self._phase = QUEUED
        self._deadline.note_arrival()
        if len(self._data) - self._parsed > AT_ONCE:
            self._port.turns.add(self)
        else:
            self.loop.call_soon(self._resume)

    def _wait(self) -> None:
        """Wait for more of a request, which may have begun."""
        if self._is_write_paused:
            return
        if self._peer_has_ended:
            self._close()
        elif self._data and not self._body_left and not self._is_in_head:
            at = self.loop.time() + self._deadline.HEAD_S
            self._is_in_head = bool(self._data.strip(b"\r\n"))
            self._deadline.set(at if self._is_in_head else min(self._deadline.at, at))

    def _regulate(self) -> None:
        """Pause reading while enough bytes wait or the caller does not read; else resume it."""
        is_read_paused = self._is_write_paused or (
            self._phase in (QUEUED, ANSWERING) and len(self._data) - self._parsed > AT_ONCE
        )
        if is_read_paused != self._is_read_paused and not self._transport.is_closing():
            self._is_read_paused = is_read_paused
            if is_read_paused:
                self._deadline.pause()
                self._transport.pause_reading()
            else:
                self._deadline.resume()
                self._transport.resume_reading()

    def _on_deadline(self) -> None:
        """Handle a deadline that has passed."""
        if self._phase == QUEUED:  # the caller is not late, but we are
            self._deadline.set(self.loop.time())
        elif self._is_in_head or self._body_bytes is not None:
            self._refuse_late()
        else:
            self._close()

    def _time_out(self) -> None:
        """End: the head of the first request is late."""
        if self._phase == QUEUED:  # it is not late, but we are; its own timer goes on
            return
        if self._is_in_head:
            self._refuse_late()
        else:
            self._transport.abort()

    # Ends

    def _hand_over(self) -> None:
        """Hand the connection over, with the request whose head is being read."""
        self._port.count_handed_over()
        data, until = self._data, self._deadline.at if self._is_in_head else math.inf
        self._detach()
        self._make_general().take_over(
            self._transport,
            data,
            until=until,
            has_ended=self._peer_has_ended,
            is_write_paused=self._is_write_paused,  # by the answers that had waited
        )

    def _refuse_late(self) -> None:
        """Answer a request that did not arrive in time, and end."""
        self._connection.late()
        self._detach()
        self._make_general().refuse(self._transport, TOO_SLOW)

    def _detach(self) -> None:
        """Let another protocol go on."""
        self._port.outbox.flush()
        self._phase = OVER
        self._forget()
        if self._is_read_paused:
            self._is_read_paused = False
            self._transport.resume_reading()

    def _forget(self) -> None:
        """Keep nothing of the connection."""
        self._state.connections.discard(self)
        self._deadline.end()
        self._unread.cancel()
        self._release()
        self._data = b""
        del self._parser  # it refers to this object

    def _close(self) -> None:
        """Close, after the answers so far."""
        self._port.outbox.flush()
        self._phase = OVER
        self._data = b""
        self._transport.close()


def _lines_of(fields: Fields) -> bytes:
    return b"".join([b"%b: %b\r\n" % field for field in fields])


class AnswerDriver:
    """Runs the coroutine of an answer without a task, and sends the result.

    The coroutine may wait for futures, but must not ask for its task, as ``asyncio.timeout`` does.
    """

    __slots__ = ("_connection", "_context", "_making")

    def __init__(self, making: Making, connection: HotProtocol) -> None:
        self._making = making
        self._connection = connection
        self._context: Context | None = None

    def go_on(self, _future: object = None) -> None:
        """Run the coroutine until it waits again, or send what it made."""
        try:
            waits_for = self._making.send(None)
        except StopIteration as done:
            if done.value is not None:
                self._connection.reply(done.value)
        except (Exception, asyncio.CancelledError):
            log.exception("a request failed")
            self._connection.abort()
        else:
            self._wait(waits_for)

    def _wait(self, future: asyncio.Future[Any] | None) -> None:
        """Go on when a future is done; without one, in the next iteration of the loop."""
        if self._context is None:  # like a task, each has its own variables
            self._context = copy_context()
        if future is None:
            self._connection.loop.call_soon(self.go_on, context=self._context)
        else:
            future.add_done_callback(self.go_on, context=self._context)
