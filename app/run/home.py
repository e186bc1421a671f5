"""The directory with the state of one installation: the admin key, embedded store and catalog, two locks."""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from pathlib import Path
from typing import Final

import structlog

from app.run.errors import HomeTaken

CHILDREN_END_WITHIN_S: Final = 30.0
"""An API finishes what is in flight, a store writes what it has: both within half of it."""

log = structlog.get_logger("quotagate.home")


def make(home: Path) -> Path:
    """The directory as an absolute path, made if need be, and closed to other users."""
    home = home.resolve()
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    return home


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
