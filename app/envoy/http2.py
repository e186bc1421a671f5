"""HTTP/2 on one connection, parsed by h2, with the bounds that h2 leaves to its user."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Any, ClassVar, Final, Protocol

import structlog
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    DataReceived,
    Event,
    PingAckReceived,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings
from hpack import Decoder, HeaderTuple, HPACKDecodingError
from hyperframe.frame import GoAwayFrame

from app.admission.errors import OverloadedError
from app.http.server.connections import UNREAD_S, ClientConnection
from app.http.server.intake import Intake
from app.http.server.parsing import ParsingTurns

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MAX_STREAMS: Final = 128
"""Open streams of a connection."""
MAX_FRAME: Final = 16_384
"""Bytes of a frame, without its head; HTTP/2 allows no smaller bound."""
MAX_HEADER_LIST: Final = 65_536
"""Bytes of a header list, both as HTTP/2 counts them and encoded. Envoy adds a visitor's
trace state, and takes headers of up to 60 KiB; above the bound, all calls of the connection end."""
TABLE_SIZE_UPDATES: Final = 2
"""How often a header block may change the size of the compression table (RFC 7541, 4.2)."""
MAX_CLOSED: Final = 128
"""Closed streams that a connection remembers, to tell late frames from wrong ones."""
TABLE: Final = 4_096
"""Bytes of the compression table for answers, even if the peer allows more: it would keep them."""
HEAD: Final = 9
"""Bytes of a frame's head."""
READ: Final = 4_096
"""Bytes of one read. The kernel keeps the rest until these are parsed."""
FRAMES: Final = 1_000
"""Frames that a connection may send without a request that gets an answer. Each answer makes up for
``FRAMES_OF_A_CALL``, each second for ``FRAMES_PER_S``; above, the connection is closed. This bounds resets,
pings, settings, window updates, priorities, and empty or unknown frames, whatever their order."""
FRAMES_PER_S: Final = 50
FRAMES_OF_A_CALL: Final = 32
LARGE_DATA: Final = 256
"""The size from which a DATA frame is not counted: the size of requests is bounded elsewhere."""
FRAMES_AT_A_TIME: Final = 16
"""Frames that are parsed before another connection has its turn."""
PARSING_S: Final = 0.002
"""How long the connections of a port parse before the event loop continues with other work."""
LAST_STREAM: Final = 2**31 - 1
LEAVING: Final = b"leaving!"
"""The content of the ping that follows the first GOAWAY: its answer shows that the peer has read both."""

_DATA, _HEADERS, _SETTINGS, _GOAWAY, _CONTINUATION = 0, 1, 4, 7, 9
_SETTING: Final = 6
"""Bytes of a setting: its name, and 4 bytes of value."""
_DEFINED: Final = frozenset(int(code).to_bytes(2, "big") for code in SettingCodes)

log: Final = structlog.get_logger("quotagate.envoy")

Headers = Sequence[tuple[bytes, bytes]]


class BrokenBoundError(Exception):
    """The peer breaks a bound of the connection, which is closed with this code."""

    def __init__(self, code: ErrorCodes) -> None:
        super().__init__(code.name)
        self.code = code


class HeaderDecoder(Decoder):
    """hpack's decoder, plus a bound for changes of the table's size: 16 KiB of them take 23 ms."""

    def decode(self, data: bytes, raw: bool = False) -> Iterable[HeaderTuple]:
        """Decode a block.

        Raises:
            HPACKDecodingError: it is not valid, or changes the size too often.
        """
        self._updates = 0
        return super().decode(data, raw)

    @property
    def header_table_size(self) -> int:
        """The size in bytes."""
        return self.header_table.maxsize

    @header_table_size.setter
    def header_table_size(self, value: int) -> None:
        self._updates += 1
        if self._updates > TABLE_SIZE_UPDATES:
            raise HPACKDecodingError("The block changes the size of the table too often.")
        self.header_table.maxsize = value


class ConnectionState(H2Connection):
    """h2's state of a connection, in less memory."""

    MAX_CLOSED_STREAMS = MAX_CLOSED


