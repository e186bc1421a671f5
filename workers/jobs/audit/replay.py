"""The audit's second stage: every bucket of a partition is replayed, and its findings are explained."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import pyarrow as pa

from workers.jobs.audit import findings
from workers.jobs.audit.bucket_findings import SCHEMA, BucketFindings
from workers.jobs.audit.judge import AuditRules, judged
from workers.jobs.audit.sieve import BucketColumns, confirm
from workers.jobs.verdicts import APPLIED, BucketVerdicts, VerdictPartition, values

LATE_MS: Final = 60_000
"""The longest possible time between an ask and its call to the store."""

ROWS_AT_ONCE: Final = 5_000
"""How many findings are in memory as Python's values at a time."""

Name = tuple[str, str]
"""Quota key and bucket name."""

Row = dict[str, Any]
"""A row of ``bucket_findings.SCHEMA``; absent values are null."""


@dataclass(frozen=True, slots=True)
class ReplayRules:
    """The settings of a replay.

    Attributes:
        asks: how many asks the audit has: any of them could have had improbably many falsely seen ids.
    """

    audit: AuditRules
    asks: int


def replay(rules: ReplayRules, pieces: Iterable[pa.Table]) -> pa.Table:
    """The findings in the buckets of a partition, as ``SCHEMA``."""
    buckets = VerdictPartition(pieces)
    each = (row for bucket in buckets for row in _findings(bucket, rules.audit))
    batches, noted = [], []
    while some := list(islice(each, ROWS_AT_ONCE)):
        batches.append(pa.RecordBatch.from_pylist(some, SCHEMA))
        noted += [row for row in some if row["case"] == "falsely_seen" or row.get("unlogged")]
    counting = _Counting(buckets)
    more = [*_subtracted(noted, counting, rules.asks), *_untold(noted, counting)]
    return pa.Table.from_batches([*batches, pa.RecordBatch.from_pylist(more, SCHEMA)])


def _findings(bucket: BucketVerdicts, rules: AuditRules) -> Iterator[Row]:
    """The findings in one bucket: by the sieve if it is exactly as logged, else by the judge."""
    events = (bucket.bucket, bucket.quota)
    if events in rules.resets or events in rules.loads:
        tallies = None
    else:
        pieces = (BucketColumns(**columns) for columns in bucket.pieces(BucketColumns._fields))
        tallies = confirm(pieces, bucket.partition.quotas, rules)
    if tallies is None:
        return judged(bucket.rows(), rules)
    return BucketFindings.of_tallies(bucket.quota, bucket.bucket, tallies).flush()


class _Counting:
    """The rows that tell how many charges of a bucket the log may lack (``verdicts.COUNTING``)."""

    def __init__(self, buckets: VerdictPartition) -> None:
        names = ("applied", "how", "at_ms", "principal", "ids")
        columns = {name: buckets.counting.column(name).combine_chunks() for name in names}
        columns["applied"] = columns["applied"].indices
        self.allowed: Counter[Name] = Counter()
        self._named: dict[tuple[Name, str | None, int], list[tuple[int, int]]] = defaultdict(list)
        for applied, how, at_ms, principal, ids in zip(
            *(values(columns[name]) for name in names), strict=True
        ):
            quota = dict(zip(APPLIED, buckets.applied[applied], strict=True))
            name = quota["quota"], quota["bucket"]
            self.allowed[name] += 1 if how == "unanswered" else -1
            if how == "unanswered":
                until_ms = at_ms + quota["ttl_ms"] + LATE_MS
                for each in ids or ():
                    self._named[name, principal, each].append((at_ms, until_ms))

    def explains(self, case: Row) -> bool:
        """Whether an ask without the store named an id before it was taken as seen.

        That ask's call may have charged the id. The search covers the life of a layer, which is longer than
        the window of the charges.
        """
        spans = self._named.get(((case["quota"], case["bucket"]), case["principal"], case["digest"]), ())
        return any(from_ms <= case["at_ms"] <= until_ms for from_ms, until_ms in spans)


def _subtracted(found: Iterable[Row], counting: _Counting, asks: int) -> list[Row]:
    """Counts that subtract the falsely seen ids which other asks explain, and count the improbable asks."""
    explained: Counter[tuple[str, str, str | None]] = Counter()
    seen: dict[tuple[str, str, str | None, int], list[float]] = {}
    for case in found:
        if case["case"] != "falsely_seen":
            continue
        where = case["quota"], case["bucket"], case["principal"]
        if case.get("digest") is not None and counting.explains(case):
            explained[where] += 1
        else:
            among = seen.setdefault((*where, case["order"]), [0, 0])
            among[:] = among[0] + case["amount"], max(among[1], case.get("among") or 0)
    unlikely = Counter(
        where[:3] for where, (ids, among) in seen.items() if findings.unlikely(int(ids), int(among), asks)
    )
    return [
        *({**_tally(*where), "falsely_seen": -ids} for where, ids in explained.items()),
        *({**_tally(*where), "unlikely": asks_} for where, asks_ in unlikely.items()),
    ]


def _untold(found: Iterable[Row], counting: _Counting) -> list[Row]:
    """The unlogged charges in buckets with more of them than decisions without the store explain.

    A decision without the store may have charged each of its buckets once, unless a row of kind ``late`` has
    that charge. The result has a finding for each principal with such charges.
    """
    unlogged: dict[Name, Counter[str | None]] = defaultdict(Counter)
    for tally in found:
        if tally["case"] == "tally" and tally.get("unlogged"):
            unlogged[tally["quota"], tally["bucket"]][tally["principal"]] += tally["unlogged"]
    return [
        {**_tally(*name, principal), "untold": times}
        for name, principals in unlogged.items()
        if principals.total() > max(counting.allowed[name], 0)
        for principal, times in principals.items()
    ]


def _tally(quota: str, bucket: str, principal: str | None) -> Row:
    return {"case": "tally", "quota": quota, "bucket": bucket, "principal": principal}
