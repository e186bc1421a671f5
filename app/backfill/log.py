"""Writes a load to the decision log: the loaded buckets, and the load's position in the store's order."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from msgspec import msgpack

from app.backfill.errors import LogFullError
from app.decision_log.batch import OLDEST, Batch, Row, batch_id
from app.decision_log.stream import LogStream
from app.node.own_name import own_name
from app.store.loading import Load, Loader

WHO: Final = "quotagate backfill load"
FULL: Final = (
    "the decision log is full, as no worker reads it, and a load that is not logged looks to an audit like "
    "charges from nowhere: start the decision-log worker (`quotagate workers`), or set QUOTAGATE_LOG=off"
)


class LoadLog:
    """Announces in the decision log, as a node of its own, the buckets that are about to be loaded.

    After a load a bucket holds more than the charges in the log add up to, so audits must know of it.
    """

    def __init__(self, stream: LogStream, loader: Loader) -> None:
        self._stream = stream
        self._loader = loader
        self._node = own_name()
        self._number = 0

    async def batch(self, loads: Sequence[Load]) -> tuple[bytes, int]:
        """Return a batch that precedes these loads in the store's order, encoded, and its number of rows.

        Raises:
            StoreError: the store did not answer.
        """
        orders, at_ms = await self._loader.next_orders(loads), await self._loader.now_ms()
        order_of: dict[str, int] = {}
        buckets: dict[str, list[str]] = {}
        for load, order in zip(loads, orders, strict=True):
            order_of.setdefault(load.applied.bucket, order)
            quotas = buckets.setdefault(load.applied.bucket, [])
            if load.applied.quota.key not in quotas:
                quotas.append(load.applied.quota.key)
        rows = [
            Row("load", at_ms, order_of[bucket], what=bucket, after=json.dumps({"quotas": quotas}), who=WHO)
            for bucket, quotas in buckets.items()
        ]
        self._number += 1
        batch = Batch(OLDEST, batch_id(self._node, self._number), self._node, at_ms, [], rows)
        return msgpack.encode(batch), len(rows)

    async def append(self, batch: bytes, rows: int) -> None:
        """Append a batch to the log's stream; appending it twice has the same result as once.

        Raises:
            LogFullError: there is no room.
            StoreError: the store did not answer; it may have the batch all the same.
        """
        if not await self._stream.append(batch, rows, self._node, self._number):
            raise LogFullError(FULL)
