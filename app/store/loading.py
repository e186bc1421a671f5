"""Loading assertions into a running store, by its own library."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

from app.domain.digest import spread
from app.domain.ladder import AppliedQuota
from app.domain.loading import Charges, LoadResult, WrittenId
from app.domain.quota import Quota
from app.domain.sampled_rate import Sample
from app.domain.slots import slot_of
from app.domain.token_bucket import Tokens
from app.store.client import client_of, is_clustered
from app.store.compiled_quota import AFTER, BEFORE, BETWEEN, parameters
from app.store.compiled_quota import ALGORITHMS as NUMBERS
from app.store.encoding import ORDER_STEP, encode_call
from app.store.keys import ORDER_KEY, PREFIX, RESETS_KEY, bucket_key, order_key, resets_key, slot_key
from app.store.library import Library, MissingFunctionError, call_function
from app.store.redis import run, run_script
from app.store.script import ALGORITHMS, FORGET, maker, numbers, text

Items = Sequence[WrittenId] | Sequence[Charges] | Sequence[Sample] | Sequence[Tokens]

PROGRESS_KEPT_MS: Final = 7 * 86_400_000
"""How long the progress of a load that was cut short is kept."""

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
    """The script that loads: each algorithm of the decisions, followed by its loader."""
    makers = [maker(name, text(f"load_{name}")) for name in ALGORITHMS]
    return "\n".join([numbers(), text("call"), text("holds"), text("undo"), OUTCOMES, *makers, text("load")])


SCRIPT: Final = assemble()


@dataclass(frozen=True, slots=True)
class Load:
    """The items of one kind that one bucket should hold; ids and charges are in order of time."""

    applied: AppliedQuota
    items: Items


class Loader:
    """Puts assertions into a store, one bounded call at a time.

    Args:
        url: the URL of the store.
        name: the name of the load; the store keeps its progress under it.
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
        self._client = client_of(url, timeout_s, connect_within_s=timeout_s)
        self._is_clustered = is_clustered(self._client)
        self._name = name
        self._key = f"{PREFIX}:backfill:{name}".encode()
        self._library = Library.of(script)
        self._call = encode_call(
            caller_clock=at_ms is not None, sequential=False, logged=False, max_ids=max_ids
        )
        self.at_ms = at_ms

    async def now_ms(self) -> int:
        """The present time.

        Raises:
            StoreError: no answer, or an error as the answer.
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

    async def next_orders(self, loads: Sequence[Load]) -> list[int]:
        """For each load the next place in its order of the decision log; later decisions come after it.

        Raises:
            StoreError: as for ``now_ms``.
        """
        orders: dict[int, int] = {}
        for slot in (slots := [self._slot_of(load) for load in loads]):
            if slot not in orders:
                keys = (resets_key(slot), order_key(slot)) if self._is_clustered else (RESETS_KEY, ORDER_KEY)
                # Without buckets to remove, this script only takes a number.
                orders[slot] = int(await run_script(self._client, FORGET, keys, 0)) * ORDER_STEP
        return [orders[slot] for slot in slots]

    async def load(self, loads: Sequence[Load], done: int) -> list[LoadResult]:
        """Load some buckets, and store how many assertions are done after this call.

        Raises:
            StoreError: as for ``now_ms``; the call may be made again in any case.
        """
        if not self._is_clustered:
            return await self._load_in_one_slot(loads, done, self._key)
        results: list[LoadResult] = []
        for slot in dict.fromkeys(map(self._slot_of, loads)):
            slot_loads = [load for load in loads if self._slot_of(load) == slot]
            results += await self._load_in_one_slot(
                slot_loads, done, slot_key(slot, f"backfill:{self._name}")
            )
        await run(self._client, "SET", self._key, done, "PX", PROGRESS_KEPT_MS)
        return results

    async def _load_in_one_slot(self, loads: Sequence[Load], done: int, progress: bytes) -> list[LoadResult]:
        keys = [progress, *(bucket_key(load.applied) for load in loads)]
        first = _NOW_AND_DONE.pack(self.at_ms or 0, done)
        arguments = [self._call, first, *(_encode(load.applied.quota, load.items) for load in loads)]
        reply = await self._called(keys, arguments)
        return [LoadResult(*_LOADED.unpack(packed)) for packed in reply[1:]]

    async def _called(self, keys: Sequence[bytes], arguments: Sequence[bytes]) -> list[Any]:
        """The reply of the library's function; on a cluster each primary may still lack the library."""
        if not self._is_clustered:
            return await call_function(partial(run, self._client), self._library, keys, arguments)
        try:
            return cast("list[Any]", await self._fcall(keys, arguments))
        except MissingFunctionError:
            await run(self._client, "FUNCTION LOAD", "REPLACE", self._library.code)  # on all primaries
            return cast("list[Any]", await self._fcall(keys, arguments))

    async def _fcall(self, keys: Sequence[bytes], arguments: Sequence[bytes]) -> Any:
        return await run(self._client, "FCALL", self._library.name, len(keys), *keys, *arguments)

    def _slot_of(self, load: Load) -> int:
        """The slot of a load's bucket; 0 for all if the store is no cluster."""
        return slot_of(bucket_key(load.applied)) if self._is_clustered else 0

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
    """A bucket's parameters and the items that it should hold; ``lua/load.lua`` has the layout."""
    kind, layout = _LAYOUTS[type(items[0])]
    head = (
        BEFORE.pack(NUMBERS[quota.algorithm], 0),
        BETWEEN.pack(len(items), quota.limit, kind),
        AFTER.pack(*parameters(quota), quota.longest_delay_ms),
    )
    return b"".join([*head, *(layout.pack(*item) for item in items)])
