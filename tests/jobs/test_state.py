"""An audit that goes on from a state reports what an audit of the whole log does, or refuses the state."""

from __future__ import annotations

import copy
import json
import random
import shutil
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from app.domain.oracle import Oracle
from tests.jobs.audits import DRIVER, AuditResult, audit
from tests.jobs.logs import SECRET, START_MS, Row
from tests.jobs.tampering import KINDS, Kind, Rows, Traffic, left_by, traffic
from workers.decision_log.compact import Compactor
from workers.decision_log.folder import Folder
from workers.decision_log.schema import HOUR_MS, partition
from workers.jobs import files
from workers.jobs.audit import continued as continued_audit
from workers.jobs.audit import report, state
from workers.jobs.command import main
from workers.jobs.errors import JobError
from workers.jobs.files import log_files

TABLES = ("overall", "principals", "buckets", "cases")
Honest = tuple[Traffic, dict[str, Rows]]


@pytest.fixture(scope="module")
def honest() -> Honest:
    return traffic(["one"])


def tampered(honest: Honest, kind: Kind | None) -> tuple[Traffic, Rows]:
    made, parts = copy.deepcopy(honest)
    if kind is not None:
        whose = kind.of or "one"
        parts[whose] = kind.does(parts[whose])
    return made, [row for part in parts.values() for row in part]


def arrived(rows: Rows, dice: random.Random) -> Rows:
    """The rows in the order in which they reach the log: by themselves, or with their batches."""
    if dice.random() < 0.5:
        return sorted(rows, key=lambda row: row["at_ms"])
    last: dict[str, int] = {}
    for row in rows:
        last[row["batch"]] = max(last.get(row["batch"], 0), row["at_ms"])
    return sorted(rows, key=lambda row: (last[row["batch"]], row["batch"]))


def in_parts(rows: Rows, dice: random.Random) -> list[Rows]:
    """The rows cut into two to four parts."""
    cuts = sorted(dice.randrange(len(rows)) for _ in range(dice.choice((1, 2, 3))))
    return [rows[a:b] for a, b in zip([0, *cuts], [*cuts, len(rows)], strict=True)]


def found(result: AuditResult) -> dict[str, Any]:
    """The tables of a report, in an order that does not depend on the order of reading.

    Of rows with a wrong time each task keeps twenty as cases; all of them are counted.
    """
    tables = {name: result.rows(name) for name in TABLES}
    tables["cases"] = [case for case in tables["cases"] if case["case"] != "clock"]
    return {
        name: sorted(rows, key=lambda row: [str(each) for each in row.values()])
        for name, rows in tables.items()
    }


def continued(made: Traffic, parts: Sequence[Sequence[Row]], folder: Path) -> list[AuditResult]:
    """The audits of a log that grows, with a state."""
    results = []
    for number, rows in enumerate(parts):
        made.write(folder / "log", rows, f"part-{number}")
        if any(row["kind"] == "decision" for part in parts[: number + 1] for row in part):
            results.append(audit(folder / "log", "--state", str(folder / "state")))
    return results


def read_whole(result: AuditResult) -> bool:
    return any("whole" in line for line in result.report["state"])


@pytest.mark.parametrize(
    "settled_ms", [300, *(pytest.param(ms, marks=pytest.mark.prove) for ms in (0, 60_000))]
)
@pytest.mark.parametrize("kind", [None, *KINDS], ids=lambda kind: kind.name if kind else "nothing")
def test_runs_with_a_state_find_what_one_run_over_the_whole_log_finds(
    kind: Kind | None, settled_ms: int, honest: Honest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(report, "SETTLED_MS", settled_ms)
    dice = random.Random(f"{kind and kind.name} {settled_ms}")
    made, rows = tampered(honest, kind)
    results = continued(made, in_parts(arrived(rows, dice), dice), tmp_path)
    whole = audit(made.write(tmp_path / "whole", rows))
    assert found(results[-1]) == found(whole)
    if kind is None and settled_ms:
        assert not any(map(read_whole, results))


class Log:
    """A log of several hours with the audits' state."""

    def __init__(self, folder: Path, hours: int = 3) -> None:
        self.made = Traffic(Oracle(SECRET))
        self.made.now_ms = START_MS - 60_000
        self.made.set_quotas()
        self.hours = []
        for hour in range(hours):
            self.made.now_ms = START_MS + hour * HOUR_MS
            self.hours.append(left_by(self.made.run_as(f"h{hour}"), (f"h{hour}-1", f"h{hour}-2")))
        self.hours[0] += left_by(self.made.changes, ("admin",))
        self.folder, self.state = folder / "log", folder / "state"

    def write(self, rows: Rows, name: str = "part") -> None:
        self.made.write(self.folder, rows, name)

    def write_batches(self, rows: Rows) -> None:
        """Write each batch into a file of its own."""
        for batch in sorted({row["batch"] for row in rows}):
            self.write([row for row in rows if row["batch"] == batch], batch)

    def audit(self, *more: str) -> AuditResult:
        return audit(self.folder, "--state", str(self.state), *more)

    def whole(self) -> AuditResult:
        copied = self.folder.with_name("copied")
        shutil.rmtree(copied, ignore_errors=True)
        shutil.copytree(self.folder, copied)
        return audit(copied)

    def files(self, hour: int | None = None) -> list[Path]:
        where = self.folder / partition(START_MS + hour * HOUR_MS) if hour is not None else self.folder
        return sorted(where.rglob("*.parquet"))


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path)


