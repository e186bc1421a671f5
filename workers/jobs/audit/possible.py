"""Finds rows that no node can have written: with unknown words, or with numbers no quota has.

The judges compute with the values of a row. Such a row is a finding by itself, and goes no further.
"""

from __future__ import annotations

from typing import Final, get_args

import numpy as np
import pyarrow as pa

from app.domain.ask import MODES
from app.domain.decision import OUTCOMES
from app.domain.quota import KEYS, Algorithm, Enforcement
from workers.jobs.audit.bucket_findings import SCHEMA
from workers.jobs.verdicts import Flags, LogRows, among, integers, numbers, valid

KINDS: Final = (
    *("decision", "late", "ids", "renewal", "lease", "settlement", "lapse", "undone", "undo"),
    *("reset", "load", "quota", "factor", "dropped"),
)
WORDS: Final = {
    "quota": tuple(KEYS),
    "algorithm": get_args(Algorithm),
    "enforcement": get_args(Enforcement),
    "outcome": OUTCOMES,
}
"""The words that a verdict may have."""

EXAMPLES: Final = 20
"""How many such rows of a row group are kept as cases; all of them are counted."""

MOST_CHARGES: Final = 2.0**62
"""More ids than any window may have."""

MOST_SAMPLES: Final = 1_000
"""More than any quota may have."""


def impossible(rows: LogRows) -> Flags:
    """True for each row that no node can have written."""
    mode = rows.column("mode")
    odd = ~among(rows.column("kind"), *KINDS) | (valid(mode) & ~among(mode, *MODES))
    odd[rows.of_row[_impossible_verdicts(rows)]] = True
    return odd


def _impossible_verdicts(rows: LogRows) -> Flags:
    odd = np.zeros(len(rows.of_row), bool)
    for name, words in WORDS.items():
        odd |= ~among(rows.verdict(name), *words)
    for name in ("limit", "burst", "usage", "observed", "remaining", "max_debt"):
        odd |= ~np.isfinite(numbers(rows.verdict(name)))
    for name in ("limit", "burst", "max_debt"):
        odd |= numbers(rows.verdict(name)) < 0
    samples, sample_ms, window_ms, interval_ms, ttl_ms = (
        integers(rows.verdict(name))
        for name in ("samples", "sample_ms", "window_ms", "interval_ms", "ttl_ms")
    )
    counts_ids = among(rows.verdict("algorithm"), "producer_ids")
    is_rate = among(rows.verdict("algorithm"), "sampled_rate")
    odd |= is_rate & ((samples < 1) | (samples > MOST_SAMPLES) | (sample_ms < 1))
    odd |= counts_ids & ((window_ms < 1) | (interval_ms < 1) | (ttl_ms < 1))
    charges = numbers(rows.verdict("observed"))
    odd |= counts_ids & ((charges < 0) | (charges > MOST_CHARGES))
    return odd


def findings(rows: LogRows) -> pa.Table:
    """A finding for each of some impossible rows."""
    names = ("kind", "principal", "at_ms", "order", "mode", "place", "batch")
    each = zip(*(rows.column(name).to_pylist() for name in names), strict=True)
    found = []
    for number, (kind, principal, at_ms, order, mode, place, batch) in enumerate(each):
        counts = {"principal": principal, "contradicts": 1}
        if number < EXAMPLES:
            counts |= {
                "case": "contradicts",
                "at_ms": at_ms,
                "order": order,
                "logged": f"kind {kind}, mode {mode}",
                "exact": f"words and numbers that a node writes (place {place} of batch {batch})",
            }
        found.append(counts)
    return pa.Table.from_pylist(found, SCHEMA)
