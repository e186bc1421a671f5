"""Hypothesis without its deadline of 200 ms for each example, which a busy machine misses."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")
