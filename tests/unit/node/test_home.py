"""The home: other users get no access to our files in it, and other files keep their permissions."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from app.node import home


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


def test_access_of_other_users_is_removed_and_logged(old: Path):
    (old / "log" / "hour=1" / "a.parquet").chmod(0o604)
    with capture_logs() as logged:
        home.restrict_access(old)
        home.restrict_access(old)
    assert {mode(path) for path in (old, *old.rglob("*")) if path.is_dir()} == {0o700}
    assert {mode(path) for path in old.rglob("*") if path.is_file()} == {0o600}
    [line] = logged
    assert line["event"] == "removed the access of other users"
    assert (line["paths"][0], line["count"]) == (str(old), 10)
    assert {str(old / "catalog.db-wal"), str(old / "log" / "hour=1" / "a.parquet")} <= set(line["paths"])


def test_many_paths_are_counted_in_the_log(old: Path):
    for n in range(100):
        (old / "log" / str(n)).touch(0o644)
    with capture_logs() as logged:
        home.restrict_access(old)
    assert (len(logged[0]["paths"]), logged[0]["count"]) == (home.MAX_LOGGED_PATHS, 110)


def test_files_that_are_not_ours_keep_their_permissions(old: Path, tmp_path: Path):
    """The home may be a project's folder, or link to a log elsewhere."""
    for name in ("notes.txt", "poetry.lock"):
        (old / name).touch(0o644)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(0o755)
    (elsewhere / "theirs").touch(0o644)
    (old / "store" / "link").symlink_to(elsewhere)
    (old / "log").rename(tmp_path / "large-disk")
    (old / "log").symlink_to(tmp_path / "large-disk")
    home.restrict_access(old)
    assert [mode(old / name) for name in ("notes.txt", "poetry.lock")] == [0o644, 0o644]
    assert (mode(elsewhere), mode(elsewhere / "theirs")) == (0o755, 0o644)
    assert mode(tmp_path / "large-disk") == 0o755


def test_shared_folder_as_home_keeps_its_permissions_with_a_warning(tmp_path: Path):
    """With QUOTAGATE_HOME=/tmp, by root."""
    tmp_path.chmod(0o1777)
    (tmp_path / "catalog.db").touch(0o644)
    with capture_logs() as logged:
        home.restrict_access(tmp_path)
    assert mode(tmp_path) == 0o1777
    assert mode(tmp_path / "catalog.db") == 0o600
    assert "all users share" in logged[0]["event"]


def test_file_whose_access_cannot_be_removed_is_logged(old: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(self: Path, mode: int) -> None:
        raise PermissionError(1, os.strerror(1))

    monkeypatch.setattr(Path, "chmod", refuse)
    with capture_logs() as logged:
        home.restrict_access(old)
    assert {line["event"] for line in logged} == {"other users have access, and it cannot be removed"}
    assert str(old / "catalog.db") in {line["path"] for line in logged}


def test_new_files_are_private(tmp_path: Path):
    before = os.umask(0o022)
    try:
        home.keep_private()
        (tmp_path / "folder").mkdir()
        (tmp_path / "file").touch()
    finally:
        os.umask(before)
    assert (mode(tmp_path / "folder"), mode(tmp_path / "file")) == (0o700, 0o600)
