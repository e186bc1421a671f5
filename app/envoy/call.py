"""One gRPC call on a stream of HTTP/2: its head, its only message, its status and its answer."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from enum import IntEnum
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from hpack import NeverIndexedHeaderTuple

from app.admission.errors import OverloadedError
from app.envoy.bounded import BoundedBySource
from app.envoy.http2 import Headers, Http2Connection, Http2Stream
from app.http.head import AUTHORIZATION, TRACEPARENT, RequestHead
from app.http.server.intake import Intake

MAX_BODY: Final = 512 * 1024
"""The largest request in bytes: eight descriptors, each with the longest header that Envoy takes, 60 KiB."""
MAX_UNFINISHED: Final = 8_192
"""How many incomplete requests the process holds. At each of these bounds, a newcomer evicts the oldest one
of the address with the most."""
MAX_CALLS: Final = 8_192
"""How many calls may be in the process at a time."""
MAX_WATCHES: Final = 1_024
"""How many callers may watch the health of the process."""
PREFIX_BYTES: Final = 5
"""Before each message: whether it is compressed, and its length."""
UNITS_S: Final[Mapping[str, float]] = {"H": 3600, "M": 60, "S": 1, "m": 1e-3, "u": 1e-6, "n": 1e-9}

_TIMEOUT: Final = re.compile(rb"([0-9]{1,8})([HMSmun])")
_HEAD: Final = [(b":status", b"200"), (b"content-type", b"application/grpc")]
_OK: Final = [(b"grpc-status", b"0")]
_VISIBLE: Final = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")

OVERLOADED: Final = "The node is overloaded; nothing was charged."


class StatusCode(IntEnum):
    """The status codes of gRPC that this server gives."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


