"""Output folders appear complete or not at all, on an object store with their marker last, for one run."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests import object_store
from workers.jobs import folder as output
from workers.jobs.errors import JobError
from workers.jobs.folder import CLAIM, OutputFolder

ROWS = pa.table({"number": [1, 2, 3]})
TAKEN = "out: another run is writing it now; give this one another --out"
HOLDS = """
import sys, time
from workers.jobs.folder import OutputFolder
with OutputFolder(sys.argv[1]) as folder:
    folder.text("half", "")
    print("begun", flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim is written often, and waited for as long as a busy machine may need."""
    monkeypatch.setattr(output, "CLAIMED_EVERY_S", 0.02)
    monkeypatch.setattr(output, "SETTLED_S", 0.0)
    monkeypatch.setattr(output, "ABANDONED_S", 60.0)


def held(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("at_once", [True, False])
def test_folder_appears_once_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, at_once: bool
):
    """An object store, which copies file by file, gets the marker last."""
    out = tmp_path / "out"
    written: list[tuple[str, set[str]]] = []
    real = OutputFolder._write

    def write(self: OutputFolder, path: str, content: bytes) -> None:
        written.append((path, held(out)))
        real(self, path, content)

    monkeypatch.setattr(OutputFolder, "_write", write)
    with OutputFolder(str(out)) as folder:
        assert folder.renames_at_once
        folder.renames_at_once = at_once
        folder.table("rows", ROWS.to_batches(), ROWS.schema)
        folder.text("_marker.json", "{}")
        assert not out.exists()
        temporary = tmp_path / f"_out.{folder._claim}.making"
        assert ("_marker.json" in held(temporary)) is at_once
    assert held(tmp_path) == {"out/rows/part-0.parquet", "out/_marker.json"}
    assert (out / "_marker.json").read_text() == "{}"
    assert pq.read_table(out / "rows") == ROWS
    [(path, there)] = [each for each in written if each[0].endswith("_marker.json")]
    assert Path(path).parent == (temporary if at_once else out)
    assert there == (set() if at_once else {"rows/part-0.parquet"})


class Order(dict[str, bytes]):
    """The objects of a store, with the order in which they were written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[str] = []

    def __setitem__(self, key: str, content: bytes) -> None:
        self.written.append(key)
        super().__setitem__(key, content)


def test_marker_in_an_object_store_is_written_last(monkeypatch: pytest.MonkeyPatch):
    for name, value in object_store.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with object_store.running() as store:
        store.objects = objects = Order()
        for overwrite in (False, True):
            objects.written.clear()
            with OutputFolder(store.url("out"), overwrite=overwrite) as folder:
                folder.text("_marker.json", "{}")
                folder.table("rows", ROWS.to_batches(), ROWS.schema)
            kept = {name for name in objects if not name.endswith("/")}
            assert kept == {"out/rows/part-0.parquet", "out/_marker.json"}
            written = [name for name in objects.written if not name.endswith(CLAIM)]
            assert written[-1] == "out/_marker.json"
        with OutputFolder(store.url("other")), pytest.raises(JobError, match="another run is writing it now"):
            OutputFolder(store.url("other")).__enter__()


@pytest.mark.parametrize("at_once", [True, False])
def test_failure_keeps_the_old_folder(tmp_path: Path, *, at_once: bool):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").touch()
    with pytest.raises(JobError, match="exists already; --overwrite replaces it"):
        OutputFolder(str(tmp_path / "out"))
    with pytest.raises(RuntimeError), OutputFolder(str(tmp_path / "out"), overwrite=True) as folder:  # noqa: PT012
        folder.renames_at_once = at_once
        folder.text("new", "")
        raise RuntimeError
    assert held(tmp_path) == {"out/old"}
    with OutputFolder(str(tmp_path / "out"), overwrite=True) as folder:
        folder.renames_at_once = at_once
        folder.text("new", "")
    assert held(tmp_path) == {"out/new"}


def test_leftovers_of_a_killed_run_are_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(output, "ABANDONED_S", 0.1)
    (tmp_path / "_out.0123.making").mkdir()
    (tmp_path / "_out.0123.making" / "half").touch()
    (tmp_path / f"_out.{CLAIM}").write_bytes(b"0123 7")
    with OutputFolder(str(tmp_path / "out")) as folder:
        assert held(tmp_path) == {f"_out.{CLAIM}"}
        folder.text("new", "")
    assert held(tmp_path) == {"out/new"}


def test_folder_that_appears_during_the_run_stays(tmp_path: Path):
    with pytest.raises(JobError, match="exists already"), OutputFolder(str(tmp_path / "out")) as folder:  # noqa: PT012
        folder.text("new", "")
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "precious").touch()
    assert held(tmp_path) == {"out/precious"}


