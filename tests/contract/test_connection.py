"""The connection for calls: replies in order, whose silence it is, and how it ends; with a real store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from redis.exceptions import ConnectionError, ResponseError  # noqa: A004

from app.store.connection import Connection
from app.store.redis import client_of
from tests import stores
from tests.stores import Server

KINDS = stores.KINDS


@asynccontextmanager
async def connected(server: Server, lost: list[str]) -> AsyncIterator[Connection]:
    client = client_of(server.url, 5.0)
    unused = cast("Any", client.connection_pool).make_connection()
    connection = await Connection.open(unused, lambda: lost.append("lost"))
    yield connection
    connection.close(ConnectionError("closed"))
    await client.aclose()


async def until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110  a condition of the loop's own state, which sets no event
            await asyncio.sleep(0)


async def unanswered(server: Server, connection: Connection) -> asyncio.Task[Any]:
    """A command to a store that is held, which is silent about it."""
    server.hold()
    asked = asyncio.create_task(connection.call("PING"))
    await until(lambda: connection.silent_since() is not None)
    return asked


@pytest.mark.parametrize("kind", KINDS)
async def test_replies_come_in_the_order_of_their_commands(kind: str):
    with stores.server(kind) as server:
        async with connected(server, []) as connection:
            said = await asyncio.gather(
                *(connection.call("ECHO", str(n)) for n in range(100)),
                connection.call("INCR", "n"),
                connection.call("ECHO", b"x" * 1_000_000),
            )
            assert said == [*(b"%d" % n for n in range(100)), 1, b"x" * 1_000_000]
            with pytest.raises(ResponseError, match="unknown command"):
                await connection.call("NONSENSE")
            assert connection.silent_since() is None


@pytest.mark.parametrize("kind", KINDS)
async def test_a_store_that_hangs_is_silent_and_a_reply_that_lies_unread_is_not(kind: str):
    with stores.server(kind) as server:
        async with connected(server, []) as connection:
            server.hold()
            asked = asyncio.create_task(connection.call("PING"))
            loop = asyncio.get_running_loop()
            began = loop.time()
            await until(lambda: connection.silent_since() is not None)
            since = connection.silent_since()
            assert since is not None
            assert began <= since <= loop.time()
            server.go_on()
            while connection.silent_since() is not None:  # the loop is held up: nothing is read here
                pass
            assert not asked.done()
            assert await asked == b"PONG"


async def test_a_connection_that_the_store_closes_fails_what_is_owed_and_says_so():
    lost: list[str] = []
    with stores.server("valkey") as server:
        async with connected(server, lost) as connection:
            asked = await unanswered(server, connection)
            server.kill()
            with pytest.raises(ConnectionError):
                await asked
            await until(lambda: lost)
            assert not connection.is_open
            with pytest.raises(ConnectionError):
                await connection.call("PING")
    assert lost == ["lost"]


async def test_who_hangs_up_is_told_of_no_loss():
    lost: list[str] = []
    with stores.server("valkey") as server:
        async with connected(server, lost) as connection:
            asked = await unanswered(server, connection)
            connection.close(TimeoutError("given up"))
            with pytest.raises(TimeoutError, match="given up"):
                await asked
            server.go_on()
    assert lost == []
