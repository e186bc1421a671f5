"""The counts of a process: how many names a gauge keeps."""

from __future__ import annotations

from app.admission.metrics.counts import KEPT, SHOWN, Gauges, touch


def test_full_gauge_forgets_all_but_the_most_active_names():
    gauges: Gauges = {}
    for n in range(KEPT):
        touch(gauges, ("request_rate", f"user={n}"), 0.0, 1.0)
    assert len(gauges) == KEPT
    touch(gauges, ("request_rate", "user=new"), 0.0, 1.0)
    assert len(gauges) == SHOWN + 1