class Http2Stream:
    """One request and its answer. A subclass overrides ``received``, ``ended``, ``late`` and ``closed``.

    Attributes:
        due: when the request must be complete, or the peer must take more of the answer; by the loop's clock.
    """

    def __init__(self, connection: Http2Connection, number: int) -> None:
        self.connection = connection
        self.number = number
        self.due = math.inf
        self.unsent = bytearray()
        self.trailers: Headers | None = None
        self.is_answering = False
        self.is_closed = False

    def opened(self, headers: Headers) -> None:
        """Receive the head of the request."""

    def received(self, data: bytes) -> None:
        """Receive a part of the body."""

    def ended(self) -> None:
        """Receive the end of the body."""

    def late(self) -> None:
        """Handle a request that was not complete when it was due."""

    def closed(self) -> None:
        """Handle the end of the stream: it was answered, or its caller has left."""

    def answering(self) -> None:
        """Mark the request as complete; the connection is not idle until the stream is closed."""
        self.due = math.inf
        self.is_answering = True
        self.connection.request_completed()

    def start(self, headers: Headers, *, is_end: bool = False) -> None:
        """Send the head of the answer; ``is_end`` if that is all of it."""
        if not self.is_closed:
            self.connection.send_headers(self, headers, is_end=is_end)

    def send(self, data: bytes, trailers: Headers | None = None) -> None:
        """Send a part of the answer, as soon as the peer takes it; with trailers, the last part."""
        if not self.is_closed:
            self.unsent += data
            self.trailers = trailers
            self.connection.send_unsent(self)


class Http2Streams(Protocol):
    """Makes the stream of a request."""

    def __call__(self, connection: Http2Connection, number: int) -> Http2Stream:
        """Return the stream with this number."""


