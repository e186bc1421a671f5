"""The content of buckets from the decision log: each bucket's writes, replayed in the store's order."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import le
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import msgpack

from app.domain.assertion import Assertion
from app.domain.quota import Quota
from app.domain.sampled_rate import kept_samples
from workers.decision_log.schema import SCHEMA as LOG
from workers.jobs import batches
from workers.jobs.audit.possible import impossible
from workers.jobs.backfill.assertions import Asserted, States, asserted, partitions_for
from workers.jobs.backfill.bucket_state import LevelState, Write, bucket_state_of
from workers.jobs.batches import Task
from workers.jobs.errors import JobError
from workers.jobs.files import LogPart, location_of
from workers.jobs.period import Period
from workers.jobs.runner import Runner
from workers.jobs.verdicts import (
    APPLIED,
    COUNTING,
    SCHEMA,
    TYPES,
    BucketVerdicts,
    Flags,
    LogRows,
    Orders,
    VerdictPartition,
    among,
    integers,
    named_quotas,
    partitioned,
    valid,
    verdicts_of,
)

UNREAD: Final = frozenset({"ids", "usage", "plain_ids", "siblings", "batch_rows", "client_id", "ip"})
COLUMNS: Final = tuple(name for name in LOG.names if name not in UNREAD)
WRITTEN: Final = ("at_ms", "mode", "is_refused", "usage", "charged_ids", "refreshed_ids")
KEPT: Final = frozenset({"applied", "how", "order", *WRITTEN})
"""The columns of a verdict that determine a bucket's state; the others are left empty."""

VERDICTS_OF_A_DECISION: Final = 3
"""A guess at the number, to choose the number of partitions."""

OVERVIEW, SCAN, REPLAY = 5.0, 55.0, 40.0
"""The shares of the parts of the job in its time, in per cent."""


@dataclass(slots=True)
class ScannedWrites:
    """The result of a task, or of several.

    Attributes:
        last_ms: the time of the last row.
        decided_ms: the time of the last row that the store decided: a node's clock may be ahead.
        admitted: how many decisions of the store admit.
        apart: how many rows have only the charges of an ask that is not logged, as QUOTAGATE_LOG=denied
            writes.
        resets: when buckets were reset.
    """

    last_ms: int | None = None
    decided_ms: int | None = None
    admitted: int = 0
    apart: int = 0
    resets: Orders = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether the log has every decision. QUOTAGATE_LOG=denied keeps only the ids of admitted asks."""
        return bool(self.admitted) and not self.apart

    def add(self, other: ScannedWrites) -> None:
        """Add the result of another task."""
        self.last_ms = max((at for at in (self.last_ms, other.last_ms) if at is not None), default=None)
        decided = (at for at in (self.decided_ms, other.decided_ms) if at is not None)
        self.decided_ms = max(decided, default=None)
        self.admitted += other.admitted
        self.apart += other.apart
        for name, orders in other.resets.items():
            self.resets.setdefault(name, []).extend(orders)


class LogReplay(NamedTuple):
    """The settings of a replay.

    Attributes:
        rates: whether rates and token buckets are replayed: only with a log that has every decision.
    """

    at_ms: int
    max_ids: int
    rates: bool
    resets: Orders


@dataclass(frozen=True, slots=True)
class Log:
    """The rows of a decision log."""

    url: str
    tasks: Sequence[LogPart]
    period: Period

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return sum(task.rows for task in self.tasks)

    def states(self, runner: Runner, at_ms: int | None, max_ids: int) -> States:
        """The content of buckets at a moment after all rows of the period; None is the time of the last one.

        Raises:
            JobError: a file cannot be read, or there is no row in the period.
        """
        overview = batches.overview(runner, self.tasks, self.period, self.period, OVERVIEW)
        copies = batches.copies(runner, self.tasks, overview, 0)
        partitions = partitions_for(self.rows * VERDICTS_OF_A_DECISION)
        once = batches.each_once(self.tasks, self.period, copies)
        parts, scattered = runner.scatter(partial(scan, partitions), once, SCAN)
        scanned = ScannedWrites()
        for part in parts:
            scanned.add(part)
        last_ms = scanned.last_ms if scanned.decided_ms is None else scanned.decided_ms
        if last_ms is None:
            raise JobError(f"{location_of(self.url).name}: no row in the period {self.period}")
        as_of_ms = last_ms if at_ms is None else at_ms
        resets = {name: sorted(set(orders)) for name, orders in scanned.resets.items()}
        rules = LogReplay(as_of_ms, max_ids, scanned.is_whole, resets)
        return States(as_of_ms, rules.rates, scattered.gather(partial(replay, rules), REPLAY))


def scan(partitions: int, task: Task) -> tuple[ScannedWrites, list[pa.Table]]:
    """Scan the rows of a task; also return the verdicts that wrote something, by partition.

    Raises:
        JobError: the file cannot be read, or has a row that no node can have written.
    """
    found = ScannedWrites()
    pieces: list[list[pa.Table]] = [[] for _ in range(partitions)]
    for rows in task.each(COLUMNS):
        if impossible(rows).any():
            raise JobError("the log has a row that no node can have written: `quotagate audit` names it")
        if rows.count:
            found.add(_events(rows))
            for piece, table in zip(pieces, partitioned(_writes(rows), partitions), strict=True):
                piece.append(table)
    return found, [pa.concat_tables([SCHEMA.empty_table(), *piece]).unify_dictionaries() for piece in pieces]


def replay(rules: LogReplay, pieces: Iterable[pa.Table]) -> Asserted:
    """The content of a partition's buckets."""
    return asserted(one for bucket in VerdictPartition(pieces) for one in _assertions(bucket, rules))


