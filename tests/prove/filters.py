"""Producer-id filters filled through the real script, and their bytes read back as cells."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import redis

from app.domain.ask import Mode
from app.domain.entity import Entity
from app.domain.ladder import AppliedQuota
from app.domain.quota import Layers, Quota
from app.domain.shape import BLOCK_BYTES, CELLS, LAYERS
from app.store.compiled_quota import compiled
from app.store.keys import bucket_key
from app.store.port import Answer, Charge, IdsResult, Plan
from app.store.redis import RedisStore

Spreads = npt.NDArray[np.uint32]
"""Ids, each spread over eight words: one row per id."""

HEAD = struct.Struct("<ddIddddIIII")
SEGMENT = struct.Struct("<IBBIIIIII")


def strangers(count: int, seed: int) -> Spreads:
    """Ids that were never in an ask: a keyed hash makes random words of any id."""
    return np.random.default_rng(seed).integers(0, 1 << 32, (count, 8), np.uint32)


@dataclass
class Segment:
    """A segment as stored in the key: for each block 504 cells of four bits, dead layers masked."""

    ids: int
    share: int
    hashes: int
    counts: tuple[int, ...]
    cells: npt.NDArray[np.uint8]

    def seen(self, spreads: Spreads) -> npt.NDArray[np.uint8]:
        """For each id, the layers that take it as seen, as bits."""
        words = spreads.astype(np.uint64)
        blocks = (words[:, 0] * np.uint64(len(self.cells))) >> np.uint64(32)
        layers = np.full(len(spreads), 15, np.uint8)
        fraction = words[:, 1]
        for n in range(self.hashes):
            fraction = words[:, 1 + n // 3] if n % 3 == 0 else fraction & np.uint64(0xFFFFFFFF)
            fraction = fraction * np.uint64(CELLS)
            layers &= self.cells[blocks, fraction >> np.uint64(32)]
        return layers

    def expected(self) -> npt.NDArray[np.float64]:
        """For each block, the probability that an unseen id in it is taken as seen by any layer.

        By inclusion and exclusion over layers, since layers that hold the same ids have the same cells:
        a stranger has all its k cells in every layer of a set with chance (cells set in all of them / 504)^k.
        """
        chance = np.zeros(len(self.cells))
        for chosen in range(1, 1 << LAYERS):
            in_all = np.count_nonzero((self.cells & chosen) == chosen, axis=1) / CELLS
            chance -= (-1) ** chosen.bit_count() * in_all**self.hashes
        return chance


def read(packed: bytes, now_ms: int, ttl_ms: int) -> list[Segment]:
    """The live segments of a key, in the layout that ``lua/producer_ids.lua`` shows."""
    number, *starts = HEAD.unpack_from(packed)[2:7]
    entries = HEAD.unpack_from(packed)[10]
    live = [n for n in range(max(number - LAYERS + 1, 1), number + 1) if now_ms - starts[n % LAYERS] < ttl_ms]
    room = 4
    while room < entries:
        room *= 4
    at, found = HEAD.size + room * SEGMENT.size, []
    for entry in range(entries):
        fields = SEGMENT.unpack_from(packed, HEAD.size + entry * SEGMENT.size)
        ids, share, hashes, blocks, _, *counts = fields
        raw = np.frombuffer(packed, np.uint8, blocks * BLOCK_BYTES, at).reshape(blocks, BLOCK_BYTES)
        at += blocks * BLOCK_BYTES
        if hashes:
            cells = np.stack((raw[:, 4:] & 15, raw[:, 4:] >> 4), axis=2).reshape(blocks, CELLS)
            found.append(Segment(ids, share, hashes, tuple(counts), cells & _mask(raw, live)))
    return found


def _mask(raw: npt.NDArray[np.uint8], live: list[int]) -> npt.NDArray[np.uint8]:
    """For each block, the slots of live layers, which are among the four up to the block's last writer."""
    written = raw[:, :4].copy().view("<u4").astype(np.int64)
    mask = np.zeros_like(written, np.uint8)
    for number in live:
        holds = (number <= written) & (number > written - LAYERS)
        mask |= np.where(holds, 1 << number % LAYERS, 0).astype(np.uint8)
    return mask


class Principal:
    """One principal's ids in a store, under the caller's clock."""

    def __init__(self, url: str, limit: int, *, max_ids: int = 1_000_000) -> None:
        self.quota = Quota("producer_ids_rate", limit, "producer_ids", "deny")
        self.layers: Layers = self.quota.layers
        entity = str(Entity.of(user=f"p{limit}"))
        self.applied = AppliedQuota(self.quota, entity, entity, entity)
        self.key = bucket_key(self.applied)
        self.store = RedisStore(url, caller_clock=True, max_ids=max_ids, timeout_s=60)
        self.redis: Any = redis.Redis.from_url(url)
        self.now_ms = 1_000_000_000

    async def result(self, spreads: Spreads, mode: Mode = "record") -> IdsResult:
        """Ask for ids; returns the result of their charge."""
        (result,) = (await self.ask(spreads, mode)).results
        assert isinstance(result, IdsResult)
        return result

    async def ask(self, spreads: Spreads, mode: Mode = "record") -> Answer:
        await self.store.connect()
        charge = self.charge(self.quota, len(spreads), spreads.astype("<u4").tobytes())
        return (await self.store.decide([Plan(mode, (charge,), at_ms=self.now_ms)]))[0]

    def charge(self, quota: Quota, ids: int, spreads: bytes) -> Charge:
        """The charge of an ask for this many ids to the bucket, under a quota."""
        compiled_quota = compiled(quota, self.applied.entity, 0)
        return Charge(compiled_quota, self.applied.owner, self.applied.bucket, self.key, ids, spreads)

    async def fill(self, layers: list[Spreads]) -> None:
        """Record each layer's ids in a layer of their own, one after the other."""
        for n, spreads in enumerate(layers):
            self.now_ms += self.layers.interval_ms if n else 0
            for some in chunks(spreads, 1_000):
                await self.ask(some)

    def segments(self) -> list[Segment]:
        return read(self.redis.get(self.key), self.now_ms, self.layers.ttl_ms)

    def bytes(self) -> int:
        return int(self.redis.memory_usage(self.key, samples=0))

    async def close(self) -> None:
        await self.store.close()
        self.redis.close()


def chunks(spreads: Spreads, size: int) -> Iterator[Spreads]:
    for at in range(0, len(spreads), size):
        yield spreads[at : at + size]
