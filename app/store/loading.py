"""Loading assertions into a running store, by its own library."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from app.domain.digest import spread
from app.domain.ladder import AppliedQuota
from app.domain.loading import Charges, LoadResult, WrittenId
from app.domain.quota import Quota
from app.domain.sampled_rate import Sample
from app.domain.token_bucket import Tokens
from app.store.encoding import ALGORITHMS as NUMBERS
from app.store.encoding import ORDER_STEP, QUOTA, encode_call, parameters
from app.store.keys import ORDER_KEY, PREFIX, RESETS_KEY, bucket_key
from app.store.library import Library, call_function
from app.store.redis import run, run_script
from app.store.script import ALGORITHMS, FORGET, maker, numbers, text

Items = Sequence[WrittenId] | Sequence[Charges] | Sequence[Sample] | Sequence[Tokens]

MOST_AT_ONCE: Final = 200
"""Assertions in one call, so that none blocks the store for long."""

OUTCOMES: Final = "local ADDED, THERE, OVER, NO_ROOM = 1, 2, 3, 4\n"

_LAYOUTS: Final[Mapping[type, tuple[int, struct.Struct]]] = {
    WrittenId: (1, struct.Struct("<32sdd")),
    Charges: (2, struct.Struct("<dd")),
    Sample: (3, struct.Struct("<ddd")),
    Tokens: (4, struct.Struct("<dd")),
}
"""The number of each kind of item, and how an item is packed."""
_NOW_AND_DONE: Final = struct.Struct("<dd")
_LOADED: Final = struct.Struct("<4I")


def assemble() -> str:
    """The script that loads: the algorithms as they decide, each followed by how it loads."""
    makers = [maker(name, text(f"load_{name}")) for name in ALGORITHMS]
    return "\n".join([numbers(), text("call"), text("holds"), OUTCOMES, *makers, text("load")])


SCRIPT: Final = assemble()


@dataclass(frozen=True, slots=True)
class Load:
    """What one bucket should hold: items of one kind, those of ids and charges in order of time."""

    applied: AppliedQuota
    items: Items


class Loader:
    """Puts assertions into a store, one bounded call at a time.

    Args:
        url: the store's.
        name: of the load; its progress is kept in the store under this name.
        at_ms: the present time under the caller's clock; None under the store's clock.
        max_ids: the most ids remembered for one principal.
        script: another text in place of the script, for the tests that plant faults in it.
    """

    def __init__(
        self,
        url: str,
        name: str,
        *,
        at_ms: int | None = None,
        max_ids: int = 1_000_000,
        timeout_s: float = 30.0,
        script: str = SCRIPT,
    ) -> None:
        self._client = Redis.from_url(
            url, socket_timeout=timeout_s, retry=Retry(NoBackoff(), 0), client_name="quotagate-backfill"
        )
        self._key = f"{PREFIX}:backfill:{name}".encode()
        self._library = Library.of(script)
        self._call = encode_call(
            caller_clock=at_ms is not None, sequential=False, logged=False, max_ids=max_ids
        )
        self.at_ms = at_ms

    async def now_ms(self) -> int:
        """The present time.

        Raises:
            StoreError: no answer, or an error for one.
        """
        if self.at_ms is not None:
            return self.at_ms
        seconds, micros = await run(self._client, "TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    async def done(self) -> int:
        """How many assertions an earlier run had done when it was cut short; 0 if there was no such run.

        Raises:
            StoreError: as for ``now_ms``.
        """
        return int(await run(self._client, "GET", self._key) or 0)

    async def next_order(self) -> int:
        """The next place in the order of the decision log: whatever the store decides later comes after it.

        Raises:
            StoreError: as for ``now_ms``.
        """
        # Without buckets to remove, this script only takes a number.
        return int(await run_script(self._client, FORGET, [RESETS_KEY, ORDER_KEY], 0)) * ORDER_STEP

    async def load(self, loads: Sequence[Load], done: int) -> list[LoadResult]:
        """Load some buckets, and store how many assertions are done after this call.

        Raises:
            StoreError: as for ``now_ms``; the call may be made again, whatever became of it.
        """
        keys = [self._key, *(bucket_key(load.applied) for load in loads)]
        first = _NOW_AND_DONE.pack(self.at_ms or 0, done)
        arguments = [self._call, first, *(_encode(load.applied.quota, load.items) for load in loads)]
        reply = await call_function(partial(run, self._client), self._library, keys, arguments)
        return [LoadResult(*_LOADED.unpack(packed)) for packed in reply[1:]]

    async def finish(self) -> None:
        """Delete the progress: all is loaded.

        Raises:
            StoreError: as for ``now_ms``.
        """
        await run(self._client, "DEL", self._key)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()


def written_id(digest: int, at_ms: int, layer_ms: int) -> WrittenId:
    """An id whose digest is known, as a signed integer."""
    return WrittenId(spread(digest.to_bytes(8, "big", signed=True)), at_ms, layer_ms)


def _encode(quota: Quota, items: Items) -> bytes:
    """A bucket's parameters and what it should hold; ``lua/load.lua`` draws it."""
    kind, layout = _LAYOUTS[type(items[0])]
    head = QUOTA.pack(
        NUMBERS[quota.algorithm],
        0,
        len(items),
        quota.limit,
        kind,
        *parameters(quota),
        quota.longest_delay_ms,
    )
    return b"".join([head, *(layout.pack(*item) for item in items)])
