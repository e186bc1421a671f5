"""The connection for calls, with a real store: the order of replies, a silent store, and the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
import redis
from redis.exceptions import ConnectionError, ResponseError  # noqa: A004

from app.store.client import client_of
from app.store.connection import Connection
from app.store.redis import RedisStore
from tests import stores
from tests.stores import Server
from tests.waiting import until

KINDS = stores.KINDS
GREETING = ("the library's name", "its version", "the connection's name")
"""Replies to a greeting, errors among them; there is a greeting for calls, and one for examinations."""


@asynccontextmanager
async def connected(server: Server, lost: list[str]) -> AsyncIterator[Connection]:
    client = client_of(server.url, 5.0)
    unused = cast("Any", client.connection_pool).make_connection()
    connection = await Connection.open(unused, lambda _error: lost.append("lost"))
    yield connection
    connection.close(ConnectionError("closed"))
    await client.aclose()


async def unanswered(server: Server, connection: Connection) -> asyncio.Task[Any]:
    """Send a command to a paused store, which does not reply."""
    server.hold()
    asked = asyncio.create_task(connection.call("PING"))
    await until(lambda: connection.silent_since() is not None, every_s=0)
    return asked


@pytest.mark.parametrize("kind", KINDS)
async def test_replies_arrive_in_the_order_of_their_commands(kind: str):
    with stores.server(kind) as server:
        async with connected(server, []) as connection:
            replies = await asyncio.gather(
                *(connection.call("ECHO", str(n)) for n in range(100)),
                connection.call("INCR", "n"),
                connection.call("ECHO", b"x" * 1_000_000),
            )
            assert replies == [*(b"%d" % n for n in range(100)), 1, b"x" * 1_000_000]
            with pytest.raises(ResponseError, match="unknown command"):
                await connection.call("NONSENSE")
            with pytest.raises(TypeError):
                await connection.call("ECHO", cast("Any", object()))  # and no reply is due for it
            assert await connection.call("ECHO", "next") == b"next"
            assert connection.silent_since() is None


@pytest.mark.parametrize("kind", KINDS)
async def test_hung_store_is_silent_but_an_unread_reply_is_not_silence(kind: str):
    with stores.server(kind) as server:
        async with connected(server, []) as connection:
            server.hold()
            asked = asyncio.create_task(connection.call("PING"))
            loop = asyncio.get_running_loop()
            began = loop.time()
            await until(lambda: connection.silent_since() is not None, every_s=0)
            since = connection.silent_since()
            assert since is not None
            assert began <= since <= loop.time()
            server.go_on()
            while connection.silent_since() is not None:  # blocks the loop, so nothing is read
                pass
            assert not asked.done()
            assert await asked == b"PONG"


async def test_connection_closed_by_the_store_fails_pending_calls_and_reports_it():
    lost: list[str] = []
    with stores.server("valkey") as server:
        async with connected(server, lost) as connection:
            asked = await unanswered(server, connection)
            server.kill()
            with pytest.raises(ConnectionError):
                await asked
            await until(lambda: lost, every_s=0)
            assert not connection.is_open
            with pytest.raises(ConnectionError):
                await connection.call("PING")
    assert lost == ["lost"]


async def test_connection_closed_by_us_reports_no_loss():
    lost: list[str] = []
    with stores.server("valkey") as server:
        async with connected(server, lost) as connection:
            asked = await unanswered(server, connection)
            connection.close(TimeoutError("given up"))
            with pytest.raises(TimeoutError, match="given up"):
                await asked
            server.go_on()
    assert lost == []


class HearingStore(RedisStore):
    """Counts the replies that end its silence while it connects."""

    heard = 0

    def _hear(self) -> None:
        self.heard += 1
        super()._hear()


@pytest.mark.parametrize("kind", KINDS)
async def test_each_reply_to_a_greeting_ends_the_silence(kind: str):
    """Each reply alone is due within the budget, so that a crowded machine does not make a store silent."""
    with stores.server(kind) as server, redis.Redis.from_url(server.url) as operator:
        store = HearingStore(server.url)
        lost: list[str] = []
        store.lost = lambda _error: lost.append("lost")
        await store.examine()
        before = store.heard
        await store.examine()
        connected = store.heard - before
        cast("Any", operator).execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await until(lambda: lost)
        before = store.heard
        await store.examine()
        assert store.heard - before >= connected + 2 * len(GREETING)
        assert store.silent_since() is None
        await store.close()