class RefusedCallError(Exception):
    """A call is answered with a status other than OK; ``outcome`` is the label of the metric."""

    def __init__(self, code: StatusCode, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.outcome = code.name.lower()


class TooLargeError(RefusedCallError):
    """The message of a call is larger than this server reads."""

    def __init__(self) -> None:
        super().__init__(StatusCode.RESOURCE_EXHAUSTED, f"The message is larger than {MAX_BODY:,} bytes.")


class MessageReader:
    r"""Reads the only message of a request, which may come in parts.

    >>> reader = MessageReader()
    >>> reader.feed(b"\0\0\0\0"), reader.feed(b"\2a"), reader.feed(b"b"), reader.message()
    (None, None, None, b'ab')
    """

    def __init__(self) -> None:
        self._bytes = b""

    def feed(self, part: bytes) -> None:
        """Receive a part of the message.

        Raises:
            RefusedCallError: it is compressed or too large, or there are several messages.
        """
        read = self._bytes = self._bytes + part if self._bytes else part
        if read and read[0]:
            raise RefusedCallError(StatusCode.UNIMPLEMENTED, "Messages must not be compressed.")
        if len(read) < PREFIX_BYTES:
            return
        size = int.from_bytes(read[1:PREFIX_BYTES], "big")
        if size > MAX_BODY:
            raise TooLargeError
        if len(read) > PREFIX_BYTES + size:
            raise RefusedCallError(StatusCode.INVALID_ARGUMENT, "The call has more than one message.")

    def message(self) -> bytes:
        """Return the message.

        Raises:
            RefusedCallError: it is not complete.
        """
        read = self._bytes
        if len(read) < PREFIX_BYTES or len(read) < PREFIX_BYTES + int.from_bytes(read[1:PREFIX_BYTES], "big"):
            raise RefusedCallError(StatusCode.INVALID_ARGUMENT, "The call has no complete message.")
        return read[PREFIX_BYTES:]


class Method(NamedTuple):
    """A method of the server.

    Attributes:
        answer: answers a call with its message, and returns the last message of the answer, if there is one.
        counted: called with the outcome of a refused call.
        active: the calls of this method that are being answered.
        shed_cause: why a call is shed if ``active`` is full.
        too_large: returns the answer to a call with a message that is too large; None if that is an error.
    """

    answer: Callable[[GrpcCall, bytes], Awaitable[bytes | None]]
    counted: Callable[[str], None]
    active: BoundedBySource
    shed_cause: str
    too_large: Callable[[], bytes] | None = None


class CallLimits:
    """The bounds that all calls of a process share.

    Args:
        intake: counts the bytes of requests that are not answered.
        shed: called with the cause of each call that is shed.
    """

    def __init__(self, intake: Intake, shed: Callable[[str], None]) -> None:
        self.intake = intake
        self.shed = shed
        self.unfinished = BoundedBySource(MAX_UNFINISHED)
        self.calls = BoundedBySource(MAX_CALLS)
        self.watches = BoundedBySource(MAX_WATCHES)


class GrpcCall(Http2Stream):
    """A call, from its head to its status.

    Attributes:
        deadline: when its caller stops waiting, by the loop's clock; None if that is unknown.
    """

    def __init__(
        self,
        connection: Http2Connection,
        number: int,
        methods: Mapping[bytes, Method],
        limits: CallLimits,
        peer: Mapping[str, Any],
    ) -> None:
        super().__init__(connection, number)
        self.deadline: float | None = None
        self._methods = methods
        self._method: Method | None = None
        self._limits = limits
        self._peer = peer
        self._fields: dict[bytes, list[bytes]] = {AUTHORIZATION: [], TRACEPARENT: []}
        """The header fields that are kept for the head."""
        self._reader = MessageReader()
        self._taken = 0
        self._has_started = False
        self._task: asyncio.Task[None] | None = None

    def is_gone(self) -> bool:
        """Whether the caller has left, or has its answer."""
        return self.is_closed

    def head(self) -> RequestHead:
        """Return the call as the head of a request, for the rules of access."""
        return RequestHead(fields={name: sent for name, sent in self._fields.items() if sent}, **self._peer)

    # Events of the stream

    def opened(self, headers: Headers) -> None:
        """Find the method, and read the header fields that the call needs."""
        self._limits.unfinished.add(self.connection.source, self)
        method = path = kind = encoding = b""
        timeout: bytes | None = None
        for name, value in headers:
            if name == b":method":
                method = value
            elif name == b":path":
                path = value
            elif name == b"content-type":
                kind = value
            elif name == b"grpc-timeout":
                timeout = value
            elif name == b"grpc-encoding":
                encoding = value
            elif name in self._fields:
                self._fields[name].append(value)
        if method != b"POST" or not _is_grpc(kind):
            self.start([(b":status", b"405" if method != b"POST" else b"415")], is_end=True)
            return
        self._method = self._methods.get(path)
        try:
            self._check_head(encoding, timeout)
        except RefusedCallError as refusal:
            self.refuse(refusal)

    def _check_head(self, encoding: bytes, timeout: bytes | None) -> None:
        if self._method is None:
            raise RefusedCallError(StatusCode.UNIMPLEMENTED, "There is no such method.")
        if encoding not in (b"", b"identity"):
            raise RefusedCallError(StatusCode.UNIMPLEMENTED, "Messages must not be compressed.")
        if timeout is not None:
            self.deadline = asyncio.get_running_loop().time() + timeout_s(timeout)
        self._take(sum(len(value) for sent in self._fields.values() for value in sent))

    def received(self, data: bytes) -> None:
        """Receive a part of the message."""
        try:
            self._take(len(data))
            self._reader.feed(data)
        except TooLargeError as refusal:
            if self._method is None or self._method.too_large is None:
                self.refuse(refusal)
            else:
                self.finish(self._method.too_large())
        except RefusedCallError as refusal:
            self.refuse(refusal)

    def ended(self) -> None:
        """Begin to answer."""
        assert self._method is not None
        source = self.connection.source
        try:
            message = self._reader.message()
        except RefusedCallError as refusal:
            self.refuse(refusal)
            return
        self._limits.unfinished.discard(source, self)
        self.answering()
        self._method.active.add(source, self)
        self._task = asyncio.get_running_loop().create_task(self._answer(self._method, message))

    def late(self) -> None:
        """Refuse a call whose message did not come."""
        self.refuse(RefusedCallError(StatusCode.DEADLINE_EXCEEDED, "The message did not arrive in time."))

    def closed(self) -> None:
        """Hold nothing any more; a caller that has left is not answered."""
        source = self.connection.source
        self._limits.unfinished.discard(source, self)
        if self._method is not None:
            self._method.active.discard(source, self)
        self.release()
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()

    def release(self) -> None:
        """Stop counting the bytes of the request."""
        if self._taken:
            self._limits.intake.give_back(self.connection.source, self._taken)
            self._taken = 0

    def evict(self) -> None:
        """Give way to a call of another source."""
        cause = (
            "unfinished_requests"
            if self._method is None or not self.is_answering
            else self._method.shed_cause
        )
        self._limits.shed(cause)
        self.refuse(RefusedCallError(StatusCode.UNAVAILABLE, OVERLOADED))

    # Its answer

    def send_message(self, message: bytes) -> None:
        """Send one of several messages."""
        self._start()
        self.send(_framed(message))

    def finish(self, message: bytes | None = None) -> None:
        """End the call with the status OK, after the last message, if there is one more."""
        self._start()
        self.send(b"" if message is None else _framed(message), _OK)

    def refuse(self, refusal: RefusedCallError) -> None:
        """End the call with another status."""
        if self.is_closed:
            return
        if self._method is not None:
            self._method.counted(refusal.outcome)
        trailers = [
            (b"grpc-status", b"%d" % refusal.code),
            NeverIndexedHeaderTuple(b"grpc-message", quote(str(refusal), safe=_VISIBLE).encode()),
        ]
        if self._has_started:
            self.send(b"", trailers)
        else:
            self.start([*_HEAD, *trailers], is_end=True)
            self.connection.flush()

    def _start(self) -> None:
        if not self._has_started:
            self._has_started = True
            self.start(_HEAD)

    async def _answer(self, method: Method, message: bytes) -> None:
        try:
            last = await method.answer(self, message)
        except RefusedCallError as refusal:
            self.refuse(refusal)
        else:
            self.finish(last)

    def _take(self, size: int) -> None:
        if not size:
            return
        try:
            self._limits.intake.take(self.connection.source, size)
        except OverloadedError as error:
            self._limits.shed(error.cause)
            raise RefusedCallError(StatusCode.UNAVAILABLE, OVERLOADED) from None
        self._taken += size


def peer_of(address: str, name: str | None, path: str) -> dict[str, Any]:
    """Return the attributes that the heads of all calls of a connection share.

    Args:
        name: the name in the client certificate; None without one.
    """
    return {"path": path, "address": address, "peer": name}


def timeout_s(sent: bytes) -> float:
    """Return the time that a caller waits, in seconds.

    >>> timeout_s(b"100m"), timeout_s(b"2H")
    (0.1, 7200.0)

    Raises:
        RefusedCallError: the text is not a timeout.
    """
    found = _TIMEOUT.fullmatch(sent)
    if found is None:
        raise RefusedCallError(StatusCode.INVALID_ARGUMENT, "grpc-timeout must be up to 8 digits and a unit.")
    return float(found[1]) * UNITS_S[found[2].decode()]


def _is_grpc(kind: bytes) -> bool:
    return kind.startswith(b"application/grpc") and kind[16:17] in (b"", b"+", b";")


def _framed(message: bytes) -> bytes:
    return b"\0" + len(message).to_bytes(4, "big") + message
