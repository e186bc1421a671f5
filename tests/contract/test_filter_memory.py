"""The memory of a principal's producer ids, as the store reports it: for the first id, and for many."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import redis

from app.domain.ladder import AppliedQuota
from app.domain.shape import FALSE_SEEN
from app.store.keys import bucket_key
from app.store.redis import RedisStore
from app.store.script import SCRIPT
from tests.prove.filters import Principal, chunks, strangers
from tests.report import say
from tests.stores import KINDS, processor_s, running

ONE_ID_BYTES = 4_096
MOST_BYTES = 30
CAP = 1_000_000


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limit", [1, 1_000, 500_000])
async def test_first_id_costs_at_most_4_kib_under_any_limit(kind: str, limit: int):
    with running(kind) as url:
        principal = Principal(url, limit)
        entity = "user=" + "n" * 120  # the longest name that is not hashed
        principal.applied = AppliedQuota(principal.quota, entity, entity, entity)
        principal.key = bucket_key(principal.applied)
        await principal.ask(strangers(1, seed=1), "admit")
        assert principal.bytes() <= ONE_ID_BYTES
        await principal.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_many_new_principals_cost_at_most_4_kib_of_used_memory_each(kind: str):
    many = 2_000
    with running(kind) as url, redis.Redis.from_url(url) as client:
        principal = Principal(url, 500_000)
        await principal.ask(strangers(1, seed=0), "admit")
        before = client.info("memory")["used_memory"]
        for n in range(many):
            entity = f"user=new-{n}"
            principal.applied = AppliedQuota(principal.quota, entity, entity, entity)
            principal.key = bucket_key(principal.applied)
            await principal.ask(strangers(1, seed=n), "admit")
        each = (client.info("memory")["used_memory"] - before) / many
        await principal.close()
    say(f"{kind}: {each:,.0f} bytes a principal")
    assert each <= ONE_ID_BYTES


@pytest.mark.parametrize(("kind", "limit"), [*product(KINDS, (1_000, 7_000, 10_000)), ("valkey", 100_000)])
async def test_id_costs_at_most_30_bytes_when_all_segments_are_full(kind: str, limit: int):
    """As many ids as the limit allows, the same in all four layers."""
    with running(kind) as url:
        principal = Principal(url, limit)
        ids = strangers(limit, seed=limit)
        await principal.fill([ids] * 4)
        segments = principal.segments()
        each = principal.bytes() / len(ids)
        remembered = (await principal.result(ids[:1], "peek")).remembered
        await principal.close()
    seen = np.max(np.stack([segment.seen(ids) for segment in segments]), axis=0)
    chance = 1 - math.prod(1 - float(segment.expected().mean()) for segment in segments)
    say(f"{kind}, limit {limit:,}: {len(segments)} segments, {each:.1f} bytes an id, {chance:.1e} false-seen")
    assert len(segments) <= 4
    assert len(ids) * 0.999 <= remembered <= len(ids)
    assert (seen > 0).all()
    assert chance <= FALSE_SEEN
    assert each <= MOST_BYTES


OLDER = (
    (
        "return min(max(SMALLEST_SEGMENT, ceil(limit / 3)), FIRST_SEGMENT, max_ids)",
        "return min(max(SMALLEST_SEGMENT, ceil(limit / 3)), max_ids)",
    ),
    ("return min(size >= 2 * ids and size or ids * GROWTH, max_ids)", "return min(ids * GROWTH, max_ids)"),
)
"""The rules for sizes of segments: now, and before the first segment was made small."""


async def test_bucket_of_the_older_shape_is_still_read_and_extended():
    limit, script = 6_000, SCRIPT
    for now, then in OLDER:
        assert script.count(now) == 1
        script = script.replace(now, then)
    ids = strangers(limit, seed=4)
    with running("valkey") as url:
        principal = Principal(url, limit)
        newer = principal.store
        principal.store = RedisStore(url, caller_clock=True, max_ids=CAP, script=script)
        await principal.store.connect()
        before, later = ids[:1_500], ids[1_500:]
        for some in chunks(before, 500):
            await principal.ask(some)
        assert [segment.ids for segment in principal.segments()] == [2_000]
        await principal.store.close()
        principal.store = newer
        for some in chunks(before, 500):
            assert (await principal.ask(some, "admit")).results[0].observed == len(before)
        for some in chunks(later, 500):
            await principal.ask(some)
        assert [segment.ids for segment in principal.segments()] == [2_000, 6_000]
        result = await principal.result(ids[:1], "peek")
        assert result.remembered == len(ids)
        assert (np.max(np.stack([s.seen(ids) for s in principal.segments()]), axis=0) > 0).all()
        await principal.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_thousand_new_ids_of_one_principal_occupy_the_store_for_less_than_its_budget(kind: str):
    """Measured in processor time, the fastest of five runs, from no key to one with room for all ids."""
    took = []
    with running(kind) as url:
        for attempt in range(5):
            principal = Principal(url, 500_000)
            entity = f"user=burst-{attempt}"
            principal.applied = AppliedQuota(principal.quota, entity, entity, entity)
            principal.key = bucket_key(principal.applied)
            await principal.ask(strangers(1, seed=1), "peek")
            before_s = processor_s(principal.redis)
            result = await principal.result(strangers(1_000, seed=attempt), "admit")
            took.append((processor_s(principal.redis) - before_s) * 1000)
            assert result.remembered == 1_000
            size = principal.bytes()
            await principal.close()
    say(f"{kind}: {min(took):.1f} ms for 1,000 new ids, {size:,} bytes")
    assert min(took) < 50
