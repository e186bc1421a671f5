"""An HTTP/2 client of raw frames, which may do anything that a well-behaved client avoids."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar

from hpack import Decoder, Encoder
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    RstStreamFrame,
    SettingsFrame,
)

from app.envoy.http2 import HEAD, MAX_FRAME, PREFACE
from app.envoy.server import METHOD

FrameT = TypeVar("FrameT", bound=Frame)
HEADERS: Final = (
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", METHOD.encode()),
    (b":authority", b"localhost"),
    (b"content-type", b"application/grpc"),
    (b"te", b"trailers"),
)
SETTINGS: Final = SettingsFrame(0).serialize()


def framed(message: bytes) -> bytes:
    """A message of gRPC with its prefix."""
    return b"\0" + len(message).to_bytes(4, "big") + message


class Peer:
    """One connection to the port.

    Attributes:
        compresses: whether values of headers are compressed, which takes long for large ones.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.compresses = True
        self._encoder = Encoder()
        self._decoder = Decoder()
        self._received = b""

    def head(self, number: int, headers: Sequence[tuple[bytes, bytes]] = HEADERS, *flags: str) -> bytes:
        """The frames that open a stream."""
        block = self._encoder.encode(headers, huffman=self.compresses)
        first, *more = (block[at : at + MAX_FRAME] for at in range(0, len(block), MAX_FRAME))
        frames: list[Frame] = [HeadersFrame(number, first, flags=flags)]
        frames += [ContinuationFrame(number, part) for part in more]
        frames[-1].flags.add("END_HEADERS")
        return b"".join(frame.serialize() for frame in frames)

    def request(self, number: int, message: bytes) -> bytes:
        """The frames of a whole request."""
        return self.head(number) + data(number, framed(message), "END_STREAM")

    def send(self, *frames: bytes) -> None:
        """Send bytes; a closed connection is no error."""
        try:
            self.socket.sendall(b"".join(frames))
        except OSError:
            return

    def frames(self) -> Iterator[Frame]:
        """Each frame that comes, until the connection ends."""
        while True:
            while len(self._received) >= HEAD:
                frame, size = Frame.parse_frame_header(memoryview(self._received[:HEAD]))
                if len(self._received) < HEAD + size:
                    break
                frame.parse_body(memoryview(self._received[HEAD : HEAD + size]))
                self._received = self._received[HEAD + size :]
                yield frame
            try:
                more = self.socket.recv(65_536)
            except ConnectionError:
                return
            if not more:
                return
            self._received += more

    def end(self) -> int | None:
        """The code of the last GOAWAY once the connection has ended; None without one."""
        codes = [frame.error_code for frame in self.frames() if isinstance(frame, GoAwayFrame)]
        return codes[-1] if codes else None

    def status(self, number: int) -> int:
        """The gRPC status of a stream."""
        for frame in self.frames():
            if isinstance(frame, HeadersFrame):
                fields = dict(self._decoder.decode(frame.data, raw=True))
                if frame.stream_id == number and b"grpc-status" in fields:
                    return int(fields[b"grpc-status"])
        raise AssertionError("no status came")

    def fields(self, number: int) -> dict[bytes, bytes]:
        """The header fields of the answer on a stream; none if the stream or the connection ends first."""
        for frame in self.frames():
            if isinstance(frame, HeadersFrame):
                fields = dict(self._decoder.decode(frame.data, raw=True))
                if frame.stream_id == number:
                    return fields
            if isinstance(frame, GoAwayFrame) or (
                isinstance(frame, RstStreamFrame) and frame.stream_id == number
            ):
                break
        return {}

    def first(self, kind: type[FrameT], number: int | None = None) -> FrameT:
        """The first frame of a kind, of a stream if one is given."""
        for frame in self.frames():
            if isinstance(frame, kind) and number in (None, frame.stream_id):
                return frame
        raise AssertionError(f"no {kind.__name__} came")


def data(number: int, content: bytes, *flags: str) -> bytes:
    """A DATA frame."""
    return DataFrame(number, content, flags=flags).serialize()


def settings(body: bytes) -> bytes:
    """A SETTINGS frame; hyperframe writes no names above 255."""
    return len(body).to_bytes(3, "big") + b"\4\0\0\0\0\0" + body


def undefined_settings() -> Iterator[bytes]:
    """Frames with each setting that HTTP/2 does not define, as many in a frame as fit."""
    most = MAX_FRAME // 6
    for first in range(0x100, 2**16, most):
        names = range(first, min(first + most, 2**16))
        yield settings(b"".join(name.to_bytes(2, "big") + b"\0\0\0\1" for name in names))


@contextmanager
def peer(port: int, source: str = "127.0.0.1", *, greets: bool = True) -> Iterator[Peer]:
    """A connection from an address; it has sent its preface if it greets."""
    with socket.create_connection(("127.0.0.1", port), 60, source_address=(source, 0)) as connection:
        made = Peer(connection)
        if greets:
            made.send(PREFACE, SETTINGS)
        yield made
