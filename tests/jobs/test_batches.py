"""Batches are put together from the parts of several tasks as if each place of a batch were in a set."""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.oracle import Oracle
from tests.jobs.logs import SECRET, START_MS, OracleLog, asks
from workers.decision_log.schema import HOUR_MS, SCHEMA, partition
from workers.jobs import batches, files
from workers.jobs.batches import (
    EDGE_MS,
    BatchFault,
    BatchFaults,
    BatchSummary,
    LogGaps,
    Overview,
    each_once,
    fault_of,
    faults,
    gaps_in,
    in_two_versions,
    joined,
)
from workers.jobs.files import row_groups
from workers.jobs.period import Period
from workers.jobs.progress import Silent
from workers.jobs.runner import ProcessRunner

Row = dict[str, Any]
WHOLE = Period()
places = st.integers(0, 30)
runs = st.lists(st.tuples(places, st.integers(0, 5)).map(lambda run: (run[0], run[0] + run[1])), max_size=8)


def covered(some: list[tuple[int, int]]) -> set[int]:
    return {place for first, last in some for place in range(first, last + 1)}


def summary_of(some: list[int], size: int | None, task: int = 0, from_ms: int = 0) -> BatchSummary:
    """The summary of the rows in some places, of which some may be there twice."""
    return BatchSummary(len(some), joined([(place, place) for place in some]), size, size, from_ms, [task])


def all_batches(found: Overview) -> dict[str, BatchSummary]:
    """All batches, also those that are set apart because they are whole."""
    apart = (one for node, some in found.whole.items() for each in some for one in each.summaries(node))
    return {**found.batches, **dict(apart)}


@given(runs)
def test_joined_runs_cover_the_same_places_with_gaps_between_them(some: list[tuple[int, int]]):
    found = joined(some)
    assert covered(found) == covered(some)
    assert all(last + 1 < begin for (_, last), (begin, _) in pairwise(found))
    assert all(first <= last for first, last in found)


@given(st.lists(st.lists(places, min_size=1, max_size=12), min_size=1, max_size=5), st.integers(1, 31))
def test_parts_of_a_batch_add_up_to_its_set_of_places(parts: list[list[int]], size: int):
    whole, *others = (summary_of(part, size, task, from_ms=-task) for task, part in enumerate(parts))
    for other in others:
        whole.add(other)
    every = [place for part in parts for place in part]
    assert (whole.rows, whole.places) == (len(every), len(set(every)))
    assert whole.is_repeated == (len(every) > len(set(every)))
    assert (whole.tasks, whole.from_ms) == (list(range(len(parts))), 1 - len(parts))
    fault = fault_of("n", whole)
    assert fault.missing == len(set(range(size)) - set(every))
    assert fault.added == len(set(every) - set(range(size)))


@given(st.lists(places, min_size=1, max_size=12))
def test_batch_of_an_older_writer_lacks_only_rows_before_its_last(some: list[int]):
    fault = fault_of("n", summary_of(some, None))
    assert (fault.missing, fault.added) == (max(some) + 1 - len(set(some)), 0)


a_row = st.tuples(st.sampled_from("mn"), st.integers(1, 4), st.integers(0, 2))
rows_of_tasks = st.lists(st.lists(st.lists(a_row, max_size=8), max_size=3), min_size=1, max_size=4)
"""For each task its row groups, and their rows: node, number of the batch, and place, of three in a batch."""
SIZE = 3


@given(rows_of_tasks)
def test_whole_batches_are_set_apart_and_nothing_else_changes(tasks: list[list[list[tuple[str, int, int]]]]):
    places: dict[str, dict[int, list[int]]] = {}
    found = Overview()
    for task, groups in enumerate(tasks):
        part = Overview()
        for group in groups:
            mine: dict[str, list[int]] = {}
            for node, number, place in group:
                mine.setdefault(f"{node}-{number:012d}", []).append(place)
            for batch, its in mine.items():
                places.setdefault(batch, {}).setdefault(task, []).extend(its)
            part.add(Overview({batch: summary_of(its, SIZE, task) for batch, its in mine.items()}))
            part.set_apart(task)
        found.add(part)
    found.join()
    right = {}
    for batch, by_task in places.items():
        right[batch], *others = (summary_of(its, SIZE, task) for task, its in by_task.items())
        for other in others:
            right[batch].add(other)
    for each in (every := all_batches(found)).values():
        each.tasks[:] = sorted(set(each.tasks))
    assert every == right
    assert found.batches.keys() == {
        batch for batch, each in right.items() if not each.is_whole or len(each.tasks) > 1
    }
    assert {batch for batch, each in found.batches.items() if each.is_repeated} == {
        batch for batch, each in right.items() if each.is_repeated
    }
    numbers = {(node, int(number)) for node, some in found.numbers().items() for number in some}
    assert numbers == {(batch[0], int(batch[2:])) for batch in right}


