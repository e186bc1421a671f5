"""Exact sets answer like the filter, as long as the filter has no false positive."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from app.domain.digest import digest, spread
from app.domain.exact_ids import COMPACT_FROM, ExactIds
from app.domain.oracle import BucketCharge, IdsBucket, corrected_now
from app.domain.quota import LAYER_POLICIES, Layers, Quota

SECRET = b"k" * 32
WINDOW = 1_200
MAX_IDS = 60

STEPS = st.lists(
    st.tuples(
        st.sampled_from((0, 1, 100, 299, 300, 399, 400, 401, 900, 1_199, 1_200, 1_601, -1, -2_000)),
        st.lists(st.integers(0, 80), max_size=5, unique=True),
        st.sampled_from(("admit", "admit", "record", "peek")),
        st.sampled_from((0, 3, 10, 50)),
        st.sampled_from(tuple(LAYER_POLICIES)),
    ),
    max_size=60,
)


def quota_of(limit: int, policy: str) -> Quota:
    layers = Layers.named(policy, WINDOW)
    return Quota("producer_ids_rate", limit, "producer_ids", "deny", window_ms=WINDOW, layers=layers)


@given(STEPS)
@settings(max_examples=300)
def test_exact_ids_decide_and_remember_as_the_filter_does(steps):
    exact, filtered = IdsBucket(MAX_IDS, ExactIds()), IdsBucket(MAX_IDS)
    now = 1_000_000
    for gap, ids, mode, limit, policy in steps:
        now += gap
        quota = quota_of(limit, policy)
        spreads = tuple(spread(digest(SECRET, "alice", each)) for each in ids)
        results = []
        for bucket in (exact, filtered):
            if mode == "peek" and bucket.newest_ms is not None and now < bucket.newest_ms:
                continue
            at = corrected_now(mode, quota, bucket, now)
            charge = BucketCharge(quota, len(ids), "deny", mode == "record", at, now, spreads)
            verdict = bucket.judge(charge)
            if mode != "peek" and (mode == "record" or verdict.outcome == "admit"):
                bucket.charge(charge)
            elif mode != "peek":
                bucket.touch(charge)
            layers = quota.layers
            found = [bucket.state.find(each, at, layers) is not None for each in spreads]
            results.append((verdict, bucket.shows(charge), bucket.newest_ms, found))
        assert not results or results[0] == results[1]


def test_dead_charges_are_dropped_in_bulk():
    state = ExactIds()
    quota = quota_of(10, "layered")
    for at in range(3 * COMPACT_FROM):
        state.charge([at.to_bytes(8, "big")], at, 100, quota.layers, 10, 1_000_000)
        assert state.charged(at, 100) == min(at + 1, 100)
    assert len(state.charges) < 2 * COMPACT_FROM


def test_unseen_id_can_be_adopted_and_seen_id_forgotten():
    layers = Layers.named("layered", WINDOW)
    state = ExactIds()
    state.adopt(b"stranger", 0, layers)
    assert state.find(b"stranger", layers.ttl_ms - 1, layers) is not None
    assert state.find(b"stranger", layers.ttl_ms, replace(layers)) is None
    assert state.charged(0, WINDOW) == 0
    state.forget(b"stranger")
    assert state.find(b"stranger", 0, layers) is None


def test_refresh_writes_no_unseen_id():
    layers = Layers.named("layered", WINDOW)
    state = ExactIds()
    state.refresh(b"stranger", 0, layers, 10, MAX_IDS)
    assert state.find(b"stranger", 0, layers) is None
    assert state.newest_ms is None