def test_run_that_waited_for_another_to_end_does_not_replace_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first = OutputFolder(str(tmp_path / "out")).__enter__()
    first.text("mine", "")
    first._done.set()  # its claim does not change for a while
    first._keeper.join()
    later = OutputFolder(str(tmp_path / "out"))
    ending = iter([lambda: first.__exit__(None, None, None)])
    monkeypatch.setattr(time, "sleep", lambda _: next(ending, lambda: None)())
    with pytest.raises(JobError, match="exists already"):
        later.__enter__()
    assert held(tmp_path) == {"out/mine"}


def test_of_two_runs_the_later_one_stops_at_its_beginning(tmp_path: Path):
    out = tmp_path / "out"
    with OutputFolder(str(out)) as first:
        first.text("mine", "")
        with pytest.raises(JobError, match=TAKEN):
            OutputFolder(str(out)).__enter__()
        with pytest.raises(JobError, match=TAKEN):
            OutputFolder(str(out), overwrite=True).__enter__()
    assert held(tmp_path) == {"out/mine"}


def test_run_whose_claim_could_not_be_written_for_a_while_ends_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """On a full disk a file is opened, and then its first byte is refused."""
    refused = threading.Event()
    real = OutputFolder._write

    def write(folder: OutputFolder, path: str, content: bytes) -> None:
        if path.endswith(folder._claim) and not refused.is_set():
            Path(path).touch()
            refused.set()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(folder, path, content)

    with OutputFolder(str(tmp_path / "out")) as folder:
        folder.text("mine", "")
        monkeypatch.setattr(OutputFolder, "_write", write)
        assert refused.wait(60)
    assert held(tmp_path) == {"out/mine"}


def test_interrupted_start_leaves_no_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        OutputFolder(str(tmp_path / "out")).__enter__()
    assert held(tmp_path) == set()


@pytest.mark.parametrize("overwrite", [True, False])
def test_file_of_this_name_is_refused(tmp_path: Path, *, overwrite: bool):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(JobError, match=r"/out: is a file, must be a folder$"):
        OutputFolder(str(tmp_path / "out"), overwrite=overwrite)


def test_of_two_runs_that_begin_together_one_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Neither saw the other's claim, and the second one was written over the first."""
    claim = tmp_path / f"_out.{CLAIM}"
    with monkeypatch.context() as patched:
        patched.setattr(time, "sleep", lambda _: claim.write_bytes(b"another 0"))
        with pytest.raises(JobError, match=TAKEN):
            OutputFolder(str(tmp_path / "out")).__enter__()
    assert held(tmp_path) == {claim.name}


@pytest.mark.parametrize("fails", [True, False])
def test_run_whose_folder_was_taken_over_leaves_it_alone(tmp_path: Path, *, fails: bool):
    claim = tmp_path / f"_out.{CLAIM}"
    with (  # noqa: PT012
        pytest.raises((JobError, RuntimeError)) as stopped,
        OutputFolder(str(tmp_path / "out")) as folder,
    ):
        folder.text("mine", "")
        folder._done.set()  # a claim that is just being written would be written over the other one
        folder._keeper.join()
        claim.write_bytes(b"another 0")
        if fails:
            raise RuntimeError
    assert isinstance(stopped.value, RuntimeError if fails else JobError)
    assert claim.read_bytes() == b"another 0"
    assert not (tmp_path / "out").exists()


def test_killed_run_is_followed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path / "out")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert program.stdout is not None
        assert program.stdout.readline() == "begun\n"
        with pytest.raises(JobError, match=TAKEN):
            OutputFolder(str(tmp_path / "out")).__enter__()
    finally:
        program.kill()
        program.communicate()
    assert {name.rpartition("/")[2] for name in held(tmp_path)} == {f"_out.{CLAIM}", "half"}
    monkeypatch.setattr(output, "ABANDONED_S", 0.1)
    with OutputFolder(str(tmp_path / "out")) as folder:
        folder.text("new", "")
    assert held(tmp_path) == {"out/new"}


def test_place_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(JobError, match=f"^{tmp_path}/file/out: cannot be written: "):
        OutputFolder(str(tmp_path / "file/out")).__enter__()