@given(st.sets(st.tuples(st.sampled_from("mn"), st.integers(1, 9), st.integers(0, 9))), st.integers(0, 9))
def test_siblings_that_are_dropped_change_no_gap(siblings: set[tuple[str, int, int]], begins_ms: int):
    def gaps(*, drops: bool) -> LogGaps:
        found = Overview({"n-000000000004": summary_of([0], 1, from_ms=begins_ms)}, siblings=set(siblings))
        found.begins_ms = begins_ms
        if drops:
            found.set_apart(0)
            assert len({each for each in found.siblings if each[2] >= begins_ms}) <= 4
        return gaps_in(found)

    assert gaps(drops=True) == gaps(drops=False)


def test_rows_that_disagree_about_the_size_of_their_batch_were_added():
    whole = summary_of([0, 1], 2)
    whole.add(summary_of([2], 3))
    assert (whole.least, whole.most) == (2, 3)
    assert fault_of("n", whole) == BatchFault("n", 0, 1, 0)
    newer = summary_of([0, 1], None)
    newer.add(summary_of([2], 3))
    assert fault_of("n", newer) == BatchFault("n", 0, 0, 0), "an older writer's rows do not name it"


def test_first_batches_of_a_log_without_its_beginning_may_lack_rows():
    def faulty(from_ms: int, added: int = 0) -> BatchFault:
        return BatchFault("n", 1, added, from_ms)

    begins_ms = 5 * HOUR_MS + 1_000
    edge_ms = 5 * HOUR_MS + EDGE_MS
    some = [faulty(begins_ms), faulty(edge_ms - 1), faulty(edge_ms), faulty(begins_ms, 1)]
    assert BatchFaults(some).since(begins_ms).batches == some[2:]


def test_faults_over_many_batches_are_counted_and_the_worst_are_named():
    found = Overview({f"n-{number:012d}": summary_of([number], number + 1) for number in range(1, 30)})
    said = faults(found)
    assert (said.missing, said.added) == (sum(range(1, 30)), 0)
    assert [fault.missing for fault in said.worst] == list(range(29, 9, -1))
    complete = Overview({name: summary_of(list(range(30)), 30) for name in found.batches})
    assert not faults(found, complete).batches, "the other rows are outside of the period"


class Log(NamedTuple):
    """A log, and what ``batches`` says about it."""

    tasks: list[files.RowGroups]
    found: Overview
    copies: list[batches.Copy]

    def read(self, period: Period = WHOLE) -> list[Row]:
        tasks = each_once(self.tasks, period, self.copies)
        return [row for task in tasks for rows in task.each(SCHEMA.names) for row in rows.table.to_pylist()]


def looked_at(folder: Path, period: Period = WHOLE, judged: Period = WHOLE) -> Log:
    tasks = row_groups(str(folder), period)
    with ProcessRunner(Silent(), 0) as runner:
        found = batches.overview(runner, tasks, period, judged, 50)
        return Log(tasks, found, batches.copies(runner, tasks, found, 50))


def write(folder: Path, rows: list[Row], name: str = "part", rows_of_a_group: int = 7) -> None:
    """Write rows in small row groups."""
    for hour in sorted({partition(row["at_ms"]) for row in rows}):
        file = folder / hour / f"{name}.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        mine = [row for row in rows if partition(row["at_ms"]) == hour]
        pq.write_table(pa.Table.from_pylist(mine, SCHEMA), file, row_group_size=rows_of_a_group)


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """Five batches of 20 rows; one begins in the first hour and ends in the second."""
    log = OracleLog(Oracle(SECRET))
    log.now_ms = START_MS + HOUR_MS - 5_000
    log.run(asks(1, ("a", "b")), 100, (100,))
    return [
        row | {"batch": f"n-{1 + at // 20:012d}", "place": at % 20, "batch_rows": 20}
        for at, row in enumerate(log.rows)
    ]


@pytest.fixture(params=[1, 20, 1_000], ids=lambda rows: f"{rows} rows a task")
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "FEWEST_ROWS", request.param)


def shown(row: Row) -> tuple[Any, ...]:
    return row["batch"], row["place"], row["at_ms"], row["decision"]


