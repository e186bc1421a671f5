"""The counts of a process: how many names a gauge keeps, and histograms of other versions."""

from __future__ import annotations

from itertools import accumulate

from app.admission.metrics.counts import (
    DECISION_SECONDS,
    KEPT,
    SECONDS,
    SHOWN,
    Gauges,
    Histogram,
    touch,
)


def test_full_gauge_forgets_all_but_the_most_active_names():
    gauges: Gauges = {}
    for n in range(KEPT):
        touch(gauges, ("request_rate", f"user={n}"), 0.0, 1.0)
    assert len(gauges) == KEPT
    touch(gauges, ("request_rate", "user=new"), 0.0, 1.0)
    assert len(gauges) == SHOWN + 1


def test_histogram_of_an_older_version_is_added_by_its_own_bounds():
    times = [0.00005, 0.0015, 0.0025, 0.02, 0.03, 0.7, 1.5]
    older, ours = Histogram.of(SECONDS), Histogram.of(DECISION_SECONDS)
    older.observe(times)
    ours.observe(times)
    ours.add(older)
    reached = dict(zip(ours.bounds, accumulate(ours.counts), strict=False))
    assert [reached[bound] for bound in SECONDS] == [
        2 * sum(each <= bound for each in times) for bound in SECONDS
    ]
    assert (sum(ours.counts), ours.total) == (2 * len(times), 2 * sum(times))
