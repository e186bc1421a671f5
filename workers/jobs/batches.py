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
from workers.jobs.verdicts import Flags, LogRows, among, integers, valid

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
"""The longest time between rows of one batch: near an hour's start, some rows may be in the previous hour."""

AS_WRITTEN: Final = tuple(name for name in LOG.names if name not in ADDED)
"""The columns by which two rows of one identity are compared: a newer writer may repeat a batch with more."""

NO_NUMBERS: Final = np.zeros(0, np.int64)

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
        tasks: the numbers of the tasks in which it has rows.
    """

    rows: int
    runs: Runs
    least: int | None
    most: int | None
    from_ms: int
    tasks: list[int] = field(default_factory=list)

    def add(self, other: BatchSummary) -> None:
        """Add rows of another task."""
        self.rows += other.rows
        self.runs = joined([*self.runs, *other.runs])
        self.least = _of_known(min, self.least, other.least)
        self.most = _of_known(max, self.most, other.most)
        self.from_ms = min(self.from_ms, other.from_ms)
        self.tasks += other.tasks

    @property
    def places(self) -> int:
        """How many different places its rows have."""
        return sum(last - first + 1 for first, last in self.runs)

    @property
    def is_repeated(self) -> bool:
        """Whether a row is there twice."""
        return self.rows > self.places

    @property
    def is_whole(self) -> bool:
        """Whether it has all its rows, each once."""
        return self.least == self.most == self.rows and self.runs == [(0, self.rows - 1)]


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


class WholeBatches(NamedTuple):
    """Batches of a node that have all their rows in one task, each once: 20 bytes for a batch.

    Attributes:
        numbers, sizes, from_ms: of each batch, its number, how many rows it has, and the time of the first.
    """

    task: int
    numbers: NDArray[np.int64]
    sizes: NDArray[np.int32]
    from_ms: NDArray[np.int64]

    def where(self, chosen: Flags) -> WholeBatches:
        """Some of the batches."""
        return WholeBatches(self.task, self.numbers[chosen], self.sizes[chosen], self.from_ms[chosen])

    def summaries(self, node: str) -> Iterator[tuple[str, BatchSummary]]:
        """The name and the summary of each batch."""
        for number, size, from_ms in zip(*(each.tolist() for each in self[1:]), strict=True):
            summary = BatchSummary(size, [(0, size - 1)], size, size, from_ms, [self.task])
            yield f"{node}-{number:012d}", summary


@dataclass(slots=True)
class Overview:
    """The batches of some rows, and the times of those within a period.

    A node that is asked now and then writes ten batches a second, so there may be about as many batches as
    rows. Only batches with a peculiarity have an object.

    Attributes:
        batches: batches that lack rows, have some twice, or have them in several tasks.
        whole: the other batches, by node.
        siblings: the newest batches of other nodes that rows name: node, number and time.
        begins_ms: the time of the first row.
        first_ms, last_ms: the times of the first and the last row of the period; None without rows.
        ordered_ms: the time of its first row that the store decided.
        judged_from_ms, judged_to_ms: the times of the first and the last row of the period that is judged.
    """

    batches: dict[str, BatchSummary] = field(default_factory=dict)
    whole: dict[str, list[WholeBatches]] = field(default_factory=dict)
    siblings: set[tuple[str, int, int]] = field(default_factory=set)
    begins_ms: int | None = None
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
            self._add_batch(batch, summary)
        for node, some in other.whole.items():
            self.whole.setdefault(node, []).extend(some)
        self.siblings |= other.siblings
        for of, names in (
            (min, ("begins_ms", "first_ms", "ordered_ms", "judged_from_ms")),
            (max, ("last_ms", "judged_to_ms")),
        ):
            for name in names:
                setattr(self, name, _of_known(of, getattr(self, name), getattr(other, name)))

    def _add_batch(self, batch: str, summary: BatchSummary) -> None:
        if batch in self.batches:
            self.batches[batch].add(summary)
        else:
            self.batches[batch] = summary

    def set_apart(self, task: int) -> None:
        """Set whole batches apart, after some rows of a task, and drop siblings that change no gap."""
        peculiar: dict[str, BatchSummary] = {}
        columns: dict[str, list[tuple[int, int, int]]] = {}
        for batch, summary in self.batches.items():
            if summary.is_whole and (named := NUMBERED.fullmatch(batch)):
                columns.setdefault(named[1], []).append((int(named[2]), summary.rows, summary.from_ms))
            else:
                peculiar[batch] = summary
        self.batches = peculiar
        for node, some in columns.items():
            numbers, sizes, from_ms = (np.array(column, np.int64) for column in zip(*some, strict=True))
            apart = WholeBatches(task, numbers, sizes.astype(np.int32), from_ms)
            self.whole.setdefault(node, []).append(apart)
        self._drop_siblings()

    def _drop_siblings(self) -> None:
        """Keep siblings that are older than all rows, and the first and the last of each node's others."""
        begins_ms = self.begins_ms or 0
        older = {each for each in self.siblings if each[2] < begins_ms}
        first: dict[str, tuple[str, int, int]] = {}
        last: dict[str, tuple[str, int, int]] = {}
        for each in sorted(self.siblings - older):
            first.setdefault(each[0], each)
            last[each[0]] = each
        self.siblings = older.union(first.values(), last.values())

    def join(self) -> None:
        """Give each batch that is whole in several tasks, or has further rows in others, one summary."""
        odd = _numbers_by_node(self.batches)
        for node, some in self.whole.items():
            numbers, copies = np.unique(np.concatenate([each.numbers for each in some]), return_counts=True)
            repeated = np.union1d(numbers[copies > 1], odd.get(node, NO_NUMBERS))
            for place, each in enumerate(some):
                chosen = np.isin(each.numbers, repeated)
                for batch, summary in each.where(chosen).summaries(node):
                    self._add_batch(batch, summary)
                some[place] = each.where(~chosen)

    def has_whole(self, batch: str) -> bool:
        """Whether a batch is one of those that are whole."""
        named = NUMBERED.fullmatch(batch)
        return named is not None and any(
            int(named[2]) in each.numbers for each in self.whole.get(named[1], ())
        )

    def numbers(self) -> dict[str, NDArray[np.int64]]:
        """The numbers of each node's batches, ascending; batches with other names are left out."""
        found = _numbers_by_node(self.batches)
        for node, some in self.whole.items():
            arrays = [found.get(node, NO_NUMBERS), *(each.numbers for each in some)]
            found[node] = np.unique(np.concatenate(arrays))
        return found


