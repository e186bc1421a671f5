"""Counts of shadow quotas in the store: the verdicts that they would have given, added up over processes.

    qg1:overview:shadow:DIGEST    a hash: the verdicts of a shadow quota under one definition, by outcome
    qg1:overview:batch:NODE       a hash: the number of the last batch of counts that a process added

On a cluster all have the tag ``{overview}``, so they are in one slot. A shadow quota takes about 200 bytes,
for 90 days after its last ask; only an administrator can make more of them.

A process adds what it counted since its last batch. Batches are numbered, and a number is added once, so a
process may send a batch again if it got no reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

from redis.asyncio import Redis

from app.store.client import shared_key_of
from app.store.compiled_quota import ShadowPeriod
from app.store.redis import run_script
from app.store.script import text

OUTCOMES: Final = ("admit", "delay", "throttle", "reject")

NAME: Final = "overview:shadow:"
BATCH_NAME: Final = "overview:batch:"
"""The names of the keys for ``app.store.client.shared_key_of``, without their last parts."""

KEPT_MS: Final = 90 * 86_400_000
"""How long counts are kept after the last ask."""
BATCH_KEPT_MS: Final = 86_400_000
"""How long a process may send a batch again."""
MOST: Final = 100
"""The most quotas in a batch, which the store adds in about half a millisecond."""

ADD: Final = text("shadow_add").partition("]]\n")[2]
READ: Final = text("shadow_read").partition("]]\n")[2]
"""The scripts without their descriptions."""


ShadowCount = tuple[ShadowPeriod, list[int]]
"""A shadow quota, and its verdicts by ``OUTCOMES``."""


class ShadowCounts:
    """The counts of all shadow quotas; the client belongs to somebody else."""

    def __init__(self, client: Redis) -> None:
        self._client = client

    async def add(self, node: str, batch: int, counts: Sequence[ShadowCount]) -> bool:
        """Add a batch of counts, unless this batch was added already.

        Args:
            node: the name of the process, of this start alone.
            batch: the number of the batch; each number is larger than its predecessor.
            counts: at most ``MOST``.

        Returns:
            false if the store has no room.

        Raises:
            StoreError: the store did not answer; it may have added them.
        """
        names = [BATCH_NAME + node, *(_name(period) for period, _ in counts)]
        numbers = [number for _, each in counts for number in each]
        keys = [shared_key_of(self._client, name) for name in names]
        return bool(await run_script(self._client, ADD, keys, batch, KEPT_MS, BATCH_KEPT_MS, *numbers))

    async def read(self, periods: Sequence[ShadowPeriod]) -> tuple[int, list[list[int]]]:
        """The store's time (ms), and the counts of each quota by ``OUTCOMES``.

        Raises:
            StoreError: the store did not answer.
        """
        keys = [shared_key_of(self._client, _name(period)) for period in periods]
        now_ms, *found = await run_script(self._client, READ, keys)
        return int(now_ms), [[int(number or 0) for number in each] for each in found]


def _name(period: ShadowPeriod) -> str:
    """The name of the key of a quota's counts."""
    said = f"{period.quota} {period.entity} {period.since_ms}".encode()
    return NAME + blake2b(said, digest_size=16).hexdigest()