def said(result: AuditResult) -> str:
    return "\n".join(result.report["state"])


def test_only_new_files_are_read(log: Log, monkeypatch: pytest.MonkeyPatch):
    log.write(log.hours[0] + log.hours[1])
    assert said(log.audit()) == ""
    read: list[str] = []
    reading = files._read

    def noting(filesystem: Any, path: str, *more: Any) -> Any:
        read.append(path)
        return reading(filesystem, path, *more)

    monkeypatch.setattr(files, "_read", noting)
    log.write(log.hours[2])
    last = log.audit()
    [new] = log.files(2)
    assert set(read) == {str(new)}
    assert said(last) == "  --state: read 1 new file of 4"
    assert last.overall["asks"] == sum(row["kind"] == "decision" for rows in log.hours for row in rows)
    assert found(last) == found(log.whole())


def test_audit_without_new_files_reports_the_same(log: Log):
    log.write(log.hours[0])
    before, kept = log.audit(), log.state.read_bytes()
    assert found(log.audit()) == found(before)
    assert log.state.read_bytes() != b"" != kept


def merge(log: Log, *, with_sources: bool = False) -> None:
    """Merge the files of each hour, as the writer does."""
    for stay_s in (1e9,) if with_sources else (-1e9, -1e9):
        Compactor(Folder(log.folder), stay_s=stay_s).compact(START_MS + 24 * HOUR_MS)


@pytest.mark.parametrize("with_sources", [True, False])
def test_merged_files_are_read_only_for_rows_that_are_new(log: Log, *, with_sources: bool):
    first, second = log.hours[0][:60], log.hours[0][60:]
    log.write_batches(first)
    log.write_batches(log.hours[1][:40])
    log.audit()
    log.write_batches(second)
    log.write_batches(log.hours[1][40:])
    merge(log, with_sources=with_sources)
    last = log.audit()
    assert not read_whole(last), said(last)
    assert found(last) == found(log.whole())
    merge(log)
    log.write(log.hours[2])
    last = log.audit()
    assert not read_whole(last), said(last)
    assert found(last) == found(log.whole())


def change_merged(log: Log, hour: int) -> None:
    """Change a wait in the merged file of an hour."""
    [merged] = [file for file in log.files(hour) if file.name.startswith("merged-")]
    table = pq.read_table(merged, partitioning=None)
    rows = table.to_pylist()
    next(row for row in rows if row["decision"] == "throttle")["throttle_ms"] += 1
    pq.write_table(pa.Table.from_pylist(rows, table.schema), merged)


def test_state_is_refused_if_a_merged_file_has_other_content_and_the_first_hours_are_gone(log: Log):
    log.write_batches(log.hours[0])
    log.write_batches(log.hours[1])
    log.audit()
    merge(log)
    change_merged(log, 1)
    for file in log.files(-1) + log.files(0):
        file.unlink()
    with pytest.raises(JobError, match=r"--state .*differ from those before, and the log no longer has all"):
        log.audit()


def test_log_is_read_whole_if_a_merged_file_has_other_content(log: Log):
    log.write_batches(log.hours[0])
    assert log.audit().held
    merge(log)
    change_merged(log, 0)
    last = log.audit()
    assert read_whole(last)
    assert "differ from those before" in said(last)
    assert not last.held
    assert found(last) == found(log.whole())


def test_hours_that_retention_removed_stay_in_the_report(log: Log):
    log.write(log.hours[0])
    log.write(log.hours[1])
    log.audit()
    log.write(log.hours[2])
    whole = log.whole()
    for file in log.files(0) + log.files(-1):
        file.unlink()
    last = log.audit()
    assert found(last) == found(whole)
    assert said(last).endswith("the report has 2 hours that were removed from the log")
    again = log.audit()
    assert found(again) == found(whole)
    assert said(again).endswith("the report has 2 hours that were removed from the log")


