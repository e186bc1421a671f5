"""Shapes: the table of shares, computed again, and cells, which are uniform and independent."""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.digest import digest, spread
from app.domain.shape import (
    CELLS,
    FALSE_SEEN,
    LAYERS,
    MAX_HASHES,
    SHARES,
    SMALLEST_SEGMENT,
    SMALLEST_SHARE,
    Shape,
    first_segment,
    next_segment,
    next_share,
    step,
)
from tests.false_seen import false_seen

SECRET = b"s" * 32
IDS = 60_000


def most_ids(hashes: int, chance: float) -> float:
    """The mean ids per block at which a layer has this false-seen probability, by bisection."""
    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if false_seen(middle, hashes) <= chance else (low, middle)
    return low


@pytest.mark.parametrize("share", range(1, SMALLEST_SHARE + 1))
def test_each_share_has_the_best_number_of_hashes(share: int):
    chance = FALSE_SEEN * 2.0**-share / LAYERS
    loads = {hashes: most_ids(hashes, chance) for hashes in range(8, MAX_HASHES + 1)}
    hashes, load = SHARES[share - 1]
    assert hashes == max(loads, key=loads.__getitem__)
    assert load == pytest.approx(loads[hashes], rel=1e-9)


def test_false_seen_is_the_sum_over_poisson_block_sizes():
    load, hashes = 10.0, 14
    terms = (
        math.exp(-load) * load**i / math.factorial(i) * (1 - (1 - 1 / CELLS) ** (hashes * i)) ** hashes
        for i in range(150)
    )
    assert false_seen(load, hashes) == pytest.approx(sum(terms), rel=1e-12)


@given(st.integers(1, 1_000_000), st.integers(1, SMALLEST_SHARE))
def test_shape_is_the_smallest_within_its_share_plus_its_square_root(ids: int, share: int):
    shape = Shape.of(ids, share)
    assert (shape.ids, shape.share) == (ids, share)
    chance = FALSE_SEEN * 2.0**-share / LAYERS
    needed = bisect_left(range(shape.blocks), shape.blocks, key=lambda n: n + math.ceil(math.sqrt(n)))
    assert needed + math.ceil(math.sqrt(needed)) == shape.blocks
    assert false_seen(ids / needed, shape.hashes) <= chance * (1 + 1e-9)
    if needed > 1:
        assert false_seen(ids / (needed - 1), shape.hashes) > chance


@given(st.binary(min_size=32, max_size=32), st.integers(1, 1_000_000), st.integers(1, SMALLEST_SHARE))
def test_blocks_and_cells_lie_within_the_segment(spread_: bytes, ids: int, share: int):
    shape = Shape.of(ids, share)
    block, cells = shape.places(spread_)
    assert 0 <= block < shape.blocks
    assert len(cells) == shape.hashes
    assert all(0 <= cell < CELLS for cell in cells)


def test_word_gives_the_digits_of_its_fraction_in_base_504():
    word = 0xDEADBEEF
    _, cells = Shape(1, 1, 3, 1).places(b"\0" * 4 + word.to_bytes(4, "little") + b"\0" * 24)
    assert sum(cell / CELLS ** (n + 1) for n, cell in enumerate(cells)) == pytest.approx(
        word / 2**32, abs=CELLS**-3
    )


def test_each_word_after_the_first_gives_three_cells():
    words = [0, *(n << 29 for n in range(1, 8))]
    spread_ = b"".join(word.to_bytes(4, "little") for word in words)
    _, cells = Shape(1, 1, MAX_HASHES, 1).places(spread_)
    assert cells == tuple(cell for eighths in range(1, 8) for cell in (63 * eighths, 0, 0))


def drawn() -> np.ndarray:
    """One row for each of many ids: its block, and its cells for all 21 hashes."""
    shape = Shape(1, 1, MAX_HASHES, 16)
    rows = []
    for producer_id in range(IDS):
        block, cells = shape.places(spread(digest(SECRET, "alice", producer_id)))
        rows.append((block, *cells))
    return np.array(rows)


@pytest.fixture(scope="module")
def places() -> np.ndarray:
    return drawn()


def sigmas(counts: np.ndarray) -> float:
    """The distance of a chi-square with equal expectations from its mean, in standard deviations."""
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


@pytest.mark.parametrize("column", range(MAX_HASHES + 1))
def test_blocks_and_cells_are_uniform(places: np.ndarray, column: int):
    counts = np.bincount(places[:, column], minlength=CELLS if column else 16)
    assert abs(sigmas(counts)) < 4.5


def test_cells_are_independent(places: np.ndarray):
    coarse = places * 12 // np.array([16, *[CELLS] * MAX_HASHES])
    for one in range(MAX_HASHES + 1):
        for other in range(one):
            pairs = np.bincount(coarse[:, one] * 12 + coarse[:, other], minlength=144)
            rows, columns = pairs.reshape(12, 12).sum(1), pairs.reshape(12, 12).sum(0)
            expected = np.outer(rows, columns) / IDS
            used = expected > 0
            freedom = (np.count_nonzero(rows) - 1) * (np.count_nonzero(columns) - 1)
            chi = ((pairs.reshape(12, 12) - expected)[used] ** 2 / expected[used]).sum()
            assert abs(chi - freedom) / math.sqrt(2 * freedom) < 5.5, (one, other)


def test_first_and_next_segments():
    assert [first_segment(limit, 1_000) for limit in (0, 1, 96, 97, 99, 100, 420, 500, 5_000)] == [
        *(32, 32, 32, 33, 33, 34, 140, 140, 140)
    ]
    assert first_segment(5_000, 100) == 100
    assert next_segment(32, 5, 1_000) == 128
    assert next_segment(300, 5, 1_000) == 1_000


def test_growth_is_the_least_in_whole_quarters_that_reaches_the_limit():
    assert step(140, 200_000) == 11.5
    assert 140 * 11.25**3 < 200_000 <= 140 * 11.5**3


@given(st.integers(0, 5_000_000))
def test_at_most_four_segments_hold_the_limit(limit: int):
    sizes = [first_segment(limit, 10_000_000)]
    while sizes[-1] < limit:
        sizes.append(next_segment(sizes[-1], limit, 10_000_000))
    assert len(sizes) <= 4
    assert sizes[-1] == limit or sizes[0] == SMALLEST_SEGMENT
    assert all(after >= 2 * before for before, after in pairwise(sizes))
    assert next_segment(sizes[-1], limit, 10_000_000) == min(4 * sizes[-1], 10_000_000)


@given(st.integers(1, 500_000), st.integers(100, 500_000))
def test_segment_from_another_plan_is_followed_by_a_larger_one(ids: int, limit: int):
    """Such a segment comes from an older version or another limit."""
    after = next_segment(ids, limit, 1_000_000)
    assert after >= 2 * ids
    assert after <= max(4 * ids, limit)
    assert next_segment(-(-limit // 3), limit, 1_000_000) in {limit, 4 * -(-limit // 3)}


@given(st.lists(st.booleans(), max_size=40))
def test_live_shares_never_sum_above_one(keeps: list[bool]):
    """Segments are added, and the oldest may go before the next; only the smallest share may repeat."""
    live: tuple[int, ...] = ()
    for keep in keeps:
        left = live if keep else live[1:]
        live = (*left, next_share(left))
        assert sum(2.0**-share for share in live) <= 1 + len(live) * 2.0**-SMALLEST_SHARE
