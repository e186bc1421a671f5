"""The list of metrics: units, and the bounds of the histograms."""

from __future__ import annotations

from app.admission.metrics.counts import Counts
from app.admission.metrics.exposition import Exposition
from app.decision_log.status import LogStatus


def test_bounds_of_the_histograms_are_those_that_dashboards_read():
    found = {
        family.name.removeprefix("quotagate_"): " ".join(
            sample.labels["le"] for sample in family.samples if sample.name.endswith("_bucket")
        )
        for family in Exposition(Counts()).collect()
        if family.type == "histogram"
    }
    seconds = "0.0001 0.00025 0.0005 0.001 0.0025 0.005 0.01 0.025 0.05 0.1 0.25 0.5 1.0"
    assert found == {
        "decision_seconds": f"{seconds} +Inf",
        "store_seconds": f"{seconds} +Inf",
        "queue_seconds": f"{seconds} 2.5 5.0 +Inf",
        "script_asks": "1.0 2.0 5.0 10.0 20.0 50.0 100.0 +Inf",
    }


def test_age_of_the_oldest_log_batch_is_in_seconds():
    status = LogStatus(0, 5_250, 2, 0, 0, 0, "", 0)
    families = {family.name: family for family in Exposition(Counts(), log=status).collect()}
    assert families["quotagate_log_lag_seconds"].samples[0].value == 5.25
