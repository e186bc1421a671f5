"""QUOTAGATE_LOG_MAX_BYTES: the oldest hours go first, and the hour being written stays."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import object_store
from tests.decision_log import worker
from tests.decision_log.batches import BEGAN_MS, Node
from tests.decision_log.conftest import eventually, known, leave, written
from tests.decision_log.test_compact import put
from tests.decision_log.test_worker import AT_ONCE
from workers.decision_log.compact import Compactor
from workers.decision_log.folder import Folder
from workers.decision_log.retention import Bounded, bound
from workers.decision_log.schema import HOUR_MS, partition

HOURS = 6
NOW_MS = BEGAN_MS + HOURS * HOUR_MS
"""A moment after the last of the hours that `hours` makes."""


def hours(folder: Path, nodes: tuple[str, ...] = ("n1", "n2")) -> list[list]:
    """Write six hours of batches of two nodes, each last modified at its hour's end; return them by hour."""
    made = []
    running = [Node(name) for name in nodes]
    for hour in range(HOURS):
        for node in running:
            node.now_ms = BEGAN_MS + hour * HOUR_MS
        batches = [batch for node in running for batch in node.batches(2)]
        put(folder, *batches)
        made.append(batches)
        touch(folder, hour, BEGAN_MS + (hour + 1) * HOUR_MS)
    return made


def touch(folder: Path, hour: int, written_ms: float) -> None:
    for file in (folder / partition(BEGAN_MS + hour * HOUR_MS)).iterdir():
        os.utime(file, (written_ms / 1000, written_ms / 1000))


def size(folder: Path, *hours: int) -> int:
    """The size in bytes of some hours, or of everything."""
    where = [folder / partition(BEGAN_MS + hour * HOUR_MS) for hour in hours] or [folder]
    return sum(file.stat().st_size for each in where for file in each.rglob("*") if file.is_file())


def left(folder: Path) -> list[int]:
    """The hours that exist."""
    return [hour for hour in range(HOURS) if (folder / partition(BEGAN_MS + hour * HOUR_MS)).exists()]


def test_oldest_hours_are_removed_until_the_rest_fits(folder):
    batches = hours(folder)
    whole, last_four = size(folder), size(folder, 2, 3, 4, 5)
    assert bound(Folder(folder), NOW_MS, whole) == Bounded(0, 0, whole)
    assert bound(Folder(folder), NOW_MS, last_four) == Bounded(2, whole - last_four, last_four)
    assert left(folder) == [2, 3, 4, 5]
    assert written(folder) == known(batch for hour in batches[2:] for batch in hour)
    assert size(folder) == last_four
    one_more = bound(Folder(folder), NOW_MS, last_four - 1)
    assert (one_more.hours, left(folder)) == (1, [3, 4, 5])