def _events(rows: LogRows) -> ScannedWrites:
    """The times of rows, the resets, and the counts that show which asks the log has."""
    kind, order, at_ms = rows.column("kind"), rows.column("order"), integers(rows.column("at_ms"))
    decided = at_ms[valid(order)]
    from_store = among(kind, "decision") & among(rows.column("source"), "store")
    charges = np.zeros(rows.count, bool)
    charges[rows.of_row[_not_empty(rows.verdict("charged_ids"))]] = True
    found = ScannedWrites(
        int(at_ms.max()),
        int(decided.max()) if len(decided) else None,
        int((from_store & among(rows.column("decision"), "admit")).sum()),
        int((among(kind, "ids") & charges).sum()),
    )
    change = rows.column("change")
    for place in np.flatnonzero(among(kind, "reset") & valid(order)).tolist():
        said = change[place].as_py() or {}
        for quota in named_quotas(said.get("before")):
            found.resets.setdefault((said.get("what") or "", quota), []).append(order[place].as_py())
    return found


def _writes(rows: LogRows) -> pa.Table:
    """The verdicts that wrote to their buckets."""
    verdicts = verdicts_of(rows)
    columns = {name: verdicts.column(name).combine_chunks() for name in ("applied", "how", "mode")}
    algorithm = APPLIED.index("algorithm")
    packed = columns["applied"].dictionary.to_pylist()
    rates = np.array([msgpack.decode(each)[algorithm] != "producer_ids" for each in packed], bool)
    wrote = rates[integers(columns["applied"].indices)]
    for name in ("charged_ids", "refreshed_ids"):
        wrote |= _not_empty(verdicts.column(name).combine_chunks())
    wrote &= ~among(columns["mode"], "peek") & ~among(columns["how"], *COUNTING)
    kept = verdicts.select([name for name in SCHEMA.names if name in KEPT]).filter(pa.array(wrote))
    return pa.Table.from_arrays(
        [kept.column(name) if name in KEPT else pa.nulls(kept.num_rows, type_) for name, type_ in TYPES],
        schema=SCHEMA,
    )


def _not_empty(lists: pa.Array) -> Flags:
    return integers(pc.list_value_length(lists)) > 0


def _assertions(bucket: BucketVerdicts, rules: LogReplay) -> Iterator[Assertion]:
    """The content of a bucket."""
    quotas = bucket.partition.quotas
    resets = rules.resets.get((bucket.bucket, bucket.quota), ())
    ahead = deque(resets)
    state = None
    for piece in bucket.pieces(("applied", "order", *WRITTEN)):
        quota = quotas[piece["applied"][0]]
        if not rules.rates and quota.algorithm != "producer_ids":
            return
        if state is None:
            state = bucket_state_of(quota, bucket.bucket, rules.max_ids)
        begin = 0
        if isinstance(state, LevelState) and not resets:
            begin = _first_that_counts(state, quota, piece, rules.at_ms)
        chosen = [quotas[place] for place in piece["applied"][begin:]]
        writes = map(Write._make, zip(chosen, *(piece[name][begin:] for name in WRITTEN), strict=True))
        for order, write in zip(piece["order"][begin:], writes, strict=True):
            while ahead and ahead[0] < order:
                ahead.popleft()
                state = bucket_state_of(write.quota, bucket.bucket, rules.max_ids)
            state.apply(write)
    if state is not None and not ahead:  # else the last event of the bucket was a reset
        yield from state.assertions(rules.at_ms)


def _first_that_counts(
    state: LevelState, quota: Quota, columns: Mapping[str, Sequence[Any]], at_ms: int
) -> int:
    """The place of the first of some writes that can still show in a sampled rate at a moment.

    It begins a sample, as nothing was written for so long, and all earlier samples have left the window by
    then. The result is 0 for a token bucket, and if a clock was set back or usage was given back.
    """
    times, newest_ms = columns["at_ms"], state.level.newest_ms
    is_in_order = (newest_ms is None or newest_ms <= times[0]) and all(map(le, times, times[1:]))
    if quota.algorithm != "sampled_rate" or not is_in_order or "refund" in columns["mode"]:
        return 0
    window_ms = kept_samples(quota.samples) * quota.sample_ms
    place = min(bisect_right(times, at_ms - window_ms), len(times) - 1)
    while place and times[place] - times[place - 1] < quota.sample_ms:
        place -= 1
    return place
