"""Histories as other people's programs write them: types of times, names of columns, formats and faults."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, Final, NamedTuple

import pandas as pd  # type: ignore[import-untyped]
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from app.storage_location import StorageLocation
from tests import object_store
from tests.jobs import backfills
from tests.jobs.logs import SECRET, START_MS
from workers.jobs import command
from workers.jobs.__main__ import Processes
from workers.jobs.backfill import json_history, parquet_history
from workers.jobs.backfill.history_files import HistoryFiles
from workers.jobs.backfill.uses import HistoryColumns
from workers.jobs.errors import JobError

AT_MS: Final = START_MS + 123
NAMED: Final = HistoryColumns()


class Use(NamedTuple):
    """A use as it was read."""

    principal: str
    id: str
    at_ms: int


def read(path: Path | str, kind: str = "parquet", columns: HistoryColumns = NAMED) -> list[Use]:
    return [Use(*use) for use in backfills.uses(path, kind, columns)]


def refusal(path: Path | str, kind: str = "parquet", columns: HistoryColumns = NAMED) -> str:
    with pytest.raises(JobError) as refused:
        read(path, kind, columns)
    said = str(refused.value)
    assert "\n" not in said
    assert "Error" not in said
    return said


def write(file: Path, **columns: Any) -> None:
    table = {"principal": ["a"], "id": [4711], "time": [AT_MS], **columns}
    pq.write_table(pa.table(table), file)


TIMES: Final[Mapping[str, Any]] = {
    "pandas": pa.array([AT_MS * 1_000_000 + 999_999], pa.timestamp("ns")),
    "pandas-utc": pa.array([AT_MS * 1_000_000 + 1], pa.timestamp("ns", tz="UTC")),
    "pandas-berlin": pa.array([AT_MS * 1_000_000], pa.timestamp("ns", tz="Europe/Berlin")),
    "micros": pa.array([AT_MS * 1_000 + 999], pa.timestamp("us")),
    "micros-utc": pa.array([AT_MS * 1_000], pa.timestamp("us", tz="+01:00")),
    "millis": pa.array([AT_MS], pa.timestamp("ms")),
    "numbers": pa.array([AT_MS], pa.int64()),
    "unsigned": pa.array([AT_MS], pa.uint64()),
    "text": pa.array(["2026-11-21T10:00:00.123Z"]),
    "text-offset": pa.array(["2026-11-21 11:00:00.123456789+01:00"]),
    "text-no-zone": pa.array(["2026-11-21T10:00:00.123"]),
    "text-number": pa.array([str(AT_MS)]),
    "category": pa.array(["2026-11-21T10:00:00.123Z"]).dictionary_encode(),
}
"""One instant in every type that a program may write."""


def test_one_instant_is_read_from_every_type_of_time_in_one_folder(tmp_path: Path):
    for name, times in TIMES.items():
        write(tmp_path / f"{name}.parquet", principal=[name], time=times)
    nanos = pa.table({"principal": ["int96"], "id": [1], "time": TIMES["pandas"]})
    pq.write_table(nanos, tmp_path / "int96.parquet", use_deprecated_int96_timestamps=True)
    frame = pd.DataFrame({"principal": ["frame"], "id": [1], "time": pd.to_datetime([AT_MS], unit="ms")})
    frame.astype({"time": "datetime64[ns]"}).to_parquet(tmp_path / "frame.parquet")
    found = {row.principal: row.at_ms for row in read(tmp_path)}
    assert found == dict.fromkeys([*TIMES, "int96", "frame"], AT_MS)


def test_other_columns_may_have_any_type(tmp_path: Path):
    write(
        tmp_path / "uses.parquet",
        nanos=pa.array([1], pa.timestamp("ns")),
        of_day=pa.array([1], pa.time64("ns")),
        wide=pa.array([1], pa.decimal256(60, 3)),
        nothing=pa.array([None], pa.null()),
        many=[[1, 2]],
        mapped=pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())),
        Time=[5],
        PRINCIPAL=["other"],
    )
    assert read(tmp_path) == [Use(principal="a", id="4711", at_ms=AT_MS)]


def test_nanoseconds_that_are_missing_or_far_off_are_refused(tmp_path: Path):
    file = tmp_path / "uses.parquet"
    write(file, time=pa.array([None], pa.timestamp("ns")))
    assert "uses.parquet: field time: must be an instant" in refusal(file)
    write(file, time=pa.array([5], pa.timestamp("ns")))
    assert "uses.parquet: field time: must lie in the years 2000 to 2199" in refusal(file)


ODD_NAMES: Final[Sequence[tuple[str, str, str]]] = (
    ("user.name", "producer.id", "@timestamp"),
    ("who asked", "pid`s", "it's time"),
    ('"quoted"', "a[0]", "time (ms)"),
    ("`back`tick`", "$.id", "{time}"),
    ("Benutzer*in", "идентификатор", "時刻"),
    ("a as b", "1", "current_timestamp()"),
    ("*", "id; drop table x", "time -- comment"),
    ("_corrupt", "_file", "_type"),
    ("value", "line", "at_ms"),
    ("a\\b", "x'y\"z?", " time "),
    ("principal.", ".id", "a..b"),
    ("A", "a", "Á"),
)


@pytest.mark.parametrize("names", ODD_NAMES, ids=" | ".join)
def test_name_of_a_column_is_taken_literally(tmp_path: Path, names: tuple[str, str, str]):
    uses = {names[0]: "alice", names[1]: 4711, names[2]: AT_MS, "principal": "p", "id": 1, "time": START_MS}
    pq.write_table(pa.Table.from_pylist([uses]), tmp_path / "uses.parquet")
    (tmp_path / "uses.json").write_text(json.dumps(uses) + "\n", encoding="utf-8")
    wanted = [Use(principal="alice", id="4711", at_ms=AT_MS)]
    assert read(tmp_path / "uses.parquet", "parquet", HistoryColumns(*names)) == wanted
    assert read(tmp_path / "uses.json", "json", HistoryColumns(*names)) == wanted


NESTED: Final = {
    "kafka.user": "exact",
    "kafka": {"user": "nested", "producer": {"id": 4711, "x.y": 5}},
    "meta": {"at": AT_MS},
}


def test_exact_name_goes_before_a_nested_field(tmp_path: Path):
    pq.write_table(pa.Table.from_pylist([NESTED]), tmp_path / "uses.parquet")
    (tmp_path / "uses.json").write_text(json.dumps(NESTED) + "\n")
    columns = HistoryColumns("kafka.user", "kafka.producer.id", "meta.at")
    for kind in ("parquet", "json"):
        [found] = read(tmp_path / f"uses.{kind}", kind, columns)
        assert found == Use(principal="exact", id="4711", at_ms=AT_MS)
    assert parquet_history.find({"kafka": {"x.y": "int"}}, "kafka.x.y") == ("kafka", "x.y")


@pytest.mark.parametrize(
    "name",
    ["upper(principal)", "principal as x", "`principal`", "*", "PRINCIPAL", "principal ", "1", "kafka.no"],
)
def test_name_that_is_missing_lists_the_columns_that_are_there(tmp_path: Path, name: str):
    write(tmp_path / "uses.parquet", kafka=[{"user": "a"}])
    said = refusal(tmp_path / "uses.parquet", columns=HistoryColumns(name))
    assert said == (
        f"{tmp_path}/uses.parquet: column {name}: is missing; name it with --principal-column"
        " (there are: principal, id, time, kafka)"
    )


OBJECTS: Final = [{"principal": "a", "id": 4711, "time": AT_MS}, {"principal": "b", "id": "x", "time": AT_MS}]
LINES: Final = "".join(json.dumps(each) + "\n" for each in OBJECTS)


def test_json_is_read_in_the_shapes_that_programs_write(tmp_path: Path):
    pd.DataFrame(OBJECTS).to_json(tmp_path / "records.json", orient="records")
    (tmp_path / "pretty.json").write_text(json.dumps(OBJECTS, indent=2))
    (tmp_path / "lines.jsonl").write_text("\n" + LINES + "\n  \n")
    (tmp_path / "marked.json").write_text("\ufeff" + LINES, encoding="utf-8")
    (tmp_path / "marked-array.json").write_text("\ufeff" + json.dumps(OBJECTS), encoding="utf-8")
    (tmp_path / "windows.json").write_bytes(LINES.replace("\n", "\r\n").encode())
    (tmp_path / "empty.json").write_text("")
    (tmp_path / "packed.json.gz").write_bytes(gzip.compress(LINES.encode()))
    (tmp_path / "packed-array.json.gz").write_bytes(gzip.compress(json.dumps(OBJECTS, indent=1).encode()))
    found = read(tmp_path, "json")
    wanted = [Use(principal="a", id="4711", at_ms=AT_MS), Use(principal="b", id="x", at_ms=AT_MS)]
    assert sorted(found) == sorted(wanted * 8)


def test_whole_number_of_an_array_is_not_confused_with_a_fraction(tmp_path: Path):
    (tmp_path / "uses.json").write_text(json.dumps([OBJECTS[0] | {"id": 4711.0}]))
    assert "uses.json: field id: must be a signed 64-bit integer or a text" in refusal(
        tmp_path / "uses.json", "json"
    )
    (tmp_path / "uses.json").write_text('[{"principal": "a"}, 5')
    assert "uses.json: a line is not a JSON object" in refusal(tmp_path / "uses.json", "json")


def test_unsigned_ids_are_read_up_to_the_largest_id(tmp_path: Path):
    file = tmp_path / "uses.parquet"
    write(file, id=pa.array([2**63 - 1], pa.uint64()))
    assert read(file)[0].id == str(2**63 - 1)
    write(file, id=pa.array([2**63], pa.uint64()))
    assert "uses.parquet: field id: must be a signed 64-bit integer" in refusal(file)


def test_columns_in_the_names_of_folders_are_read(tmp_path: Path):
    for name, number in (("alice", 1), ("bob", 2)):
        (tmp_path / "uses" / f"principal={name}").mkdir(parents=True)
        table = pa.table({"id": [number], "time": pa.array([AT_MS * 1_000_000], pa.timestamp("ns"))})
        pq.write_table(table, tmp_path / "uses" / f"principal={name}" / "part.parquet")
    found = sorted((row.principal, row.id, row.at_ms) for row in read(tmp_path / "uses"))
    assert found == [("alice", "1", AT_MS), ("bob", "2", AT_MS)]


Maker = Callable[[Path], None]


def bytes_of(content: bytes) -> Maker:
    def make(file: Path) -> None:
        file.write_bytes(content)

    return make


def cut_off(file: Path) -> None:
    write(file)
    file.write_bytes(file.read_bytes()[:-20])


def without_id(file: Path) -> None:
    pq.write_table(pa.table({"principal": ["a"], "time": [AT_MS]}), file)


CSV: Final = b"principal,id,time\na,1,5\n"
FAULTS: Final[Sequence[tuple[str, str, Maker, str]]] = (
    ("parquet", "uses.csv", bytes_of(CSV), "is not Parquet; a history is Parquet or JSON, so convert CSV"),
    ("parquet", "uses", bytes_of(LINES.encode()), "is JSON, not Parquet: add --format json"),
    ("parquet", "uses", bytes_of(b"  \n[{}]"), "is JSON, not Parquet: add --format json"),
    ("parquet", "uses.parquet", bytes_of(b""), "is empty, and no Parquet file"),
    ("parquet", "uses.parquet", bytes_of(b"PAR1"), "is damaged or cut off"),
    ("parquet", "uses.parquet", cut_off, "is damaged or cut off: its Parquet footer cannot be read"),
    ("parquet", "uses.parquet", bytes_of(gzip.compress(CSV)), "is compressed by gzip"),
    ("parquet", "uses.parquet", without_id, "column id: is missing; name it with --id-column"),
    ("json", "uses.json", bytes_of(CSV), "does not begin with a JSON object or array"),
    ("json", "uses.json", write, "is Parquet, not JSON: add --format parquet"),
    (
        "json",
        "uses.json",
        bytes_of(gzip.compress(LINES.encode())),
        "is compressed by gzip: its name must end with .gz",
    ),
    ("json", "uses.json", bytes_of(LINES.encode("utf-16")), "is UTF-16: JSON must be UTF-8"),
    (
        "json",
        "uses.json",
        bytes_of(LINES.encode() + CSV),
        "a line is not a JSON object; in principal,id,time",
    ),
)


@pytest.mark.parametrize(("kind", "name", "make", "why"), FAULTS, ids=[fault[-1] for fault in FAULTS])
def test_file_of_another_kind_is_named_with_what_would_be_right(
    tmp_path: Path, kind: str, name: str, make: Maker, why: str
):
    """Among files that are right."""
    write(tmp_path / "a.parquet") if kind == "parquet" else (tmp_path / "a.json").write_text(LINES)
    make(tmp_path / name)
    said = refusal(tmp_path, kind)
    assert said.startswith(f"{tmp_path}/{name}: {why}"), said


@pytest.mark.parametrize(
    ("role", "column", "why"),
    [
        ("time", pa.array([1.5]), "is double, must be timestamp or"),
        ("time", pa.array([date(2026, 11, 21)]), "is date, must be timestamp or"),
        ("time", pa.array([True]), "is boolean, must be"),
        ("time", pa.array([[1]]), "is list, must be"),
        ("id", pa.array([{"low": 1, "high": 2}]), "is a structure of low, high, must be string or bigint"),
        ("id", pa.array([b"1"]), "is binary, must be string or bigint"),
        ("principal", pa.array([7]), "is bigint, must be string"),
    ],
)
def test_column_of_a_wrong_type_is_named_with_its_type(tmp_path: Path, role: str, column: pa.Array, why: str):
    write(tmp_path / "uses.parquet", **{role: column})
    assert f"uses.parquet: column {role}: {why}" in refusal(tmp_path)


def test_two_columns_of_one_name_are_refused(tmp_path: Path):
    columns = [pa.array(["a"]), pa.array([1]), pa.array([2]), pa.array([AT_MS])]
    table = pa.Table.from_arrays(columns, names=["principal", "id", "id", "time"])
    pq.write_table(table, tmp_path / "uses.parquet")
    assert "uses.parquet: has two columns of the name id" in refusal(tmp_path)


def test_place_that_cannot_be_read_is_named_without_its_secrets(tmp_path: Path):
    (tmp_path / "nothing").mkdir()
    none = "there is no such file or folder"
    for url, why in (
        (f"{tmp_path}/missing.parquet", f"{tmp_path}/missing.parquet: {none}"),
        (f"{tmp_path}/missing/*.json", f"{tmp_path}/missing/*.json: {none}"),
        (f"file://{tmp_path}/missing", f"file://{tmp_path}/missing: {none}"),
        (f"{tmp_path}/nothing", f"{tmp_path}/nothing: the folder has no files"),
        ("s3a://me:hunter2@bucket/uses", "s3a://...: must be a path, or begin with one of file://, s3://"),
        ("gs://bucket/uses?key=hunter2", "gs://bucket/uses: Unexpected query parameter"),
    ):
        for kind in ("parquet", "json"):
            said = refusal(url, kind)
            assert said.startswith(why)
            assert "hunter2" not in said


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """Runs the job in this process."""
    monkeypatch.setenv("QUOTAGATE_HASH_SECRET", SECRET.hex())

    def run(*arguments: str) -> tuple[int, str, str]:
        code = command.main(Processes(), ["backfill", *arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_backfill_reads_what_pandas_writes(run: Callable[..., tuple[int, str, str]], tmp_path: Path):
    seen = pd.to_datetime([AT_MS, AT_MS + 1], unit="ms").astype("datetime64[ns]")
    frame = pd.DataFrame({"user.name": ["a", "b"], "producer id": [1, 2], "@timestamp": seen})
    frame.to_parquet(tmp_path / "uses.parquet")
    columns = ("--principal-column", "user.name", "--id-column", "producer id", "--time-column", "@timestamp")
    code, out, err = run(
        "--history", str(tmp_path / "uses.parquet"), "--out", str(tmp_path / "out"), *columns
    )
    assert (code, err) == (0, "")
    assert out.startswith("4 assertions as of 2026-11-21 10:00:00.124 UTC")


def test_backfill_ends_with_one_line_for_a_fault(run: Callable[..., tuple[int, str, str]], tmp_path: Path):
    write(tmp_path / "uses.parquet")
    out = ("--out", str(tmp_path / "out"))
    for history, more, why in (
        ("missing.parquet", (), "missing.parquet: there is no such file or folder"),
        (
            "uses.parquet",
            ("--id-column", "p`id"),
            "column p`id: is missing; name it with --id-column (there are:",
        ),
        ("uses.parquet", ("--format", "json"), "uses.parquet: is Parquet, not JSON: add --format parquet"),
    ):
        code, said, err = run("--history", str(tmp_path / history), *out, *more)
        assert (code, said) == (1, "")
        assert why in err
        assert len(err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_output_of_an_unknown_filesystem_is_refused_in_one_line(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path
):
    write(tmp_path / "uses.parquet")
    code, said, err = run("--history", str(tmp_path), "--out", "s3a://me:hunter2@bucket/out")
    assert (code, said) == (1, "")
    assert err.startswith("quotagate: s3a://...: must be a path, or begin with one of file://, s3://")
    assert len(err.splitlines()) == 1


def test_damaged_column_is_named_by_its_file(run: Callable[..., tuple[int, str, str]], tmp_path: Path):
    """The footer is whole, so the damage shows only while the rows are read."""
    file = tmp_path / "a b%20c.parquet"
    write(file, principal=["alice"] * 1_000, id=list(range(1_000)), time=[AT_MS] * 1_000)
    whole = bytearray(file.read_bytes())
    whole[30 : len(whole) // 2] = b"\xff" * (len(whole) // 2 - 30)
    file.write_bytes(whole)
    code, said, err = run("--history", str(file), "--out", str(tmp_path / "out"))
    assert (code, said) == (1, "")
    assert err == f"quotagate: {file}: is damaged: it cannot be read\n"


@pytest.mark.parametrize("end", ["\n", ""], ids=["newline", "no-newline"])
def test_lines_of_a_large_file_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str):
    """Each line once, wherever parts and blocks begin and end."""
    uses = [{"principal": "a" * (number % 23), "id": number, "time": AT_MS} for number in range(1, 60)]
    for use in uses:
        use["principal"] = use["principal"] or "b"
    file = tmp_path / "uses.json"
    file.write_text("\n".join(map(json.dumps, uses)) + end)
    wanted = sorted(str(use["id"]) for use in uses)
    for part in (40, 61, 62, 63, 64, 200, 10_000):
        for block in (7, 62):
            monkeypatch.setattr(json_history, "PART", part)
            monkeypatch.setattr(json_history, "BLOCK", block)
            assert sorted(use.id for use in read(file, "json")) == wanted, (part, block)


def test_pattern_chooses_files_and_whole_folders(tmp_path: Path):
    for name in (
        "day-1/a.json",
        "day-2/b.json",
        "day-2/in/c.json",
        "night/d.json",
        "day-2/_e.json",
        "day-3/.f",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps(OBJECTS[0] | {"principal": Path(name).stem}))

    def principals(pattern: str) -> str:
        return "".join(sorted(use.principal for use in read(f"{tmp_path}/{pattern}", "json")))

    assert principals("*") == "abcd"
    assert principals("day-*") == "abc"
    assert principals("day-?/*.json") == "ab"
    assert principals("{day-1,night}/*") == "ad"
    assert principals("[d]ay-[^1]") == "bc"
    assert principals("day-2/{b,in/c}.json") == "bc"
    assert refusal(f"{tmp_path}/d*.json", "json") == f"{tmp_path}/d*.json: there is no such file or folder"
    assert principals("") == "abcd"


def test_history_in_an_object_store_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, value in object_store.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    write(tmp_path / "uses.parquet")
    with object_store.running() as objects:
        filesystem, folder = StorageLocation(objects.url("uses")).open()
        for name, content in (
            ("principal=b/uses.parquet", (tmp_path / "uses.parquet").read_bytes()),
            ("uses.json.gz", gzip.compress(LINES.encode())),
        ):
            with filesystem.open_output_stream(f"{folder}/{name}", compression=None) as file:
                file.write(content)
        url = objects.url("uses/principal=b")
        assert read(url) == [Use("a", "4711", AT_MS)]
        assert len(read(objects.url("uses/*.gz"), "json")) == len(OBJECTS)
        said = refusal(url, columns=HistoryColumns(id="pid"))
        assert said.startswith(f"s3://{folder}/principal=b/uses.parquet: column pid: is missing")
        assert "there is no such file or folder" in refusal(objects.url("nowhere"))


def test_name_in_json_is_a_text_or_a_whole_number(tmp_path: Path):
    file = tmp_path / "uses.json"
    file.write_text(json.dumps(OBJECTS[0] | {"principal": 7}))
    assert read(file, "json") == [Use("7", "4711", AT_MS)]
    for principal in (7.5, True, ["a"], {"a": 1}):
        file.write_text(json.dumps(OBJECTS[0] | {"principal": principal}))
        assert "uses.json: field principal: must be a text; it names who asks; in principal=" in refusal(
            file, "json"
        )


def test_gzip_of_several_members_is_read_and_one_that_is_cut_off_is_refused(tmp_path: Path):
    file = tmp_path / "uses.json.gz"
    file.write_bytes(gzip.compress(LINES.encode()) * 2)
    assert len(read(file, "json")) == 4
    file.write_bytes(gzip.compress(LINES.encode() * 5_000)[:-30])
    assert refusal(file, "json") == f"{file}: is damaged: it cannot be read"


def test_file_that_is_gone_meanwhile_is_named(tmp_path: Path):
    for name, tasks in (
        ("uses.json", json_history.json_tasks),
        ("uses.parquet", parquet_history.parquet_tasks),
    ):
        file = tmp_path / name
        write(file) if name.endswith("t") else file.write_text(LINES)
        [found] = HistoryFiles(str(file)).files
        [task] = tasks(found, NAMED)
        file.unlink()
        with pytest.raises(JobError, match=f"{name}: was removed meanwhile; start the job again"):
            list(task.uses())
