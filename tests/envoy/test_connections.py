"""Connections to the port: time limits, and the graceful close."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from hyperframe.frame import (
    DataFrame,
    GoAwayFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from app.admission.metrics.metrics import Metrics
from app.envoy.call import StatusCode
from app.envoy.http2 import LAST_STREAM, Http2Connection
from app.envoy.server import METHOD
from app.http.server.intake import Intake
from tests.envoy.in_process import channel_to, opened
from tests.envoy.raw import Peer, data, framed, peer
from tests.envoy.test_outages import BODY, StubAdmission


async def played(port: int, play: Callable[[Peer], Any]) -> Any:
    """The result of a play with one connection, in a thread of its own."""

    def run() -> Any:
        with peer(port) as found:
            return play(found)

    return await asyncio.to_thread(run)


async def until(look: Callable[[], bool]) -> None:
    """Wait until it is true."""
    while not look():  # noqa: ASYNC110  nothing announces it
        await asyncio.sleep(0.01)


async def test_half_a_message_is_refused_in_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Http2Connection, "UNFINISHED_S", 0.2)
    intake = Intake()

    def play(found: Peer) -> int:
        found.send(found.head(1), data(1, framed(BODY)[:-1]))
        return found.status(1)

    async with opened(StubAdmission(), Metrics(), intake=intake) as (_, port):
        assert await played(port, play) == StatusCode.DEADLINE_EXCEEDED
        await until(lambda: intake.total == 0)


@pytest.mark.parametrize("sent", [b"\0\0\x09\0\0\0\0\0\1abc", b"\0\0"])
async def test_half_a_frame_is_closed_in_time(monkeypatch: pytest.MonkeyPatch, sent: bytes):
    monkeypatch.setattr(Http2Connection, "UNFINISHED_S", 0.2)
    intake = Intake()

    def play(found: Peer) -> int | None:
        found.send(found.head(1), sent)
        return found.end()

    async with opened(StubAdmission(), Metrics(), intake=intake) as (_, port):
        await played(port, play)
        await until(lambda: intake.total == 0)


async def test_busy_connection_that_always_holds_half_a_frame_goes_on(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Http2Connection, "UNFINISHED_S", 2.0)

    def play(found: Peer) -> int:
        first = found.request(1, BODY)
        rest, number, until = b"", 1, time.monotonic() + 2 * Http2Connection.UNFINISHED_S
        while time.monotonic() < until:
            following = found.request(number + 2, BODY)
            sent = rest or first
            found.send(sent, WindowUpdateFrame(0, window_increment=100).serialize(), following[:5])
            assert found.first(DataFrame).stream_id == number
            rest, number = following[5:], number + 2
        return number

    async with opened(StubAdmission(), Metrics()) as (_, port):
        assert await played(port, play) > 1


async def test_peer_that_gives_no_window_is_closed_in_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Http2Connection, "UNREAD_S", 0.2)

    def play(found: Peer) -> int | None:
        found.send(SettingsFrame(0, settings={SettingsFrame.INITIAL_WINDOW_SIZE: 0}).serialize())
        found.send(found.request(1, BODY))
        return found.end()

    async with opened(StubAdmission(), Metrics()) as (_, port):
        assert await played(port, play) is None


async def test_peer_that_does_not_read_is_closed_in_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Http2Connection, "UNREAD_S", 0.2)
    monkeypatch.setattr("app.envoy.http2.FRAMES", 10**9)

    def play(found: Peer) -> bool:
        found.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        pings = PingFrame(0, b"12345678").serialize() * 10_000
        try:
            while True:
                found.socket.sendall(pings)
        except ConnectionError:
            return True

    async with opened(StubAdmission(), Metrics()) as (_, port):
        assert await played(port, play)


async def test_reset_call_is_not_decided_any_more():
    admission = StubAdmission()
    admission.waits.clear()
    async with opened(admission, Metrics()) as (_, port):

        def play(found: Peer) -> None:
            found.send(found.request(1, BODY), PingFrame(0, b"12345678").serialize())
            found.first(PingFrame)
            found.send(RstStreamFrame(1, error_code=8).serialize(), PingFrame(0, b"12345678").serialize())
            found.first(PingFrame)

        await played(port, play)
        await until(lambda: admission.gone == len(admission.within_s) == 1)


async def test_connection_is_idle_only_between_calls():
    admission, events = StubAdmission(), []
    admission.waits.clear()
    async with opened(admission, Metrics()) as (port, number), channel_to(number) as channel:
        call = channel.unary_unary(METHOD)(BODY)
        await until(lambda: bool(admission.within_s))
        (connection,) = port.connections
        events.append(connection.client.idle_since)
        admission.waits.set()
        await call
        events.append(connection.client.idle_since)
    assert events[0] == float("inf") > events[1] > 0


async def test_stop_loses_no_call_in_flight():
    admission = StubAdmission()
    admission.waits.clear()
    async with opened(admission, Metrics()) as (port, number), channel_to(number) as channel:
        calls = [channel.unary_unary(METHOD)(BODY) for _ in range(100)]
        await until(lambda: len(admission.within_s) == len(calls))
        stopping = asyncio.create_task(port.stop(60.0))
        await until(lambda: all(connection.is_leaving for connection in port.connections))
        admission.waits.set()
        for call in calls:
            assert await call
        await stopping


async def test_stop_closes_at_once_after_its_time():
    admission = StubAdmission()
    admission.waits.clear()
    async with opened(admission, Metrics()) as (port, number), channel_to(number) as channel:
        call = channel.unary_unary(METHOD)(BODY)
        await until(lambda: bool(admission.within_s))
        await port.stop(0.05)
        with pytest.raises(grpc.aio.AioRpcError):
            await call
        await until(lambda: admission.gone == 1)


async def test_first_goaway_takes_requests_on_their_way_and_the_second_names_the_last():
    async with opened(StubAdmission(), Metrics()) as (port, number):
        loop = asyncio.get_running_loop()

        def play(found: Peer) -> list[int]:
            found.send(found.request(1, BODY))
            found.first(DataFrame)
            stopping = asyncio.run_coroutine_threadsafe(port.stop(60.0), loop)
            first = found.first(GoAwayFrame)
            ping = found.first(PingFrame)
            found.send(found.request(3, BODY), PingFrame(0, ping.opaque_data, flags=["ACK"]).serialize())
            second, answered = 0, []
            for frame in found.frames():
                if isinstance(frame, DataFrame):  # perhaps before the second, if the frames came apart
                    answered.append(frame.stream_id)
                elif isinstance(frame, GoAwayFrame):
                    second = frame.last_stream_id
                    found.send(found.request(5, BODY))
            stopping.result(60)
            return [first.last_stream_id, second, *answered]

        assert await played(number, play) == [LAST_STREAM, 3, 3]
