"""The size of a segment of a layered filter, from the ids it holds and its allowed false-seen probability.

A segment consists of blocks of 504 cells. An id has one block, and k cells in it, drawn independently. With
m ids per block on average, the number of ids in one block is Poisson(m), and i ids leave a cell unset with
probability (1 - 1/504)^(k i). So (Putze, Sanders, Singler 2009, section 3)

    false_seen(m, k) = sum over i of Poisson(i; m) * (1 - (1 - 1/504)^(k i))^k
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

CELLS: Final = 504
BLOCK_BYTES: Final = 256
LAYERS: Final = 4
MAX_HASHES: Final = 21
FALSE_SEEN: Final = 1e-4
"""The highest probability that an unseen id is taken as seen, over all live layers and segments together."""

SMALLEST_SEGMENT: Final = 32
FIRST_SEGMENT: Final = 140
"""The most ids per layer of a first segment: with header and ring it takes 3 KiB under any limit."""

STEPS: Final = 3
"""The most steps from the first segment to one with as many ids per layer as the limit."""

LEAST_STEP: Final = 7
"""The least growth per step. Fewer, larger steps are better: the earlier segments take memory too."""

GROWTH: Final = 4
"""The growth from segment to segment beyond the limit; recorded ids and ids that stay in use fill them."""

SHARES: Final = (
    (14, 17.522573837268),
    (15, 16.107327828875),
    (15, 14.844918294898),
    (16, 13.710210628102),
    (17, 12.678077041761),
    (17, 11.747373257968),
    (18, 10.896223115390),
    (18, 10.116778447815),
    (19, 9.405483440873),
    (20, 8.747111156350),
    (20, 8.145539452342),
    (21, 7.586621433182),
    (21, 7.071841320711),
    (21, 6.590116563860),
    (21, 6.139104545617),
    (21, 5.716682359594),
)
"""The number of hashes with which a block holds the most ids, and that number of ids; for share 1, 2, …

A test recomputes these numbers."""

SMALLEST_SHARE: Final = len(SHARES)


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of one segment, for all of its layers.

    Attributes:
        ids: how many ids a layer holds before the segment is full.
        share: the segment may use 2^-share of the false-seen probability, each layer a quarter of that.
        hashes: the number of cells of an id.
        blocks: the number of blocks, of 256 bytes each.
    """

    ids: int
    share: int
    hashes: int
    blocks: int

    @classmethod
    def of(cls, ids: int, share: int) -> Shape:
        """The shape of a segment with this many ids per layer.

        The square root of the number of blocks is added to it, because ids fall on blocks unevenly: in a
        small segment, one crowded block would exceed the share.

        >>> Shape.of(334, 1)
        Shape(ids=334, share=1, hashes=14, blocks=25)
        """
        hashes, ids_per_block = SHARES[share - 1]
        blocks = math.ceil(ids / ids_per_block)
        return cls(ids, share, hashes, blocks + math.ceil(math.sqrt(blocks)))

    def places(self, spread: bytes) -> tuple[int, tuple[int, ...]]:
        """The block of an id and its cells in it, from its 32 spread bytes.

        The first word picks the block, the others the cells.
        """
        (first,) = struct.unpack_from("<I", spread)
        return first * self.blocks >> 32, _cells(spread)[: self.hashes]


@lru_cache(maxsize=4096)  # the oracle looks for the same ids in each segment, and in ask after ask
def _cells(spread: bytes) -> tuple[int, ...]:
    """The cells of an id in its block, enough for the largest number of hashes.

    Each word but the first, as a fraction of 2^32, gives three digits in base 504, which are equally likely
    and independent. (9-bit pieces mod 504 would hit eight cells twice as often.)
    """
    cells = []
    for word in struct.unpack_from("<7I", spread, 4):
        fraction = word
        for _ in range(3):
            cell, fraction = divmod(fraction * CELLS, 1 << 32)
            cells.append(cell)
    return tuple(cells)


def first_segment(limit: float, max_ids: int) -> int:
    """How many ids per layer the first segment holds.

    >>> first_segment(5, 1_000_000), first_segment(300, 1_000_000), first_segment(500_000, 1_000_000)
    (32, 100, 140)
    """
    return min(max(SMALLEST_SEGMENT, math.ceil(limit / 3)), FIRST_SEGMENT, max_ids)


def step(first: int, limit: float) -> float:
    """The growth from each segment to the next, up to the limit.

    Three steps if each is large enough, else two, else one. The growth is in whole quarters, so that every
    product is exact here and in the store's script.
    """
    for steps in range(STEPS, 1, -1):
        grows = 3.0
        while first * grows**steps < limit:
            grows += 0.25
        if grows >= LEAST_STEP:
            return grows
    return max(3.0, limit / first)


def next_segment(ids: int, limit: float, max_ids: int) -> int:
    """How many ids per layer the segment after a full one holds.

    It is the first planned size that is at least twice the size of the full segment, which may come from
    another limit or an older version. Beyond the limit, sizes grow by ``GROWTH``.

    >>> sizes = [first_segment(500_000, 1_000_000)]
    >>> for _ in range(4):
    ...     sizes.append(next_segment(sizes[-1], 500_000, 1_000_000))
    >>> sizes
    [140, 2170, 33635, 500000, 1000000]
    """
    size: float = first_segment(limit, max_ids)
    grows = step(int(size), limit)
    while size < 2 * ids and size < limit:
        size = min(math.ceil(size * grows), limit)
    return min(int(size) if size >= 2 * ids else ids * GROWTH, max_ids)


def next_share(live: tuple[int, ...]) -> int:
    """The share of a new segment: half of the probability left by live ones, rounded down to a power of two.

    >>> next_share(()), next_share((1,)), next_share((1, 2)), next_share((2,))
    (1, 2, 3, 2)
    """
    left = 1.0 - sum(2.0**-share for share in live)
    share = 1
    while 2.0**-share > left / 2 and share < SMALLEST_SHARE:
        share += 1
    return share
