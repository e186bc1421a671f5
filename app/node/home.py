"""The home: the directory of one installation with its admin key, embedded store and catalog, and locks."""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import structlog

from app.node.errors import HomeInUseError

CHILDREN_END_WITHIN_S: Final = 30.0
"""Twice the time that an API needs to finish its requests, or a store to write its data."""

OTHERS: Final = 0o077
"""The permissions of group and others, which are removed."""

OUR_FILES: Final = ("admin.key*", "catalog.db*", "lock", "children.lock", "store.sock")
OUR_FOLDERS: Final = ("store", "log")
"""The files and folders that Quotagate makes in its home. Others keep their permissions."""

MAX_LOGGED_PATHS: Final = 20
"""The most paths in one log line; the others are only counted."""

log = structlog.get_logger("quotagate.home")


def keep_private() -> None:
    """From now on, make this process and its children create files that only their owner can read."""
    os.umask(OTHERS)


def make(home: Path) -> Path:
    """Create the directory if needed, with access for its owner only; return its absolute path."""
    home = home.resolve()
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    return home


def restrict_access(home: Path) -> None:
    """Remove other users' access to files that an earlier version, or a `mkdir`, left open; log the paths."""
    closed: list[str] = []
    for path in _open_to_others(home):
        try:
            path.chmod(stat.S_IMODE(path.stat().st_mode) & ~OTHERS)
        except FileNotFoundError:  # removed meanwhile
            continue
        except OSError as error:
            log.warning(
                "other users have access, and it cannot be removed", path=str(path), why=error.strerror
            )
            continue
        closed.append(str(path))
    if closed:
        log.warning("removed the access of other users", paths=closed[:MAX_LOGGED_PATHS], count=len(closed))


def _open_to_others(home: Path) -> Iterator[Path]:
    """The home and our files in it to which other users have access; links are not followed."""
    paths = [path for pattern in OUR_FILES for path in sorted(home.glob(pattern))]
    for folder in (home / name for name in OUR_FOLDERS):
        if not folder.is_symlink():
            for where, _, files in os.walk(folder):
                paths += [Path(where), *(Path(where, name) for name in sorted(files))]
    for path in [home, *paths]:
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            continue
        if path == home and mode & stat.S_ISVTX:
            log.warning("the home is a directory that all users share; their access stays", home=str(home))
        elif mode & OTHERS and not stat.S_ISLNK(mode):
            yield path


def lock(home: Path) -> int:
    """Lock out other supervisors while the returned file descriptor is open in this process.

    Raises:
        HomeInUseError: another supervisor holds the lock.
    """
    fd = os.open(home / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if not _locked(fd):
        os.close(fd)
        raise HomeInUseError(f"another `quotagate up` uses the home {home}")
    return fd


def lock_of_children(home: Path, *, within_s: float = CHILDREN_END_WITHIN_S) -> int:
    """Return a lock (a file descriptor) that children inherit, so it is free once the last child has ended.

    Waits for the children of an earlier run: after a supervisor was killed, its children are still ending.
    Two stores must never write to one append-only file, and an older store that ends removes the socket of
    the newer one.

    Raises:
        HomeInUseError: the children of an earlier run did not end in time.
    """
    fd = os.open(home / "children.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    give_up = time.monotonic() + within_s
    logged = False
    while not _locked(fd):
        if time.monotonic() >= give_up:
            os.close(fd)
            raise HomeInUseError(f"processes of an earlier `quotagate up` still run and use the home {home}")
        if not logged:
            log.info("waiting for the processes of an earlier run to end", home=str(home))
            logged = True
        time.sleep(0.02)
    return fd


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def admin_key(home: Path) -> tuple[str, bool]:
    """Return the key in `admin.key`, and whether it was made just now."""
    path = home / "admin.key"
    with suppress(FileNotFoundError):
        return path.read_text(encoding="ascii").strip(), False
    # Written to a draft and linked into place: no process reads half a key, and the first of two makers wins.
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
