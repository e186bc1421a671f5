"""The batches of a log, from a few narrow columns: which rows are there twice, and which are missing.

A node numbers its batches, and each row says how many rows its batch has. The writer may put a batch into two
files after a crash, so rows of one batch and place are one row: the first copy counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from workers.decision_log.schema import ADDED, HOUR_MS, IDENTITY
from workers.decision_log.schema import SCHEMA as LOG
from workers.jobs.files import LogPart
from workers.jobs.period import Period
from workers.jobs.runner import Runner
from workers.jobs.verdicts import LogRows, among, integers, valid

COLUMNS: Final = (*IDENTITY, "at_ms", "order", "batch_rows", "siblings")
NUMBERED: Final = re.compile(r"(.*)-([0-9]{12})", re.DOTALL)
"""The name of a batch: its node, and a number that grows by one."""

MOST_MISSING: Final = 10**12
"""The largest number of missing batches of a node: their numbers have twelve digits."""

FIRST: Final = 1
"""The number of a node's first batch."""

SHOWN: Final = 20
"""The most batches, nodes, and rows in two versions that a report names; all are counted."""

EDGE_MS: Final = 60_000
"""The longest time between rows of one batch: near an hour's start, some may be in the hour before."""

AS_WRITTEN: Final = tuple(name for name in LOG.names if name not in ADDED)
"""The columns by which two rows of one identity are compared: a newer writer may repeat a batch with more."""

Runs = list[tuple[int, int]]
"""Places that follow each other, from the first to the last of each run."""


@dataclass(slots=True)
class BatchSummary:
    """A summary of rows of a batch.

    Attributes:
        rows: how many there are, each copy counted.
        runs: their places.
        least, most: the batch's size according to its rows, which should agree; None from an older writer.
        from_ms: the time of the first row.
        siblings: the other nodes that it names: node, number and time of the newest batch of each.
        tasks: the numbers of the tasks in which it has rows.
    """

    rows: int
    runs: Runs
    least: int | None
    most: int | None
    from_ms: int
    siblings: list[tuple[str, int, int]]
    tasks: list[int] = field(default_factory=list)

    def add(self, other: BatchSummary) -> None:
        """Add rows of another task."""
        self.rows += other.rows
        self.runs = joined([*self.runs, *other.runs])
        self.least = _of_known(min, self.least, other.least)
        self.most = _of_known(max, self.most, other.most)
        self.from_ms = min(self.from_ms, other.from_ms)
        self.siblings = self.siblings or other.siblings
        self.tasks += other.tasks

    @property
    def places(self) -> int:
        """How many different places its rows have."""
        return sum(last - first + 1 for first, last in self.runs)

    @property
    def is_repeated(self) -> bool:
        """Whether a row is there twice."""
        return self.rows > self.places


