"""The home: closed to others, whoever made it, and nothing closed that is not ours."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from app.run import home


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A home as an earlier version left it under an umask of 022."""
    there = tmp_path / "home"
    for folder in ("log/hour=1", "store/appendonlydir"):
        (there / folder).mkdir(parents=True)
    for name in ("catalog.db", "catalog.db-wal", "admin.key", "log/hour=1/a.parquet", "store/valkey.log"):
        (there / name).touch(0o644)
    return there


def test_what_was_open_is_closed_and_named(old: Path):
    (old / "log" / "hour=1" / "a.parquet").chmod(0o604)
    with capture_logs() as said:
        home.close(old)
        home.close(old)
    assert {mode(path) for path in (old, *old.rglob("*")) if path.is_dir()} == {0o700}
    assert {mode(path) for path in old.rglob("*") if path.is_file()} == {0o600}
    [line] = said
    assert line["event"] == "was open to others and is closed now"
    assert (line["paths"][0], line["count"]) == (str(old), 10)
    assert {str(old / "catalog.db-wal"), str(old / "log" / "hour=1" / "a.parquet")} <= set(line["paths"])


def test_many_are_counted(old: Path):
    for n in range(100):
        (old / "log" / str(n)).touch(0o644)
    with capture_logs() as said:
        home.close(old)
    assert (len(said[0]["paths"]), said[0]["count"]) == (home.SHOWN, 110)


def test_what_is_not_ours_stays_as_it_is(old: Path, tmp_path: Path):
    """Somebody may have made a project's folder the home, or keep the log elsewhere by a link."""
    for name in ("notes.txt", "poetry.lock"):
        (old / name).touch(0o644)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(0o755)
    (elsewhere / "theirs").touch(0o644)
    (old / "store" / "link").symlink_to(elsewhere)
    (old / "log").rename(tmp_path / "large-disk")
    (old / "log").symlink_to(tmp_path / "large-disk")
    home.close(old)
    assert [mode(old / name) for name in ("notes.txt", "poetry.lock")] == [0o644, 0o644]
    assert (mode(elsewhere), mode(elsewhere / "theirs")) == (0o755, 0o644)
    assert mode(tmp_path / "large-disk") == 0o755


def test_a_folder_that_everybody_shares_is_left_open_and_said(tmp_path: Path):
    """With QUOTAGATE_HOME=/tmp, by root."""
    tmp_path.chmod(0o1777)
    (tmp_path / "catalog.db").touch(0o644)
    with capture_logs() as said:
        home.close(tmp_path)
    assert mode(tmp_path) == 0o1777
    assert mode(tmp_path / "catalog.db") == 0o600
    assert "cannot be closed" in said[0]["event"]


def test_a_file_that_cannot_be_closed_is_named(old: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(self: Path, mode: int) -> None:
        raise PermissionError(1, os.strerror(1))

    monkeypatch.setattr(Path, "chmod", refuse)
    with capture_logs() as said:
        home.close(old)
    assert {line["event"] for line in said} == {"open to others, and cannot be closed"}
    assert str(old / "catalog.db") in {line["path"] for line in said}


def test_what_is_made_from_now_on_is_closed_to_others(tmp_path: Path):
    before = os.umask(0o022)
    try:
        home.keep_private()
        (tmp_path / "folder").mkdir()
        (tmp_path / "file").touch()
    finally:
        os.umask(before)
    assert (mode(tmp_path / "folder"), mode(tmp_path / "file")) == (0o700, 0o600)
