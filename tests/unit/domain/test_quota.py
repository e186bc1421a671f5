"""Values that follow from the settings of a quota."""

from __future__ import annotations

import math

from app.domain.quota import Quota


def test_clock_may_be_behind_by_what_the_bucket_remembers():
    windows = [
        quota.clock_window_ms
        for quota in (
            Quota("request_rate", 5, "sampled_rate", "delay", samples=11, sample_ms=1_000),
            Quota("controller_mutation_rate", 5, "token_bucket", "deny", burst=50),
            Quota("controller_mutation_rate", 0, "token_bucket", "deny", burst=50),
        )
    ]
    assert windows == [11_000, 10_000, math.inf]
