"""The audit's second stage: every bucket of a partition is replayed, and its findings are explained."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from workers.jobs.audit import findings
from workers.jobs.audit.bucket_findings import SCHEMA, BucketFindings, BucketTally
from workers.jobs.audit.judge import AuditRules, Replay, events_before, judge_of, judged
from workers.jobs.audit.levels import LevelJudge
from workers.jobs.audit.saved_replays import decode, encode
from workers.jobs.audit.sieve import BucketColumns, confirm
from workers.jobs.errors import JobError
from workers.jobs.verdicts import APPLIED, BucketVerdicts, VerdictPartition, values

LATE_MS: Final = 60_000
"""The longest possible time between an ask and its call to the store."""

ROWS_AT_ONCE: Final = 5_000
"""How many findings are in memory as Python's values at a time."""

Name = tuple[str, str]
"""Quota key and bucket name."""

Row = dict[str, Any]
"""A row of ``bucket_findings.SCHEMA``; absent values are null."""


REPLAYS: Final = pa.schema(
    [*((name, pa.string()) for name in ("quota", "bucket", "key")), ("replay", pa.binary())]
)
"""The replays of buckets, to go on with."""


@dataclass(frozen=True, slots=True)
class ReplayRules:
    """The settings of a replay.

    Attributes:
        asks: how many asks the audit has: any of them could have had improbably many falsely seen ids.
        settled_ms: rows up to this time are settled: no row from before them comes later. None: nothing is
            kept for a later audit.
    """

    audit: AuditRules
    asks: int
    settled_ms: int | None = None


class Kept(NamedTuple):
    """The results of a partition that a later audit needs.

    Attributes:
        findings: the findings in settled rows, as ``bucket_findings.SCHEMA``.
        replays: the replay of each bucket up to its last settled row, as ``REPLAYS``.
        verdicts: the rows after the settled ones, and the rows of ``verdicts.COUNTING``.
    """

    findings: pa.Table
    replays: pa.Table
    verdicts: pa.Table


class Replayed(NamedTuple):
    """The findings in the buckets of a partition, without the findings in ``kept``."""

    findings: pa.Table
    kept: Kept | None


class LateRowsError(JobError):
    """New rows change what an earlier audit found: the log has to be read whole."""


def replay(rules: ReplayRules, pieces: Iterable[pa.Table]) -> Replayed:
    """Replay the buckets of a partition.

    Args:
        pieces: verdicts; and from an earlier audit replays, and findings that count towards others
            (``is_noted``).

    Raises:
        LateRowsError: a row belongs before the end of an earlier replay.
    """
    verdicts, replays, noted = [], {}, []
    for piece in pieces:
        if "replay" in piece.schema.names:
            replays.update({_name(row): row["replay"] for row in piece.to_pylist()})
        elif "case" in piece.schema.names:
            noted += piece.to_pylist()
        else:
            verdicts.append(piece)
    buckets = VerdictPartition(verdicts)
    settled, found = _Findings(noted), _Findings(noted)
    is_open = np.zeros(len(buckets.at_ms), bool)
    _check_events(replays, rules.audit)
    for bucket in buckets:
        name = bucket.quota, bucket.bucket, bucket.key
        before = replays.get(name)
        end = bucket.end if rules.settled_ms is None else _settled_end(bucket, rules.settled_ms)
        is_open[end : bucket.end] = True
        if (after := _replayed(bucket, rules, end, before, settled, found)) is not None:
            replays[name] = after
    counting = _Counting(buckets)
    found.add([*_subtracted(noted, counting, rules.asks), *_untold(noted, counting)])
    if rules.settled_ms is None:
        return Replayed(pa.concat_tables([settled.table(), found.table()]), None)
    names = (dict(zip(REPLAYS.names, (*name, content), strict=True)) for name, content in replays.items())
    left = pa.concat_tables([buckets.where(is_open), buckets.counting])
    kept = Kept(settled.table(), pa.Table.from_pylist(list(names), REPLAYS), left)
    return Replayed(found.table(), kept)


def _check_events(replays: Mapping[tuple[str, str, str], bytes], rules: AuditRules) -> None:
    """Refuse replays that lack a reset or a load."""
    for (quota, bucket, _), content in replays.items():
        if (bucket, quota) in rules.resets or (bucket, quota) in rules.loads:
            replay = decode(content)
            if events_before(rules, quota, bucket, replay.last_order) != replay.events:
                raise LateRowsError(f"a reset of {bucket} arrived late")


def _name(row: Row) -> tuple[str, str, str]:
    return row["quota"], row["bucket"], row["key"]


