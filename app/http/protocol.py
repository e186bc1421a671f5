"""HTTP/1.1 on one connection: uvicorn's protocol, and what callers may do that it does not foresee."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, ClassVar, Final, cast

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from app.http import host
from app.http.connections import Connections
from app.http.decisions import IS_GONE
from app.http.peer import PeerProtocol
from app.http.problems import PROBLEM_JSON, Problem

MAX_HEAD: Final = 65_536
"""Bytes of a target and header fields together."""
PIECE: Final = 1_024
"""Bytes that are parsed at once, bodies apart; the requests in them are all taken in."""
WAITING: Final = 8
"""With so many requests waiting for their turn, no further piece is parsed."""
BODY_RATE: Final = 65_536
"""Bytes of a body for which a caller is given a second."""
FRAMING: Final = 8
"""Bytes that may frame a byte of a chunked body; chunks of one byte take six."""
THROWN_AWAY: Final = 16 * 2**20
"""Bytes of a body that nobody wants which are read all the same, so that the connection stays good."""
A_LITTLE: Final = 65_536
"""Bytes that are read where it cannot stay good; who still sends hears the answer only if most is read."""

NOT_HTTP: Final = Problem(400, "This is no request of HTTP/1.1.")
WRONG_HOST: Final = Problem(400, "A request of HTTP/1.1 names its host once (RFC 9112, 3.2).")
TOO_SLOW: Final = Problem(408, "The request did not come to its end in time.")
TOO_LARGE: Final = Problem(431, f"The head is larger than {MAX_HEAD:,} bytes.")

_BODY_FIELDS: Final = (b"content-length", b"transfer-encoding")


class Flow(FlowControl):
    """Reading and writing as uvicorn pauses them; what is held stays so until it is released.

    Attributes:
        read_since: when reading was resumed last, by the loop's clock.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(transport)
        self._loop = loop
        self.is_held = False
        self.read_since = 0.0

    def resume_reading(self) -> None:
        """Read on, unless this is held."""
        if self.read_paused and not self.is_held:
            self.read_since = self._loop.time()
            super().resume_reading()

    def hold(self) -> None:
        """Read nothing, whatever uvicorn says."""
        self.is_held = True
        self.pause_reading()

    def release(self) -> None:
        """Leave it to uvicorn again."""
        self.is_held = False
        self.resume_reading()


