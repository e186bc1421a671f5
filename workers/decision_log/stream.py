"""The stream of batches as its one reader sees it: what it took before and did not finish, then the new."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NamedTuple

from redis.asyncio import Redis

from app.store import decision_log_standing
from app.store.decision_log import STREAM
from app.store.decision_log_standing import GROUP
from app.store.port import StoreError
from app.store.redis import run

CONSUMER: Final = "writer"
"""One name for all: whoever leads goes on where its predecessor was."""

GONE: Final = ("NOGROUP", "UNBLOCKED")
"""What the store says once it was emptied."""

LOOK_BACK_S: Final = 2.0

NEW: Final = b">"
FIRST: Final = b"0"


class Entry(NamedTuple):
    """A batch as it lies in the stream, and how many rows it says it has."""

    id: bytes
    packed: bytes
    rows: int


class Stream:
    """Reads the stream; what it gave is given again after any failure, until it is said to be done.

    Args:
        client: waits for a reply longer than ``read`` waits for entries.
    """

    def __init__(self, client: Redis, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._look_at = clock() + LOOK_BACK_S
        self._after = FIRST
        self._made = False
        self._taken: set[bytes] = set()
        """What this reader holds: what is pending beside it, a failure kept from it."""

    async def read(self, count: int, wait_ms: int) -> list[Entry]:
        """The next entries, at most so many; waits so long for new ones.

        Raises:
            StoreError: the store did not answer.
        """
        try:
            if not self._made:
                await self._make_group()
            await self._look_back()
            found = await self._read(count, wait_ms)
        except StoreError as error:
            self._after = FIRST  # a reply may be lost whose entries now are pending
            if any(word in str(error) for word in GONE):
                self._made = False
                return []
            raise
        pending = self._after != NEW
        if pending:
            self._after = found[-1][0] if found else NEW
        entries = [_entry(id_, fields) for id_, fields in found if id_ not in self._taken]
        self._taken.update(entry.id for entry in entries)
        return entries

    async def done(self, told: list[tuple[bytes, int, int]]) -> None:
        """Remove entries that are in files: id, rows written, rows unreadable of each.

        Raises:
            StoreError: the store did not answer; to be told again.
        """
        await decision_log_standing.took(self._client, told)
        self._taken.difference_update(id_ for id_, *_ in told)

    async def _make_group(self) -> None:
        try:
            await run(self._client, "XGROUP", "CREATE", STREAM, GROUP, "0", "MKSTREAM")
        except StoreError as error:
            if "BUSYGROUP" not in str(error):
                raise
        self._made = True

    async def _look_back(self) -> None:
        """Read what is pending again, if more is than is held here.

        A call of the last leader that still waited when its lease ended may have been given new entries.
        """
        if self._after != NEW or self._clock() < self._look_at:
            return
        self._look_at = self._clock() + LOOK_BACK_S
        summary = await run(self._client, "XPENDING", STREAM, GROUP)
        if summary["pending"] > len(self._taken):
            self._after = FIRST

    async def _read(self, count: int, wait_ms: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        wait = ("BLOCK", max(wait_ms, 1)) if self._after == NEW else ()
        whose = ("GROUP", GROUP, CONSUMER, "COUNT", count)
        reply = await run(self._client, "XREADGROUP", *whose, *wait, "STREAMS", STREAM, self._after)
        return list(reply[0][1]) if reply else []


def _entry(id_: bytes, fields: dict[bytes, bytes]) -> Entry:
    """An entry; without fields, and so no batch, if somebody removed it while it was pending."""
    said = fields.get(b"rows", b"")
    return Entry(id_, fields.get(b"batch", b""), int(said) if said.isdigit() else 0)
