"""The decision log's rows of a load: into which buckets something was put, and where in the store's order."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from msgspec import msgpack

from app.run.own_name import own_name
from app.store.decision_log import VERSION, Batch, Row, batch_id
from app.store.loading import Load, Loader
from app.store.log_stream import LogStream

WHO: Final = "quotagate backfill load"
FULL: Final = (
    "the decision log is full, as nobody reads it, and to an audit a load it does not tell of is charges "
    "out of nowhere: start the worker decision-log (`quotagate workers`), or set QUOTAGATE_LOG=off"
)


class LogFull(Exception):
    """The log takes nothing more."""


class LoadLog:
    """Writes to the decision log what is about to be loaded, as a node of its own.

    What a bucket holds is from then on more than the log's charges make it, and audits must know.
    """

    def __init__(self, stream: LogStream, loader: Loader) -> None:
        self._stream = stream
        self._loader = loader
        self._node = own_name()
        self._number = 0

    async def told(self, loads: Sequence[Load]) -> tuple[bytes, int]:
        """A batch that tells of loads which come after it in the store's order, and how many rows it has.

        Raises:
            StoreError: the store did not answer.
        """
        order, at_ms = await self._loader.next_order(), await self._loader.now_ms()
        buckets: dict[str, list[str]] = {}
        for load in loads:
            quotas = buckets.setdefault(load.applied.bucket, [])
            if load.applied.quota.key not in quotas:
                quotas.append(load.applied.quota.key)
        rows = [
            Row("load", at_ms, order, what=bucket, after=json.dumps({"quotas": quotas}), who=WHO)
            for bucket, quotas in buckets.items()
        ]
        self._number += 1
        batch = Batch(VERSION, batch_id(self._node, self._number), self._node, at_ms, [], rows)
        return msgpack.encode(batch), len(rows)

    async def leave(self, batch: bytes, rows: int) -> None:
        """Leave a batch in the log's stream; left twice it is one.

        Raises:
            LogFull: there is no room.
            StoreError: the store did not answer; it may have been taken.
        """
        if not await self._stream.append(batch, rows, self._node, self._number):
            raise LogFull(FULL)