class Http2Connection(asyncio.BufferedProtocol):
    """The server's end of a connection.

    - Frames are parsed one at a time, when it is this connection's turn. Meanwhile nothing more is read.
    - Frames without an answered request, header blocks, open streams and incomplete frames are bounded.
    - A request, a frame and an answer that make no progress have a time limit.
    - A half-closed peer still gets its answers.

    Args:
        client: the connection as its acceptor counts it.
        stream: makes the stream of a request.
        turns: share the time for parsing among the connections of the port.
        intake: counts the bytes of incomplete frames.
        shed: called with the cause when a bound closes the connection.
        ended: called when the connection has ended.
    """

    UNFINISHED_S: ClassVar[float] = 10.0
    """The longest time for a request, plus a second for each 64 KiB; and for the rest of a frame."""
    UNREAD_S: ClassVar[float] = UNREAD_S
    LINGER_S: ClassVar[float] = 1.0
    """How long the connection stays open after the last byte was sent, so that the peer can read it."""
    BUFFER: ClassVar = bytearray(READ)
    """The read buffer of all connections; its bytes are copied out before the next read."""

    def __init__(
        self,
        client: ClientConnection,
        stream: Http2Streams,
        *,
        turns: ParsingTurns,
        intake: Intake,
        shed: Callable[[str], None],
        ended: Callable[[Http2Connection], None],
    ) -> None:
        self.client = client
        self.source = client.source
        self.peer: dict[str, Any] = {}
        """Facts about the peer for the maker of streams."""
        self.transport: asyncio.Transport
        self._stream = stream
        self._turns = turns
        self._intake = intake
        self._shed = shed
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._state: ConnectionState | None = None
        """Made when the preface has come: a silent connection takes no memory for it."""
        self._streams: dict[int, Http2Stream] = {}
        self._answering = 0
        self._unparsed = bytearray()
        self._counted = 0
        self._is_queued = False
        self._is_paused = False
        self._is_full = False
        self._unread = 0
        self._discarded = 0
        self._stalled_due = math.inf
        self._block = 0
        self._frames = float(FRAMES)
        self._frames_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._peer_has_ended = False
        self.is_leaving = False
        self._has_left = False
        self._is_ending = False

    # Events of the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the preface; the acceptor limits how long."""
        self.transport = transport
        self._frames_at = self._loop.time()

    def get_buffer(self, _sizehint: int) -> bytearray:
        """Return the buffer for the next read."""
        return self.BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        """Keep the received bytes, and wait for the turn to parse them."""
        if self._is_ending:
            self._discard(nbytes)
            return
        self._unparsed += memoryview(self.BUFFER)[:nbytes]
        if self._is_queued or self._is_full:
            self._pause()
        else:
            self._queue()

    def eof_received(self) -> bool:
        """Stay open while there is something to answer; with TLS, a connection cannot be half-closed."""
        self._peer_has_ended = True
        if self.transport.get_extra_info("ssl_object") is not None or self._is_ending:
            return False
        if not self._is_queued and not self._is_full:
            self._end_half_closed()
        return True

    def connection_lost(self, _exc: Exception | None) -> None:
        """Let all requests go."""
        self._is_ending = True
        self._count_partial(0)
        self._unparsed.clear()
        if self._timer is not None:
            self._timer.cancel()
        for stream in tuple(self._streams.values()):
            self._close(stream)
        self._ended(self)
        self.client.closed()

    def pause_writing(self) -> None:
        """Parse nothing more for a peer that does not read."""
        self._is_full = True
        self._unread = self.transport.get_write_buffer_size()
        self._stalled_due = self._loop.time() + self.UNREAD_S
        self._wait_until(self._stalled_due)

    def resume_writing(self) -> None:
        """Parse on, at this connection's next turn."""
        self._is_full = False
        self._stalled_due = math.inf
        self._loop.call_soon(self._queue)

    def abort(self) -> None:
        """Close at once."""
        self._is_ending = True
        self.transport.abort()

    # Graceful close

    def leave(self) -> None:
        """Close when all requests are answered, without losing one that is on its way.

        The first GOAWAY asks for no more requests. When the peer has read it, the second one names the last
        request that gets an answer (RFC 9113, 6.8).
        """
        if self.is_leaving or self._is_ending:
            return
        self.is_leaving = True
        if self._state is None:
            self._shut()
            return
        self._goaway(ErrorCodes.NO_ERROR, LAST_STREAM)
        self._state.ping(LEAVING)
        self.flush()
        self._loop.call_later(self.LINGER_S, self._leave_now)

    def _leave_now(self) -> None:
        if self._state is not None and not self._has_left and not self._is_ending:
            self._has_left = True
            self._goaway(ErrorCodes.NO_ERROR, self._state.highest_inbound_stream_id)
            self._shut_if_done()

    def _goaway(self, code: ErrorCodes, last: int) -> None:
        """Write a GOAWAY frame; h2's own ends all streams."""
        self.flush()
        if not self.transport.is_closing():
            self.transport.write(GoAwayFrame(0, last_stream_id=last, error_code=int(code)).serialize())

    def _shut_if_done(self) -> None:
        if self._has_left and not self._streams and not self._is_ending:
            self._shut()

    def _shut(self) -> None:
        """Send the rest, and close once the peer has read it: a close with unread input would discard it."""
        self._is_ending = True
        self._count_partial(0)
        self._unparsed.clear()
        self._resume()
        if self.transport.is_closing():
            return
        if self._peer_has_ended or not self.transport.can_write_eof():
            self.transport.close()
        else:
            self.transport.write_eof()
        self._loop.call_later(self.LINGER_S, self.transport.abort)

    def _end(self, code: ErrorCodes) -> None:
        """Close the connection for a fault of the peer."""
        self._goaway(code, 0 if self._state is None else self._state.highest_inbound_stream_id)
        self._end_said()

    def _end_said(self) -> None:
        """Close the connection after its last GOAWAY."""
        self.flush()
        self._is_ending = True
        for stream in tuple(self._streams.values()):
            self._close(stream)
        self._shut()

    def _discard(self, size: int) -> None:
        """Read a little more than is needed, so that the peer gets to read the last bytes."""
        self._discarded += size
        if self._discarded > 8 * READ:
            self.transport.abort()

    def _end_half_closed(self) -> None:
        """Drop requests that will never be complete, and close after the last answer."""
        for stream in tuple(self._streams.values()):
            if not stream.is_answering:
                self._close(stream)
        self._has_left = True
        self._shut_if_done()

    # Parsing

    def parse(self, until: float) -> bool:
        """Parse some frames; return whether there may be more.

        Args:
            until: no further frame is begun after this time, by ``perf_counter``.
        """
        frames = 0
        while not (self._is_ending or self._is_full):
            if frames == FRAMES_AT_A_TIME or perf_counter() >= until:
                self.flush()
                return True
            frames += 1
            try:
                frame = self._next_frame()
                if frame is None:
                    self._count_partial(len(self._unparsed))
                    break
                self._stalled_due = math.inf
                self._receive(frame)
            except BrokenBoundError as broken:
                if broken.code is ErrorCodes.ENHANCE_YOUR_CALM:
                    self._shed("http2_frames")
                self._end(broken.code)
            except OverloadedError as overloaded:
                self._shed(overloaded.cause)
                self._end(ErrorCodes.ENHANCE_YOUR_CALM)
            except ProtocolError:  # h2 has made the GOAWAY
                self._end_said()
        self._is_queued = False
        if not self._is_ending and not self._is_full:
            self._resume()
            if self._peer_has_ended:
                self._end_half_closed()
        self.flush()
        return False

    def _next_frame(self) -> bytes | None:
        """Take the next frame from the unparsed bytes; None if it is not complete.

        Raises:
            BrokenBoundError: the frame breaks a bound, or the bytes are not HTTP/2.
        """
        unparsed = self._unparsed
        if self._state is None:
            if not PREFACE.startswith(unparsed[: len(PREFACE)]):
                raise BrokenBoundError(ErrorCodes.PROTOCOL_ERROR)
            if len(unparsed) < len(PREFACE):
                return None
            self._begin()
            del unparsed[: len(PREFACE)]
        if len(unparsed) < HEAD:
            return None
        size, kind = int.from_bytes(unparsed[:3], "big"), unparsed[3]
        if size > MAX_FRAME:
            raise BrokenBoundError(ErrorCodes.FRAME_SIZE_ERROR)
        block = size + (self._block if kind == _CONTINUATION else 0)
        if kind in (_HEADERS, _CONTINUATION) and block > MAX_HEADER_LIST:
            raise BrokenBoundError(ErrorCodes.ENHANCE_YOUR_CALM)
        if len(unparsed) < HEAD + size:
            return None
        if kind in (_HEADERS, _CONTINUATION):
            self._block = block
        if kind != _DATA or size < LARGE_DATA:
            self._count_frame()
        frame = bytes(unparsed[: HEAD + size])
        del unparsed[: HEAD + size]
        return frame

    def _begin(self) -> None:
        state = self._state = ConnectionState(_CONFIGURATION)
        state.local_settings = _ADVERTISED
        state.initiate_connection()
        state.local_settings = _LOCAL
        state.decoder = HeaderDecoder(MAX_HEADER_LIST)
        state.receive_data(PREFACE)
        self.flush()

    def _count_frame(self) -> None:
        self._frames -= 1
        if self._frames < 0:
            now = self._loop.time()
            self._frames = min(float(FRAMES), self._frames + (now - self._frames_at) * FRAMES_PER_S)
            self._frames_at = now
            if self._frames < 0:
                raise BrokenBoundError(ErrorCodes.ENHANCE_YOUR_CALM)

    def _count_partial(self, size: int) -> None:
        """Count the bytes of an incomplete frame, in place of those counted before.

        Raises:
            OverloadedError: the caller, or the node, has too many waiting bytes.
        """
        if self._counted:
            self._intake.give_back(self.source, self._counted)
            self._counted = 0
        if not size:
            self._stalled_due = self._stalled_due if self._is_full else math.inf
            return
        self._intake.take(self.source, size)
        self._counted = size
        if self._stalled_due == math.inf:
            self._stalled_due = self._loop.time() + self.UNFINISHED_S
            self._wait_until(self._stalled_due)

    def _receive(self, frame: bytes) -> None:
        assert self._state is not None
        if frame[3] == _GOAWAY:  # h2 would end all streams, but their peer still waits for answers
            self._has_left = True
            self._shut_if_done()
            return
        if frame[3] == _SETTINGS:
            frame = _defined(frame)
        for event in self._state.receive_data(frame):
            handle = _HANDLED.get(type(event))
            if handle is not None:
                handle(self, event)

    # Events of h2

    def _on_request(self, event: Any) -> None:
        assert self._state is not None
        number = event.stream_id
        if len(self._streams) >= MAX_STREAMS or self._has_left:
            self._state.reset_stream(number, ErrorCodes.REFUSED_STREAM)
            return
        stream = self._streams[number] = self._stream(self, number)
        stream.due = self._loop.time() + self.UNFINISHED_S
        self._wait_until(stream.due)
        stream.opened(event.headers)

    def _on_data(self, event: Any) -> None:
        assert self._state is not None
        stream = self._streams.get(event.stream_id)
        self._state.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        if stream is not None:
            stream.due += len(event.data) / 65_536
            stream.received(event.data)

    def _on_end(self, event: Any) -> None:
        if (stream := self._streams.get(event.stream_id)) is not None:
            stream.ended()

    def _on_reset(self, event: Any) -> None:
        if (stream := self._streams.get(event.stream_id)) is not None:
            self._close(stream)

    def _on_settings(self, _event: Any) -> None:
        assert self._state is not None
        encoder = self._state.encoder
        encoder.header_table_size = min(encoder.header_table_size, TABLE)
        if changes := encoder.table_size_changes:  # the peer needs to know only the smallest and the last
            encoder.table_size_changes = [min(changes), changes[-1]]
        self._on_window(_event)

    def _on_window(self, _event: Any) -> None:
        for stream in tuple(self._streams.values()):
            if stream.unsent:
                self.send_unsent(stream)

    def _on_pong(self, event: Any) -> None:
        if self.is_leaving and event.ping_data == LEAVING:
            self._leave_now()

    # Answers

    def request_completed(self) -> None:
        """Count a request that is being answered."""
        self._answering += 1
        self.client.idle_since = math.inf
        self.client.request_received()

    def send_headers(self, stream: Http2Stream, headers: Headers, *, is_end: bool = False) -> None:
        """Send the head of an answer, or its trailers."""
        assert self._state is not None
        try:
            self._state.send_headers(stream.number, headers, end_stream=is_end)
        except ProtocolError:  # the peer reset it in the frame that is being parsed
            self._close(stream)
            return
        if is_end:
            self._frames = min(float(FRAMES), self._frames + FRAMES_OF_A_CALL * stream.is_answering)
            self._close(stream)

    def send_unsent(self, stream: Http2Stream) -> None:
        """Send as much of an answer as the peer takes, and the trailers after all of it."""
        state = self._state
        assert state is not None
        unsent = stream.unsent
        while unsent:
            try:
                room = min(state.local_flow_control_window(stream.number), state.max_outbound_frame_size)
                if room > 0:
                    state.send_data(stream.number, bytes(unsent[:room]))
            except ProtocolError:
                self._close(stream)
                return
            if room <= 0:
                if stream.due == math.inf:
                    self._stall(stream)
                self.flush()
                return
            del unsent[:room]
            stream.due = math.inf
        if stream.trailers is not None:
            self.send_headers(stream, stream.trailers, is_end=True)
        self.flush()

    def _stall(self, stream: Http2Stream) -> None:
        stream.due = self._loop.time() + self.UNREAD_S
        self._wait_until(stream.due)

    def flush(self) -> None:
        """Write the bytes that h2 has produced."""
        if self._state is not None and (data := self._state.data_to_send()) and not self._is_ending:
            self.transport.write(data)

    def _close(self, stream: Http2Stream) -> None:
        """Close a stream; one whose request is not complete is reset."""
        if stream.is_closed:
            return
        stream.is_closed = True
        del self._streams[stream.number]
        if self._state is not None and not self._is_ending:
            known = self._state.streams.get(stream.number)
            if known is not None and not known.closed:
                self._state.reset_stream(stream.number, ErrorCodes.NO_ERROR)
        stream.unsent.clear()
        if stream.is_answering:
            self._answering -= 1
            if not self._answering:
                self.client.idle_since = self._loop.time()
        stream.closed()
        if self._has_left and not self._streams and not self._is_ending:
            self._loop.call_soon(self._shut_if_done)  # after the trailers are written

    # Reading, and time

    def _queue(self) -> None:
        if not self._is_queued and not self._is_ending:
            self._is_queued = True
            self._turns.add(self)

    def _pause(self) -> None:
        if not self._is_paused and not self.transport.is_closing():
            self._is_paused = True
            self.transport.pause_reading()

    def _resume(self) -> None:
        if self._is_paused and not self.transport.is_closing():
            self._is_paused = False
            self.transport.resume_reading()

    def _wait_until(self, due: float) -> None:
        """Set the timer, unless it runs out earlier anyway."""
        if self._timer is not None:
            if self._timer.when() <= due:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(due, self._check_progress)

    def _check_progress(self) -> None:
        """End requests, frames and answers that made no progress in time."""
        self._timer = None
        if self._is_ending:
            return
        now = self._loop.time()
        if self._stalled_due <= now and not self._is_queued:
            if not self._is_full or (left := self.transport.get_write_buffer_size()) >= self._unread:
                self.client.late()
                self.abort()
                return
            self._unread = left
            self._stalled_due = now + self.UNREAD_S
        for stream in tuple(self._streams.values()):
            if stream.due <= now:
                if stream.unsent:
                    self.abort()
                    return
                if self._is_queued or self._is_full:  # the wait is ours
                    stream.due = now + self.UNFINISHED_S
                else:
                    stream.late()
        self.flush()
        due = min((stream.due for stream in self._streams.values()), default=math.inf)
        due = min(due, max(self._stalled_due, now + 1))
        if due < math.inf:
            self._wait_until(due)