@pytest.mark.usefixtures("size")
def test_batch_over_files_hours_and_row_groups(rows: list[Row], tmp_path: Path):
    write(tmp_path, rows[:45], "one")
    write(tmp_path, rows[45:], "two")
    log = looked_at(tmp_path)
    assert len({partition(row["at_ms"]) for row in rows}) == 2
    assert {
        name: (each.rows, each.runs, each.least, each.most) for name, each in all_batches(log.found).items()
    } == {f"n-{number:012d}": (20, [(0, 19)], 20, 20) for number in range(1, 6)}
    assert not faults(log.found).batches
    assert log.copies == []
    assert gaps_in(log.found) == LogGaps(0, False, ())
    assert sorted(map(shown, log.read())) == sorted(map(shown, rows))


@pytest.mark.usefixtures("size")
def test_batch_that_is_in_two_files_in_part(rows: list[Row], tmp_path: Path):
    write(tmp_path, rows[:70], "one")
    write(tmp_path, rows[50:], "two")
    log = looked_at(tmp_path)
    repeated = {name for name, each in log.found.batches.items() if each.is_repeated}
    assert repeated == {"n-000000000003", "n-000000000004"}
    assert {each.batch for each in log.copies} == repeated
    assert not faults(log.found).batches
    assert in_two_versions(log.copies) == []
    assert sorted(map(shown, log.read())) == sorted(map(shown, rows))
    from_ms = rows[60]["at_ms"]
    later = [shown(row) for row in log.read(Period(from_ms, None))]
    assert sorted(later) == sorted(shown(row) for row in rows if row["at_ms"] >= from_ms)


@pytest.mark.usefixtures("size")
def test_row_in_two_versions_is_named_and_the_first_copy_counts(rows: list[Row], tmp_path: Path):
    changed = copy.deepcopy(rows[50:])
    changed[3] |= {"decision": "reject", "throttle_ms": 0}
    write(tmp_path, rows, "one")
    write(tmp_path, changed, "two")
    log = looked_at(tmp_path)
    assert in_two_versions(log.copies) == [(changed[3]["batch"], changed[3]["place"])]
    assert sorted(map(shown, log.read())) == sorted(map(shown, rows))


def test_newer_writer_may_repeat_a_batch_with_more_columns(rows: list[Row], tmp_path: Path):
    older = [row | {"batch_rows": None, "siblings": None} for row in rows]
    write(tmp_path, older, "one")
    write(tmp_path, rows, "two")
    log = looked_at(tmp_path)
    assert len(log.copies) == 200
    assert in_two_versions(log.copies) == []


@pytest.mark.usefixtures("size")
def test_missing_and_added_rows(rows: list[Row], tmp_path: Path):
    added = rows[99] | {"place": 20}
    write(tmp_path, [*rows[1:30], *rows[31:79], *rows[80:], added])
    assert faults(looked_at(tmp_path).found).batches == [
        BatchFault("n-000000000001", 1, 0, rows[1]["at_ms"]),
        BatchFault("n-000000000002", 1, 0, rows[20]["at_ms"]),
        BatchFault("n-000000000004", 1, 0, rows[60]["at_ms"]),
        BatchFault("n-000000000005", 0, 1, rows[80]["at_ms"]),
    ]


@pytest.mark.usefixtures("size")
def test_siblings_extend_the_span_of_a_node(rows: list[Row], tmp_path: Path):
    named = copy.deepcopy(rows)
    at_ms = rows[0]["at_ms"]
    named[20]["siblings"] = [
        {"node": "n", "number": 7, "at_ms": at_ms},
        {"node": "gone", "number": 3, "at_ms": at_ms},
        {"node": "removed", "number": 3, "at_ms": at_ms - 1},
    ]
    write(tmp_path, named)
    gaps = gaps_in(looked_at(tmp_path).found)
    assert {gap.node: (gap.first, gap.last, gap.missing) for gap in gaps.nodes} == {
        "n": (1, 7, 2),
        "gone": (3, 3, 1),
    }
    assert gaps.absent == ("gone",)


@pytest.mark.usefixtures("size")
def test_times_of_the_period_and_of_its_judged_part(rows: list[Row], tmp_path: Path):
    some = copy.deepcopy(rows)
    for row in some[:25]:
        row["order"] = None
    write(tmp_path, some)
    times = [row["at_ms"] for row in rows]
    period, judged = Period(times[10], times[90]), Period(times[30], times[80])
    found = looked_at(tmp_path, period, judged).found
    assert (found.first_ms, found.last_ms, found.ordered_ms) == (times[10], times[89], times[25])
    assert (found.judged_from_ms, found.judged_to_ms) == (times[30], times[79])
    assert found.judged_span_ms == times[79] - times[30]