def _numbers_by_node(batches: Iterable[str]) -> dict[str, NDArray[np.int64]]:
    """The numbers of each node's batches, ascending; other names are left out."""
    found: dict[str, set[int]] = {}
    for batch in batches:
        if named := NUMBERED.fullmatch(batch):
            found.setdefault(named[1], set()).add(int(named[2]))
    return {node: np.array(sorted(numbers), np.int64) for node, numbers in found.items()}


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
    found.join()
    return found


def _part(period: Period, judged: Period, task: tuple[int, LogPart]) -> Overview:
    found = Overview()
    number, rows = task
    for table in rows.tables(COLUMNS):
        found.add(_of_rows(number, LogRows(table), period, judged))
        found.set_apart(number)
    return found


def _of_rows(task: int, rows: LogRows, period: Period, judged: Period) -> Overview:
    """The overview of one row group."""
    at_ms, place, size = (integers(rows.column(name)) for name in ("at_ms", "place", "batch_rows"))
    has_size = valid(rows.column("batch_rows"))
    found = Overview(siblings=set(_siblings(rows)))
    found.begins_ms, _ = _ends(at_ms)
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
    for begin, end in groups_of(code):
        known = size[begin:end][has_size[begin:end]]
        found.batches[names[code[begin]]] = BatchSummary(
            end - begin,
            runs_of(place[begin:end]),
            int(known.min()) if len(known) else None,
            int(known.max()) if len(known) else None,
            int(at_ms[begin:end].min()),
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


def _siblings(rows: LogRows) -> Iterator[tuple[str, int, int]]:
    """The newest batches of other nodes that rows name: node, number and time."""
    siblings = rows.column("siblings")
    for place in np.flatnonzero(valid(siblings)).tolist():
        yield from ((each["node"], each["number"], each["at_ms"]) for each in siblings[place].as_py())


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
    summaries = found.batches.items() if whole is None else _of_batches(whole, found)
    faults_ = (fault_of(name, summary) for name, summary in summaries)
    return BatchFaults([fault for fault in faults_ if fault.missing or fault.added])


def _of_batches(whole: Overview, found: Overview) -> Iterator[tuple[str, BatchSummary]]:
    """The peculiar batches of a log of which some rows were found."""
    numbers = found.numbers()
    for batch, summary in whole.batches.items():
        named = NUMBERED.fullmatch(batch)
        if batch in found.batches or (named and int(named[2]) in numbers.get(named[1], NO_NUMBERS)):
            yield batch, summary


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


def gaps_in(found: Overview, whole: Overview | None = None) -> LogGaps:
    """The gaps in the numbers of each node's batches, between the first and the last that exist or are named.

    Args:
        whole: the whole log, if ``found`` has only some of its rows; it does not extend the span from first
            to last.
    """
    existing = found.numbers()
    ends = {node: (int(numbers[0]), int(numbers[-1])) for node, numbers in existing.items()}
    for node, number, at_ms in found.siblings:
        if at_ms >= (found.begins_ms or 0):  # older batches may have been removed with their hour
            first, last = ends.get(node, (number, number))
            ends[node] = min(first, number), max(last, number)
    elsewhere = {} if whole is None else whole.numbers()
    gaps = []
    absent, beginning = [], False
    for node, (first, last) in ends.items():
        numbers = np.union1d(existing.get(node, NO_NUMBERS), elsewhere.get(node, NO_NUMBERS))
        there = numbers[(numbers >= first) & (numbers <= last)]
        beginning = beginning or (len(there) > 0 and int(there[0]) > FIRST)
        gaps.append(NodeGap(node, first, last, min(last - first + 1 - len(there), MOST_MISSING)))
        if not len(there):
            absent.append(node)
    lacking = sorted((gap for gap in gaps if gap.missing), key=lambda gap: (-gap.missing, gap.node))
    missing = sum(gap.missing for gap in lacking)
    return LogGaps(missing, beginning, tuple(lacking[:SHOWN]), tuple(sorted(absent)[:SHOWN]))


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
        gaps, begins_ms = gaps_in(found, everything), everything.first_ms
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
