"""The node's end of the decision log's stream: batches go in while there is room, and push no others out."""

from __future__ import annotations

from typing import Final, Self

from redis.asyncio import Redis

from app.store.decision_log import NODES, STREAM
from app.store.decision_log_standing import LogStanding, read
from app.store.keys import LONGEST_TTL_MS
from app.store.redis import client_of, run

MAX_BATCHES: Final = 4_096
"""How many batches may lie unread in the store: up to a million decisions, and 256 MiB: 64 KiB fill a batch.
Only rows of hundreds of plain ids, each of the longest kind, can make them more."""

APPEND: Final = """
-- KEYS: the stream, the heartbeat. ARGV: how many batches it may hold, rows, batch, ms both are kept, the
-- node, its batch's number. What was read is deleted, so the length is what is unread: none of that is given
-- up for something newer.
if redis.call('XLEN', KEYS[1]) >= tonumber(ARGV[1]) then return 0 end
redis.call('XADD', KEYS[1], '*', 'rows', ARGV[2], 'batch', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
redis.call('HSET', KEYS[2], ARGV[5], ARGV[6] .. ':' .. now)
redis.call('PEXPIRE', KEYS[2], ARGV[4])
return 1
"""


class LogStream:
    """Where a node leaves its batches."""

    def __init__(self, client: Redis) -> None:
        self._client = client

    @classmethod
    def at(cls, url: str, *, timeout_s: float = 1.0) -> Self:
        """The stream in a store, with connections of its own, so that no decision waits for it."""
        return cls(client_of(url, timeout_s))

    async def append(self, batch: bytes, rows: int, node: str, number: int) -> bool:
        """Leave a batch, and say in the heartbeat that its node left it; False if there is no room.

        Raises:
            StoreError: the store did not answer; it may have been taken.
        """
        arguments = (MAX_BATCHES, rows, batch, LONGEST_TTL_MS, node, number)
        return bool(await run(self._client, "EVAL", APPEND, 2, STREAM, NODES, *arguments))

    async def standing(self) -> LogStanding:
        """How the log stands, and what its writer has left about itself.

        Raises:
            StoreError: the store did not answer.
        """
        return await read(self._client)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()