class Protocol(PeerProtocol):
    """One connection.

    - An upgrade is declined by answering as if it had not been offered, body and all. Java's own client
      offers HTTP/2 with the first request of each connection.
    - Trailers are no headers.
    - What is no HTTP, and a head without bounds, is answered with a problem, after the answers to what was
      asked before it.
    - A request that names no host, or several, is none of HTTP/1.1 (RFC 9112, 3.2).
    - Who connects and says nothing, or begins a question and does not end it, is not waited for without end;
      nor is who does not read the answers.
    - Requests are taken in while their answers are read: what waits for its turn, what is not parsed yet and
      what is not read are all bounded.
    - A body that nobody wants, and what comes after the last word, are read up to a bound.
    - A connection that is one too many is closed without a word.
    - A caller that ends its side after a question still gets the answer; one that leaves altogether is
      written to no more, whichever of its questions is being answered.

    Args:
        allowed: how many connections there may be; None for as many as come.
    """

    HEAD_S: ClassVar[float] = 10.0
    """From the first byte of a head to its last."""
    BODY_S: ClassVar[float] = 10.0
    """From the head to the last byte of the body, and a second more for each 64 KiB."""
    UNREAD_S: ClassVar[float] = 10.0
    """How long an answer may lie here of which the caller reads nothing."""
    LINGER_S: ClassVar[float] = 1.0
    """How long is listened after the last word, for the caller to read it."""

    flow: Flow

    def __init__(self, *arguments: Any, allowed: Connections | None = None, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._allowed = allowed
        self._newest: RequestResponseCycle | None = None
        self._answering: RequestResponseCycle | None = None
        self._last_word: bytes | None = None  # once it is known, nothing is parsed any more
        self._has_heard_all = False
        self._unparsed = b""
        self._due = 0.0  # when what is awaited must be there, by the loop's clock
        self._unread_timer: asyncio.TimerHandle | None = None
        self._refusal: Problem | None = None
        self._announced_size = 0
        self._body_size = 0
        self._framed_size = 0
        self._thrown_away = 0
        self._begun = 0
        self._is_amid_a_request = False
        self._hosts: list[bytes] = [b""]
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
        self.flow = Flow(transport, self.loop)
        if self._allowed is not None and not self._allowed.enter(self._address):
            self._allowed = None  # which did not count it
            self._last_word = b""
            transport.abort()
            return
        self._wait_until(self.loop.time() + self.timeout_keep_alive)

    def data_received(self, data: bytes) -> None:
        """Read on."""
        if self._is_ending():
            self._throw_away(len(data))
            return
        begun, was_amid = self._begun, self._is_amid_a_request
        self._unparsed = self._unparsed + data if self._unparsed else data
        self._parse()
        if self._is_ending():
            return
        if self._is_amid_a_request:
            if not was_amid or self._begun != begun:
                self._wait_until(self._due)
        elif not self._is_idle():
            self._unset_keepalive_if_required()
        elif was_amid:  # what came was answered before it ended
            self._wait_until(self.loop.time() + self.timeout_keep_alive)
        else:  # blank lines, which begin nothing
            self._wait_until(min(self._due, self.loop.time() + self.HEAD_S))

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Stay open while there is something to answer; over TLS no connection is closed by halves."""
        self._has_heard_all = True
        self._forget_what_is_not_whole()
        if self._is_idle() or self.scheme == "https":
            return None
        self._last_word = self._last_word or b""
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """Answer nothing more."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        if self._unread_timer is not None:
            self._unread_timer.cancel()
        if self._allowed is not None:
            self._allowed.leave(self._address)
        self.pipeline.clear()
        self._unparsed = b""
        if self._answering is not None:
            _give_up(self._answering)

    def pause_writing(self) -> None:
        """Take in nothing more from a caller that does not read."""
        super().pause_writing()
        self.flow.hold()
        self._watch_what_is_unread()

    def resume_writing(self) -> None:
        """Go on."""
        super().resume_writing()
        if not self._is_ending():
            self._parse()

    def timeout_keep_alive_handler(self) -> None:
        """Wait no longer."""
        now = self.loop.time()
        if self._is_amid_a_request:
            if self.flow.read_paused:  # it is us who do not read
                self._due = now + self.BODY_S
            self._due = max(self._due, self.flow.read_since + self.BODY_S)
        answered = not self._in_head and self._newest is not None and self._newest.response_complete
        if now < self._due:
            self._wait_until(self._due)
        elif self._is_amid_a_request and not answered:
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
            self._due = self.loop.time() + self.HEAD_S

    def on_headers_complete(self) -> None:
        """Begin to answer."""
        if not self._head_is_made_up:
            if self._head_size_at_most + self._arriving > MAX_HEAD:
                self._head_size = len(self.url) + sum(
                    len(name) + len(value) + 4 for name, value in self.headers
                )
                if self._head_size > MAX_HEAD:
                    self._refuse(TOO_LARGE)
            hosts, announced = [], 0
            for name, value in self.headers:
                if name == b"host":
                    hosts.append(value)
                elif name == b"content-length":
                    announced = int(value)
            if not hosts or hosts != self._hosts:  # which were right
                if host.is_wrong(hosts, version=self.parser.get_http_version()):
                    self._refuse(WRONG_HOST)
                self._hosts = hosts
            self._in_head = False
            super().on_headers_complete()
            self._newest = self.cycle
            self._fields = self.headers
            self.headers = []  # for trailers, which are no headers
            self._announced_size = announced
            self._body_size = self._framed_size = self._thrown_away = 0
            in_time = announced / BODY_RATE if announced <= THROWN_AWAY else 0
            self._due = self.loop.time() + self.BODY_S + in_time

    def on_body(self, body: bytes) -> None:
        """Take in a part of a body, or throw it away if it was answered already."""
        self._body_size += len(body)
        if not self._announced_size:
            self._due += len(body) / BODY_RATE
        if self.cycle.response_complete:
            self._thrown_away += len(body)
            if self._thrown_away > (THROWN_AWAY if self._announced_size <= THROWN_AWAY else A_LITTLE):
                self._refuse(None)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request; the parser believes that one with an upgrade has no body."""
        if not self.parser.should_upgrade():
            super().on_message_complete()
            self._is_amid_a_request = False

    def _refuse(self, problem: Problem | None) -> None:
        """End the parsing, and the connection; None if everything was answered."""
        self._refusal = problem
        raise ValueError("what comes is refused")

    # Answers

    def on_response_complete(self) -> None:
        """Go on to the next question, or say the last word."""
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._is_ending():
            if self._is_idle():
                self._close()
            return
        if self._unparsed:
            self._parse()
        if self._is_amid_a_request:
            self._wait_until(self._due)
        elif self._is_idle():
            self._due = self.loop.time() + self.timeout_keep_alive

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        cast("dict[str, Any]", cycle.scope)[IS_GONE] = lambda: cycle.disconnected
        super()._start_asgi_task(cycle, app)

    def _wait_until(self, due: float) -> None:
        self._unset_keepalive_if_required()
        self._due = due
        self.timeout_keep_alive_task = self.loop.call_at(due, self.timeout_keep_alive_handler)

    def _watch_what_is_unread(self) -> None:
        size = self.transport.get_write_buffer_size()
        self._unread_timer = self.loop.call_later(self.UNREAD_S, self._look_at_what_is_unread, size)

    def _look_at_what_is_unread(self, before: int) -> None:
        self._unread_timer = None
        left = self.transport.get_write_buffer_size()
        if left >= before:
            self.transport.abort()
        elif left:
            self._watch_what_is_unread()

    def _parse(self) -> None:
        """As much of what came as there is room for; the rest waits, and nothing more is read."""
        data, at = self._unparsed, 0
        self._refusal = NOT_HTTP
        try:
            while at < len(data) and len(self.pipeline) < WAITING and not self.flow.write_paused:
                size = self._piece_size()
                if at or size < len(data):
                    piece = memoryview(data)[at : at + size]
                    at += len(piece)
                    self._read(piece)
                else:  # as it mostly is
                    at = len(data)
                    self._read(data)
                if self._last_word is not None:
                    return
        except httptools.HttpParserError:
            self._end(TOO_LARGE if self._head_size > MAX_HEAD else self._refusal)
            return
        self._unparsed = data[at:]
        if self._unparsed:
            self.flow.hold()
        elif self.flow.is_held and not self.flow.write_paused:
            self.flow.release()

    def _piece_size(self) -> int:
        """The rest of a body is one piece."""
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
                if self._begun == begun:  # all of it lies within one head
                    self._head_size += len(data)
                if self._head_size > MAX_HEAD:
                    self._end(TOO_LARGE)
            elif self._is_amid_a_request:
                self._framed_size += len(data)
                if self._framed_size > MAX_HEAD + FRAMING * self._body_size:
                    self._end(NOT_HTTP)
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

    def _end(self, problem: Problem | None) -> None:
        """Answer what was asked, then with a problem, and no more."""
        self._unset_keepalive_if_required()
        self._forget_what_is_not_whole()
        self._unparsed = b""
        self._thrown_away = 0
        self._last_word = self._answer(problem) if problem else b""
        if self._is_idle():
            self._close()
        else:
            self.flow.hold()

    def _throw_away(self, size: int) -> None:
        self._thrown_away += size
        if self._thrown_away > A_LITTLE:
            self.transport.close()

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

    @property
    def _address(self) -> str:
        return self.client[0] if self.client else ""

    def _is_ending(self) -> bool:
        """Whether the last word is known."""
        return self._last_word is not None

    def _is_idle(self) -> bool:
        """Whether nothing is left to answer."""
        now = self._answering
        return not self.pipeline and (now is None or now.response_complete or now.disconnected)

    def _close(self) -> None:
        """Say the last word; then listen a little, as closing with something unread would take it back."""
        if self.transport.is_closing():
            return
        self.transport.write(self._last_word or b"")
        if not self._last_word or self._has_heard_all or not self.transport.can_write_eof():
            self.transport.close()
            return
        self.transport.write_eof()
        self.flow.release()
        self.timeout_keep_alive_task = self.loop.call_later(self.LINGER_S, self.transport.close)


def _give_up(cycle: RequestResponseCycle) -> None:
    """Let whoever answers know that nobody listens."""
    cycle.disconnected = True
    cycle.message_event.set()