def test_removal_leaves_no_gap_behind_the_first_batch_of_a_node(folder):
    """As after retention: an audit finds first batches gone, and no gap behind them."""
    hours(folder)
    bound(Folder(folder), NOW_MS, size(folder) // 2)
    for node in ("n1", "n2"):
        numbers = sorted({int(batch[-12:]) for batch, _ in written(folder) if batch.startswith(node)})
        assert numbers == list(range(numbers[0], 2 * HOURS + 1))
        assert numbers[0] > 1


@pytest.mark.parametrize("at_ms", [NOW_MS - 1, NOW_MS - HOUR_MS])
def test_current_hour_is_kept_under_any_bound(folder, at_ms):
    hours(folder)
    found = bound(Folder(folder), at_ms, 1)
    assert left(folder) == [5]
    assert (found.hours, found.left) == (5, size(folder, 5))


@pytest.mark.parametrize("written_last", [0, 2])
def test_old_hour_that_was_written_last_is_kept_and_so_are_later_hours(folder, written_last):
    """A node that was cut off sends its waiting batches late. That must cause no gap, and lasts briefly."""
    hours(folder)
    touch(folder, written_last, NOW_MS + 5_000)
    bound(Folder(folder), NOW_MS, 1)
    assert left(folder) == list(range(written_last, HOURS))
    touch(folder, 5, NOW_MS + 6_000)
    bound(Folder(folder), NOW_MS, 1)
    assert left(folder) == [5]


def test_hour_ahead_of_the_clock_is_kept(folder):
    hours(folder)
    bound(Folder(folder), BEGAN_MS + HOUR_MS + 1, 1)
    assert left(folder) == [1, 2, 3, 4, 5]


def test_unreadable_batches_are_removed_with_the_hours_of_their_time(folder):
    hours(folder)
    aside = folder / "_unreadable"
    aside.mkdir()
    for name, hour in (("old", 1), ("young", 5)):
        (aside / f"{name}.batch").write_bytes(b"?" * 1_000)
        at_s = (BEGAN_MS + hour * HOUR_MS + 1) / 1000
        os.utime(aside / f"{name}.batch", (at_s, at_s))
    found = bound(Folder(folder), NOW_MS, size(folder, 2, 3, 4, 5) + 1_000)
    assert [file.name for file in aside.iterdir()] == ["young.batch"]
    assert (found.hours, left(folder)) == (2, [2, 3, 4, 5])


def test_merged_and_partial_files_count_and_are_removed_with_their_hour(folder):
    batches = hours(folder)
    (folder / partition(BEGAN_MS) / "_half.parquet").write_bytes(b"PAR1" * 100)
    Compactor(Folder(folder), stay_s=-1e9).compact(NOW_MS + HOUR_MS)
    for hour in range(HOURS):
        touch(folder, hour, BEGAN_MS + (hour + 1) * HOUR_MS)
    bound(Folder(folder), NOW_MS, size(folder, 4, 5))
    assert left(folder) == [4, 5]
    assert written(folder) == known(batch for hour in batches[4:] for batch in hour)


def test_foreign_files_neither_count_nor_are_removed(folder):
    hours(folder)
    whole = size(folder)
    (folder / "notes.txt").write_bytes(b"x" * 1_000_000)
    assert bound(Folder(folder), NOW_MS, whole).removed == 0
    bound(Folder(folder), NOW_MS, 1)
    assert (folder / "notes.txt").exists()


def test_missing_folder_counts_as_empty(folder):
    assert bound(Folder(folder), NOW_MS, 1) == Bounded(0, 0, 0)


def test_object_store_is_bounded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With an object store that gives all objects the same age, the newest hour is kept."""
    for name, value in object_store.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    hours(tmp_path)
    with object_store.running() as objects:
        folder = Folder(objects.url("log"))
        for file in tmp_path.rglob("*.parquet"):
            folder.put(str(file.parent.relative_to(tmp_path)), file.name, file.read_bytes())
        found = bound(folder, NOW_MS, size(tmp_path, 4, 5))
        assert (found.hours, found.left) == (4, size(tmp_path, 4, 5))
        assert bound(folder, NOW_MS, 1).left == size(tmp_path, 5)
        assert sorted(folder.hours()) == [BEGAN_MS + 5 * HOUR_MS]


def test_worker_keeps_the_log_within_its_bound(shared, client, folder):
    """The worker logs the hours that it removed and the hour that it must keep, each once."""
    node = Node()
    batches = []
    for hour in range(HOURS):
        node.now_ms = BEGAN_MS + hour * HOUR_MS
        batches.append(node.batch())
    options = {"settings": {"log_max_bytes": 1}, "times": {"bound": 0.02}, "limits": AT_ONCE}
    with worker.inside(shared, folder, **options) as lines:
        for batch in batches:
            leave(client, [batch])
            eventually(lambda: known([batch]) <= written(folder))  # noqa: B023
        eventually(lambda: left(folder) == [HOURS - 1])
        eventually(lambda: any("is kept" in line["event"] for line in lines))
    assert written(folder) == known(batches[-1:])
    removed = [line for line in lines if "were removed" in line["event"]]
    assert sum(line["hours_removed"] for line in removed) == HOURS - 1
    assert all(line["log_level"] == "warning" and line["bound"] == 1 for line in removed)