def _of_known(of: Callable[[int, int], int], one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else of(one, other)


def joined(runs: Iterable[tuple[int, int]]) -> Runs:
    """Runs that cover the same places and do not overlap, in order.

    >>> joined([(5, 9), (0, 4), (8, 12), (20, 20)])
    [(0, 12), (20, 20)]
    """
    found: Runs = []
    for first, last in sorted(runs):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(last, found[-1][1])
        else:
            found.append((first, last))
    return found


@dataclass(slots=True)
class Overview:
    """The batches of some rows, and the times of those within a period.

    Attributes:
        first_ms, last_ms: the times of the first and the last row of the period; None without rows.
        ordered_ms: the time of its first row that the store decided.
        judged_from_ms, judged_to_ms: the times of the first and the last row of the period that is judged.
    """

    batches: dict[str, BatchSummary] = field(default_factory=dict)
    first_ms: int | None = None
    last_ms: int | None = None
    ordered_ms: int | None = None
    judged_from_ms: int | None = None
    judged_to_ms: int | None = None

    @property
    def judged_span_ms(self) -> int:
        """The time from the first to the last row of the period that is judged."""
        return (self.judged_to_ms or 0) - (self.judged_from_ms or 0)

    def add(self, other: Overview) -> None:
        """Add other rows."""
        for batch, summary in other.batches.items():
            if batch in self.batches:
                self.batches[batch].add(summary)
            else:
                self.batches[batch] = summary
        for of, names in (
            (min, ("first_ms", "ordered_ms", "judged_from_ms")),
            (max, ("last_ms", "judged_to_ms")),
        ):
            for name in names:
                setattr(self, name, _of_known(of, getattr(self, name), getattr(other, name)))


def overview(
    runner: Runner, tasks: Sequence[LogPart], period: Period, judged: Period, share: float
) -> Overview:
    """The batches of a log's rows.

    Raises:
        JobError: a file cannot be read.
    """
    found = Overview()
    for part in runner.each(partial(_part, period, judged), list(enumerate(tasks)), share):
        found.add(part)
    return found


def _part(period: Period, judged: Period, task: tuple[int, LogPart]) -> Overview:
    found = Overview()
    number, rows = task
    for table in rows.tables(COLUMNS):
        found.add(_of_rows(number, LogRows(table), period, judged))
    return found


def _of_rows(task: int, rows: LogRows, period: Period, judged: Period) -> Overview:
    """The overview of one row group."""
    at_ms, place, size = (integers(rows.column(name)) for name in ("at_ms", "place", "batch_rows"))
    has_size = valid(rows.column("batch_rows"))
    found = Overview()
    inside = at_ms[period.mask(at_ms)]
    found.first_ms, found.last_ms = _ends(inside)
    found.ordered_ms, _ = _ends(at_ms[period.mask(at_ms) & valid(rows.column("order"))])
    found.judged_from_ms, found.judged_to_ms = _ends(at_ms[judged.mask(at_ms)])
    batch = rows.column("batch")
    code = integers(batch.indices)
    order = np.lexsort((place, code))
    code, place, at_ms = code[order], place[order], at_ms[order]
    size, has_size = size[order], has_size[order]
    names = batch.dictionary.to_pylist()
    named = {names[code]: siblings for code, siblings in _siblings(rows)}
    for begin, end in groups_of(code):
        known = size[begin:end][has_size[begin:end]]
        found.batches[names[code[begin]]] = BatchSummary(
            end - begin,
            runs_of(place[begin:end]),
            int(known.min()) if len(known) else None,
            int(known.max()) if len(known) else None,
            int(at_ms[begin:end].min()),
            named.get(names[code[begin]], []),
            [task],
        )
    return found


def _ends(at_ms: NDArray[np.int64]) -> tuple[int | None, int | None]:
    """The first and the last of some times."""
    return (int(at_ms.min()), int(at_ms.max())) if len(at_ms) else (None, None)


def groups_of(sorted_: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Where each group of equal numbers begins and ends."""
    if len(sorted_):
        begins = [0, *(np.flatnonzero(np.diff(sorted_)) + 1).tolist()]
        yield from zip(begins, [*begins[1:], len(sorted_)], strict=True)


def runs_of(places: NDArray[np.int64]) -> Runs:
    """The runs of ascending places, some of which may be there twice."""
    breaks = np.flatnonzero(np.diff(places) > 1)
    firsts, lasts = places[[0, *(breaks + 1)]].tolist(), places[[*breaks, -1]].tolist()
    return list(zip(firsts, lasts, strict=True))


def _siblings(rows: LogRows) -> Iterator[tuple[int, list[tuple[str, int, int]]]]:
    """The batch of each row that names other nodes, by its place in the dictionary, and these nodes."""
    siblings = rows.column("siblings")
    code = integers(rows.column("batch").indices)
    for place in np.flatnonzero(valid(siblings)).tolist():
        named = siblings[place].as_py()
        yield int(code[place]), [(each["node"], each["number"], each["at_ms"]) for each in named]


class BatchFault(NamedTuple):
    """The fault of a batch: how many rows are missing, and how many were added."""

    batch: str
    missing: int
    added: int
    from_ms: int


def fault_of(batch: str, summary: BatchSummary) -> BatchFault:
    """The fault of a batch. From an older writer, only rows missing before the last one are found."""
    last = summary.runs[-1][1]
    size = last + 1 if summary.most is None else summary.most
    within = sum(max(0, min(last, size - 1) - max(first, 0) + 1) for first, last in summary.runs)
    added = max(summary.places - within, int(summary.most != summary.least))
    return BatchFault(batch, max(size - within, 0), added, summary.from_ms)


class BatchFaults(NamedTuple):
    """The faults of batches."""

    batches: Sequence[BatchFault]

    @property
    def missing(self) -> int:
        """How many rows are missing."""
        return sum(fault.missing for fault in self.batches)

    @property
    def added(self) -> int:
        """How many rows were added."""
        return sum(fault.added for fault in self.batches)

    @property
    def worst(self) -> Sequence[BatchFault]:
        """The most faulty batches, which a report names."""
        return sorted(self.batches, key=lambda one: (-one.missing - one.added, one.batch))[:SHOWN]

    def since(self, begins_ms: int) -> BatchFaults:
        """The faults in a log without its beginning: its first batches may have rows in a removed hour."""
        from_ms = begins_ms // HOUR_MS * HOUR_MS + EDGE_MS
        return BatchFaults([fault for fault in self.batches if fault.from_ms >= from_ms or fault.added])


def faults(found: Overview, whole: Overview | None = None) -> BatchFaults:
    """The faults of batches.

    Args:
        whole: the batches of the whole log, if ``found`` has only some of its rows.
    """
    summaries = found.batches if whole is None else {name: whole.batches[name] for name in found.batches}
    faults_ = (fault_of(name, summary) for name, summary in summaries.items())
    return BatchFaults([fault for fault in faults_ if fault.missing or fault.added])


class NodeGap(NamedTuple):
    """A node with batches missing between its first and its last number."""

    node: str
    first: int
    last: int
    missing: int


@dataclass(frozen=True, slots=True)
class LogGaps:
    """The gaps in the rows that were read.

    Attributes:
        batches: batches missing between others of the same node, or named by other nodes.
        beginning: the first batches of a node are missing; they may have been removed with their hours.
        nodes: the nodes that lack most batches.
        absent: nodes without any batch that other nodes name.
    """

    batches: int
    beginning: bool
    nodes: tuple[NodeGap, ...]
    absent: tuple[str, ...] = ()


def gaps_in(found: Overview, elsewhere: Iterable[str] = ()) -> LogGaps:
    """The gaps in the numbers of each node's batches, between the first and the last that exist or are named.

    Args:
        elsewhere: further existing batches, which do not extend the span from first to last.
    """
    existing = _numbers(found.batches)
    ends = {node: (min(numbers), max(numbers)) for node, numbers in existing.items()}
    begins_ms = min((summary.from_ms for summary in found.batches.values()), default=0)
    for summary in found.batches.values():
        for node, number, at_ms in summary.siblings:
            if at_ms >= begins_ms:  # batches from before the first row may have been removed with their hour
                first, last = ends.get(node, (number, number))
                ends[node] = min(first, number), max(last, number)
    for node, numbers in _numbers(elsewhere).items():
        existing.setdefault(node, set()).update(numbers)
    gaps = []
    absent, beginning = [], False
    for node, (first, last) in ends.items():
        there = [number for number in existing.get(node, ()) if first <= number <= last]
        beginning = beginning or (bool(there) and min(there) > FIRST)
        gaps.append(NodeGap(node, first, last, min(last - first + 1 - len(there), MOST_MISSING)))
        if not there:
            absent.append(node)
    lacking = sorted((gap for gap in gaps if gap.missing), key=lambda gap: (-gap.missing, gap.node))
    missing = sum(gap.missing for gap in lacking)
    return LogGaps(missing, beginning, tuple(lacking[:SHOWN]), tuple(sorted(absent)[:SHOWN]))


def _numbers(batches: Iterable[str]) -> dict[str, set[int]]:
    """The numbers of each node's batches; other names are left out."""
    found: dict[str, set[int]] = {}
    for batch in batches:
        if named := NUMBERED.fullmatch(batch):
            found.setdefault(named[1], set()).add(int(named[2]))
    return found


def gaps_and_faults(
    runner: Runner, whole: Callable[[], Sequence[LogPart]], found: Overview, period: Period
) -> tuple[LogGaps, BatchFaults]:
    """The gaps between batches, and the faults of batches.

    If only a period is audited, batches may have rows outside of it: rows that seem to be missing are looked
    for in the whole log.
    """
    gaps, faulty = gaps_in(found), faults(found)
    begins_ms = found.first_ms
    if period != Period() and (gaps.batches or gaps.beginning or faulty.batches):
        everything = overview(runner, whole(), Period(), period, 0)
        gaps, begins_ms = gaps_in(found, everything.batches), everything.first_ms
        faulty = faults(found, everything)
    if gaps.beginning:
        faulty = faulty.since(begins_ms or 0)
    return gaps, faulty


@dataclass(frozen=True, slots=True)
class Task:
    """A part of the log to read, without the rows that were read before.

    Attributes:
        left_out: the places of rows that are second copies, by row group.
    """

    part: LogPart
    period: Period
    left_out: Mapping[int, Sequence[int]]

    @property
    def rows(self) -> int:
        """How many rows the row groups have."""
        return self.part.rows

    def each(self, columns: Sequence[str]) -> Iterator[LogRows]:
        """The rows of each row group that are in the period, each once.

        Raises:
            JobError: the file cannot be read.
        """
        for number, table in enumerate(self.part.tables(columns)):
            keeps = self.period.mask(integers(table.column("at_ms").combine_chunks()))
            keeps[np.array(self.left_out.get(number, ()), np.int64)] = False
            yield LogRows(table if keeps.all() else table.filter(pa.array(keeps)))


class Copy(NamedTuple):
    """A row of a batch that has rows twice: its identity, its place in the log, and a hash of its content."""

    batch: str
    place: int
    task: int
    table: int
    row: int
    content: bytes


def copies(runner: Runner, tasks: Sequence[LogPart], found: Overview, share: float) -> list[Copy]:
    """The rows of batches that have rows twice, in the order in which they are read; there are few.

    Raises:
        JobError: a file cannot be read.
    """
    repeated = {batch: summary for batch, summary in found.batches.items() if summary.is_repeated}
    numbers = sorted({task for summary in repeated.values() for task in summary.tasks})
    some = [(number, tasks[number]) for number in numbers]
    return [copy for part in runner.each(partial(_copies, frozenset(repeated)), some, share) for copy in part]


def _copies(repeated: frozenset[str], task: tuple[int, LogPart]) -> list[Copy]:
    number, row_groups = task
    found = []
    for at, table in enumerate(row_groups.tables(LOG.names)):
        rows = np.flatnonzero(among(LogRows(table).column("batch"), *repeated))
        for place, row in zip(rows.tolist(), table.take(pa.array(rows)).to_pylist(), strict=True):
            content = repr([row.get(name) for name in AS_WRITTEN]).encode()
            found.append(
                Copy(row["batch"], row["place"], number, at, place, blake2b(content, digest_size=16).digest())
            )
    return found


def in_two_versions(found: Iterable[Copy]) -> list[tuple[str, int]]:
    """The identities (batch and place) of rows that differ in content."""
    contents: dict[tuple[str, int], set[bytes]] = {}
    for copy in found:
        contents.setdefault((copy.batch, copy.place), set()).add(copy.content)
    return sorted(identity for identity, versions in contents.items() if len(versions) > 1)


def each_once(tasks: Sequence[LogPart], period: Period, found: Iterable[Copy]) -> list[Task]:
    """The tasks that read each row of a period once: of several copies the first."""
    left_out: dict[int, dict[int, list[int]]] = {}
    known: set[tuple[str, int]] = set()
    for copy in found:
        if (identity := (copy.batch, copy.place)) in known:
            left_out.setdefault(copy.task, {}).setdefault(copy.table, []).append(copy.row)
        known.add(identity)
    return [Task(task, period, left_out.get(number, {})) for number, task in enumerate(tasks)]
