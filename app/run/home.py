"""The directory with the state of one installation: the admin key, embedded store and catalog, two locks."""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import structlog

from app.run.errors import HomeTaken

CHILDREN_END_WITHIN_S: Final = 30.0
"""An API finishes what is in flight, a store writes what it has: both within half of it."""

OTHERS: Final = 0o077
"""What group and others may do with a file: here, nothing."""

OUR_FILES: Final = ("admin.key*", "catalog.db*", "lock", "children.lock", "store.sock")
OUR_FOLDERS: Final = ("store", "log")
"""What this program makes in its home. Whatever else lies there is not ours to close."""

SHOWN: Final = 20
"""So many paths are named in one line of the log; the others are counted."""

log = structlog.get_logger("quotagate.home")


def keep_private() -> None:
    """From now on, let this program and its children make files and folders that are closed to others."""
    os.umask(OTHERS)


def make(home: Path) -> Path:
    """The directory as an absolute path, made if need be, and closed to other users."""
    home = home.resolve()
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    return home


def close(home: Path) -> None:
    """Close what an earlier version, or somebody's `mkdir`, left open to others, and say what it was."""
    closed: list[str] = []
    for path in _open_to_others(home):
        try:
            path.chmod(stat.S_IMODE(path.stat().st_mode) & ~OTHERS)
        except FileNotFoundError:  # it ended meanwhile
            continue
        except OSError as error:
            log.warning("open to others, and cannot be closed", path=str(path), why=error.strerror)
            continue
        closed.append(str(path))
    if closed:
        log.warning("was open to others and is closed now", paths=closed[:SHOWN], count=len(closed))


def _open_to_others(home: Path) -> Iterator[Path]:
    """The home and what is ours in it, where others may read, write or enter; links are not followed."""
    found = [path for pattern in OUR_FILES for path in sorted(home.glob(pattern))]
    for folder in (home / name for name in OUR_FOLDERS):
        if not folder.is_symlink():
            for where, _, files in os.walk(folder):
                found += [Path(where), *(Path(where, name) for name in sorted(files))]
    for path in [home, *found]:
        try:
            seen = path.lstat()
        except FileNotFoundError:
            continue
        if path == home and seen.st_mode & stat.S_ISVTX:
            log.warning("a home that all users share cannot be closed to them", home=str(home))
        elif seen.st_mode & OTHERS and not stat.S_ISLNK(seen.st_mode):
            yield path


def lock(home: Path) -> int:
    """Keep other supervisors out for as long as the answer, a file descriptor, stays open in this program."""
    fd = os.open(home / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if not _locked(fd):
        os.close(fd)
        raise HomeTaken(f"another `quotagate up` keeps its state in {home}")
    return fd


def lock_of_children(home: Path, *, within_s: float = CHILDREN_END_WITHIN_S) -> int:
    """A lock that children inherit, so that it ends with the last of them; waits for those of an earlier run.

    A supervisor that was killed leaves children that are still ending. Two stores must never write to one
    append-only file, and the older one would take away the socket of the newer one when it goes.
    """
    fd = os.open(home / "children.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    give_up = time.monotonic() + within_s
    said = False
    while not _locked(fd):
        if time.monotonic() >= give_up:
            os.close(fd)
            raise HomeTaken(f"programs of an earlier `quotagate up` still run and keep their state in {home}")
        if not said:
            log.info("waiting for the programs of an earlier run to end", home=str(home))
            said = True
        time.sleep(0.02)
    return fd


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def admin_key(home: Path) -> tuple[str, bool]:
    """The key kept in `admin.key`, and whether it was made just now."""
    path = home / "admin.key"
    try:
        return path.read_text(encoding="ascii").strip(), False
    except FileNotFoundError:
        pass
    # Written aside and linked into place: nobody ever reads half a key, and the first of two makers wins.
    key = secrets.token_urlsafe(32)
    draft = home / f"admin.key.{os.getpid()}"
    draft.unlink(missing_ok=True)
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "w", encoding="ascii") as file:
        file.write(f"{key}\n")
    try:
        os.link(draft, path)
    except FileExistsError:
        return path.read_text(encoding="ascii").strip(), False
    finally:
        draft.unlink()
    return key, True
