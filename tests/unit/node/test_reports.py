"""Reports are read from a folder, whatever is in it: links, pipes, odd names, huge and broken files."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from app.node import reports
from app.node.reports import ReportError, list_reports, read_report
from tests.report_folders import AUDIT, TABLES, made

ODD = (
    "<img src=x onerror=alert(1)>",
    "a b",
    "%2e%2e%2f",
    "..a",
    "new\nline",
    "back\\slash",
    "ünï\u202ecode",
    "?#&",
    "-P",
    "\ufffd",
)


def names(folder: Path) -> list[str]:
    return [report.name for report in list_reports(folder).reports]


def why(folder: Path, name: str) -> str:
    with pytest.raises(ReportError) as refused:
        read_report(folder, name)
    return str(refused.value)


def test_report_has_what_the_job_wrote(tmp_path: Path):
    about = {"log": "log", "from_ms": 1_000, "to_ms": 2_500}
    report = made(tmp_path, "nightly", report=about, tables=TABLES)
    os.utime(report, ns=(5, 1_763_719_742_123_456_789))
    found = read_report(tmp_path, "nightly")
    assert (found.name, found.kind, found.log, found.from_ms, found.to_ms) == (
        *("nightly", "audit", "log"),
        *(1_000, 2_500),
    )
    assert found.modified_ms == 1_763_719_742_123
    assert json.loads(bytes(found.summary)) == AUDIT
    (table,) = found.tables
    assert (table.columns, table.rows, table.count) == (["at_ms", "admit"], [[1_000, 5], [2_000, None]], 7)
    (listed,) = list_reports(tmp_path).reports
    assert (listed.name, listed.kind, listed.from_ms, listed.to_ms) == ("nightly", "audit", 1_000, 2_500)
    assert json.loads(bytes(listed.summary or b"")) == AUDIT


@pytest.mark.parametrize(
    ("summary", "kind"),
    [
        (AUDIT, "audit"),
        ({"decisions": 1, "newly_refused": None}, "whatif"),
        ({"entities": 1, "outliers": 0, "refused_asks": 0}, "recommend"),
        ({"buckets": 1, "ids": 2, "as_of_ms": 3}, "backfill"),
        ({"another": "program"}, None),
    ],
)
def test_report_of_an_older_version_has_a_summary_alone(
    tmp_path: Path, summary: Mapping[str, object], kind: str | None
):
    made(tmp_path, "old", summary=summary)
    found = read_report(tmp_path, "old")
    assert (found.kind, found.log, found.from_ms, found.to_ms, found.tables) == (kind, None, None, None, [])


def test_newest_reports_come_first_and_old_ones_are_left_out(tmp_path: Path):
    for number in range(reports.MAX_LISTED + 5):
        os.utime(made(tmp_path, f"r{number}"), (number, number))
    found = list_reports(tmp_path)
    newest = range(reports.MAX_LISTED + 4, 4, -1)
    assert [report.name for report in found.reports] == [f"r{number}" for number in newest]
    assert (found.more, found.unreadable) == (True, 0)
    assert read_report(tmp_path, "r0").kind == "audit", "it is there for those who know its name"


@pytest.mark.parametrize("name", ODD)
def test_odd_name_is_listed_and_found_as_it_is(tmp_path: Path, name: str):
    made(tmp_path, f"x{name}" if name.startswith(".") else name)
    (listed,) = names(tmp_path)
    assert read_report(tmp_path, listed).name == listed


def test_name_that_is_not_utf_8_is_left_out(tmp_path: Path):
    made(tmp_path, os.fsdecode(b"a\xff"))
    assert names(tmp_path) == []
    assert "no report named" in why(tmp_path, os.fsdecode(b"a\xff"))


@pytest.mark.parametrize(
    "name", ["..", ".", "", "nightly/..", "../reports", "nightly/", "/etc", ".git", "_a.making"]
)
def test_name_that_is_not_listed_is_refused(tmp_path: Path, name: str):
    folder = tmp_path / "reports"
    folder.mkdir()
    for hidden in (".git", "_a.making", "nightly"):
        made(folder, hidden)
    made(tmp_path, "outside")
    assert names(folder) == ["nightly"]
    assert "no report named" in why(folder, name)


def test_links_are_not_followed(tmp_path: Path):
    folder = tmp_path / "reports"
    folder.mkdir()
    outside = made(tmp_path, "outside")
    (folder / "linked").symlink_to(outside)
    (folder / "loop").symlink_to("loop")
    for way in ("symbolic", "hard"):
        (folder / way).mkdir()
    (folder / "symbolic" / "summary.json").symlink_to(outside / "summary.json")
    (folder / "hard" / "summary.json").hardlink_to(outside / "summary.json")
    tables = made(folder, "tables")
    (tables / "tables.json").symlink_to(outside / "summary.json")
    assert names(folder) == ["tables"]
    assert list_reports(folder).unreadable == 2
    assert "no report named" in why(folder, "linked")
    assert "no report named" in why(folder, "loop")
    for name in ("symbolic", "hard"):
        assert "summary.json is a link" in why(folder, name)
    assert "tables.json is a link" in why(folder, "tables")


def pipe(path: Path) -> None:
    os.mkfifo(path)


def folder_(path: Path) -> None:
    path.mkdir()


def socket_(path: Path) -> None:
    os.mknod(path, 0o140600)


def device(path: Path) -> None:
    try:
        os.mknod(path, 0o020600, os.makedev(1, 5))  # /dev/zero never ends
    except PermissionError:
        pytest.skip("only root makes devices")


@pytest.mark.parametrize("make", [pipe, folder_, socket_, device])
@pytest.mark.parametrize("name", ["summary.json", "report.json", "tables.json"])
def test_only_regular_files_are_read(tmp_path: Path, name: str, make: Callable[[Path], None]):
    report = made(tmp_path, "odd")
    (report / name).unlink(missing_ok=True)
    make(report / name)
    assert f"{name} is a link, or no regular file" in why(tmp_path, "odd")
    assert names(tmp_path) == (["odd"] if name == "tables.json" else [])


def test_pipe_that_takes_the_place_of_a_file_does_not_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    summary = made(tmp_path, "swapped") / "summary.json"
    open_, swapped = os.open, []

    def opened(path: Any, *arguments: Any, **more: Any) -> int:
        if path == "summary.json":
            summary.unlink()
            os.mkfifo(summary)
            swapped.append(path)
        return open_(path, *arguments, **more)

    monkeypatch.setattr(os, "open", opened)
    assert "no regular file" in why(tmp_path, "swapped")
    assert swapped


@pytest.mark.parametrize(("size", "is_read"), [(reports.MAX_BYTES, True), (reports.MAX_BYTES + 1, False)])
def test_largest_file(tmp_path: Path, size: int, is_read: bool):
    text = json.dumps(AUDIT)
    made(tmp_path, "large", summary=text.encode() + b" " * (size - len(text)))
    if is_read:
        assert read_report(tmp_path, "large").kind == "audit"
        assert names(tmp_path) == ["large"]
    else:
        assert "larger than 16,777,216 bytes" in why(tmp_path, "large")
        assert list_reports(tmp_path).unreadable == 1


def test_large_summary_is_not_in_the_list(tmp_path: Path):
    findings = [{"principal": f"user-{number}", "findings": ["x"]} for number in range(5_000)]
    made(tmp_path, "large", summary={**AUDIT, "findings": findings})
    (listed,) = list_reports(tmp_path).reports
    assert (listed.kind, listed.summary) == ("audit", None)
    assert len(json.loads(bytes(read_report(tmp_path, "large").summary))["findings"]) == 5_000


def test_file_that_grows_is_read_up_to_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    summary = made(tmp_path, "growing") / "summary.json"
    check, sizes = os.fstat, []

    def before(fd: int) -> os.stat_result:
        found = check(fd)
        sizes.append(found.st_size)
        with summary.open("ab") as file:
            file.write(b" " * reports.MAX_BYTES)
        return found

    monkeypatch.setattr(os, "fstat", before)
    assert "larger than" in why(tmp_path, "growing")
    assert sizes == [len(json.dumps(AUDIT))]


@pytest.fixture
def vanishing(tmp_path: Path) -> Iterator[Path]:
    """A folder in which a report comes and goes all the time."""
    ended = threading.Event()
    tables = json.dumps(TABLES).encode()

    def go_on() -> None:
        number = 0
        while not ended.is_set():
            number += 1
            made(tmp_path, f"_new{number}", tables=tables)
            (tmp_path / f"_new{number}").rename(tmp_path / "nightly")
            for file in ("tables.json", "summary.json"):
                (tmp_path / "nightly" / file).unlink()
            (tmp_path / "nightly").rmdir()

    thread = threading.Thread(target=go_on)
    thread.start()
    yield tmp_path
    ended.set()
    thread.join()


def test_report_that_vanishes_while_it_is_read(vanishing: Path):
    until = time.monotonic() + 60
    seen: set[str] = set()
    while time.monotonic() < until and len(seen) < 2:
        list_reports(vanishing)
        try:
            read_report(vanishing, "nightly")
            seen.add("read")
        except ReportError:
            seen.add("refused")
    assert seen == {"read", "refused"}


@pytest.mark.parametrize(
    "summary",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"decisions": NaN}',
        b'{"decisions": 1} {}',
        b'{"a": "\xff"}',
        b"[" * 100_000,
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"\x00" * 100,
        b"<html><script>alert(1)</script>",
    ],
)
def test_broken_summary_is_refused(tmp_path: Path, summary: bytes):
    made(tmp_path, "broken", summary=summary)
    made(tmp_path, "whole")
    assert "summary.json is damaged" in why(tmp_path, "broken")
    assert names(tmp_path) == ["whole"]
    assert list_reports(tmp_path).unreadable == 1


@pytest.mark.parametrize(
    "tables",
    [
        [],
        {"tables": {}},
        {"tables": [{"name": "a"}]},
        {"tables": [{"name": "a", "title": "b", "columns": [1], "rows": []}]},
        {"tables": [{"name": "a", "title": "b", "columns": ["c"], "rows": [{}]}]},
        {"tables": [{"name": "a", "title": "b", "columns": ["c"], "rows": [[{}]]}]},
        {"tables": [{"name": "a", "title": "b", "columns": ["c"] * 101, "rows": []}]},
        {"tables": [{"name": "a", "title": "b", "columns": ["c"], "rows": []}] * 101},
    ],
)
def test_tables_of_another_form_are_refused(tmp_path: Path, tables: object):
    made(tmp_path, "odd", tables=tables)
    assert "tables.json is damaged" in why(tmp_path, "odd")


def test_huge_table_is_cut(tmp_path: Path):
    rows = b",".join([b"[1]"] * 1_000_000)
    table = b'{"tables":[{"name":"a","title":"b","columns":["c"],"rows":[' + rows + b"]}]}"
    made(tmp_path, "huge", tables=table)
    (found,) = read_report(tmp_path, "huge").tables
    assert (len(found.rows), found.count) == (reports.MAX_ROWS, 1_000_000)


def test_missing_folder_is_no_empty_one(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        list_reports(tmp_path / "away")
