"""The replay's buckets are held to those of the oracle, in answers, state and shown numbers."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from app.domain.ask import Ask
from app.domain.exact_ids import ExactIds
from app.domain.ladder import AppliedQuota
from app.domain.oracle import (
    BucketCharge,
    IdsBucket,
    Part,
    RateBucket,
    TokensBucket,
    corrected_now,
    judgement_of,
)
from app.domain.quota import Layers, Quota
from workers.jobs.whatif.buckets import Ids, Level, Rate, new_bucket
from workers.jobs.whatif.quota_form import REJECT, QuotaForm

MAX_IDS = 8
RATES = st.builds(
    Quota,
    st.sampled_from(["producer_byte_rate", "request_rate", "connection_creation_rate"]),
    st.sampled_from([0, 0.3, 1, 7, 20]),
    st.just("sampled_rate"),
    st.sampled_from(["deny", "delay"]),
    samples=st.integers(1, 4),
    sample_ms=st.sampled_from([100, 1000]),
)
TOKENS = st.builds(
    Quota,
    st.just("controller_mutation_rate"),
    st.sampled_from([0.3, 1, 7]),
    st.just("token_bucket"),
    st.sampled_from(["deny", "delay"]),
    burst=st.sampled_from([1.0, 5.5, 20.0]),
    max_debt=st.sampled_from([0.5, 30.0]),
)
IDS = st.builds(
    Quota,
    st.just("producer_ids_rate"),
    st.integers(0, 6),
    st.just("producer_ids"),
    st.just("deny"),
    window_ms=st.just(1_000),
    layers=st.sampled_from([Layers(334, 1334), Layers(1000, 1000)]),
)
STEPS = st.lists(
    st.tuples(
        st.integers(-3_000, 1_500),
        st.sampled_from([0, 0.1, 0.7, 1, 3, 19]),
        st.lists(st.integers(0, 12), max_size=3, unique=True),
        st.sampled_from(["admit", "admit", "admit", "record", "peek", "refund"]),
        st.sampled_from([False, False, True]),
    ),
    max_size=40,
)


@given(st.one_of(RATES, TOKENS, IDS), STEPS)
def test_a_bucket_is_the_oracles(quota: Quota, steps: list[tuple[Any, ...]]) -> None:
    ours = new_bucket(quota, MAX_IDS)
    theirs = {"sampled_rate": RateBucket, "token_bucket": TokensBucket}.get(
        quota.algorithm, lambda: IdsBucket(MAX_IDS, ExactIds())
    )()
    at_ms = 1_000_000
    for apart_ms, amount, numbers, mode, recheck in steps:
        at_ms += apart_ms if apart_ms > -100 else apart_ms // 2
        ids = tuple(bytes([number] * 8) for number in numbers) if quota.algorithm == "producer_ids" else ()
        usage = len(ids) if quota.algorithm == "producer_ids" else amount
        recording = mode == "record"
        enforcement = "delay" if recording and not ids else quota.enforcement
        form = QuotaForm(quota, enforcement, recording=recording, recheck=recheck)
        if ours.newest_ms - at_ms > form.clock_window_ms and mode in ("peek", "refund"):
            continue  # the replay has these judged by the domain
        if ours.newest_ms - at_ms > form.clock_window_ms:
            ours.move_to(at_ms)
        now_ms = corrected_now(mode, quota, theirs, at_ms)
        charge = BucketCharge(quota, usage, enforcement, recording, now_ms, at_ms, ids)
        part = Part(AppliedQuota(quota, "user=*", "user=a", ""), theirs, charge)
        if mode == "refund":
            if not ids and quota.algorithm != "producer_ids":
                ours.refund(form, usage, at_ms)
                theirs.refund(charge)
            continue
        judged = judgement_of(Ask(mode=mode, recheck=recheck), part)
        answer = ours.ask(form, usage, at_ms, ids)
        assert answer == (REJECT if judged.outcome == "reject" else judged.throttle_ms)
        if mode == "peek":
            continue
        if judged.outcome in ("admit", "delay"):
            ours.charge(form, usage, at_ms, ids)
            theirs.charge(charge)
        else:
            ours.touch(form, at_ms, ids)
            theirs.touch(charge)
        assert ours.shows(form, at_ms) == theirs.shows(charge)
        if isinstance(ours, Rate):
            assert ours.shown(form, at_ms) == theirs.shows(charge)[0]
        assert _state(ours) == _state(theirs)


def _state(bucket: Any) -> Any:
    if isinstance(bucket, Rate):
        return bucket.state()
    if isinstance(bucket, Level):
        return bucket.domain().state
    if isinstance(bucket, Ids):
        return _state(IdsBucket(MAX_IDS, bucket.exact))
    if isinstance(bucket, IdsBucket):
        exact: Any = bucket.state
        return exact.layers, exact.charges[exact.dead :], {n: ids for n, ids in exact.held.items() if ids}
    return bucket.state
