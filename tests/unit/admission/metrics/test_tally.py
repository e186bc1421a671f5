"""The most throttled buckets, in bounded memory."""

from __future__ import annotations

from itertools import count

from app.admission.metrics.tally import KEPT, Tally
from app.store.samples import ThrottledBucket


def test_the_most_throttled_buckets_come_first_with_their_counts() -> None:
    tally = Tally()
    for number in range(20):
        for _ in range(number):
            tally.add("request_rate", f"user={number}", 10)
    assert tally.take(2) == [
        ThrottledBucket("request_rate", "user=19", 19, 190),
        ThrottledBucket("request_rate", "user=18", 18, 180),
    ]
    assert tally.take(8) == []


def test_a_flood_of_new_names_hides_no_bucket_that_has_its_share() -> None:
    tally, names = Tally(), count()
    asks = 50 * KEPT
    for number in range(asks):
        tally.add("request_rate", f"user=made-up-{next(names)}", 1)
        if number % 50 == 0:  # 1 in 50, and a tally keeps 1 in KEPT
            tally.add("request_rate", "user=busy", 1)
        assert len(tally._counts) <= KEPT
    assert tally.take(1) == [ThrottledBucket("request_rate", "user=busy", KEPT, KEPT)]
