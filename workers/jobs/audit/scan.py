"""The audit's first stage: what a task's rows say by themselves, and their verdicts for the second stage."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from app.domain.decision import OUTCOMES
from workers.decision_log.schema import SCHEMA as LOG
from workers.jobs.audit import possible, row_rules
from workers.jobs.audit.limits import FactorChange, LimitChange
from workers.jobs.batches import Task
from workers.jobs.period import Period
from workers.jobs.sums import Sums
from workers.jobs.verdicts import (
    SCHEMA,
    Flags,
    LogRows,
    Orders,
    among,
    flags,
    integers,
    named_quotas,
    partition_of,
    partitioned,
    placed,
    quotas_of,
    valid,
    verdicts_of,
)

K = TypeVar("K")
V = TypeVar("V")

COLUMNS: Final = tuple(name for name in LOG.names if name not in {"plain_ids", "siblings", "batch_rows"})
MOST_DROPPED: Final = 10**12
"""The largest number of dropped rows that one row of the log may report."""

ASK_COUNTS: Final = ("asks", *OUTCOMES, "fallback", "unordered", "replayed")
"""The counts of asks: all, by decision, decided without the store, without an order, repeated to a retry."""

ASKS: Final = pa.schema([("principal", pa.string()), *((name, pa.int64()) for name in ASK_COUNTS)])
TIMES: Final = {"verdicts": "sum", "first_ms": "min", "last_ms": "max"}
USES: Final = pa.schema(
    [
        *((name, pa.string()) for name in ("quota", "entity", "node")),
        ("limit", pa.float64()),
        *((name, pa.int64()) for name in TIMES),
    ]
)
"""The uses of limits: by which node, in how many verdicts, and the times of the first and the last."""


@dataclass(frozen=True, slots=True)
class ScanRules:
    """The settings of a scan.

    Attributes:
        judged: the period that is judged; rows before it only tell what buckets held.
        slice_ms: the length of a slice of time, by which decisions are counted.
        by_store: times are the store's, not the callers'.
        sequential: request delays are added to byte delays (``QUOTAGATE_COMBINE_DELAYS``).
        partitions: the number of partitions of the second stage.
    """

    judged: Period
    slice_ms: int
    by_store: bool
    sequential: bool
    partitions: int


@dataclass(slots=True)
class Scanned:
    """The result of a task, or of several.

    Attributes:
        counts: how many rows there are of some kinds: new decisions of the store (``from_store``), those that
            admit, in the period (``admitted``) or ever (``ever_admitted``), or show charges (``ever_held``);
            the ids of asks that are not logged (``apart``); changes of quotas and factors; rows that nodes
            ``dropped``.
        asks: the counts of asks by principal.
        slices: the number of asks by the beginning of their slice of time, and by outcome or ``fallback``.
        resets, loads: when buckets were reset or loaded.
        changes: the changes of quotas by entity.
        factors: the throttle factors that each node began to apply.
        uses: the limits that nodes used: in how many verdicts, and the times of the first and the last.
        findings: the findings in single rows.
    """

    counts: Counter[str] = field(default_factory=Counter)
    asks: Sums = field(default_factory=lambda: Sums(ASKS, dict.fromkeys(ASK_COUNTS, "sum")))
    slices: Counter[tuple[int, str]] = field(default_factory=Counter)
    resets: Orders = field(default_factory=dict)
    loads: Orders = field(default_factory=dict)
    changes: dict[str, list[LimitChange]] = field(default_factory=dict)
    factors: dict[str, list[FactorChange]] = field(default_factory=dict)
    uses: Sums = field(default_factory=lambda: Sums(USES, TIMES))
    findings: list[pa.Table] = field(default_factory=list)

    def add(self, other: Scanned) -> None:
        """Add the result of another task."""
        self.counts.update(other.counts)
        self.slices.update(other.slices)
        self.asks.add(other.asks.table())
        self.uses.add(other.uses.table())
        self.findings += other.findings
        _extend(self.resets, other.resets)
        _extend(self.loads, other.loads)
        _extend(self.changes, other.changes)
        _extend(self.factors, other.factors)


def _extend(mine: dict[K, list[V]], others: Mapping[K, Sequence[V]]) -> None:
    for name, some in others.items():
        mine.setdefault(name, []).extend(some)


@dataclass(frozen=True, slots=True)
class SavedRows:
    """Rows that an earlier audit kept for the second stage: verdicts, or others with a quota and a bucket."""

    table: pa.Table


def scan(rules: ScanRules, task: Task | SavedRows) -> tuple[Scanned, list[pa.Table]]:
    """Scan the rows of a task; also return its verdicts, by partition.

    Raises:
        JobError: the file cannot be read.
    """
    found = Scanned()
    if isinstance(task, SavedRows):
        return found, _by_partition(task.table, rules.partitions)
    pieces: list[list[pa.Table]] = [[] for _ in range(rules.partitions)]
    for read in task.each(COLUMNS):
        _note_events(read, found)
        before = Period(None, rules.judged.to_ms)
        rows = read.where(before.mask(integers(read.column("at_ms"))))
        at_ms = integers(rows.column("at_ms"))
        judged = rules.judged.mask(at_ms)
        _count(rows, judged, found)
        _count_asks(rows, judged, at_ms // rules.slice_ms * rules.slice_ms, found)
        if (odd := possible.impossible(rows)).any():
            found.findings.append(possible.findings(rows.where(odd & judged)))
            judged, rows = judged[~odd], rows.where(~odd)
        verdicts = verdicts_of(rows)
        _note_uses(verdicts, rules.judged, found)
        found.findings.append(
            row_rules.findings(rows.where(judged).table, by_store=rules.by_store, sequential=rules.sequential)
        )
        for piece, table in zip(pieces, partitioned(verdicts, rules.partitions), strict=True):
            piece.append(table)
    return found, [pa.concat_tables([SCHEMA.empty_table(), *piece]).unify_dictionaries() for piece in pieces]


def _by_partition(rows: pa.Table, partitions: int) -> list[pa.Table]:
    if rows.schema.equals(SCHEMA):
        return partitioned(rows, partitions)
    names = zip(rows.column("quota").to_pylist(), rows.column("bucket").to_pylist(), strict=True)
    home = np.array([partition_of(*name, partitions) for name in names], np.int64)
    return placed(rows, home, partitions)


def _count(rows: LogRows, judged: Flags, found: Scanned) -> None:
    """Count the rows of some kinds."""
    kind, admits = rows.column("kind"), among(rows.column("decision"), "admit")
    from_store = among(kind, "decision") & among(rows.column("source"), "store")
    holds, charges = np.zeros(rows.count, bool), np.zeros(rows.count, bool)
    holds[rows.of_row[flags(pc.greater(rows.verdict("observed"), 0))]] = True
    charges[rows.of_row[integers(pc.list_value_length(rows.verdict("charged_ids"))) > 0]] = True
    is_new = from_store & ~flags(rows.column("replayed")) & judged
    counted: dict[str, Flags] = {
        "from_store": is_new,
        "admitted": is_new & admits,
        "apart": among(kind, "ids") & charges & judged,
        "factors": among(kind, "factor") & judged,
        "changes": among(kind, "quota") & judged,
        "ever_admitted": from_store & admits,
        "ever_held": from_store & holds,
    }
    found.counts.update({name: int(those.sum()) for name, those in counted.items()})


def _count_asks(rows: LogRows, judged: Flags, slices: NDArray[np.int64], found: Scanned) -> None:
    """Count asks by principal, and by slice of time."""
    asked = judged & among(rows.column("kind"), "decision")
    counted: dict[str, Flags] = {
        "asks": asked,
        **{outcome: asked & among(rows.column("decision"), outcome) for outcome in OUTCOMES},
        "fallback": asked & among(rows.column("source"), "fallback"),
        "unordered": asked & ~valid(rows.column("order")),
        "replayed": asked & flags(rows.column("replayed")),
    }
    principal = rows.column("principal")
    code, size = integers(principal.indices, len(principal.dictionary)), len(principal.dictionary) + 1
    sums = {name: np.bincount(code[those], minlength=size) for name, those in counted.items()}
    met = np.flatnonzero(sums["asks"])
    names = pa.array([*principal.dictionary.to_pylist(), None], pa.string()).take(pa.array(met))
    found.asks.add(pa.table({"principal": names, **{name: sum_[met] for name, sum_ in sums.items()}}))
    for name in (*OUTCOMES, "fallback"):
        begins, times = np.unique(slices[counted[name]], return_counts=True)
        for begin, asks in zip(begins.tolist(), times.tolist(), strict=True):
            found.slices[begin, name] += asks


def _note_events(rows: LogRows, found: Scanned) -> None:
    """Note the changes that decisions depend on; there are few."""
    kind, change, node = rows.column("kind"), rows.column("change"), rows.column("node")
    order, at_ms = rows.column("order"), rows.column("at_ms")
    for place in np.flatnonzero(among(kind, "reset", "load", "quota", "factor", "dropped")).tolist():
        what, said = kind[place].as_py(), change[place].as_py() or {}
        placed, at = order[place].as_py(), at_ms[place].as_py()
        if what == "quota":
            limit = LimitChange(at, said.get("version"), said.get("before"), said.get("after"))
            found.changes.setdefault(str(said.get("what")), []).append(limit)
        elif what == "factor":
            with suppress(TypeError, ValueError, RecursionError):
                before, after = said.get("before"), float(json.loads(said["after"]))
                factor = FactorChange(at, None if before is None else float(json.loads(before)), after)
                found.factors.setdefault(node[place].as_py(), []).append(factor)
        elif what == "dropped":
            found.counts["dropped"] += _dropped(said.get("after"))
        elif placed is not None:
            events, quotas = (found.resets, "before") if what == "reset" else (found.loads, "after")
            for quota in named_quotas(said.get(quotas)):
                events.setdefault((str(said.get("what")), quota), []).append(placed)


def _dropped(after: str | None) -> int:
    """The number of dropped rows that a node reports; at least one."""
    with suppress(TypeError, ValueError, KeyError, RecursionError):
        rows = json.loads(after or "")["rows"]
        return min(max(rows, 1), MOST_DROPPED) if isinstance(rows, int) else 1
    return 1


def _note_uses(verdicts: pa.Table, judged: Period, found: Scanned) -> None:
    """Note the limits that nodes used in new decisions of the store.

    Late verdicts are left out: their limit is from the time of the ask, their time from the store's answer.
    """
    at_ms = integers(verdicts.column("at_ms").combine_chunks())
    those = np.flatnonzero(flags(verdicts.column("by_store").combine_chunks()) & judged.mask(at_ms))
    if not len(those):
        return
    applied, node = (verdicts.column(name).combine_chunks() for name in ("applied", "node"))
    nodes = len(node.dictionary) + 1
    code = (integers(applied.indices) * nodes + integers(node.indices, nodes - 1))[those]
    order = np.argsort(code, kind="stable")
    code, at_ms = code[order], at_ms[those][order]
    begins = np.flatnonzero(np.diff(code, prepend=-1))
    quotas = quotas_of(applied)
    used = [(quotas[one // nodes], one % nodes) for one in code[begins].tolist()]
    names = [*node.dictionary.to_pylist(), None]
    found.uses.add(
        pa.table(
            {
                **{name: [quota[name] for quota, _ in used] for name in ("quota", "entity", "limit")},
                "node": pa.array([names[node] for _, node in used], pa.string()),
                "verdicts": np.diff(begins, append=len(code)),
                "first_ms": np.minimum.reduceat(at_ms, begins),
                "last_ms": np.maximum.reduceat(at_ms, begins),
            }
        )
    )
