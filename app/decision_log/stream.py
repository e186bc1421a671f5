"""Both ends of the decision log's stream: nodes append batches while there is room, one worker reads them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NamedTuple, Self

from redis.asyncio import Redis

from app.decision_log.batch import NODES_NAME, STREAM_NAME
from app.decision_log.status import GROUP, LogStatus, acknowledge, read_status
from app.store.client import client_of, shared_key_of
from app.store.keys import LONGEST_TTL_MS
from app.store.port import StoreError
from app.store.redis import run, run_script
from app.store.script import text

MAX_BATCHES: Final = 4_096
"""The most unread batches in the store: up to a million decisions, and 256 MiB, as a batch of 64 KiB is full.
Only rows of hundreds of plain ids, each of the greatest length, can make batches larger."""

APPEND: Final = text("log_append")

CONSUMER: Final = "writer"
"""One name for all writers, so that a new leader continues where the last one stopped."""

GONE: Final = ("NOGROUP", "UNBLOCKED")
"""Errors of a store that was emptied."""

REREAD_AFTER_S: Final = 2.0

NEW: Final = b">"
FIRST: Final = b"0"


class LogStream:
    """The end of the stream where a node leaves its batches."""

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._keys = shared_key_of(client, STREAM_NAME), shared_key_of(client, NODES_NAME)

    @classmethod
    def at(cls, url: str, *, timeout_s: float = 1.0) -> Self:
        """The stream in a store, with its own connections, so that no decision waits for it."""
        return cls(client_of(url, timeout_s))

    async def append(self, batch: bytes, rows: int, node: str, number: int) -> bool:
        """Append a batch, and note it in the heartbeat of its node; return False if there is no room.

        Raises:
            StoreError: the store did not answer; it may have taken the batch.
        """
        arguments = (MAX_BATCHES, rows, batch, LONGEST_TTL_MS, node, number)
        return bool(await run_script(self._client, APPEND, self._keys, *arguments))

    async def status(self) -> LogStatus:
        """The status of the log, with the report of its writer.

        Raises:
            StoreError: the store did not answer.
        """
        return await read_status(self._client)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()


class StreamEntry(NamedTuple):
    """A packed batch from the stream, and its number of rows according to its entry."""

    id: bytes
    packed: bytes
    rows: int


class StreamReader:
    """The end of the stream where the writer reads.

    It first returns entries that were read before and not finished, then new ones. After any failure it
    returns entries again until ``done`` was called for them.

    Args:
        client: must wait for replies longer than ``read`` waits for entries.
    """

    def __init__(self, client: Redis, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._stream = shared_key_of(client, STREAM_NAME)
        self._clock = clock
        self._reread_at = clock() + REREAD_AFTER_S
        self._after = FIRST
        self._has_group = False
        self._unfinished: set[bytes] = set()
        """Ids of entries that were returned and are not done; after a failure, others may be pending too."""

    async def read(self, count: int, wait_ms: int) -> list[StreamEntry]:
        """The next entries, at most ``count``; waits up to ``wait_ms`` for new ones.

        Raises:
            StoreError: the store did not answer.
        """
        try:
            if not self._has_group:
                await self._make_group()
            await self._reread_pending()
            entries = await self._read(count, wait_ms)
        except StoreError as error:
            self._after = FIRST  # the lost reply may have had entries, which are pending now
            if any(word in str(error) for word in GONE):
                self._has_group = False
                return []
            raise
        if self._after != NEW:
            self._after = entries[-1].id if entries else NEW
        fresh = [entry for entry in entries if entry.id not in self._unfinished]
        self._unfinished.update(entry.id for entry in fresh)
        return fresh

    async def done(self, entries: list[tuple[bytes, int, int]]) -> None:
        """Remove entries that are in files: id, rows written, rows unreadable of each.

        Raises:
            StoreError: the store did not answer; call it again.
        """
        await acknowledge(self._client, entries)
        self._unfinished.difference_update(id_ for id_, *_ in entries)

    async def _make_group(self) -> None:
        try:
            await run(self._client, "XGROUP", "CREATE", self._stream, GROUP, "0", "MKSTREAM")
        except StoreError as error:
            if "BUSYGROUP" not in str(error):
                raise
        self._has_group = True

    async def _reread_pending(self) -> None:
        """Read pending entries again, if there are more of them than this reader returned.

        The last leader may have got new entries by a call that still waited when its lease ended.
        """
        if self._after != NEW or self._clock() < self._reread_at:
            return
        self._reread_at = self._clock() + REREAD_AFTER_S
        summary = await run(self._client, "XPENDING", self._stream, GROUP)
        if summary["pending"] > len(self._unfinished):
            self._after = FIRST

    async def _read(self, count: int, wait_ms: int) -> list[StreamEntry]:
        wait = ("BLOCK", max(wait_ms, 1)) if self._after == NEW else ()
        whose = ("GROUP", GROUP, CONSUMER, "COUNT", count)
        reply = await run(self._client, "XREADGROUP", *whose, *wait, "STREAMS", self._stream, self._after)
        return [_entry(id_, fields) for id_, fields in reply[0][1]] if reply else []


def _entry(id_: bytes, fields: dict[bytes, bytes]) -> StreamEntry:
    """An entry; its batch is empty if the entry was removed while pending, as it then has no fields."""
    rows = fields.get(b"rows", b"")
    return StreamEntry(id_, fields.get(b"batch", b""), int(rows) if rows.isdigit() else 0)