def test_hour_without_files_is_no_reason_to_read_the_log_whole(log: Log):
    log.write(log.hours[0])
    log.audit()
    log.write(log.hours[2])
    last = log.audit()
    assert not read_whole(last), said(last)
    assert found(last) == found(log.whole())
    log.write(log.hours[1])
    assert found(log.audit()) == found(log.whole()), "its rows came late"


def test_two_runs_at_once_leave_the_state_of_one_of_them(log: Log, monkeypatch: pytest.MonkeyPatch):
    log.write(log.hours[0])
    log.audit()
    saving = state.AuditState.save

    def after_another_run(*given: Any) -> None:
        monkeypatch.setattr(state.AuditState, "save", saving)
        log.write(log.hours[2])
        assert said(log.audit()) == "  --state: read 2 new files of 4"
        saving(*given)

    monkeypatch.setattr(state.AuditState, "save", after_another_run)
    log.write(log.hours[1])
    assert said(log.audit()) == "  --state: read 1 new file of 3"
    last = log.audit()
    assert said(last) == "  --state: read 1 new file of 4", "the run that ended last saved fewer files"
    assert found(last) == found(log.whole())


def test_files_that_are_merged_during_a_run_end_it_and_the_next_run_goes_on(
    log: Log, monkeypatch: pytest.MonkeyPatch
):
    log.write_batches(log.hours[0])
    log.audit()
    log.write_batches(log.hours[1])
    before = log.state.read_bytes()

    def before_a_merge(url: str) -> dict[str, int]:
        found = log_files(url)
        merge(log)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(continued_audit, "log_files", before_a_merge)
        with pytest.raises(JobError, match="start the job again"):
            log.audit()
    assert log.state.read_bytes() == before
    last = log.audit()
    assert not read_whole(last), said(last)
    assert found(last) == found(log.whole())


def late(log: Log) -> None:
    """Write all but one row of the first hour, and then this row, which is older than all settled ones."""
    one = next(row for row in log.hours[0] if row["kind"] == "decision")
    log.write([row for row in log.hours[0] if row is not one])
    log.write(log.hours[1])
    log.audit()
    log.write([one], "late")


def test_log_is_read_whole_if_a_row_is_late(log: Log):
    late(log)
    last = log.audit()
    assert "was read whole, because" in said(last)
    assert "late" in said(last)
    assert found(last) == found(log.whole())
    log.write(log.hours[2])
    assert not read_whole(log.audit())


def test_state_is_refused_if_a_row_is_late_and_the_first_hours_are_gone(log: Log):
    late(log)
    for file in log.files(-1):
        file.unlink()
    with pytest.raises(JobError, match=r"--state .*/state: .*late.*no longer has all hours.*remove the file"):
        log.audit()


def change(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path, by: int = 100) -> None:
    path.write_bytes(path.read_bytes()[:-by])