def _defined(frame: bytes) -> bytes:
    """Return a SETTINGS frame without undefined settings: receivers ignore them, but h2 would keep them."""
    body = frame[HEAD:]
    settings = [body[at : at + _SETTING] for at in range(0, len(body), _SETTING)]
    # A setting that is cut short stays, for h2 to find.
    kept = b"".join(one for one in settings if one[:2] in _DEFINED or len(one) < _SETTING)
    return len(kept).to_bytes(3, "big") + frame[3:HEAD] + kept


_CONFIGURATION: Final = H2Configuration(
    client_side=False,
    header_encoding=None,
    validate_outbound_headers=False,
    normalize_outbound_headers=False,
)
_ADVERTISED: Final = Settings(
    client=False,
    initial_values={
        SettingCodes.MAX_CONCURRENT_STREAMS: MAX_STREAMS,
        SettingCodes.MAX_HEADER_LIST_SIZE: MAX_HEADER_LIST,
    },
)
_LOCAL: Final = Settings(client=False, initial_values={SettingCodes.MAX_CONCURRENT_STREAMS: LAST_STREAM})
"""h2 closes the connection for one stream too many, even if the peer has not read the settings yet. With this
bound only the extra stream is refused. Both settings never change, so all connections share them."""
_HANDLED: Final[dict[type[Event], Callable[[Http2Connection, Any], None]]] = {
    RequestReceived: Http2Connection._on_request,  # noqa: SLF001
    DataReceived: Http2Connection._on_data,  # noqa: SLF001
    StreamEnded: Http2Connection._on_end,  # noqa: SLF001
    StreamReset: Http2Connection._on_reset,  # noqa: SLF001
    RemoteSettingsChanged: Http2Connection._on_settings,  # noqa: SLF001
    WindowUpdated: Http2Connection._on_window,  # noqa: SLF001
    PingAckReceived: Http2Connection._on_pong,  # noqa: SLF001
}
