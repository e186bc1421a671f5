"""The node's end of the decision log's stream: batches go in while there is room, and push no others out."""

from __future__ import annotations

from typing import Final, Self

from redis.asyncio import Redis

from app.store.decision_log import STREAM
from app.store.decision_log_standing import LogStanding, read
from app.store.keys import LONGEST_TTL_MS
from app.store.redis import client_of, run

MAX_BATCHES: Final = 4_096
"""How many batches may lie unread in the store: up to a million decisions, and 256 MiB: 64 KiB fill a batch.
Only rows of hundreds of plain ids, each of the longest kind, can make them more."""

APPEND: Final = """
-- KEYS: the stream. ARGV: how many batches it may hold, rows, batch, ms it is kept. What was read is deleted,
-- so the length is what is unread: none of that is given up for something newer.
if redis.call('XLEN', KEYS[1]) >= tonumber(ARGV[1]) then return 0 end
redis.call('XADD', KEYS[1], '*', 'rows', ARGV[2], 'batch', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
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

    async def append(self, batch: bytes, rows: int) -> bool:
        """Leave a batch; False if there is no room.

        Raises:
            StoreError: the store did not answer; it may have been taken.
        """
        arguments = (MAX_BATCHES, rows, batch, LONGEST_TTL_MS)
        return bool(await run(self._client, "EVAL", APPEND, 1, STREAM, *arguments))

    async def standing(self) -> LogStanding:
        """How the log stands, and what its writer has left about itself.

        Raises:
            StoreError: the store did not answer.
        """
        return await read(self._client)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()