def alter(log: Log, **fields: object) -> None:
    """Alter the header of a state, without its hash."""
    with zipfile.ZipFile(log.state) as archive:
        members, comment = {name: archive.read(name) for name in archive.namelist()}, archive.comment
    members["state.json"] = json.dumps(json.loads(members["state.json"]) | fields).encode()
    with zipfile.ZipFile(log.state, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        archive.comment = comment


ALTERED = "is no whole state of an audit: it was altered or cut short"
UNFIT: dict[str, tuple[Callable[[Log], object], str]] = {
    "a byte of the state": (lambda log: change(log.state), ALTERED),
    "the end of the state": (lambda log: cut(log.state), ALTERED),
    "half of the state": (lambda log: cut(log.state, log.state.stat().st_size // 2), ALTERED),
    "all of the state": (lambda log: log.state.write_bytes(b""), ALTERED),
    "another file": (lambda log: log.state.write_text("{}"), ALTERED),
    "the hashes of files": (lambda log: alter(log, files={}), "state.json does not have its hash"),
    "a file of the log": (
        lambda log: change(log.files(1)[0]),
        r"files: .*hour=11/part.parquet: its sha256 is",
    ),
    "a shorter file": (lambda log: cut(log.files(0)[0]), r"files: .*hour=10/part.parquet: its sha256 is"),
    "a file is gone": (lambda log: log.files(1)[0].unlink(), r"files: .*hour=11/part.parquet: is gone"),
    "another log": (lambda log: [as_another(file) for file in log.files()], "has none of the rows"),
}


def as_another(path: Path) -> Path:
    """Put the rows of a file into another batch and another file."""
    table = pq.read_table(path, partitioning=None)
    rows = [row | {"batch": "other-000000000001"} for row in table.to_pylist()]
    pq.write_table(pa.Table.from_pylist(rows, table.schema), path)
    return path.rename(path.with_name("other.parquet"))


@pytest.mark.parametrize("name", UNFIT)
def test_state_that_does_not_fit_is_refused(name: str, log: Log):
    does, why = UNFIT[name]
    for rows in log.hours:
        log.write(rows)
    log.audit()
    does(log)
    with pytest.raises(
        JobError, match=rf"--state .*/state: .*{why}.*; remove the file, or name another one"
    ) as refused:
        log.audit()
    assert refused.value.exit_code == 1


@pytest.mark.parametrize(
    ("now", "why"),
    [
        (("--max-ids", "7"), "--max-ids: is 7, must be 1000000"),
        (("--combine-delays", "sequential"), "--combine-delays: is sequential, must be max"),
        (("--clock", "caller"), "--clock: is caller, must be store"),
        (("--older",), "--older: is True, must be False"),
        (("--grace", "5"), "--grace: is 5.0, must be 2.0"),
    ],
)
def test_state_of_an_audit_with_other_options_is_refused(now: tuple[str, ...], why: str, log: Log):
    log.write(log.hours[0])
    log.audit("--allow-lost")
    with pytest.raises(JobError, match=why):
        log.audit(*now)
    assert log.audit("--allow-missing").held, "these options may differ"


@pytest.mark.parametrize(("name", "is_now"), [("FORMAT", 2), ("code_hash", lambda: "0123")])
def test_state_of_another_version_is_refused(
    name: str, is_now: object, log: Log, monkeypatch: pytest.MonkeyPatch
):
    log.write(log.hours[0])
    log.audit()
    monkeypatch.setattr(state, name, is_now)
    field = {"FORMAT": "format: is 1, must be 2", "code_hash": r"code: is [0-9a-f]{16}, must be 0123"}[name]
    with pytest.raises(JobError, match=f"{field}, that of this Quotagate"):
        log.audit()


def test_killed_audit_leaves_the_earlier_state(log: Log, monkeypatch: pytest.MonkeyPatch):
    log.write(log.hours[0])
    log.audit()
    before = log.state.read_bytes()
    writing = state._write

    def half(files: Any, path: str, content: bytes) -> None:
        writing(files, path, content[: len(content) // 2])
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(state, "_write", half)
        log.write(log.hours[1])
        with pytest.raises(KeyboardInterrupt):
            log.audit()
    assert log.state.read_bytes() == before
    assert {path.name for path in log.state.parent.iterdir()} == {"log", "log-report", "state"}
    assert found(log.audit()) == found(log.whole())


def test_state_and_period_do_not_go_together(log: Log):
    log.write(log.hours[0])
    given = ("audit", "--log", str(log.folder), "--out", str(log.folder.with_name("out")), "--state", "s")
    assert main(DRIVER, [*given, "--from", "2026-11-21T10:00:00Z"]) == 2


@pytest.mark.parametrize("place", ["out", "other/../out"])
def test_state_in_the_output_folder_is_wrong_use(
    place: str, log: Log, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    log.write(log.hours[0])
    out = tmp_path / "out"
    given = ("audit", "--log", str(log.folder), "--out", str(out), "--overwrite")
    assert main(DRIVER, [*given, "--state", f"{tmp_path}/{place}/audit.state"]) == 2
    assert "--state: must not be in the folder of --out" in capsys.readouterr().err
    assert not out.exists()


def test_empty_name_of_a_state_is_wrong_use(log: Log, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    log.write(log.hours[0])
    given = ("audit", "--log", str(log.folder), "--out", str(tmp_path / "out"))
    assert main(DRIVER, [*given, "--state", ""]) == 2
    assert "--state: must name a file" in capsys.readouterr().err


def test_command_goes_on_from_a_state(log: Log, capsys: pytest.CaptureFixture[str]):
    given = ("audit", "--log", str(log.folder), "--out", str(log.folder.with_name("out")), "--overwrite")
    for hour, line in enumerate(("", "  --state: read 1 new file of 3\n")):
        log.write(log.hours[hour])
        assert main(DRIVER, [*given, "--state", str(log.state)]) == 0
        assert capsys.readouterr().out.endswith(f"report.html\n{line}")
    change(log.state)
    assert main(DRIVER, [*given, "--state", str(log.state)]) == 1
    [*_, said] = capsys.readouterr().err.splitlines()
    assert said.startswith(f"quotagate: --state {log.state}: {ALTERED}")
