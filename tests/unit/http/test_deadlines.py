"""Deadlines of a connection: when they pass, and how many timers they need."""

from __future__ import annotations

import asyncio
import math

from app.http.server.connections import ClientConnection, Connections
from app.http.server.deadlines import RequestDeadline, UnreadDeadline
from tests.http.ways import Line, Timers


class Waiting:
    """A deadline, and how often it has passed."""

    def __init__(self) -> None:
        self.loop = Timers()
        self.passed = 0
        connection = Connections().accept("127.0.0.1", "http", self.loop.time())
        assert connection is not None
        self.connection: ClientConnection = connection
        self.deadline = RequestDeadline(connection, self.loop, self._pass)  # type: ignore[arg-type]

    def _pass(self) -> None:
        self.passed += 1

    def set(self, seconds: float) -> None:
        self.deadline.set(self.loop.time() + seconds)


async def test_deadline_that_moves_back_needs_no_other_timer() -> None:
    waiting = Waiting()
    for _ in range(100):
        waiting.set(10)
        waiting.loop.advance(0.05)
    assert waiting.loop.made == 1
    waiting.loop.advance(9.8)
    assert waiting.passed == 0
    waiting.loop.advance(0.3)
    assert waiting.passed == 1
    assert waiting.loop.made == 2


async def test_earlier_deadline_counts_at_once() -> None:
    waiting = Waiting()
    waiting.set(75)
    waiting.set(10)
    waiting.loop.advance(10)
    assert waiting.passed == 1


async def test_deadline_that_was_dropped_or_ended_does_not_pass() -> None:
    for stop in (RequestDeadline.drop, RequestDeadline.end):
        waiting = Waiting()
        waiting.set(10)
        stop(waiting.deadline)
        waiting.loop.advance(100)
        assert waiting.passed == 0


async def test_connection_is_idle_while_its_caller_is_waited_for() -> None:
    waiting = Waiting()
    waiting.set(10)
    waiting.deadline.drop()
    assert waiting.connection.idle_since == math.inf
    waiting.deadline.note_arrival()
    assert waiting.connection.idle_since == math.inf
    waiting.loop.advance(5)
    waiting.set(10)
    since = waiting.loop.time()
    assert waiting.connection.idle_since == since
    waiting.loop.advance(1)
    waiting.set(10)
    assert waiting.connection.idle_since == since, "it waits for the same request"
    waiting.deadline.note_arrival()
    assert waiting.connection.idle_since == since + 1


async def test_time_in_which_nothing_is_read_does_not_count() -> None:
    waiting = Waiting()
    waiting.set(10)
    waiting.loop.advance(4)
    waiting.deadline.pause()
    waiting.loop.advance(3)
    waiting.deadline.pause()
    waiting.loop.advance(97)
    waiting.deadline.resume()
    waiting.deadline.resume()
    waiting.loop.advance(5.9)
    assert waiting.passed == 0
    waiting.loop.advance(0.2)
    assert waiting.passed == 1


async def test_deadline_that_is_dropped_while_nothing_is_read_does_not_pass() -> None:
    waiting = Waiting()
    waiting.set(10)
    waiting.deadline.pause()
    waiting.deadline.drop()
    waiting.loop.advance(100)
    waiting.deadline.resume()
    waiting.loop.advance(100)
    assert waiting.passed == 0


async def test_caller_that_reads_a_little_is_given_more_time() -> None:
    loop, line = Timers(), Line()
    line.protocol = asyncio.Protocol()
    line.unread = 1_000
    deadline = UnreadDeadline(line, loop)  # type: ignore[arg-type]
    deadline.watch()
    for _ in range(3):
        line.unread -= 10
        loop.advance(UnreadDeadline.UNREAD_S)
        assert not line.has_aborted
    loop.advance(UnreadDeadline.UNREAD_S)
    assert line.has_aborted


async def test_answers_that_fill_the_buffer_again_have_their_own_time() -> None:
    loop, line = Timers(), Line()
    line.protocol = asyncio.Protocol()
    deadline = UnreadDeadline(line, loop)  # type: ignore[arg-type]
    line.unread = 100
    deadline.watch()
    loop.advance(UnreadDeadline.UNREAD_S * 0.9)
    line.unread = 200  # the earlier bytes were read meanwhile
    deadline.watch()
    loop.advance(UnreadDeadline.UNREAD_S * 0.9)
    assert not line.has_aborted
    loop.advance(UnreadDeadline.UNREAD_S * 0.2)
    assert line.has_aborted