class _Findings:
    """Findings as a table, with few in memory as Python's values; also gathers those that are noted."""

    def __init__(self, noted: list[Row]) -> None:
        self._noted = noted
        self._rows: list[Row] = []
        self._batches: list[pa.RecordBatch] = []

    def add(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self._rows.append(row)
            if is_noted(row):
                self._noted.append(row)
            if len(self._rows) == ROWS_AT_ONCE:
                self._pack()

    def table(self) -> pa.Table:
        self._pack()
        return pa.Table.from_batches(self._batches, SCHEMA)

    def _pack(self) -> None:
        self._batches.append(pa.RecordBatch.from_pylist(self._rows, SCHEMA))
        self._rows = []


def is_noted(row: Row) -> bool:
    """Whether a finding counts towards others: a new id taken as seen, or unlogged charges."""
    return bool(row["case"] == "falsely_seen" or row.get("unlogged"))


def _settled_end(bucket: BucketVerdicts, settled_ms: int) -> int:
    """The place after the last row of a bucket that is settled, as are all rows before it."""
    later = np.flatnonzero(bucket.partition.at_ms[bucket.begin : bucket.end] > settled_ms)
    return bucket.begin + int(later[0]) if len(later) else bucket.end


def _replayed(
    bucket: BucketVerdicts,
    rules: ReplayRules,
    end: int,
    before: bytes | None,
    settled: _Findings,
    found: _Findings,
) -> bytes | None:
    """Replay one bucket: by the sieve if it is exactly as logged, else by the judge.

    Args:
        end: the place after the last settled row.
        before: the replay of earlier rows.
        settled, found: take the findings in settled rows, and in the others.

    Returns:
        The replay up to the last settled row; None if there is no such row, or nothing is kept.
    """
    audit = rules.audit
    if (parts := _confirmed(bucket, rules, end, before)) is not None:
        for part in parts:
            tallies = BucketFindings.of_tallies(bucket.quota, bucket.bucket, part.tallies)
            (settled if part.is_settled else found).add(tallies.flush())
        return next((part.replay for part in parts if part.replay is not None), before)
    replay = _at_first(bucket, before)
    if bucket.begin < end:
        settled.add(judged(bucket.part(bucket.begin, end).rows(), audit, replay))
        before = None if rules.settled_ms is None else encode(replay)
    if end < bucket.end:
        found.add(judged(bucket.part(end, bucket.end).rows(), audit, replay))
    return before


def _at_first(bucket: BucketVerdicts, before: bytes | None) -> Replay:
    """The replay before the rows of a bucket.

    Raises:
        LateRowsError: the replay before has rows that come later than the bucket's first row.
    """
    if before is None:
        return Replay()
    replay = decode(before)
    if _value(bucket, bucket.begin, "order") <= replay.last_order:
        raise LateRowsError(f"rows of {bucket.bucket} arrived late")
    return replay


class _Confirmed(NamedTuple):
    """A part of a bucket that is exactly as logged; the last settled one has the bucket's replay."""

    tallies: dict[Any, BucketTally]
    is_settled: bool
    replay: bytes | None


def _confirmed(
    bucket: BucketVerdicts, rules: ReplayRules, end: int, before: bytes | None
) -> list[_Confirmed] | None:
    """The parts of a bucket, if the sieve confirms all of them.

    If the replay is kept, one part ends before the last settled charge: the judge needs the state there in
    case the store lost that charge.
    """
    partition, events = bucket.partition, (bucket.bucket, bucket.quota)
    if events in rules.audit.resets or events in rules.audit.loads:
        return None
    replay = _at_first(bucket, before)
    algorithm = partition.quotas[_value(bucket, bucket.begin, "applied")].algorithm
    judge = replay.judge = replay.judge or judge_of(algorithm, rules.audit)
    ends, charge = {end, bucket.end}, -1
    if rules.settled_ms is not None:
        charges = np.flatnonzero(partition.charges[bucket.begin : end])
        charge = bucket.begin + int(charges[-1]) if len(charges) else bucket.begin
        ends.add(charge)
    parts, begin = [], bucket.begin
    for place in sorted(ends - {bucket.begin}):
        if begin == charge and isinstance(judge, LevelJudge):
            quota = partition.quotas[_value(bucket, begin, "applied")]
            judge.before, judge.written = judge.state, (quota.limit, quota.burst)
        pieces = (BucketColumns(**rows) for rows in bucket.part(begin, place).pieces(BucketColumns._fields))
        if (tallies := confirm(pieces, partition.quotas, rules.audit, judge)) is None:
            return None
        replay.last_order = _value(bucket, place - 1, "order")
        is_kept = rules.settled_ms is not None and place == end
        parts.append(_Confirmed(tallies, place <= end, encode(replay) if is_kept else None))
        begin = place
    return parts


def _value(bucket: BucketVerdicts, place: int, name: str) -> Any:
    """The value of one verdict in a column."""
    [rows] = bucket.part(place, place + 1).pieces((name,))
    return rows[name][0]


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
