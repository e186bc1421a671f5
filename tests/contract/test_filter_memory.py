"""What a remembered producer id costs in the store, by its own account."""

from __future__ import annotations

import pytest

from app.domain.shape import first_segment
from tests.prove.filters import Principal, strangers
from tests.said import say
from tests.stores import running

MOST_BYTES = 26


@pytest.mark.parametrize("limit", [1_000, 10_000, 100_000])
async def test_a_remembered_id_costs_at_most_26_bytes(limit: int):
    """One full segment, with the same ids in all four layers."""
    with running("valkey") as url:
        principal = Principal(url, limit)
        ids = strangers(first_segment(limit, 1_000_000), seed=limit)
        await principal.fill([ids] * 4)
        (segment,) = principal.segments()
        each = principal.bytes() / len(ids)
        remembered = (await principal.ask(ids[:1], "peek")).said[0].remembered
        await principal.close()
    assert remembered == len(ids) == sum(segment.counts)
    assert (segment.seen(ids) == 15).all()
    say(f"limit {limit:,}: {each:.1f} bytes an id")
    assert each <= MOST_BYTES
